"""Random layouts of the same numbers: strides, pages, lengths, what lies beside them; against the reference.

Runs on the eager kernel, and on the Triton kernels in the process that test_triton.py starts.
"""

import math

import pytest
import torch
from cases_parts import INTERPRETED
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst import blasst_attn_func, blasst_attn_with_kvcache
from blasst.core.reference import reference_attention
from blasst.testing import assert_matches_reference, attention_calls

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy of the interpreter
IMPL, EXAMPLES = ("triton", 4) if INTERPRETED else ("eager", 60)
EVERYTHING = {
    "return_lse": True,
    "return_counts": True,
    "return_mass_bound": True,
    "return_kept_tiles": True,
    "impl": IMPL,
}
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 1e-3


def filled(x, *shape):
    return x.new_full(shape, math.nan)


def heads_first(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def inside_wider_heads(x):
    wide = filled(x, *x.shape[:-1], x.shape[-1] + 16)
    wide[..., 8:-8] = x
    return wide[..., 8:-8]


def every_second_row(x):
    wide = filled(x, x.shape[0], 2 * x.shape[1], *x.shape[2:])
    wide[:, 1::2] = x
    return wide[:, 1::2]


def every_second_lane(x):
    wide = filled(x, *x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def one_of_three(x):
    whole = filled(x, *x.shape[:2], 3, *x.shape[2:])
    whole[:, :, 1] = x
    return whole[:, :, 1]


def later_sequences_first(x):
    return x.flip(0).contiguous()[torch.arange(len(x)).flip(0)] if len(x) > 1 else x


LAYOUTS = [
    lambda x: x,
    heads_first,
    inside_wider_heads,
    every_second_row,
    every_second_lane,
    one_of_three,
    later_sequences_first,
]
layouts = st.sampled_from(LAYOUTS)
dtypes = [torch.float16, torch.float32] + [torch.bfloat16] * (not INTERPRETED)
thresholds = st.sampled_from([0.0, 0.003, 0.1, 1.0])


def compare(got, inputs, rule, threshold):
    """Everything that a call returned against the reference on plain tensors."""
    truth = reference_attention(*inputs, threshold=threshold, **rule)
    if rule["max_skipped_mass"] is not None and not torch.equal(got.kept_tiles, truth.kept_tiles):
        return  # a budget decision near its own cut
    yardstick = reference_attention(
        *inputs, threshold=threshold, kept_tiles=truth.kept_tiles, dtype=inputs.q.dtype, **rule
    )
    assert_matches_reference(got, truth, yardstick, threshold, NEAR, float(inputs.v.abs().max()))


@settings(max_examples=EXAMPLES)
@given(attention_calls(dtypes), thresholds, st.tuples(layouts, layouts, layouts))
def test_any_strides(call, threshold, chosen):
    phase, inputs, options = call
    laid = [layout(x) for layout, x in zip(chosen, inputs, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(laid, inputs, strict=True))
    attend = blasst_attn_with_kvcache if phase == "decode" else blasst_attn_func
    got = attend(*laid, threshold=threshold, **options, **EVERYTHING)
    compare(got, inputs, {"phase": phase, **options}, threshold)


@settings(max_examples=EXAMPLES)
@given(attention_calls(dtypes), thresholds, st.tuples(layouts, layouts, layouts), st.data())
def test_any_pages_and_lengths(call, threshold, chosen, data):
    phase, inputs, options = call
    options.pop("dense_tail", None)  # caches have none
    if phase == "prefill" and inputs.q.shape[1] <= 8:
        phase = "decode"
    batch, capacity = inputs.k.shape[:2]
    lengths = [data.draw(st.integers(0, capacity)) for _ in range(batch)]
    page = data.draw(st.sampled_from([1, 3, 16, 64, 200]))
    per = -(-capacity // page)
    order = data.draw(st.permutations(range(batch * per + 2)))
    table = torch.tensor(order[: batch * per], dtype=torch.int32).view(batch, per)
    pages = []
    for x in inputs[1:]:
        cache = filled(x, batch * per + 2, page, *x.shape[2:])
        for b, n in enumerate(lengths):
            for i in range(-(-n // page)):
                part = x[b, i * page : min(n, (i + 1) * page)]
                cache[table[b, i], : len(part)] = part
        pages.append(cache)
    for b, n in enumerate(lengths):  # entries past need are never read
        table[b, -(-n // page) :] = data.draw(st.sampled_from([-1, 0, 2**31 - 1]))
    q, k, v = (layout(x) for layout, x in zip(chosen, (inputs.q, *pages), strict=True))
    used = torch.tensor(lengths, dtype=torch.int32)
    got = blasst_attn_with_kvcache(
        q, k, v, cache_seqlens=used, block_table=table, threshold=threshold, **options, **EVERYTHING
    )
    tiles = -(-capacity // (64 if phase == "decode" else 128))
    assert not bool(got.kept_tiles[..., tiles:].any())
    got = got._replace(kept_tiles=got.kept_tiles[..., :tiles])
    compare(got, inputs, {"phase": phase, "seqused_k": used, **options}, threshold)
