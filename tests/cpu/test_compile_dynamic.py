"""`torch.compile(fullgraph=True)` with every size symbolic from the first call on; calls under autocast."""

import pytest
import torch

from blasst import attention, blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.types import FP8
from blasst.testing import heavy_tailed_inputs, pages_from


def full(value, *shape):
    return torch.full(shape, value, dtype=torch.int32)


def paged(x):
    (k, table), (v, _) = (pages_from(t, 16, fill=0.0) for t in x[1:])
    return x.q[:, :2], k, v, full(200, len(x.q)), table


def packed(x):
    ends = [torch.arange(len(x.q) + 1, dtype=torch.int32) * t.shape[1] for t in (x.q, x.k)]
    return (*(t.flatten(0, 1) for t in x), *ends, x.q.shape[1], x.k.shape[1])


def fp8(x, *shape):
    return x.q[:, :1].half(), x.k.to(FP8), x.v.to(FP8), torch.full(shape, 0.5)


#: Name -> (a call, its arguments made of inputs).
CALLS = {
    "threshold": (
        lambda q, k, v, t: blasst_attn_func(q, k, v, threshold=t, return_counts=True),
        lambda x: (*x, torch.full(x.q.shape[:1], 0.05)),
    ),
    "sinks": (
        lambda q, k, v, sinks: blasst_attn_func(q, k, v, threshold=0.05, sinks=sinks, return_lse=True),
        lambda x: (*x, torch.zeros(8)),
    ),
    "budget": (
        lambda q, k, v: blasst_attn_func(
            q,
            k,
            v,
            threshold=1.0,
            max_skipped_mass=0.1,
            softcap=9.0,
            window_size=(100, 0),
            return_mass_bound=True,
        ),
        tuple,
    ),
    "mask": (
        lambda q, k, v, mask: blasst_attn_func(q, k, v, threshold=0.05, block_mask=mask),
        lambda x: (*x, torch.ones(len(x.q), 8, 1, -(-x.k.shape[1] // 128), dtype=torch.bool)),
    ),
    "packed": (lambda *x: blasst_attn_varlen_func(*x, threshold=0.05, return_kept_tiles=True), packed),
    "pages": (
        lambda q, k, v, used, table: blasst_attn_with_kvcache(
            q, k, v, cache_seqlens=used, block_table=table, threshold=0.05
        ),
        paged,
    ),
    "left padding": (
        lambda q, k, v, used, pad: blasst_attn_with_kvcache(
            q, k, v, cache_seqlens=used, cache_leftpad=pad, threshold_scale_factor=5.0
        ),
        lambda x: (x.q[:, :1], *x[1:], full(200, len(x.q)), full(20, len(x.q))),
    ),
    "new keys": (
        lambda q, k, v, new_k, new_v, used: blasst_attn_with_kvcache(
            q, k.clone(), v.clone(), new_k, new_v, cache_seqlens=used, threshold=0.05
        ),
        lambda x: (x.q[:, :1], *x[1:], x.k[:, :1].clone(), x.v[:, :1].clone(), x.k.shape[1] - 50),
    ),
    **{
        f"fp8 with {name}": (
            lambda q, k, v, scale: blasst_attn_with_kvcache(
                q, k, v, k_descale=scale, v_descale=scale, threshold=0.05
            ),
            lambda x, shape=shape: fp8(x, *shape(x)),
        )
        for name, shape in {
            "a scale": lambda x: (),
            "scales of heads": lambda x: (2,),
            "scales of sequences": lambda x: (len(x.q), 2),
        }.items()
    },
    "attention": (
        lambda q, k, v: attention(
            *(t.transpose(1, 2) for t in (q, k, v)), threshold=0.05, enable_gqa=True, is_causal=True
        ),
        tuple,
    ),
}


def tensors(result):
    return [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_symbolic_sizes_are_one_graph(name):
    import torch._dynamo.testing

    call, arguments = CALLS[name]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for batch, keys in ((5, 300), (4, 400), (7, 290)):  # sizes that are equal by chance would be kept equal
        given = arguments(heavy_tailed_inputs(batch, 9, keys, 8, 2, 16, seed=keys))
        for a, b in zip(tensors(compiled(*given)), tensors(call(*given)), strict=True):
            assert torch.equal(a, b)
        compilations.append(counter.frame_count)  # the first may take two attempts
    assert len(set(compilations)) == 1


@pytest.mark.parametrize("shape", [(0, 9, 20), (3, 0, 20), (3, 9, 0)])
@pytest.mark.parametrize("attn", [blasst_attn_func, blasst_attn_with_kvcache])
def test_empty_batches_rows_and_keys_compile(attn, shape):
    batch, rows, keys = shape
    x = [torch.randn(batch, n, h, 16) for n, h in ((rows, 4), (keys, 2), (keys, 2))]

    def call(q, k, v):
        return attn(q, k, v, threshold=0.1, return_lse=True, return_counts=True, return_kept_tiles=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for a, b in zip(tensors(compiled(*x)), tensors(call(*x)), strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("impl", ["eager", "reference"])
@pytest.mark.parametrize("tokens", [2, 70])
def test_autocast_leaves_a_call_and_the_products_inside_alone(tokens, impl):
    x = heavy_tailed_inputs(1, tokens, 700, 2, 1, 16, seed=1, noise=2.0)

    def call():
        return blasst_attn_with_kvcache(
            *x, threshold=0.05, return_lse=True, return_counts=True, return_mass_bound=True, impl=impl
        )

    plain = call()
    assert int(plain.counts.skipped.sum()) > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = call()
        assert got.out.dtype == torch.float32
        assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(plain), strict=True))
        assert torch.ones(2, 2).mm(torch.ones(2, 2)).dtype == torch.bfloat16  # it is on again
