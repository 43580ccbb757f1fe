"""The public functions: clear errors before any work, layouts, gradients, compilation."""

import math
import sys

import pytest
import torch
from torch.autograd import forward_ad

import blasst
from blasst import attention, blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.errors import UnsupportedError
from blasst.core.key_codes import KeyCodes
from blasst.core.types import SkipCounts
from blasst.kernels import op, select
from blasst.testing import heavy_tailed_inputs


def inputs(**kwargs):
    return heavy_tailed_inputs(2, 70, 300, 4, 2, 16, **kwargs)


def cu(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": lambda x: x.half()}, ValueError, "k: got dtype torch.float16, want torch.float32 like q"),
        ({"k": lambda x: x.to("meta")}, ValueError, "k: got a tensor on meta, want cpu like q"),
        ({"k": lambda x: x[0]}, ValueError, "k: got shape .* want 4 dimensions"),
        ({"k": lambda x: x[..., :8]}, ValueError, "k: got head_dim 8, want 16 like q"),
        ({"k": lambda x: x[:, :10]}, ValueError, "v: got shape"),
        ({"q": lambda x: x[:1]}, ValueError, "k: got batch 2, want 1 like q"),
        ({"q": lambda x: x[..., :3, :]}, ValueError, "k: got 2 heads for 3 query heads"),
        ({"q": lambda x: x[..., :0, :]}, ValueError, "k: got 2 heads for 0 query heads"),
        ({"q": lambda x: x[..., :0], "k": lambda x: x[..., :0]}, ValueError, "head dims 0"),
        ({"v": lambda x: x.tolist()}, TypeError, "v: got list, want a tensor"),
        (dict.fromkeys("qkv", lambda x: x.long()), TypeError, "q: got dtype torch.int64"),
    ],
)
def test_wrong_tensors_are_named(change, error, message):
    values = inputs()._asdict()
    for name, f in change.items():
        values[name] = f(values[name])
    with pytest.raises(error, match=message):
        blasst_attn_func(*values.values(), threshold=0.1)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"window_size": (1,)}, TypeError),
        ({"window_size": (1.5, 0)}, TypeError),
        ({"window_size": (-2, 0)}, ValueError),
        ({"softmax_scale": math.inf}, ValueError),
        ({"softmax_scale": "1"}, TypeError),
        ({"softcap": -1.0}, ValueError),
        ({"softcap": 10**400}, ValueError),
        ({"softmax_scale": 10**400}, ValueError),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, TypeError),
        ({"sinks": torch.zeros(2)}, ValueError),
        ({"dense_tail": -1}, ValueError),
        ({"dense_tail": 1.0}, TypeError),
        ({"dense_tail": True}, TypeError),
        ({"max_skipped_mass": 0.0}, ValueError),
        ({"max_skipped_mass": 1.0}, ValueError),
        ({"max_skipped_mass": True}, TypeError),
        ({"impl": "cuda9000"}, ValueError),
        ({"causal": "no"}, TypeError),
        ({"causal": None}, TypeError),
        ({"causal": torch.tensor([True, False])}, TypeError),
        ({"sinks": torch.tensor([0.0, math.nan, 0.0, 0.0])}, ValueError),
        ({"sinks": torch.tensor([0.0, 0.0, math.inf, 0.0])}, ValueError),
    ],
)
def test_wrong_options_are_named(option, error):
    with pytest.raises(error, match=next(iter(option))):
        blasst_attn_func(*inputs(), threshold=0.1, **option)


