"""Prepared decode calls: what they are told apart by. Their results are compared in tests/gpu."""

import pytest
import torch
from torch import nn

from blasst import blasst_attn_with_kvcache
from blasst.kernels import repeats


class OnGpu(torch.Tensor):
    """A subclass: it may do anything, so it is looked at."""


@pytest.mark.parametrize(
    "x", [torch.zeros(2), nn.Parameter(torch.zeros(2)), torch.zeros(2).as_subclass(OnGpu), 3, 0.5]
)
def test_calls_that_must_be_looked_at_have_no_key(x):
    assert repeats.call_key((True,), x) is None


def test_options_are_told_apart_by_value_and_type():
    keys = {repeats.call_key((option,), None) for option in (True, 1, 1.0, False, 0, "auto", None, (-1, -1))}
    assert len(keys) == 8 and None not in keys
    with torch.no_grad():
        assert repeats.call_key((True,), None) not in keys
    assert repeats.call_key(([-1, -1],), None) is None


def test_calls_under_a_transform_or_a_mode_have_no_key():
    seen = []
    torch.vmap(lambda x: (seen.append(repeats.call_key((), None)), x)[1])(torch.zeros(2))
    with torch._subclasses.FakeTensorMode():
        seen.append(repeats.call_key((), None))
    assert seen == [None, None]


def test_calls_on_a_cpu_are_not_prepared():
    before = dict(repeats._plans)
    q, kv = torch.randn(1, 1, 2, 16), torch.randn(1, 100, 1, 16)
    lengths = torch.tensor([100], dtype=torch.int32)
    for _ in range(2):
        blasst_attn_with_kvcache(q, kv, kv, cache_seqlens=lengths, threshold=0.1, window_size=[-1, -1])
    assert repeats._plans == before
