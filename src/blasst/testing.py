"""Inputs, error budgets and comparisons for tests of kernels; also for users who write their own.

Nothing here needs a test framework: a failed check raises AssertionError with figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from blasst.core.reference import ReferenceOutput
from blasst.core.types import PHASES, AttentionOutput, Phase

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


class Inputs(NamedTuple):
    """One attention input: (batch, seqlen, heads, dim) each."""

    q: Tensor
    k: Tensor
    v: Tensor


def heavy_tailed_inputs(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    block: int = 64,
    hot_fraction: float = 0.25,
    drop: tuple[float, float] = (8.0, 40.0),
    noise: float = 0.5,
) -> Inputs:
    """Inputs whose scores look like trained attention: few hot blocks of keys, the rest far below.

    The score of row r and key c is level[block of c] + noise * N(0, 1) nats at the default softmax scale:
    level 0 in hot blocks, and between -drop[1] and -drop[0] in cold ones. A threshold with ln(1 / threshold)
    well below drop[0] - 8 * noise skips cold tiles far from the cut; hot_fraction is the dial for sparsity.

    Args:
        batch: sequences.
        seqlen_q: query rows.
        seqlen_k: keys.
        num_heads: query heads.
        num_kv_heads: key heads, a divisor of num_heads.
        head_dim: at least 2.
        head_dim_v: default head_dim.
        dtype: dtype of the tensors.
        device: where they are made.
        seed: of the generator.
        block: keys per block.
        hot_fraction: chance that a block is hot; the first and the last block always are.
        drop: nats by which cold blocks lie lower, smallest and largest.
        noise: standard deviation of the scores inside a block, in nats.

    Returns:
        Inputs.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    blocks = max(-(-seqlen_k // block), 1)
    level = -(drop[0] + (drop[1] - drop[0]) * torch.rand(batch, blocks, num_kv_heads, generator=generator))
    level[torch.rand(batch, blocks, num_kv_heads, generator=generator) < hot_fraction] = 0.0
    level[:, 0] = level[:, -1] = 0.0
    level = level.repeat_interleave(block, dim=1)[:, :seqlen_k]
    scale = head_dim**0.5
    # q = (sqrt(scale), normal ...): the first channel carries the level, the others the noise
    q = normal(batch, seqlen_q, num_heads, head_dim)
    q[..., 0] = scale**0.5
    k = normal(batch, seqlen_k, num_kv_heads, head_dim) * (noise * scale / max(head_dim - 1, 1) ** 0.5)
    k[..., 0] = level * scale**0.5
    v = normal(batch, seqlen_k, num_kv_heads, head_dim_v or head_dim)
    return Inputs(*(x.to(device=device, dtype=dtype) for x in (q, k, v)))


def attention_calls(dtypes: Sequence[torch.dtype]) -> SearchStrategy[tuple[Phase, Inputs, dict[str, Any]]]:
    """A Hypothesis strategy of small calls that every backend serves; needs the package hypothesis.

    Sizes lie at and beside the edges of tiles; scores are heavy-tailed, so that small thresholds skip tiles.

    Args:
        dtypes: of the inputs.

    Returns:
        Strategy of (phase, inputs, options causal, window_size, softcap, max_skipped_mass and perhaps sinks;
        dense_tail in prefill).
    """
    from hypothesis import strategies as st

    @st.composite
    def calls(draw: DrawFn) -> tuple[Phase, Inputs, dict[str, Any]]:
        phase = draw(st.sampled_from(PHASES))
        kv_heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 3]))
        inputs = heavy_tailed_inputs(
            draw(st.sampled_from([1, 2])),
            draw(st.sampled_from([1, 5, 8] if phase == "decode" else [1, 9, 63, 64, 65, 150])),
            draw(st.sampled_from([1, 17, 65, 128, 129, 500, 700])),
            kv_heads * group,
            kv_heads,
            draw(st.sampled_from([16, 40])),
            draw(st.sampled_from([16, 24])),
            dtype=draw(st.sampled_from(dtypes)),
            seed=draw(st.integers(0, 10**6)),
            noise=draw(st.sampled_from([0.5, 2.0])),
            drop=draw(st.sampled_from([(8.0, 40.0), (1.0, 12.0)])),
        )
        options: dict[str, Any] = {
            "causal": draw(st.booleans()),
            "window_size": draw(st.sampled_from([(-1, -1), (-1, -1), (100, 0), (70, 30)])),
            "softcap": draw(st.sampled_from([0.0, 0.0, 10.0])),
            "max_skipped_mass": draw(st.sampled_from([None, None, 0.1])),
        }
        if phase == "prefill":
            options["dense_tail"] = draw(st.sampled_from([0, 0, 1, 70]))
        if draw(st.booleans()):
            options["sinks"] = torch.linspace(-2, 6, kv_heads * group)
        return phase, inputs, options

    return calls()