@pytest.mark.parametrize("wide", [2**30, 2**31, 2**32 + 5, sys.maxsize, 10**400])
def test_windows_wider_than_any_sequence_are_unlimited(wide):
    wanted = blasst_attn_func(*inputs(), threshold=0.1, window_size=(-1, -1)).out
    assert torch.equal(blasst_attn_func(*inputs(), threshold=0.1, window_size=(wide, wide)).out, wanted)
    wanted = blasst_attn_func(*inputs(), threshold=0.1, window_size=(3, -1)).out
    assert torch.equal(blasst_attn_func(*inputs(), threshold=0.1, window_size=(3, wide)).out, wanted)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cu_seqlens_q": cu(0, 70, 140).long()}, TypeError, "cu_seqlens_q: got dtype torch.int64"),
        ({"cu_seqlens_k": cu(0, 600)}, ValueError, "cu_seqlens_k: got shape"),
        ({"cu_seqlens_q": cu(0, 90, 70)}, ValueError, "cu_seqlens_q: .* never to fall"),
        ({"cu_seqlens_q": cu(0, 70, 141)}, ValueError, "cu_seqlens_q: got 141 tokens"),
        ({"max_seqlen_q": 60}, ValueError, "max_seqlen_q: got 60, want at least 70"),
        ({"max_seqlen_k": 1.0}, TypeError, "max_seqlen_k"),
        ({"seqused_k": cu(300, 301)}, ValueError, "seqused_k: got values"),
        (
            {"cu_seqlens_k": cu(0, 290, 590), "seqused_k": cu(291, 300)},
            ValueError,
            "seqused_k: got 291 for sequence 0, want at most its 290",
        ),
    ],
)
def test_wrong_lengths_of_packed_sequences_are_named(change, error, message):
    values = {
        "cu_seqlens_q": cu(0, 70, 140),
        "cu_seqlens_k": cu(0, 300, 600),
        "max_seqlen_q": 70,
        "max_seqlen_k": 300,
    }
    with pytest.raises(error, match=message):
        blasst_attn_varlen_func(*(x.flatten(0, 1) for x in inputs()), threshold=0.1, **{**values, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"cache_seqlens": cu(300, 301)},
            ValueError,
            "cache_seqlens: got values in .300, 301., want .0, 300.",
        ),
        ({"cache_seqlens": 301}, ValueError, "cache_seqlens: got 301"),
        ({"cache_seqlens": 1.5}, TypeError, "cache_seqlens: got 1.5"),
        ({"cache_leftpad": cu(5)}, ValueError, "cache_leftpad: got shape"),
        (
            {"cache_leftpad": cu(5, 200), "cache_seqlens": 100},
            ValueError,
            "cache_seqlens minus cache_leftpad",
        ),
        ({"k": torch.zeros(2, 3, 2, 16)}, ValueError, "cache_seqlens: got None"),
        ({"k": torch.zeros(2, 3, 2, 16), "cache_seqlens": 298}, ValueError, "room for new keys"),
        (
            {"k": torch.zeros(2, 3, 2, 16), "cache_seqlens": 20},
            ValueError,
            "v: got None, want k and v together",
        ),
        ({"block_table": cu(0, 1), "cache_seqlens": 20}, ValueError, "block_table: got shape"),
        ({"block_table": torch.zeros(2, 1), "cache_seqlens": 20}, TypeError, "block_table: got dtype"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "cache_seqlens: got None"),
    ],
)
def test_wrong_caches_are_named(change, error, message):
    q, k_cache, v_cache = inputs()
    with pytest.raises(error, match=message):
        blasst_attn_with_kvcache(q, k_cache, v_cache, threshold=0.1, **change)


@pytest.mark.parametrize("call", ["varlen", "cache", "append"])
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0, -1, 9], [1, 2, -1]], r"block_table: got page -1 at \[0, 1\], which sequence 0 needs"),
        ([[0, 3, 9], [1, 4, -1]], r"block_table: got page 4 at \[1, 1\], .* want \[0, 3\]"),
    ],
)
def test_a_needed_page_that_is_not_there_is_named(call, table, message):
    pages = torch.randn(4, 16, 2, 16)
    before = pages.clone()
    block_table = torch.tensor(table, dtype=torch.int32)
    q, new = torch.randn(2, 1, 4, 16), torch.ones(2, 1, 2, 16)
    with pytest.raises(ValueError, match=message):
        if call == "varlen":
            blasst_attn_varlen_func(
                q[:, 0], pages, pages, cu(0, 1, 2), cu(0, 17, 36), 1, 19, block_table=block_table
            )
        elif call == "cache":
            blasst_attn_with_kvcache(
                q, pages, pages, cache_seqlens=cu(17, 19), block_table=block_table, threshold=0.1
            )
        else:
            blasst_attn_with_kvcache(
                q, pages, pages, new, new, cache_seqlens=cu(16, 18), block_table=block_table, threshold=0.1
            )
    assert torch.equal(pages, before)


def test_pages_of_left_padding_and_past_need_are_not_looked_at():
    pages, q = torch.randn(4, 16, 2, 16), torch.randn(1, 1, 4, 16)
    table = torch.tensor([[-1, 2, 0, 99]], dtype=torch.int32)
    paged = blasst_attn_with_kvcache(
        q, pages, pages, cache_seqlens=cu(40), cache_leftpad=cu(16), block_table=table, threshold=0.1
    )
    keys = torch.cat([pages[2], pages[0][:8]])[None]
    assert torch.equal(paged.out, blasst_attn_with_kvcache(q, keys, keys, threshold=0.1).out)


