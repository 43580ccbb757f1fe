"""Mixed steps over a paged cache, in the layouts of vLLM and SGLang: each sequence as if it came alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from blasst.core.errors import UnsupportedError
from blasst.core.profile import Profile, load_profile
from blasst.core.types import PHASES, Phase
from blasst.functional import blasst_attn_func, blasst_attn_with_kvcache
from blasst.integrations.serving_batch import LayerOptions, PagedStep, require_kernels
from blasst.integrations.serving_options import ServingOptions, ServingRules
from blasst.integrations.threshold_rules import ThresholdRule

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 32
PROFILE = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_smollm2" / "profile.json"


class Batch:
    """Sequences of (new tokens, keys) with shuffled pages; slots that belong to none hold NaN."""

    def __init__(self, sequences: list[tuple[int, int]], seed: int = 0, page_size: int = PAGE) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences, self.page_size = sequences, page_size
        pages = [-(-keys // page_size) for _, keys in sequences]
        cache = torch.full((sum(pages) + 3, KV_HEADS, page_size, 2 * DIM), torch.nan)
        self.k_pages, self.v_pages = cache.transpose(1, 2).split(DIM, dim=-1)
        order = torch.randperm(cache.shape[0], generator=generator).tolist()
        self.block_table = torch.full((len(sequences), max(pages) + 5), -1, dtype=torch.int32)
        self.q = torch.randn(sum(n for n, _ in sequences), HEADS, DIM, generator=generator) * 9
        self.starts = [0]
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        for i, (new, keys) in enumerate(sequences):
            self.starts.append(self.starts[-1] + new)
            dull = torch.where(torch.arange(keys) // 128 % 2 == 1, 0.02, 1.0)  # every other tile can go
            self.k.append(torch.randn(keys, KV_HEADS, DIM, generator=generator) * dull[:, None, None])
            self.v.append(torch.randn(keys, KV_HEADS, DIM, generator=generator))
            own = [order.pop() for _ in range(pages[i])]
            self.block_table[i, : len(own)] = torch.tensor(own, dtype=torch.int32)
            for j, page in enumerate(own):
                piece = slice(j * page_size, min((j + 1) * page_size, keys))
                size = piece.stop - piece.start
                self.k_pages[page, :size] = self.k[i][piece]
                self.v_pages[page, :size] = self.v[i][piece]
        self.seq_lens = torch.tensor([keys for _, keys in sequences], dtype=torch.int32)

    def step(self, options: ServingOptions) -> PagedStep:
        longest = int(self.seq_lens.max())
        return PagedStep.split(
            self.starts, self.seq_lens, self.block_table, longest, self.page_size, options.rules()
        )


MIXED = [(1, 700), (300, 300), (8, 640), (9, 1000), (1, 5), (0, 40), (100, 900), (3, 3), (1, 1200), (8, 8)]


@pytest.mark.parametrize(
    "sequences", [MIXED, [(1, 700), (1, 30)], [(200, 800)], [(5, 600), (5, 900)]], ids=len
)
@pytest.mark.parametrize(
    "layer", [LayerOptions(DIM**-0.5), LayerOptions(0.2, (199, 0), 20.0, torch.linspace(-1, 1, HEADS))]
)
@pytest.mark.parametrize("page_size", [PAGE, 1])  # SGLang's pages hold one token unless it is told otherwise
def test_each_sequence_is_served_as_if_alone(
    sequences: list[tuple[int, int]], layer: LayerOptions, page_size: int
) -> None:
    options = ServingOptions(threshold_scale_factor={"prefill": 60.0, "decode": 40.0})
    batch = Batch(sequences, page_size=page_size)
    out = torch.full((batch.q.shape[0] + 4, HEADS, DIM), 7.0)  # rows of padding at the end
    counts = batch.step(options).attend(batch.q, batch.k_pages, batch.v_pages, out, layer)
    wanted: dict[Phase, list[int]] = {phase: [0, 0] for phase in PHASES}
    for i, (new, keys) in enumerate(sequences):
        q, k, v = batch.q[batch.starts[i] : batch.starts[i + 1]][None], batch.k[i][None], batch.v[i][None]
        phase: Phase = "prefill" if new > 8 else "decode"
        common = {"causal": True, "return_counts": True, **layer._asdict()}
        threshold = min(1.0, {"prefill": 60.0, "decode": 40.0}[phase] / keys)
        if new > 8:
            alone = blasst_attn_func(q, k, v, threshold=threshold, **common)
        elif new > 0:
            alone = blasst_attn_with_kvcache(q, k, v, cache_seqlens=keys, threshold=threshold, **common)
        else:
            continue
        assert alone.counts is not None
        wanted[phase][0] += int(alone.counts.skipped.sum())
        wanted[phase][1] += int(alone.counts.visited.sum())
        torch.testing.assert_close(out[batch.starts[i] : batch.starts[i + 1]], alone.out[0])
    assert (out[batch.q.shape[0] :] == 7.0).all()
    for phase in PHASES:
        mine = [c for p, c in counts if p == phase]
        assert sum(int(c.skipped.sum()) for c in mine) == wanted[phase][0]
        assert sum(int(c.visited.sum()) for c in mine) == wanted[phase][1]
    if layer.window_size == (-1, -1):
        assert all(skipped > 0 for skipped, visited in wanted.values() if visited)


def with_tail(profile: Profile, rows: int) -> Profile:
    fit = replace(profile.phase_fit("prefill"), dense_tail=rows)
    return replace(profile, phases={**profile.phases, "prefill": fit})


def test_a_dense_tail_is_that_of_each_sequence() -> None:
    batch = Batch([(200, 800), (100, 900), (1, 700)])
    profile = load_profile(PROFILE)
    rules = ServingRules(
        ThresholdRule("prefill", "threshold", 1.0, "test", with_tail(profile, 65)),
        ThresholdRule("decode", "threshold", 1.0, "test"),
    )
    step = PagedStep.split(batch.starts, batch.seq_lens, batch.block_table, 900, batch.page_size, rules)
    assert [group.dense_tail for group in step.groups] == [65, 0]
    layer = LayerOptions(DIM**-0.5)
    out = torch.zeros(batch.q.shape[0], HEADS, DIM)
    ((_, counts), _) = step.attend(batch.q, batch.k_pages, batch.v_pages, out, layer)
    for i, (new, _) in enumerate([(200, 800), (100, 900)]):
        q = batch.q[batch.starts[i] : batch.starts[i + 1]][None]
        k, v = batch.k[i][None], batch.v[i][None]
        alone = blasst_attn_func(q, k, v, threshold=1.0, causal=True, dense_tail=65, return_counts=True)
        assert alone.counts is not None and torch.equal(counts.skipped[i], alone.counts.skipped[0])
        assert (int(alone.counts.skipped.sum()) > 0) == (new == 200)  # of 100 rows both tiles are in the tail


def test_a_phase_without_a_threshold_skips_nothing() -> None:
    batch = Batch(MIXED)
    out = torch.empty_like(batch.q)
    step = batch.step(ServingOptions(threshold={"decode": 1.0}))
    counts = step.attend(batch.q, batch.k_pages, batch.v_pages, out, LayerOptions(DIM**-0.5))
    assert sum(int(c.skipped.sum()) for p, c in counts if p == "prefill") == 0
    assert sum(int(c.skipped.sum()) for p, c in counts if p == "decode") > 0
    assert out.isfinite().all()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_no_kernel_serves_is_said_before_a_step(page_size: int) -> None:
    layer = (HEADS, KV_HEADS, DIM, DIM, page_size)
    require_kernels(*layer, torch.float32, torch.device("cpu"), LayerOptions(0.2))
    with pytest.raises(UnsupportedError, match="float64"):
        require_kernels(*layer, torch.float64, torch.device("cpu"), LayerOptions(0.2, impl="eager"))
