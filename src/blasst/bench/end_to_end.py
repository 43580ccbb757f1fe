"""Time to the first token and per output token of a whole model, with torch's attention and with ours.

One step is a phase, a length and a batch: the cache is made, thresholds are found by counting in the model
itself, outputs of a few layers are checked, then all contestants are timed in turns.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from blasst.bench.check import WrongResultError
from blasst.bench.contestants import (
    CheckingHandler,
    Contestant,
    OwnDense,
    TorchAttention,
    counted_sparsity,
    in_charge,
    run_with,
    sparse_handler,
)
from blasst.bench.dial import DialledThreshold, dial_sparsity_from
from blasst.bench.model import BenchmarkModel
from blasst.bench.model_cache import FixedCache, key_sizes
from blasst.bench.record import BenchmarkRow, command_line
from blasst.bench.steps import BENCH, Step, dtype_name, labels
from blasst.bench.timing import Timing, interleaved
from blasst.bench.variants import CUDNN, TORCH_SDPA
from blasst.integrations.transformers_attention import Session
from blasst.kernels.select import backend_used

#: Replays of the graph of one decode step between two events.
_TOKENS_AT_ONCE = 8
#: How far from the wanted sparsity a row may lie without a note; the search stops at half of it.
_NOTED_DISTANCE = 0.02

Curve = Sequence[tuple[float, float]]


class StepResult(NamedTuple):
    """What one step gave.

    Attributes:
        rows: one for each contestant.
        notes: what a reader has to know, one sentence each.
        curve: (ln threshold, sparsity) that were counted, ascending.
    """

    rows: list[BenchmarkRow]
    notes: list[str]
    curve: list[tuple[float, float]]


class _Forward:
    """One forward of the model that can be repeated: a whole prompt, or its last token against the cache."""

    def __init__(self, model: BenchmarkModel, step: Step) -> None:
        device = model.device
        self.model, self.step = model.model, step
        self.cache = FixedCache(model.config, step.batch, step.seqlen, dtype=model.dtype, device=device)
        names = inspect.signature(type(self.model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed within transformers 5
        if step.phase == "prefill":
            self.ids, self._first = model.prompts(step.batch, step.seqlen), 0
        else:
            prompt = model.prompts(1, step.seqlen)
            self.ids, self._first = prompt, 0
            run_with(self.model, TorchAttention(), self.logits)  # fills every sequence of the cache
            self.ids, self._first = prompt[:, -1:].repeat(step.batch, 1), step.seqlen - 1
        self._positions = torch.arange(self._first, step.seqlen, device=device)[None]

    def logits(self) -> Tensor:
        """Of the last position, (batch, vocabulary)."""
        self.cache.go_to(self._first)
        positions = {} if self._first == 0 else {"position_ids": self._positions}
        with torch.no_grad():
            output = self.model(
                input_ids=self.ids,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_name: self.cache},
                **positions,
            )
        return output.logits[:, -1]

    def token(self) -> Tensor:
        """The next token of each sequence, (batch,)."""
        return self.logits().argmax(-1)


def _captured(contestant: Contestant, forward: _Forward) -> torch.cuda.CUDAGraph:
    """The graph of one decode step."""
    graph = torch.cuda.CUDAGraph()
    with in_charge(contestant.session):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                forward.token()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            forward.token()
    return graph


def _replayed(graph: torch.cuda.CUDAGraph) -> None:
    for _ in range(_TOKENS_AT_ONCE):
        graph.replay()


def _run_once(contestant: Contestant, forward: _Forward, times: int) -> None:
    with in_charge(contestant.session):
        for _ in range(times):
            forward.token()


class _Calls(NamedTuple):
    """What is timed: calls by label, forwards in each, and whether they replay graphs (None: no GPU)."""

    by_label: dict[str, Callable[[], None]]
    forwards: int
    graphs: bool | None


def _calls(contestants: Sequence[Contestant], forward: _Forward, notes: list[str]) -> _Calls:
    on_gpu, decode = forward.ids.device.type == "cuda", forward.step.phase == "decode"
    if on_gpu and decode:
        try:
            graphs = {c.label: _captured(c, forward) for c in contestants}
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            notes.append(f"no CUDA graph, so every contestant starts its own kernels: {error}")
        else:
            calls = {label: partial(_replayed, graph) for label, graph in graphs.items()}
            return _Calls(dict(calls), _TOKENS_AT_ONCE, True)
    times = _TOKENS_AT_ONCE if on_gpu and decode else 1
    return _Calls(
        {c.label: partial(_run_once, c, forward, times) for c in contestants},
        times,
        False if on_gpu and decode else None,
    )


def _rounds(
    calls: _Calls, device: torch.device, repeats: int, deadline: float, notes: list[str]
) -> dict[str, Timing]:
    """Time in turns until all rounds are done, or another one would end after the deadline."""
    if calls.graphs:
        interleaved(calls.by_label, device, repeats=1, warmup=0)
    times: dict[str, list[float]] = {label: [] for label in calls.by_label}
    done, longest = 0, 0.0
    while done < repeats and (done == 0 or time.monotonic() + longest < deadline):
        begin = time.monotonic()
        for label, timing in interleaved(calls.by_label, device, repeats=1, warmup=0).items():
            times[label].append(timing.median / calls.forwards)
        longest, done = max(longest, time.monotonic() - begin), done + 1
    if done < repeats:
        notes.append(f"the time limit of the step left room for {done} of {repeats} rounds")
    return {
        label: Timing(float(np.median(x)), float(np.percentile(x, 20)), float(np.percentile(x, 80)), done)
        for label, x in times.items()
    }


def _operations(model: BenchmarkModel, step: Step) -> float:
    """Multiplications and additions of one forward with dense attention; one position's logits."""
    config = model.config
    body = model.model.get_submodule(str(model.model.base_model_prefix))
    weights = sum(p.numel() for n, p in body.named_parameters() if p.dim() == 2 and "embed" not in n)
    rows = step.seqlen if step.phase == "prefill" else 1
    pairs = rows * step.seqlen - rows * (rows - 1) // 2
    attention = 4 * config.num_attention_heads * key_sizes(config)[1] * pairs * config.num_hidden_layers
    return float(step.batch * (2 * weights * rows + attention + 2 * config.vocab_size * config.hidden_size))