def test_the_lengths_argument_that_is_too_long_for_the_pages_is_the_one_named():
    pages, table = torch.randn(4, 16, 2, 16), torch.tensor([[0, 1]], dtype=torch.int32)
    q = torch.randn(1, 4, 16)
    with pytest.raises(ValueError, match=r"^seqused_k: got values"):
        blasst_attn_varlen_func(
            q, pages, pages, cu(0, 1), cu(0, 20), 1, 99, seqused_k=cu(33), block_table=table
        )
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: got values"):
        blasst_attn_varlen_func(q, pages, pages, cu(0, 1), cu(0, 33), 1, 99, block_table=table)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"threshold": 2.0}, ValueError),
        ({"impl": "cuda9000"}, ValueError),
        ({"softcap": -1.0}, ValueError),
        ({"window_size": (1,)}, TypeError),
        ({"max_skipped_mass": 2.0}, ValueError),
        ({"sinks": torch.zeros(3)}, ValueError),
        ({"cache_leftpad": cu(30, 0)}, ValueError),
        ({"v": torch.zeros(2, 1, 2, 8)}, ValueError),
        ({"k": [1.0]}, TypeError),
    ],
)
def test_a_refused_call_writes_nothing_into_the_cache(change, error):
    q, k_cache, v_cache = heavy_tailed_inputs(2, 1, 300, 4, 2, 16)
    before = k_cache.clone(), v_cache.clone()
    options = {"k": torch.ones(2, 1, 2, 16), "v": torch.ones(2, 1, 2, 16), "cache_seqlens": 20}
    with pytest.raises(error):
        blasst_attn_with_kvcache(q, k_cache, v_cache, **{**options, "threshold": 0.1, **change})
    assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])
    blasst_attn_with_kvcache(q, k_cache, v_cache, **options, threshold=0.1)
    assert bool((k_cache[:, 20] == 1).all()) and bool((v_cache[:, 20] == 1).all())


def test_a_call_that_no_kernel_can_serve_writes_nothing_into_the_cache(monkeypatch):
    never = select.Kernel("eager", lambda problem: "never", select.KERNELS["eager"].run)
    monkeypatch.setitem(select.KERNELS, "eager", never)
    q, k_cache, v_cache = heavy_tailed_inputs(2, 1, 300, 4, 2, 16)
    before = k_cache.clone()
    new = torch.ones(2, 1, 2, 16)
    with pytest.raises(UnsupportedError, match="never"):
        blasst_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=20, threshold=0.1)
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": [1.0]}, TypeError, "^query: got list"),
        ({"key": torch.zeros(1, 2, 10, 16)}, ValueError, "^key: got batch 1, want 2 like query"),
        ({"is_causal": 1}, TypeError, "^is_causal: got 1"),
        ({"scale": math.nan}, ValueError, "^scale: got nan"),
        ({"dropout_p": 0.1}, UnsupportedError, "^dropout_p"),
    ],
)
def test_sdpa_layout_names_its_own_arguments(change, error, message):
    values = {name: torch.zeros(2, 2, 10, 16) for name in ("query", "key", "value")} | change
    if "key" in change:
        values["value"] = values["key"]
    with pytest.raises(error, match=message):
        attention(**values, threshold=0.1)


def test_a_tangent_is_refused_instead_of_lost():
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    for call in (blasst.blasst_attn_func, blasst.blasst_attn_with_kvcache):
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(lambda q, call=call: call(q, k, v, threshold=0.1).out, (q,), (q,))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            call(q, k, forward_ad.make_dual(v, v), threshold=0.1)


def test_gradients_are_refused_at_the_call():
    q, k, v = inputs()
    for x in (q, k, v):
        x.requires_grad_()
        with pytest.raises(NotImplementedError, match="no backward pass"):
            blasst_attn_func(q, k, v, threshold=0.1)
        with torch.no_grad():
            assert blasst_attn_func(q, k, v, threshold=0.1).out.requires_grad is False
        x.requires_grad_(False)
    with torch.inference_mode():
        blasst_attn_func(q, k, v, threshold=0.1)


