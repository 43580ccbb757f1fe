"""Peak memory of the public calls on a CPU: the output and what docs/support.md states."""

import pytest
import test_both_memory as device


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(device, "DEVICE", "cpu")


@pytest.mark.parametrize("name", device.CALLS)
def test_eager_takes_no_more_than_its_output_and_what_is_stated(name):
    device.test_a_call_takes_no_more_than_its_output_and_what_is_stated(name, "eager")


def test_merging_takes_no_more_than_is_stated():
    device.test_merging_takes_five_float32_copies_of_its_output()