def max_error(actual: Tensor, truth: Tensor) -> float:
    """Largest absolute difference; infinite where one of both is NaN or infinite in another way."""
    actual, truth = actual.double(), truth.double()
    same = (actual == truth) | (actual.isnan() & truth.isnan())
    difference = torch.where(same, 0.0, (actual - truth).abs())
    return float(difference.nan_to_num(nan=math.inf, posinf=math.inf).max()) if difference.numel() else 0.0


def assert_within_budget(
    actual: Tensor, truth: Tensor, yardstick: Tensor, name: str = "out", magnitude: float = 0.0
) -> None:
    """max|actual - truth| <= 2 * (max|yardstick - truth| + eps * max|truth|), eps of actual's dtype.

    Args:
        actual: what a kernel computed.
        truth: the reference in float64.
        yardstick: the reference in the dtype of the inputs.
        name: for the message.
        magnitude: of the terms that the result is a sum of, where it can be smaller than they are.
    """
    if tuple(actual.shape) != tuple(truth.shape):
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, want {tuple(truth.shape)}")
    for what in (torch.isnan, torch.isposinf, torch.isneginf):
        if not torch.equal(what(actual), what(truth)):
            raise AssertionError(
                f"{name}: {what.__name__} differs in {int((what(actual) ^ what(truth)).sum())}"
            )
    finite = truth.isfinite()
    largest = max(float(truth[finite].abs().max()), magnitude) if bool(finite.any()) else 0.0
    allowed = 2 * (max_error(yardstick[finite], truth[finite]) + torch.finfo(actual.dtype).eps * largest)
    error = max_error(actual[finite], truth[finite])
    if not error <= allowed:
        raise AssertionError(
            f"{name}: max error {error:.3e} exceeds {allowed:.3e} (max |truth| {largest:.3e})"
        )


def assert_same_kept_tiles(
    kept_tiles: Tensor, reference: ReferenceOutput, threshold: float | Tensor | None, near: float = 0.0
) -> int:
    """The kept map equals the reference's, but for tiles whose margin lies within `near` nats of the cut.

    Args:
        kept_tiles: bool (batch, heads, query tiles, key tiles).
        reference: what the reference says of the same inputs.
        threshold: float or (batch,).
        near: nats; 0 = exactly equal.

    Returns:
        How many tiles differ (all of them near the cut).
    """
    if kept_tiles.shape != reference.kept_tiles.shape:
        raise AssertionError(
            f"kept_tiles: {tuple(kept_tiles.shape)}, want {tuple(reference.kept_tiles.shape)}"
        )
    differs = kept_tiles != reference.kept_tiles
    if threshold is None:
        far = differs
    else:
        cut = torch.as_tensor(threshold, dtype=torch.float64, device=kept_tiles.device).log()
        cut = cut.reshape(-1, 1, 1, 1)
        far = differs & ~((reference.margin - cut).abs() <= near)
    if bool(far.any()):
        where = far.nonzero()[:4].tolist()
        raise AssertionError(
            f"kept_tiles: {int(far.sum())} of {far.numel()} differ away from the cut: {where}"
        )
    return int(differs.sum())