def _row(
    model: BenchmarkModel,
    step: Step,
    contestant: Contestant,
    timings: Mapping[str, Timing],
    cuda_graph: bool | None,
) -> BenchmarkRow:
    config, timing = model.config, timings[contestant.label]
    num_kv_heads, head_dim = key_sizes(config)
    return BenchmarkRow(
        bench=BENCH,
        kernel=contestant.kernel,
        inputs=model.inputs,
        dtype=dtype_name(model.dtype),
        batch=step.batch,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        seqlen_q=step.seqlen if step.phase == "prefill" else 1,
        seqlen_k=step.seqlen,
        causal=True,
        threshold=contestant.threshold,
        sparsity=contestant.sparsity,
        ms=timing.median,
        ms_low=timing.low,
        ms_high=timing.high,
        repeats=timing.repeats,
        tflops=_operations(model, step) / timing.median / 1e9,
        ratio_to_cudnn=timings[CUDNN].median / timing.median if CUDNN in timings else None,
        ratio_to_own_dense=timings["dense"].median / timing.median,
        max_error=contestant.max_error,
        command=command_line(),
        phase=step.phase,
        contestant=contestant.label,
        model=model.name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None),
        vocab_size=config.vocab_size,
        attention_gain=model.attention_gain,
        cuda_graph=cuda_graph,
    )


