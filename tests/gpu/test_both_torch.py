"""The kernels of a GPU under torch: inference mode, autocast, streams, opcheck, compiler, export, ranks."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blasst import backend_used, blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.types import AttentionOutput
from blasst.testing import Inputs, heavy_tailed_inputs, pages_from

DEVICE = "cuda"
HALF, BFLOAT = torch.float16, torch.bfloat16
EVERYTHING = {"return_lse": True, "return_counts": True, "return_mass_bound": True, "return_kept_tiles": True}

impls = pytest.mark.parametrize("impl", ["hopper", "triton"])
#: New tokens of a call: 1 and 4 follow the decode rule, 300 the prefill rule.
tokens = pytest.mark.parametrize("tokens", [1, 4, 300])


def inputs_of(
    tokens: int,
    heads: int = 8,
    kv_heads: int = 2,
    keys: int = 3000,
    dtype: torch.dtype = BFLOAT,
    seed: int = 0,
) -> Inputs:
    block = 128 if tokens > 8 else 64
    return heavy_tailed_inputs(
        2, tokens, keys, heads, kv_heads, 128, dtype=dtype, device=DEVICE, block=block, seed=seed
    )


def attention(x: list[torch.Tensor] | Inputs, impl: str, **options: object) -> AttentionOutput:
    """By the rule of its number of new tokens; decode says its lengths, as calls that are prepared do."""
    options = {"threshold": 0.05, "causal": True, "impl": impl} | EVERYTHING | options
    if x[0].shape[1] > 8:
        return blasst_attn_func(*x, **options)
    lengths = torch.tensor([x[1].shape[1], 700], dtype=torch.int32).to(DEVICE)
    return blasst_attn_with_kvcache(*x, cache_seqlens=lengths, **options)


def assert_same(a: AttentionOutput, b: AttentionOutput) -> None:
    assert torch.equal(a.out, b.out)
    assert torch.equal(a.lse, b.lse)
    assert torch.equal(a.mass_bound, b.mass_bound)
    assert torch.equal(a.kept_tiles, b.kept_tiles)
    assert torch.equal(a.counts.skipped, b.counts.skipped)
    assert torch.equal(a.counts.visited, b.counts.visited)


@impls
@tokens
def test_inference_mode_changes_nothing(tokens: int, impl: str) -> None:
    x = inputs_of(tokens, seed=1)
    plain = attention(x, impl)
    with torch.inference_mode():
        made_there = [t.clone() for t in x]
        for _ in range(2):  # the second decode call goes the short way
            assert_same(attention(made_there, impl), plain)
            assert_same(attention(x, impl), plain)
    assert made_there[0].is_inference()
    assert_same(attention(made_there, impl), plain)


@impls
@tokens
def test_autocast_leaves_calls_alone(tokens: int, impl: str) -> None:
    x = inputs_of(tokens, dtype=HALF, seed=2)
    plain = attention(x, impl)
    with torch.autocast(DEVICE, dtype=BFLOAT):
        for _ in range(2):
            got = attention(x, impl)
            assert got.out.dtype == HALF
            assert_same(got, plain)
        linear = torch.nn.Linear(128, 128, device=DEVICE)
        with torch.no_grad():
            served = attention([linear(t) for t in x], impl)
        assert served.out.dtype == BFLOAT


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_autocast_leaves_the_products_inside_alone(impl: str) -> None:
    x = heavy_tailed_inputs(1, 70, 300, 2, 1, 64, device=DEVICE, seed=2, noise=2.0)
    plain = blasst_attn_func(*x, threshold=0.05, impl=impl, **EVERYTHING)
    with torch.autocast(DEVICE, dtype=BFLOAT):
        assert_same(blasst_attn_func(*x, threshold=0.05, impl=impl, **EVERYTHING), plain)


@impls
@tokens
def test_gradients_are_refused_at_the_call(tokens: int, impl: str) -> None:
    x = inputs_of(tokens, seed=3)
    plain = attention(x, impl)
    for name in ("q", "k", "v"):
        wants = x._replace(**{name: getattr(x, name).clone().requires_grad_()})
        with pytest.raises(NotImplementedError):
            attention(wants, impl)
        with torch.no_grad():
            assert_same(attention(wants, impl), plain)


@impls
@tokens
def test_each_of_two_streams_gets_its_own_results(tokens: int, impl: str) -> None:
    several = [inputs_of(tokens, seed=seed) for seed in (4, 5)]
    want = [attention(x, impl) for x in several]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in several], [[], []]
    for _ in range(10):
        for stream, x, mine in zip(streams, several, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(attention(x, impl))
    torch.cuda.synchronize()
    for expected, mine in zip(want, results, strict=True):
        for got in mine:
            assert_same(got, expected)


@impls
@tokens
def test_heads_of_a_rank_have_the_bits_of_all_heads(tokens: int, impl: str) -> None:
    x = inputs_of(tokens, heads=28, kv_heads=4, keys=9000, seed=6)
    whole = attention(x, impl)
    assert int(whole.counts.skipped.sum()) > 0
    for ranks in (2, 4):
        parts = [attention([t.chunk(ranks, dim=2)[rank] for t in x], impl) for rank in range(ranks)]
        for name, axis in (("out", 2), ("lse", 1), ("mass_bound", 1), ("kept_tiles", 1)):
            together = torch.cat([getattr(part, name) for part in parts], axis)
            assert torch.equal(together, getattr(whole, name)), name


class Recorded(TorchDispatchMode):
    """Arguments of the operator behind the public functions."""

    arguments: tuple[object, ...] = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.blasst.attention.default:
            self.arguments = args
        return func(*args, **(kwargs or {}))


def public_calls(impl: str) -> dict[str, object]:
    """Name -> a call of each kind."""
    prompt, step = inputs_of(70, keys=300, seed=7), inputs_of(2, keys=700, seed=8)
    lengths = torch.tensor([700, 650], dtype=torch.int32).to(DEVICE)
    ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32).to(DEVICE) for n in (70, 300)]
    (pages_k, table), (pages_v, _) = (pages_from(t, 16, fill=0.0) for t in step[1:])
    options = {"threshold": torch.tensor([0.05, 0.0]).to(DEVICE), "causal": True, "impl": impl, **EVERYTHING}
    packed = [t.flatten(0, 1) for t in prompt]
    budget = {"max_skipped_mass": 0.05, "softcap": 20.0, "window_size": (600, 0)}
    sinks = torch.zeros(8, device=DEVICE)
    return {
        "prefill": lambda: blasst_attn_func(*prompt, **options),
        "dense prefill": lambda: blasst_attn_func(*prompt, impl=impl),
        "packed": lambda: blasst_attn_varlen_func(*packed, *ends, 70, 300, **options, dense_tail=3),
        "decode": lambda: blasst_attn_with_kvcache(*step, cache_seqlens=lengths, **options),
        "paged": lambda: blasst_attn_with_kvcache(
            step.q, pages_k, pages_v, cache_seqlens=lengths, block_table=table, **options
        ),
        "budget": lambda: blasst_attn_with_kvcache(
            *step, cache_seqlens=lengths, sinks=sinks, **options, **budget
        ),
    }


@impls
@pytest.mark.parametrize("kind", ["prefill", "dense prefill", "packed", "decode", "paged", "budget"])
def test_the_op_passes_torchs_own_checks(kind: str, impl: str) -> None:
    with Recorded() as record:
        public_calls(impl)[kind]()
    assert record.arguments[-1] == impl
    results = torch.library.opcheck(torch.ops.blasst.attention, record.arguments)
    assert set(results.values()) == {"SUCCESS"}


def layer(q, k, v, threshold, lengths):
    """A prompt and a step, as a model's layer would compute them."""
    prefill = blasst_attn_func(q * 1.0, k, v, threshold=threshold, causal=True, return_counts=True)
    decode = blasst_attn_with_kvcache(
        q[:, :1], k, v, cache_seqlens=lengths, threshold=threshold, return_lse=True, return_counts=True
    )
    return prefill.out * 2, prefill.counts.skipped, decode.out, decode.lse, decode.counts.skipped


