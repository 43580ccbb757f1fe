"""A thousand random calls of the Hopper kernel against the reference, in parts that must end in time."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from blasst import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
from blasst.core.reference import reference_attention
from blasst.core.types import AttentionOutput, SkipCounts
from blasst.testing import assert_matches_reference, heavy_tailed_inputs, pages_from

PARTS, CALLS = 10, 100
#: Seconds in which a part must end, compilation included; a kernel that hangs does not.
LIMIT = 120
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 2e-3


def draw_lengths(draw: random.Random, batch: int) -> tuple[list[int], list[int]]:
    """Rows and keys of each sequence, some of them none."""
    rows = [draw.choice([0, 1, 17, 64, 65, 128, 130, draw.randint(9, 300)]) for _ in range(batch)]
    keys = [draw.choice([0, 1, 63, 128, 129, draw.randint(1, 700), n + draw.randint(0, 300)]) for n in rows]
    return rows, keys


def draw_call(draw: random.Random) -> tuple[str, dict, dict]:
    """(public function, its tensors by name, options)."""
    batch, kv_heads = draw.choice([1, 1, 2, 3]), draw.choice([1, 2])
    heads = kv_heads * draw.choice([1, 2, 3, 6, 7])
    head_dim = draw.choice([64, 96, 128, 128])
    dtype = draw.choice([torch.bfloat16, torch.float16])
    rows, keys = draw_lengths(draw, batch)
    rows[0], keys[0] = max(rows[0], 9), max(keys[0], 1)
    x = heavy_tailed_inputs(
        batch,
        max(rows),
        max(keys),
        heads,
        kv_heads,
        head_dim,
        dtype=dtype,
        device="cuda",
        seed=draw.randrange(2**31),
        block=draw.choice([64, 128]),
        drop=draw.choice([(8.0, 40.0), (1.0, 12.0)]),
        noise=draw.choice([0.5, 2.0]),
    )
    options = {
        "causal": draw.random() < 0.7,
        "window_size": draw.choice([(-1, -1)] * 3 + [(100, 0), (70, 30), (500, -1)]),
        "softcap": draw.choice([0.0, 0.0, 0.0, 15.0]),
        "sinks": torch.linspace(-2, 6, heads, device="cuda") if draw.random() < 0.25 else None,
    }
    kind = draw.choice(["func", "func", "varlen", "paged", "cache"])
    if kind == "func":
        return kind, {"q": x.q, "k": x.k, "v": x.v}, options
    if kind == "varlen":
        tensors = {
            name: torch.cat([t[b, : n[b]] for b in range(batch)])
            for name, t, n in (("q", x.q, rows), ("k", x.k, keys), ("v", x.v, keys))
        }
        for name, n in (("q", rows), ("k", keys)):
            ends = torch.tensor([0, *n], dtype=torch.int32, device="cuda").cumsum(0).int()
            tensors[f"cu_seqlens_{name}"] = ends
        return kind, tensors, options
    lengths = torch.tensor([max(n, 1) for n in keys], dtype=torch.int32, device="cuda")
    for b, n in enumerate(lengths.tolist()):
        x.k[b, n:] = x.v[b, n:] = torch.nan
    tensors = {"q": x.q, "k": x.k, "v": x.v, "seqused_k": lengths}
    if kind == "paged":
        page = draw.choice([16, 32, 64, 128, 256])
        tensors["k"], tensors["block_table"] = pages_from(x.k, page, fill=torch.nan)
        tensors["v"], _ = pages_from(x.v, page, fill=torch.nan)
    return kind, tensors, options


def call(kind: str, tensors: dict, options: dict, threshold: float | None, **wanted: object):
    """The public function on these tensors."""
    t = dict(tensors)
    q, k, v = t.pop("q"), t.pop("k"), t.pop("v")
    wanted |= {"return_lse": True, "return_kept_tiles": True, "impl": "hopper", "threshold": threshold}
    if kind == "func":
        return blasst_attn_func(q, k, v, **options, **wanted)
    if kind == "varlen":
        longest = {f"max_seqlen_{name}": int(t[f"cu_seqlens_{name}"].diff().max()) for name in ("q", "k")}
        return blasst_attn_varlen_func(q, k, v, **t, **longest, **options, **wanted)
    lengths, table = t["seqused_k"], t.get("block_table")
    return blasst_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=table, **options, **wanted)


def on_cpu(got: AttentionOutput) -> AttentionOutput:
    """A call's output on the CPU, where many small references are found faster."""
    counts = got.counts and SkipCounts(got.counts.skipped.cpu(), got.counts.visited.cpu())
    out, lse, mass_bound, kept_tiles = (
        None if x is None else x.cpu() for x in (got.out, got.lse, got.mass_bound, got.kept_tiles)
    )
    return AttentionOutput(out, lse, counts, mass_bound, kept_tiles)


def check(draw: random.Random) -> None:
    """One random call."""
    kind, tensors, options = draw_call(draw)
    batch = len(tensors["cu_seqlens_q"]) - 1 if kind == "varlen" else tensors["q"].shape[0]
    threshold = draw.choice([None, 0.0, 1e-3, 0.05, 1.0])
    wanted = {"return_counts": True, "return_mass_bound": draw.random() < 0.4}
    if threshold and draw.random() < 0.2:
        options["max_skipped_mass"] = 0.05
    if kind in ("func", "varlen") and draw.random() < 0.3:
        options["dense_tail"] = draw.choice([1, 64, 130])
    if threshold and draw.random() < 0.3:
        threshold = torch.tensor([draw.choice([0.0, 0.01, 1.0]) for _ in range(batch)], device="cuda")
    got = call(kind, tensors, options, threshold, **wanted)
    again = call(kind, tensors, options, threshold)
    assert torch.equal(got.out, again.out), "two runs differ"
    assert torch.equal(got.lse, again.lse), "two runs differ"
    assert torch.equal(got.kept_tiles, again.kept_tiles), "two runs differ"
    if isinstance(threshold, float) and threshold == 0.0:
        assert torch.equal(got.out, call(kind, tensors, options, None).out), "threshold 0 differs from dense"
    got = on_cpu(got)
    rule = {"threshold": threshold, "phase": "prefill", **options, **tensors}
    rule = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in rule.items()}
    truth = reference_attention(**rule)
    if "max_skipped_mass" in options and not torch.equal(got.kept_tiles, truth.kept_tiles):
        followed = reference_attention(**rule, kept_tiles=got.kept_tiles)
        assert float(followed.skipped_mass.max()) <= 0.05 / 1.05 * (1 + 1e-4)
        return
    yardstick = reference_attention(**rule, kept_tiles=truth.kept_tiles, dtype=tensors["q"].dtype)
    assert_matches_reference(got, truth, yardstick, rule["threshold"], NEAR)


def run(part: int) -> None:
    """All calls of a part; the message of a failure names the call."""
    torch.set_num_threads(1)
    for number in range(CALLS):
        try:
            check(random.Random(part * CALLS + number))
        except Exception as error:
            raise AssertionError(f"call {part * CALLS + number}: {error}") from error


@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls(part: int) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(part)], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


if __name__ == "__main__":
    run(int(sys.argv[1]))
