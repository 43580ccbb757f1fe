"""Peak memory of the public calls on a CPU: the output and what docs/support.md states."""

import pytest
import test_both_memory as device
import torch
from peak_memory import SMALL, peak_beside_output

from blasst import KeyCodes, blasst_attn_with_kvcache


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(device, "DEVICE", "cpu")


@pytest.mark.parametrize("name", device.CALLS)
def test_eager_takes_no_more_than_its_output_and_what_is_stated(name):
    device.test_a_call_takes_no_more_than_its_output_and_what_is_stated(name, "eager")


def test_merging_takes_no_more_than_is_stated():
    device.test_merging_takes_five_float32_copies_of_its_output()


def test_screening_takes_the_keys_in_float32_twice_more():
    capacity, heads, dim, dim_v = 8192, 2, 64, 8
    q, k = torch.randn(1, 1, heads, dim), torch.randn(1, capacity, heads, dim)
    v, codes = torch.randn(1, capacity, heads, dim_v), KeyCodes.from_keys(k, 6)
    given = (q, k, v, codes.codes, codes.low, codes.step, codes.encoded)
    got = peak_beside_output(
        lambda: blasst_attn_with_kvcache(q, k, v, threshold=0.1, screen=codes), given, "cpu"
    )
    slots = 4 * heads * (capacity + 128)
    stated = 2 * slots * (dim + dim_v) + 3 * slots + 2 * slots * dim
    assert 2 * slots * (dim + dim_v) + 3 * slots < got <= stated + SMALL  # more than without
