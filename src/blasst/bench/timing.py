"""Median times of calls, variants interleaved, on CPU and GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

#: Bytes read between calls to empty the L2 cache; larger than that of any GPU so far (H200: 50 MiB). Not
#: written: dirty lines would be written back during the timed call, and between the layers of a model it is
#: weights that fill the cache.
_FLUSH_BYTES = 256 * 2**20
#: Times that this is read. One takes an H200 some 70 us, less than the host may need to start a call, and
#: the wait for the host would count as time of the call.
_FLUSHES = 8

#: Calls started to measure the host's time, and how many of them before the device is waited for: a full
#: launch queue (about 1024 kernels) would stop the host.
_HOST_CALLS = 200
_HOST_BURST = 20


@dataclass(frozen=True)
class Timing:
    """Times of one variant, milliseconds.

    Attributes:
        median: median over the timed calls.
        low: 20th percentile.
        high: 80th percentile.
        repeats: timed calls.
    """

    median: float
    low: float
    high: float
    repeats: int


def _time_on_cpu(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def host_microseconds(call: Callable[[], object], device: torch.device) -> float | None:
    """Time of the host to start one call, without waiting for it; None where the host computes itself.

    Args:
        call: already warm.
        device: where it runs.
    """
    if device.type != "cuda":
        return None
    seconds = 0.0
    for _ in range(_HOST_CALLS // _HOST_BURST):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(_HOST_BURST):
            call()
        seconds += time.perf_counter() - start
    torch.cuda.synchronize(device)
    return seconds / _HOST_CALLS * 1e6


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int = 5,
    warmup: int = 1,
    cold_l2: bool = False,
) -> dict[str, Timing]:
    """Time several calls in turns, so that a drifting clock meets all of them alike.

    Args:
        variants: name -> call; compilation happens in the warm-up.
        device: where the calls run; "cuda" is timed with events, anything else with the host's clock.
        repeats: timed calls of each variant.
        warmup: calls of each variant before that.
        cold_l2: empty the GPU's L2 cache before each timed call, as between the layers of a model.

    Raises:
        ValueError: repeats below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    on_gpu = device.type == "cuda"
    flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device=device) if on_gpu and cold_l2 else None
    for call in variants.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in variants}
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(repeats):
        for name, call in variants.items():
            if not on_gpu:
                times[name].append(_time_on_cpu(call))
                continue
            if flush is not None:
                for _ in range(_FLUSHES):
                    flush.max()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            events.append((name, start, end))
    if on_gpu:
        # One wait at the end: the host runs ahead, so its own time between two events is not measured.
        torch.cuda.synchronize(device)
        for name, start, end in events:
            times[name].append(float(start.elapsed_time(end)))
    return {
        name: Timing(
            float(np.median(values)),
            float(np.percentile(values, 20)),
            float(np.percentile(values, 80)),
            repeats,
        )
        for name, values in times.items()
    }