def assert_matches_reference(
    actual: AttentionOutput,
    truth: ReferenceOutput,
    yardstick: ReferenceOutput,
    threshold: float | Tensor | None = None,
    near: float = 0.0,
    magnitude: float = 0.0,
) -> None:
    """Everything that a call returned against the reference: kept tiles as sets, then values and counts.

    Args:
        actual: a call's output; parts that are None are left out.
        truth: the reference in float64.
        yardstick: the reference in the dtype of the inputs, given the kept tiles of truth.
        threshold: what the call used.
        near: nats around the cut in which a decision may differ; then only the map is compared.
        magnitude: of the values that out is a weighted sum of, where out may be smaller by chance.
    """
    if actual.kept_tiles is not None and assert_same_kept_tiles(actual.kept_tiles, truth, threshold, near):
        return
    assert_within_budget(actual.out, truth.out, yardstick.out, "out", magnitude)
    if actual.lse is not None:
        # lse = row_max + ln(row_sum) may cancel: its terms are at least as large as a score of 8 nats
        assert_within_budget(actual.lse, truth.lse, yardstick.lse, "lse", magnitude=8.0)
    if actual.counts is not None:
        for name in ("skipped", "visited"):
            got, want = getattr(actual.counts, name), getattr(truth.counts, name)
            if not torch.equal(got, want):
                raise AssertionError(f"counts.{name}: {got.tolist()}, want {want.tolist()}")
    if actual.mass_bound is not None:
        allowed = actual.mass_bound.double() * (1 + 1e-5) + 1e-30
        if not bool((allowed >= truth.skipped_mass).all()):
            raise AssertionError("mass_bound: lies below the true skipped mass")


def assert_error_bound(
    out: Tensor, dense: Tensor, skipped_mass: Tensor, v: Tensor, slack: float = 0.0
) -> None:
    """|out - dense| <= 2 * skipped_mass * max|v| + slack for every row.

    Args:
        out: (batch, seqlen_q, num_heads, head_dim_v).
        dense: the same without skipping.
        skipped_mass: (batch, num_heads, seqlen_q).
        v: the values.
        slack: for the rounding of out.
    """
    error = (out.double() - dense.double()).abs().amax(-1)
    allowed = 2 * skipped_mass.double().transpose(1, 2) * v.double().abs().max() + slack
    if not bool((error <= allowed).all()):
        raise AssertionError(f"error {float((error - allowed).max()):.3e} above 2 * skipped_mass * max|v|")


def assert_finite(tensor: Tensor, name: str = "out") -> None:
    """Every element is a finite number."""
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise AssertionError(f"{name}: {bad} of {tensor.numel()} elements are not finite")


def pages_from(
    cache: Tensor, page_size: int, *, fill: float, seed: int = 0, spare: int = 3
) -> tuple[Tensor, Tensor]:
    """A contiguous cache cut into shuffled pages.

    Args:
        cache: (batch, capacity, heads, dim).
        page_size: slots per page.
        fill: what unused slots and pages hold (NaN, inf, ...).
        seed: of the shuffle.
        spare: pages that belong to nobody.

    Returns:
        (pages (num_pages, page_size, heads, dim), block_table int32 (batch, pages per sequence)).
    """
    batch, capacity = cache.shape[:2]
    per = -(-capacity // page_size)
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(batch * per + spare, generator=generator)[: batch * per].view(batch, per)
    pages = cache.new_full((batch * per + spare, page_size, *cache.shape[2:]), fill)
    # Full pages, then what is left: a padded copy of the cache would take its memory once more.
    on_device, full = place.to(cache.device), capacity // page_size
    for own, sequence in zip(on_device, cache):
        pages[own[:full]] = sequence[: full * page_size].unflatten(0, (full, page_size))
        if full < per:
            pages[own[full], : capacity - full * page_size] = sequence[full * page_size :]
    return pages, on_device.to(torch.int32)
