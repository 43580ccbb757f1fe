"""tests/mutants: its list fits the sources and its verdicts differ. `make test-mutants` runs it."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests" / "mutants" / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_every_mutant_breaks_one_line_that_is_there(mutants, tmp_path):
    listed = mutants.read_mutants()
    assert len(listed) == len({mutant.name for mutant in listed}) >= 60
    for mutant in listed:
        before = (mutants.SOURCE / mutant.file).read_text()
        (tmp_path / mutant.file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / mutant.file).write_text(before)
        mutants.apply(mutant, tmp_path)
        after = (tmp_path / mutant.file).read_text()
        assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(before)), mutant.name
    with pytest.raises(ValueError, match=r"found 0 places in core/types\.py, wanted 1"):
        mutants.apply(mutants.Mutant("none", "core/types.py", "not there", "", ()), tmp_path)


def test_every_mutant_names_tests_that_exist(mutants):
    for mutant in mutants.read_mutants():
        assert mutant.tests, mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            text = (ROOT / "tests" / "cpu" / file).read_text()
            assert not name or f"\ndef {name}(" in text, f"{mutant.name}: {test}"


@pytest.mark.parametrize(
    ("new", "state"),
    [
        ("return 1.0 / (1.0 - sparsity)", "killed"),
        ("return 2.0 / (2.0 - sparsity)", "survived"),
        ("return (", "broken"),
    ],
)
def test_a_verdict_says_what_the_tests_said(mutants, new, state):
    test = "test_threshold.py::test_ideal_speedup_of_a_sparsity"
    old = "return 1.0 / (1.0 - sparsity / 2.0)"
    verdict = mutants.judge(mutants.Mutant("speed-up", "core/threshold.py", old, new, (test,)))
    assert verdict.state == state
    assert (verdict.by == test) == (state == "killed")