def test_sdpa_layout_equals_torch():
    q, k, v = (x.transpose(1, 2) for x in inputs())
    got = attention(q, k, v, enable_gqa=True, scale=0.3, threshold=0.0, return_lse=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    options = {"enable_gqa": True, "threshold": 1.0, "return_counts": True}
    free, tail = (attention(q, k, v, **options, dense_tail=rows).counts.skipped for rows in (0, 10**6))
    assert int(free.sum()) > 0 == int(tail.sum())
    torch.testing.assert_close(got.out, expected, rtol=1e-5, atol=1e-6)
    assert got.lse.shape == q.shape[:3]
    with pytest.raises(ValueError, match="enable_gqa"):
        attention(q, k, v, threshold=0.0)
    with pytest.raises(ValueError, match="value: got shape"):
        attention(q, k, v[:, :, :5], enable_gqa=True, threshold=0.0)


def test_many_short_sequences_are_all_written():
    q = torch.randn(3000, 2, 8)
    starts = torch.arange(0, 3001, dtype=torch.int32)
    got = blasst_attn_varlen_func(q, q, q, starts, starts, 1, 1, threshold=0.5)
    torch.testing.assert_close(got.out, q)


def arguments(phase, **change):
    q, k, v = inputs()
    values = {
        "q": q,
        "k": k,
        "v": v,
        "phase": phase,
        "threshold": torch.full((2,), 0.05),
        "softmax_scale": 0.25,
        "causal": True,
        "window_size": [-1, -1],
        "softcap": 0.0,
        "sinks": None,
        "max_skipped_mass": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "seqused_k": None,
        "leftpad_k": None,
        "block_table": None,
        "max_seqlen_q": 70,
        "max_seqlen_k": 300,
        "k_descale": None,
        "v_descale": None,
        "block_mask": None,
        "dense_tail": 0,
        "screen": (),
        "int8_screen": False,
        "progressive": False,
        "want_counts": True,
        "want_mass_bound": True,
        "want_kept_tiles": True,
        "impl": "eager",
    }
    if phase == "decode":
        values.update(q=q[:, :2], max_seqlen_q=2, seqused_k=cu(300, 120))
    values.update(change)
    return tuple(values.values())


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_op_passes_torchs_own_checks(phase):
    results = torch.library.opcheck(torch.ops.blasst.attention, arguments(phase))
    assert set(results.values()) == {"SUCCESS"}


def test_outputs_of_the_op_share_no_memory(monkeypatch):
    """A kernel may fill both counts in one tensor (the one for decode on Hopper does)."""
    plain = op.select.run

    def run(*given):
        got = plain(*given)
        together = torch.stack(list(got.counts[:2]))
        return got._replace(counts=SkipCounts(*together))

    monkeypatch.setattr(op.select, "run", run)
    results = torch.library.opcheck(torch.ops.blasst.attention, arguments("decode"))
    assert set(results.values()) == {"SUCCESS"}


def test_shapes_for_the_compiler_equal_real_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._pytree import tree_map_only

    packed = dict(zip("qkv", (x.flatten(0, 1) for x in inputs()), strict=True))
    packed.update(cu_seqlens_q=cu(0, 70, 140), cu_seqlens_k=cu(0, 300, 600))
    mask = torch.ones(2, 4, 2, 3, dtype=torch.bool)
    masked = arguments("prefill", block_mask=mask)
    codes = KeyCodes.from_keys(inputs()[1], 4)
    screened = arguments("decode", screen=(codes.codes, codes.low, codes.step), want_mass_bound=False)
    for args in (arguments("prefill"), arguments("decode"), arguments("prefill", **packed), masked, screened):
        real = torch.ops.blasst.attention(*args)
        with FakeTensorMode() as mode:
            fake = torch.ops.blasst.attention(*tree_map_only(torch.Tensor, mode.from_tensor, args))
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_compiles_as_one_graph_without_recompiling_per_length_or_threshold():
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")

    def f(q, k, v, threshold, lengths):
        prefill = blasst_attn_func(q, k, v, threshold=threshold, causal=True, return_counts=True)
        decode = blasst_attn_with_kvcache(
            q[:, :1], k, v, cache_seqlens=lengths, threshold_scale_factor=threshold, return_lse=True
        )
        return prefill.out, prefill.counts.skipped, decode.out, decode.lse

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for length in (320, 256, 300):
        for threshold in (0.01, 0.02, 0.05):
            q, k, v = heavy_tailed_inputs(1, 70, length, 4, 2, 16, seed=length)
            for value in (threshold, torch.tensor([threshold])):
                if isinstance(value, float) and length == 320 and threshold == 0.01:
                    continue
                args = (q, k, v, value, cu(length - 20))
                for a, b in zip(compiled(*args), f(*args), strict=True):
                    assert torch.equal(a, b)
    # a float or a tensor threshold, a fixed or a symbolic length, a fixed or a symbolic float
    assert counter.frame_count <= 5


def test_export_keeps_the_op():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, threshold):
            return blasst_attn_func(q, k, v, threshold=threshold, causal=True).out

    args = (*inputs(), torch.full((2,), 0.05))
    program = torch.export.export(Layer(), args)
    assert any("blasst.attention" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*args), Layer()(*args))


def test_the_serving_kernel_can_be_asked_for():
    blasst_attn_func(*inputs(), threshold=0.1)
    assert blasst.backend_used() == "eager"