@pytest.mark.parametrize("dtype", [BFLOAT, torch.float32], ids=["hopper", "triton"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")  # what inductor says of the machine
def test_the_compiler_sees_one_graph_for_all_lengths(backend: str, dynamic: bool | None, dtype) -> None:
    import torch._dynamo.testing
    import torch._inductor.config

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    with torch._inductor.config.patch(compile_threads=1):
        compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counter)
        skipped = 0
        for keys in (1320, 1256, 1900):
            x = inputs_of(70, keys=keys, dtype=dtype, seed=keys)
            lengths = torch.tensor([keys - 20, keys // 2], dtype=torch.int32).to(DEVICE)
            for value in (0.01, 0.05):
                threshold = torch.full((2,), value, device=DEVICE)
                want = layer(*x, threshold, lengths)
                got = compiled(*x, threshold, lengths)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
                skipped += int(want[1].sum()) * int(want[4].sum())
    assert skipped > 0
    assert counter.frame_count <= 2  # fixed lengths, then any


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_writes_the_cache(backend: str) -> None:
    import torch._inductor.config

    x = inputs_of(1, keys=900, seed=9)
    new = [t[:, 5:6].clone() for t in x[1:]]
    lengths = torch.tensor([800, 3], dtype=torch.int32).to(DEVICE)

    def step(q, k, v, new_k, new_v, lengths):
        return blasst_attn_with_kvcache(q, k, v, new_k, new_v, cache_seqlens=lengths, threshold=0.05).out

    torch._dynamo.reset()
    own, other = ([t.clone() for t in x[1:]] for _ in range(2))
    want = step(x.q, *own, *new, lengths)
    with torch._inductor.config.patch(compile_threads=1):
        got = torch.compile(step, fullgraph=True, backend=backend)(x.q, *other, *new, lengths)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
    assert not torch.equal(own[0], x.k)


@impls
def test_an_exported_program_is_saved_loaded_and_serves_other_lengths(impl: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, threshold):
            return blasst_attn_func(q, k, v, threshold=threshold, causal=True, impl=impl).out

    threshold = torch.full((2,), 0.05, device=DEVICE)
    rows, keys = torch.export.Dim("rows", min=2, max=4096), torch.export.Dim("keys", min=2, max=65536)
    shapes = {"q": {1: rows}, "k": {1: keys}, "v": {1: keys}, "threshold": {}}
    program = torch.export.export(Layer(), (*inputs_of(70, seed=10), threshold), dynamic_shapes=shapes)
    assert any("blasst.attention" in str(node.target) for node in program.graph.nodes)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for tokens, length in ((70, 3000), (131, 1500)):
        x = inputs_of(tokens, keys=length, seed=11)
        assert torch.equal(loaded(*x, threshold), Layer()(*x, threshold))
        assert backend_used() == impl


@impls
def test_a_call_inside_another_modes_dispatch_is_the_same_call(impl: str) -> None:
    for kind, call in public_calls(impl).items():
        if kind == "dense prefill":
            continue
        plain = call()
        with Recorded():
            assert_same(call(), plain)


@impls
def test_a_graph_inside_a_pool_of_torch_survives_other_calls(impl: str) -> None:
    """Memory that a graph took stays its own while calls outside go on and end."""
    x = inputs_of(1, seed=12)
    lengths = torch.tensor([3000, 700], dtype=torch.int32).to(DEVICE)
    options = {"cache_seqlens": lengths, "causal": True, "impl": impl, **EVERYTHING}
    threshold = torch.tensor([0.05, 0.05]).to(DEVICE)
    want = blasst_attn_with_kvcache(*x, threshold=threshold, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = blasst_attn_with_kvcache(*x, threshold=threshold, **options)
    for _ in range(3):
        other = [
            blasst_attn_with_kvcache(*inputs_of(1, seed=13), threshold=0.05, **options) for _ in range(4)
        ]
        junk = torch.full((2**22,), math.nan, device=DEVICE)
        graph.replay()
        assert_same(replayed, want)
        del other, junk
