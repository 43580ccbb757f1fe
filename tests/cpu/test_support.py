"""docs/support.md says what the code serves, and the tests that it names are there."""

import pytest
import support_parts
from support_parts import ROOT, serves


@pytest.fixture(scope="module", autouse=True)
def triton_is_there():
    pytest.importorskip("triton")


def test_the_table_is_that_of_the_code():
    text = support_parts.DOCUMENT.read_text(encoding="utf-8")
    remedy = "PYTHONPATH=src python tests/cpu/support_parts.py"
    assert support_parts.BEGIN in text and support_parts.END in text
    assert text == support_parts.written(), f"out of date: run `{remedy}`"


@pytest.mark.parametrize("test", sorted(support_parts.tests_named()))
def test_tests_that_the_table_names_are_there(test):
    file, _, name = test.partition("::")
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in text if name else "\ndef test_" in text


def test_a_probe_tells_backends_apart():
    assert serves("triton", support_parts.of({"dim": 80})(40))
    assert not serves("hopper", support_parts.of({"dim": 80})(40))
    assert not serves("triton", support_parts.masked(2)) and serves("eager", support_parts.masked(2))
    assert not serves("hopper", support_parts.eighths(40)) and serves("hopper", support_parts.eighths(2))