def _checked_contestants(
    model: BenchmarkModel, forward: _Forward, dialled: Sequence[DialledThreshold], impl: str, notes: list[str]
) -> list[Contestant]:
    """All of them, after one forward in which a few layers were checked."""
    phase, layers = forward.step.phase, model.config.num_hidden_layers
    cudnn = TorchAttention(SDPBackend.CUDNN_ATTENTION if model.device.type == "cuda" else None)
    wanted = labels([entry.wanted for entry in dialled])[3:]
    thresholds = {label: entry.threshold for label, entry in zip(wanted, dialled)}
    checking = CheckingHandler(thresholds, impl, layers, cudnn)
    logits = run_with(model.model, checking, forward.logits)
    notes += checking.notes
    if not bool(logits.isfinite().all()):
        raise WrongResultError(f"{forward.step}: logits are not finite")
    if not {"dense", "threshold 0", *wanted} <= checking.errors.keys():
        raise WrongResultError(f"{forward.step}: no layer was checked, the model did not run through ours")

    def session(handler: Any) -> Session:
        return Session.create(model.model, handler)

    own = f"blasst {checking.impl}"
    found = [Contestant(TORCH_SDPA, TORCH_SDPA, session(TorchAttention()), None)]
    if checking.torch_attention.backend is not None:
        found.insert(0, Contestant(CUDNN, CUDNN, session(checking.torch_attention), None))
    found.append(Contestant("dense", own, session(OwnDense(checking.impl)), None))
    for label, threshold, sparsity in [
        ("threshold 0", 0.0, 0.0),
        *((label, entry.threshold, entry.sparsity) for label, entry in zip(wanted, dialled)),
    ]:
        handler = sparse_handler(phase, threshold, checking.impl)
        found.append(Contestant(label, own, session(handler), threshold, sparsity))
    for contestant in found:
        contestant.max_error = checking.errors.get(contestant.label, 0.0)
    return found


def measure_step(
    model: BenchmarkModel,
    step: Step,
    sparsities: Sequence[float],
    *,
    impl: str = "auto",
    repeats: int = 3,
    limit_s: float = 120.0,
    curve: Curve | None = None,
) -> StepResult:
    """Find the thresholds, check, then time every contestant in turns.

    Args:
        model: that runs.
        step: phase, length and batch.
        sparsities: wanted, in (0, 1), ascending; counted over all layers of the model.
        impl: kernel, as in `blasst_attn_func`.
        repeats: rounds.
        limit_s: seconds after which no further round begins; the first always runs.
        curve: (ln threshold, sparsity) of an earlier step to begin the search with; None = the model's own.

    Raises:
        WrongResultError: an output is wrong or nothing was counted; nothing is timed then.
        UnsupportedError: the kernel cannot serve the model.
    """
    deadline = time.monotonic() + limit_s
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    forward, notes, served = _Forward(model, step), [], [impl]

    def sparsity_of(threshold: float) -> float:
        counted = counted_sparsity(model.model, step.phase, threshold, served[0], forward.logits)
        served[0] = backend_used() or impl
        return counted

    known = _thinned(curve or ())
    begin = known if len(known) > 1 else model.curve
    dialled, counted = dial_sparsity_from(sparsity_of, sparsities, begin, tolerance=_NOTED_DISTANCE / 2)
    for entry in dialled:
        if abs(entry.sparsity - entry.wanted) > _NOTED_DISTANCE:
            notes.append(
                f"sparsity {entry.wanted:g} was not met; the closest is {entry.sparsity:.3f} at threshold "
                f"{entry.threshold:.3g}"
            )
    contestants = _checked_contestants(model, forward, dialled, served[0], notes)
    calls = _calls(contestants, forward, notes)
    timings = _rounds(calls, model.device, repeats, deadline, notes)
    rows = [_row(model, step, contestant, timings, calls.graphs) for contestant in contestants]
    return StepResult(rows, notes, counted)


def _thinned(curve: Curve) -> Curve:
    """Its points with clearly more sparsity than the one before, which tell how it rises."""
    kept: list[tuple[float, float]] = []
    for point in curve:
        if not kept or point[1] - kept[-1][1] > 0.05:
            kept.append(point)
    return kept
