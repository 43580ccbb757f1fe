"""The Hopper decode kernel: random ragged batches against the reference, and bits that must stay."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from blasst import blasst_attn_with_kvcache
from blasst.core.reference import ReferenceOutput, reference_attention
from blasst.core.types import AttentionOutput, SkipCounts
from blasst.kernels import repeats
from blasst.kernels.hopper import decode
from blasst.testing import assert_matches_reference, heavy_tailed_inputs, pages_from

PARTS, CALLS = 10, 100
#: Seconds in which a part must end, compilation included; a kernel that hangs does not.
LIMIT = 150
NEAR = 2e-3
GROUPS_AND_TOKENS = [
    (1, 1),
    (1, 8),
    (3, 1),
    (4, 1),
    (4, 4),
    (6, 2),
    (7, 1),
    (7, 3),
    (9, 8),
    (12, 3),
    (16, 1),
    (16, 2),
    (16, 4),
    (16, 8),
]
FP8 = torch.float8_e4m3fn
EVERYTHING = {"return_lse": True, "return_counts": True, "return_kept_tiles": True, "impl": "hopper"}


def draw_call(draw: random.Random) -> tuple[dict, dict]:
    """(tensors by their names in the reference, options)."""
    batch, kv_heads = draw.choice([1, 1, 2, 3, 5]), draw.choice([1, 2, 4])
    group, tokens = draw.choice(GROUPS_AND_TOKENS)
    longest = draw.choice([1, 63, 64, 65, 200, 640, draw.randint(1, 6000), draw.randint(1, 6000)])
    x = heavy_tailed_inputs(
        batch,
        tokens,
        longest,
        kv_heads * group,
        kv_heads,
        draw.choice([64, 96, 128, 128]),
        dtype=draw.choice([torch.bfloat16, torch.float16]),
        device="cuda",
        seed=draw.randrange(2**31),
        block=64,
        hot_fraction=draw.choice([0.05, 0.25]),
        drop=draw.choice([(8.0, 40.0), (1.0, 12.0)]),
        noise=draw.choice([0.5, 2.0]),
    )
    if draw.random() < 0.2:  # a hot key in the middle, far above the anchors
        x.k[:, longest // 2, :, 0] = x.k[:, longest // 2, :, 0].abs() + 60.0
    lengths = [draw.choice([longest, draw.randint(0, longest)]) for _ in range(batch)]
    tensors = {"q": x.q, "k": x.k, "v": x.v}
    if draw.random() < 0.7:
        for b, n in enumerate(lengths):
            x.k[b, n:] = x.v[b, n:] = torch.nan
        tensors["seqused_k"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        if draw.random() < 0.6:
            page = draw.choice([16, 32, 64, 128, 256])
            tensors["k"], tensors["block_table"] = pages_from(x.k, page, fill=torch.nan)
            tensors["v"], _ = pages_from(x.v, page, fill=torch.nan)
        elif draw.random() < 0.4:
            pads = [draw.randint(0, n) for n in lengths]
            for b, n in enumerate(pads):
                x.k[b, :n] = x.v[b, :n] = torch.nan
            tensors["leftpad_k"] = torch.tensor(pads, dtype=torch.int32, device="cuda")
    if draw.random() < 0.3:
        for name, largest in (("k", 200.0), ("v", 4.0)):
            whole = tensors[name]
            descale = torch.tensor([[draw.uniform(0.5, 1.0) for _ in range(kv_heads)] for _ in range(batch)])
            descale = descale.cuda() * (largest / 400)
            if "block_table" in tensors:
                descale = descale[:1]
            tensors[name] = (whole.float() / descale[:, None, :, None]).clamp(-448, 448).to(FP8)
            tensors[f"{name}_descale"] = descale.expand(batch, -1)
    options = {
        "causal": draw.random() < 0.8,
        "window_size": draw.choice([(-1, -1)] * 4 + [(100, 0), (1000, -1)]),
        "softcap": draw.choice([0.0, 0.0, 0.0, 15.0]),
        "sinks": torch.linspace(-2, 6, kv_heads * group, device="cuda") if draw.random() < 0.25 else None,
    }
    return tensors, options


def call(tensors: dict, options: dict, threshold: object, **more: object) -> AttentionOutput:
    """The public function on these tensors."""
    return blasst_attn_with_kvcache(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        cache_seqlens=tensors.get("seqused_k"),
        cache_leftpad=tensors.get("leftpad_k"),
        block_table=tensors.get("block_table"),
        k_descale=tensors.get("k_descale"),
        v_descale=tensors.get("v_descale"),
        threshold=threshold,
        **options,
        **EVERYTHING,
        **more,
    )


def on_cpu(got: AttentionOutput) -> AttentionOutput:
    """A call's output on the CPU, where many small references are found faster."""
    counts = SkipCounts(got.counts.skipped.cpu(), got.counts.visited.cpu())
    bound = None if got.mass_bound is None else got.mass_bound.cpu()
    return AttentionOutput(got.out.cpu(), got.lse.cpu(), counts, bound, got.kept_tiles.cpu())


