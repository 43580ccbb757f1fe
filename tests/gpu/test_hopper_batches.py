"""Random decode batches by the thousand, each against the rule in float64 for the whole batch at once.

`BLASST_RANDOM_BATCHES=10000 python3 -m pytest tests/gpu/test_hopper_batches.py`; the default is 1,000.
Shapes, lengths, masks, pages, scales and thresholds vary; the builds of the kernel are few. What a batch is
depends on its number alone: `python3 tests/gpu/test_hopper_batches.py --only 1234` runs one of them again.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from decode_oracle import Scores, decode_truth, scores_of
from torch import Tensor

from blasst import blasst_attn_with_kvcache
from blasst.core.types import AttentionOutput

#: Batches of a run.
BATCHES = int(os.environ.get("BLASST_RANDOM_BATCHES", "1000"))
#: Processes, and seconds in which they must end, compilation included; a kernel that hangs does not.
WORKERS = max(1, min(13, (os.cpu_count() or 1) - 3))
LIMIT = 300
#: Nats by which float32 and float64 scores of these inputs may differ.
NEAR = 2e-3
#: Batches whose checks are read back together: the device need not wait for the host after each.
TOGETHER = 8

FP8 = torch.float8_e4m3fn
#: Rows that a build holds -> (query heads of a KV head, new tokens).
ROWS = {
    8: [(1, 1), (1, 8), (3, 1), (4, 1), (4, 2), (7, 1), (8, 1)],
    16: [(3, 4), (5, 2), (6, 2), (12, 1), (16, 1), (2, 8)],
    32: [(4, 8), (7, 3), (16, 2), (9, 3), (32, 1)],
    64: [(8, 8), (12, 4), (16, 4), (48, 1), (9, 7)],
    128: [(16, 8), (12, 8), (128, 1), (9, 8), (33, 3)],
}
CONFIGURATIONS = list(product(ROWS, (64, 96, 128), (torch.bfloat16, torch.float16), (False, True)))


def wants_bound(number: int) -> bool:
    """Whether a batch asks for the mass bound; a build of its own, of every second configuration."""
    row, configuration = divmod(number, len(CONFIGURATIONS))
    return row % 2 == 1 and configuration % 2 == 0


def wants_dense(number: int) -> bool:
    """Whether a batch is compared with the dense build, which every fourth configuration has."""
    return number % len(CONFIGURATIONS) % 4 == 0 and not wants_bound(number)


class Batch:
    """One random call: tensors as the function takes them, and as the rule means them."""

    def __init__(self, number: int, device: str, longest: int = 6000) -> None:
        """Draw it.

        Args:
            number: of the batch.
            device: where its tensors are.
            longest: keys of a sequence at most.
        """
        self.draw = draw = random.Random(number)
        self.generator = torch.Generator(device).manual_seed(number)
        self.device, self.number = device, number
        rows, dim, self.dtype, fp8 = CONFIGURATIONS[number % len(CONFIGURATIONS)]
        group, tokens = draw.choice(ROWS[rows])
        batch, kv_heads = draw.choice([1, 1, 2, 3, 5, 9]), draw.choice([1, 2, 4])
        most = max(64, min(longest, 12_000_000 // (batch * kv_heads * group * tokens)))
        keys = min(most, draw.choice([1, 63, 64, 65, 200, 640, *(draw.randint(1, most) for _ in range(4))]))
        self.q, k, v = self._inputs(batch, tokens, keys, group, kv_heads, dim)
        if draw.random() < 0.2:  # a hot key in the middle, far above the anchors
            k[:, keys // 2, :, 0] = k[:, keys // 2, :, 0].abs() + 60.0
        self.lengths = self._integers([draw.choice([keys, draw.randint(0, keys)]) for _ in range(batch)])
        self.pads, self.table, self.descale = self._integers([0] * batch), None, [None, None]
        paged = draw.random() < 0.4
        if not paged and draw.random() < 0.3:
            share = torch.rand(batch, generator=self.generator, device=device)
            self.pads = (share * (self.lengths + 1)).int().clamp(max=keys)
        self.caches = [k.to(self.dtype), v.to(self.dtype)]
        if fp8:
            self._to_fp8(kv_heads)
        self.meant = [
            x.float() if scale is None else x.float() * scale[:, None, :, None]
            for x, scale in zip(self.caches, self.descale)
        ]
        self._poison()
        if paged:
            self._into_pages(draw.choice([16, 32, 64, 128, 256]))
        self.options = {
            "causal": draw.random() < 0.8,
            "window_size": draw.choice([(-1, -1)] * 4 + [(100, 0), (1000, -1)]),
            "softcap": draw.choice([0.0, 0.0, 0.0, 15.0]),
            "sinks": None,
        }
        if draw.random() < 0.25:
            self.options["sinks"] = torch.linspace(-2, 6, kv_heads * group, device=device)
        self.threshold = draw.choice([0.0, 1e-3, 0.05, 1.0])
        if draw.random() < 0.3:
            values = [draw.choice([0.0, 0.01, 1.0]) for _ in range(batch)]
            self.threshold = torch.tensor(values).to(device, non_blocking=True)
        self.with_bound = wants_bound(number)
        self.budget = draw.choice([None, 0.02, 0.2]) if self.with_bound else None

    def _integers(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device, non_blocking=True)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def _inputs(
        self, batch: int, tokens: int, keys: int, group: int, kv_heads: int, dim: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Like `blasst.testing.heavy_tailed_inputs`, made where they are needed."""
        low, high = self.draw.choice([(8.0, 40.0), (1.0, 12.0)])
        noise, hot = self.draw.choice([0.5, 2.0]), self.draw.choice([0.05, 0.25])
        blocks, scale = -(-keys // 64), dim**0.5
        chance = torch.rand(2, batch, blocks, kv_heads, generator=self.generator, device=self.device)
        level = torch.where(chance[0] < hot, 0.0, -(low + (high - low) * chance[1]))
        level[:, 0] = level[:, -1] = 0.0
        q = self._normal(batch, tokens, kv_heads * group, dim)
        q[..., 0] = scale**0.5
        k = self._normal(batch, keys, kv_heads, dim) * (noise * scale / (dim - 1) ** 0.5)
        k[..., 0] = level.repeat_interleave(64, 1)[:, :keys] * scale**0.5
        return q.to(self.dtype), k, self._normal(batch, keys, kv_heads, dim)

    def _to_fp8(self, kv_heads: int) -> None:
        batch = len(self.lengths)
        for i, largest in enumerate((200.0, 4.0)):
            scale = torch.rand(batch, kv_heads, generator=self.generator, device=self.device) * 0.5 + 0.5
            self.descale[i] = scale * (largest / 400)
            stored = self.caches[i].float() / self.descale[i][:, None, :, None]
            self.caches[i] = stored.clamp(-448, 448).to(FP8)

    def _poison(self) -> None:
        """NaN in every slot that belongs to no sequence."""
        slot = torch.arange(self.caches[0].shape[1], device=self.device)
        foreign = (slot >= self.lengths[:, None]) | (slot < self.pads[:, None])
        for i, cache in enumerate(self.caches):
            nan = torch.full((), torch.nan, device=self.device).to(cache.dtype)
            self.caches[i] = torch.where(foreign[:, :, None, None], *_bits(nan, cache)).view(cache.dtype)

    def _into_pages(self, size: int) -> None:
        batch, keys, *rest = self.caches[0].shape
        per = -(-keys // size)
        order = torch.randperm(batch * per + 3, generator=self.generator, device=self.device)
        self.table = order[: batch * per].view(batch, per).int()
        for i, cache in enumerate(self.caches):
            whole = torch.full((batch, per * size, *rest), torch.nan, device=self.device).to(cache.dtype)
            (bits,) = _bits(whole)
            bits[:, :keys] = _bits(cache)[0]
            pages = _bits(
                torch.full((len(order), size, *rest), torch.nan, device=self.device).to(cache.dtype)
            )[0]
            pages[self.table.long().flatten()] = bits.view(batch * per, size, *rest)
            self.caches[i] = pages.view(cache.dtype)

    def call(self, impl: str, threshold: object, one: int | None = None, **wanted: object) -> AttentionOutput:
        """The public function, on the whole batch or on one sequence of it."""

        def of(x: object) -> object:
            return x[one : one + 1] if isinstance(x, Tensor) and one is not None else x

        caches = self.caches if self.table is not None else [of(x) for x in self.caches]
        return blasst_attn_with_kvcache(
            of(self.q),
            *caches,
            cache_seqlens=of(self.lengths),
            cache_leftpad=of(self.pads) if self.table is None else None,
            block_table=of(self.table),
            k_descale=of(self.descale[0]),
            v_descale=of(self.descale[1]),
            threshold=of(threshold),
            return_lse=True,
            return_kept_tiles=True,
            impl=impl,
            **(self.options | wanted),
        )

    def scores(self) -> Scores:
        """What the rule looks at."""
        return scores_of(self.q, *self.meant, self.lengths.long(), self.pads.long(), **self.options)


def _bits(*tensors: Tensor) -> list[Tensor]:
    """8-bit floats as integers: a CPU neither indexes nor chooses among them."""
    return [x.view(torch.uint8) if x.dtype == FP8 else x for x in tensors]


def differences(batch: Batch, impl: str) -> dict[str, Tensor]:
    """Name of each check -> bool scalar on the device, whether it failed."""
    threshold, draw = batch.threshold, batch.draw
    wanted = {"max_skipped_mass": batch.budget, "return_mass_bound": batch.with_bound}
    got = batch.call(impl, threshold, return_counts=True, **wanted)
    failed = {}
    if impl == "hopper":  # what others do not promise
        again = batch.call(impl, threshold, **wanted)
        failed["two runs differ"] = (got.out != again.out).any() | (got.lse != again.lse).any()
        one = draw.randrange(len(batch.lengths))
        alone = batch.call(impl, threshold, one, **wanted)
        failed[f"sequence {one} alone differs"] = (got.out[one] != alone.out[0]).any() | (
            got.kept_tiles[one] != alone.kept_tiles[0]
        ).any()
        if wants_dense(batch.number) and isinstance(threshold, float) and threshold == 0.0:
            dense = batch.call(impl, None)
            failed["threshold 0 differs from dense"] = (got.out != dense.out).any()
    scores = batch.scores()
    at = threshold if isinstance(threshold, Tensor) else batch.q.new_full((), threshold).float()
    at = at.expand(len(batch.lengths))
    kept, beyond = got.kept_tiles[:, :, 0].tensor_split([scores.visited.shape[-1]], -1)  # pages may hold more
    failed["tiles beyond the cache are kept"] = beyond.any()
    truth = decode_truth(scores, at, kept)
    cut = at.double().log()[:, None, None]
    ours = scores.visited[:, None] & ~(truth.margin < cut)
    differs = ours ^ kept
    if batch.budget is not None:
        differs &= ~kept  # a budget keeps more
        limit = batch.budget / (1 + batch.budget) * (1 + 1e-5)
        failed["the budget is exceeded"] = (truth.skipped_mass > limit).any()
    failed["kept tiles differ away from the cut"] = (differs & ~((truth.margin - cut).abs() <= NEAR)).any()
    failed["skipped"] = (got.counts.skipped != truth.visited[:, None] - kept.sum(-1)).any()
    failed["visited"] = (got.counts.visited != truth.visited[:, None]).any()
    # Weights and out are rounded to the dtype (u each), doubled for terms of second order; scores differ by
    # NEAR. The smallest weights of float16 are multiples of 2**-24.
    u = torch.finfo(batch.dtype).eps / 2
    allowed = 2 * u * (truth.out.abs() + truth.weighted) + NEAR * truth.weighted + 1e-6
    if batch.dtype == torch.float16:
        allowed = allowed + batch.meant[0].shape[1] * 2**-24 * 6
    failed["out"] = ~((got.out.double() - truth.out).abs() <= allowed).all()
    same = got.lse.double() == truth.lse
    failed["lse"] = ~(same | ((got.lse.double() - truth.lse).abs() <= NEAR)).all()
    if got.mass_bound is not None:
        failed["mass bound"] = (got.mass_bound.double() * (1 + 1e-5) + 1e-30 < truth.skipped_mass).any()
    return failed


def run(numbers: list[int], device: str = "cuda", impl: str = "hopper", longest: int = 6000) -> None:
    """Check batches.

    Raises:
        AssertionError: names the first batches that failed, and their checks.
    """
    torch.set_num_threads(1)
    for begin in range(0, len(numbers), TOGETHER):
        results = []
        for number in numbers[begin : begin + TOGETHER]:
            try:
                found = differences(Batch(number, device, longest), impl)
            except Exception as error:
                raise AssertionError(f"batch {number}: {error!r}") from error
            results += [(number, name, failed) for name, failed in found.items()]
        flags = torch.stack([failed for _, _, failed in results]).tolist()
        wrong = [
            f"batch {number}: {name}" for (number, name, _), bad in zip(results, flags, strict=True) if bad
        ]
        assert not wrong, wrong


def numbers_of(worker: int, workers: int, batches: int) -> list[int]:
    """Batches of a worker: all of its configurations, so that it compiles few builds."""
    return [n for n in range(batches) if n % len(CONFIGURATIONS) % workers == worker]


def compile_builds(numbers: list[int]) -> None:
    """Put the builds of these batches into the folder of compiled kernels."""
    from blasst.kernels.hopper import decode
    from blasst.kernels.hopper.compile import cached_cubin

    wanted = {(n % len(CONFIGURATIONS), wants_bound(n), wants_dense(n)) for n in numbers}
    for configuration, bound, dense in sorted(wanted):
        rows, dim, dtype, fp8 = CONFIGURATIONS[configuration]
        rules = [{"mass": bound}, *({"skip": False, "alone": alone} for alone in (False, True) if dense)]
        for rule in rules:
            cached_cubin(decode.FILE, decode.build(dim, dtype, rows, fp8=fp8, **rule))


def test_random_batches() -> None:
    """All of them, in several processes that share the GPU; their kernels are compiled first."""

    def work(worker: int) -> str:
        command = [sys.executable, __file__, "--worker", str(worker), str(WORKERS), str(BATCHES)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        except subprocess.TimeoutExpired:
            return f"worker {worker}: not done in {LIMIT} s"
        return "" if done.returncode == 0 else f"worker {worker}: {done.stderr[-1500:]}"

    with ThreadPoolExecutor(WORKERS) as pool:
        wrong = [message for message in pool.map(work, range(WORKERS)) if message]
    if wrong:
        pytest.fail("\n".join(wrong[:3]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=int, nargs=3, metavar=("WORKER", "WORKERS", "BATCHES"))
    parser.add_argument("--only", type=int, metavar="NUMBER")
    chosen = parser.parse_args()
    batches = [chosen.only] if chosen.worker is None else numbers_of(*chosen.worker)
    compile_builds(batches)
    run(batches)