def check(draw: random.Random) -> None:
    """One random call."""
    tensors, options = draw_call(draw)
    threshold = draw.choice([None, 0.0, 1e-3, 0.05, 1.0])
    if threshold and draw.random() < 0.3:
        sequences = tensors["q"].shape[0]
        threshold = torch.tensor([draw.choice([0.0, 0.01, 1.0]) for _ in range(sequences)], device="cuda")
    more = {}
    if threshold is not None and draw.random() < 0.3:
        more["return_mass_bound"] = True
        options["max_skipped_mass"] = draw.choice([None, 0.02, 0.2])
    got = call(tensors, options, threshold, **more)
    again = call(tensors, options, threshold, **more)
    assert torch.equal(got.out, again.out), "two runs differ"
    assert torch.equal(got.lse, again.lse), "two runs differ"
    if isinstance(threshold, float) and threshold == 0.0:
        dense = call(tensors, options | {"max_skipped_mass": None}, None)
        assert torch.equal(got.out, dense.out), "threshold 0 differs from dense"
    rule = {"threshold": threshold, "phase": "decode", **options, **tensors}
    rule = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in rule.items()}
    truth = reference_attention(**rule)
    yardstick = reference_attention(**rule, kept_tiles=truth.kept_tiles, dtype=tensors["q"].dtype)
    if options.get("max_skipped_mass") is None:
        assert_matches_reference(on_cpu(got), truth, yardstick, rule["threshold"], NEAR)
        return
    # A budget's decisions have no margin in the reference: follow the kernel's, and hold it to its promise.
    followed = reference_attention(**rule, kept_tiles=got.kept_tiles.cpu())
    differ = int((got.kept_tiles.cpu() != truth.kept_tiles).sum())
    assert differ <= max(1, truth.kept_tiles.numel() // 100), f"{differ} tiles differ under a budget"
    assert_matches_reference(
        on_cpu(got), followed, yardstick if differ == 0 else followed_in(rule, got), None
    )
    eps = options["max_skipped_mass"]
    assert float(followed.skipped_mass.max()) <= eps / (1 + eps) * (1 + 1e-5)


def followed_in(rule: dict, got: AttentionOutput) -> ReferenceOutput:
    """The reference in the dtype of q with the kernel's own kept tiles."""
    return reference_attention(**rule, kept_tiles=got.kept_tiles.cpu(), dtype=rule["q"].dtype)


def run(part: int) -> None:
    """All calls of a part; the message of a failure names the call."""
    torch.set_num_threads(1)
    for number in range(CALLS):
        print("call", part * CALLS + number, flush=True)  # a call that hangs is the last one
        try:
            check(random.Random(part * CALLS + number))
        except Exception as error:
            raise AssertionError(f"call {part * CALLS + number}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_random_ragged_batches(part: int) -> None:
    command = [sys.executable, __file__, str(part)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"not done in {LIMIT} s: {(error.stdout or b'')[-20:]!r}")
    assert done.returncode == 0, done.stderr[-2000:]


def test_alone_and_in_a_batch_of_33_has_the_same_bits() -> None:
    x = heavy_tailed_inputs(33, 1, 9000, 8, 2, 128, dtype=torch.bfloat16, device="cuda", block=64, seed=1)
    lengths = torch.linspace(1, 9000, 33).int().cuda()
    threshold = torch.linspace(0, 0.05, 33).cuda()
    batch = blasst_attn_with_kvcache(*x, cache_seqlens=lengths, threshold=threshold, **EVERYTHING)
    assert int(batch.counts.skipped.sum()) > 0
    for i in range(33):
        one = [t[i : i + 1] for t in x]
        alone = blasst_attn_with_kvcache(
            *one, cache_seqlens=lengths[i : i + 1], threshold=threshold[i : i + 1], **EVERYTHING
        )
        assert torch.equal(alone.out[0], batch.out[i])
        assert torch.equal(alone.lse[0], batch.lse[i])
        assert torch.equal(alone.counts.skipped[0], batch.counts.skipped[i])


def test_values_of_skipped_tiles_are_not_used() -> None:
    x = heavy_tailed_inputs(2, 1, 5000, 8, 2, 128, dtype=torch.bfloat16, device="cuda", block=64, seed=2)
    clean = blasst_attn_with_kvcache(*x, threshold=0.01, **EVERYTHING)
    dead = ~clean.kept_tiles[:, :, 0]
    assert int(dead.sum()) > 0
    for b, head, tile in dead.nonzero().tolist():
        x.v[b, tile * 64 : (tile + 1) * 64, head] = torch.nan
    again = blasst_attn_with_kvcache(*x, threshold=0.01, **EVERYTHING)
    assert torch.equal(clean.out, again.out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 4, 12, 32])
def test_a_key_far_above_the_anchors_raises_the_base(group: int, dtype: torch.dtype) -> None:
    x = heavy_tailed_inputs(1, 1, 4096, group, 1, 128, dtype=dtype, device="cuda", block=64, seed=4)
    x.k[:, 1500, :, 0] = 2.0 * 128**0.25 * 40  # some 100 nats above the rest
    got = blasst_attn_with_kvcache(*x, threshold=0.01, **EVERYTHING)
    truth = reference_attention(*x, threshold=0.01, phase="decode")
    yardstick = reference_attention(
        *x, threshold=0.01, phase="decode", kept_tiles=truth.kept_tiles, dtype=dtype
    )
    assert_matches_reference(got, truth, yardstick, 0.01, NEAR)


@pytest.mark.parametrize("mass", [False, True])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_split_that_hears_nothing_finds_the_same(tokens: int, mass: bool, monkeypatch) -> None:
    x = heavy_tailed_inputs(
        2, tokens, 9000, 16, 1, 128, dtype=torch.bfloat16, device="cuda", block=64, seed=6
    )

    def bits() -> list[torch.Tensor]:
        got = blasst_attn_with_kvcache(*x, threshold=0.01, return_mass_bound=mass, **EVERYTHING)
        return [got.out, got.lse, got.counts.skipped, got.kept_tiles] + [got.mass_bound] * mass

    heard = bits()
    plain = decode.build
    monkeypatch.setattr(decode, "build", lambda *given, **more: {**plain(*given, **more), "PATIENCE": 0})
    monkeypatch.setattr(repeats, "_plans", {})
    for expected, got in zip(heard, bits(), strict=True):
        assert torch.equal(expected, got)


def test_nan_in_one_row_stays_there() -> None:
    x = heavy_tailed_inputs(2, 1, 3000, 8, 2, 128, dtype=torch.bfloat16, device="cuda", block=64, seed=5)
    clean = blasst_attn_with_kvcache(*x, threshold=0.0, **EVERYTHING)
    x.q[1, 0, 2] = torch.nan
    got = blasst_attn_with_kvcache(*x, threshold=0.0, **EVERYTHING)
    assert bool(got.out[1, 0, 2].isnan().all())
    got.out[1, 0, 2] = clean.out[1, 0, 2]
    assert torch.equal(got.out, clean.out)


def test_a_graph_follows_lengths_thresholds_and_pages() -> None:
    x = heavy_tailed_inputs(3, 1, 4000, 8, 2, 64, dtype=torch.bfloat16, device="cuda", block=64, seed=3)
    pages_k, table = pages_from(x.k, 64, fill=torch.nan)
    pages_v, _ = pages_from(x.v, 64, fill=torch.nan)
    lengths = torch.tensor([4000, 1, 2000], dtype=torch.int32, device="cuda")
    threshold = torch.tensor([0.0, 0.01, 1.0], device="cuda")

    def step() -> AttentionOutput:
        return blasst_attn_with_kvcache(
            x.q, pages_k, pages_v, cache_seqlens=lengths, block_table=table, threshold=threshold, **EVERYTHING
        )

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for new_lengths, new_threshold in (([3, 3999, 640], [0.05, 0.0, 0.01]), ([129, 64, 65], [1.0, 1.0, 0.0])):
        lengths.copy_(torch.tensor(new_lengths, dtype=torch.int32))
        threshold.copy_(torch.tensor(new_threshold))
        graph.replay()
        want = step()
        for got, expected in ((replayed.out, want.out), (replayed.lse, want.lse)):
            assert torch.equal(got, expected)
        assert torch.equal(replayed.counts.skipped, want.counts.skipped)


if __name__ == "__main__":
    run(int(sys.argv[1]))
