"""The attentions that `blasst bench end-to-end` times in a model, and what they must pass before.

All of them, torch's too, run through the attention function that `blasst.enable` registers with transformers:
same calls, same cache, same absence of a mask. transformers' own function for torch's attention makes a mask
while a CUDA graph is captured, with which cuDNN cannot serve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from blasst.bench.check import WrongResultError, check_close, check_equal
from blasst.core.errors import UnsupportedError
from blasst.core.types import Phase
from blasst.integrations.threshold_rules import resolve_rules
from blasst.integrations.transformers_attention import AttentionCall, Handler, Layer, Session
from blasst.integrations.transformers_sparse import SparseHandler, attend
from blasst.kernels.select import backend_used

#: Layers whose outputs are compared: the first, the middle one and the last.
_CHECKED_LAYERS = 3


@dataclass(frozen=True)
class TorchAttention:
    """torch's scaled_dot_product_attention; a handler for a session.

    Attributes:
        backend: that is forced; None = torch chooses.
    """

    backend: SDPBackend | None = None

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        """Dense attention of one call without padding."""
        if call.window_size != (-1, -1) or call.softcap or call.sinks is not None:
            raise UnsupportedError(f"{layer.name}: has a window, a softcap or sinks")
        q, k, v = (x.transpose(1, 2) for x in (call.q, call.k, call.v))
        forced = contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)
        with forced:
            return torch.nn.functional.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=q.shape[2] > 1,  # a prompt without a past, or one new token that sees all
                scale=call.softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            ).transpose(1, 2)


@dataclass(frozen=True)
class OwnDense:
    """Our kernel without a threshold; a handler for a session."""

    impl: str

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        """Dense attention of one call."""
        return attend(call, None, impl=self.impl).out


def sparse_handler(phase: Phase, threshold: float, impl: str, collect_counts: bool = False) -> SparseHandler:
    """What `blasst.enable(model, threshold={phase: threshold})` makes.

    Args:
        phase: that skips.
        threshold: in [0, 1].
        impl: kernel.
        collect_counts: count tiles.
    """
    rules = resolve_rules(None, None, {phase: threshold}, None)
    return SparseHandler(rules, impl, collect_counts=collect_counts)


@contextlib.contextmanager
def in_charge(session: Session) -> Iterator[None]:
    """The session serves its model inside."""
    session.activate()
    try:
        yield
    finally:
        session.deactivate()


def run_with(model: nn.Module, handler: Handler, forward: Callable[[], Any]) -> Any:
    """Call a forward of the model with a handler in charge.

    Args:
        model: a transformers model.
        handler: computes attention.
        forward: runs the model.
    """
    with in_charge(Session.create(model, handler)):
        return forward()


@dataclass
class Contestant:
    """One attention to be timed.

    Attributes:
        label: for rows and for finding them again.
        kernel: for rows, as in the other benchmarks.
        session: serves the model with it.
        threshold: None = dense.
        sparsity: that was counted over all layers.
        max_error: largest difference from torch's dense output in the layers that were compared.
    """

    label: str
    kernel: str
    session: Session
    threshold: float | None
    sparsity: float = 0.0
    max_error: float = 0.0


def counted_sparsity(
    model: nn.Module, phase: Phase, threshold: float, impl: str, forward: Callable[[], Any]
) -> float:
    """Skipped over visited tiles of all layers in one forward of the model.

    Args:
        model: a transformers model.
        phase: of the forward.
        threshold: in [0, 1].
        impl: kernel.
        forward: runs the model.
    """
    handler = sparse_handler(phase, threshold, impl, collect_counts=True)
    run_with(model, handler, forward)
    sums = handler.counters.sums.values()
    visited = sum(int(counts.visited.sum()) for counts in sums)
    if not visited:
        raise WrongResultError(f"no tile was counted in {phase}: the model did not run through our kernels")
    return sum(int(counts.skipped.sum()) for counts in sums) / visited


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


@dataclass
class CheckingHandler:
    """Serves with torch's dense attention, and checks ours on the same tensors in a few layers.

    Checked: dense against torch; threshold 0 gives the bits of dense and skips nothing; at other thresholds
    no row is further from dense than twice its skipped softmax weight times the largest value.

    Attributes:
        thresholds: thresholds of the contestants by label, besides None and 0.
        impl: kernel asked for; after the first call that which served.
        layers: how many the model has.
        torch_attention: which torch kernel is compared with; falls back to torch's choice.
        notes: what a reader has to know.
        errors: largest difference from torch's output by label.
    """

    thresholds: Mapping[str, float]
    impl: str
    layers: int
    torch_attention: TorchAttention
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        """torch's output, ours checked."""
        try:
            want = self.torch_attention(layer, call)
        except RuntimeError as error:
            if self.torch_attention.backend is None or isinstance(error, torch.OutOfMemoryError):
                raise
            self.notes.append(f"cuDNN does not serve this call, so it has no row: {error}")
            self.torch_attention = TorchAttention()
            want = self.torch_attention(layer, call)
        wanted = {round(i * (self.layers - 1) / (_CHECKED_LAYERS - 1)) for i in range(_CHECKED_LAYERS)}
        if layer.index in wanted:
            self._check(layer.name, call, want, layer)
        return want

    def _note(self, label: str, got: Tensor, want: Tensor) -> None:
        error = max(_largest(a - b) for a, b in zip(got.float().split(8192, 1), want.float().split(8192, 1)))
        self.errors[label] = max(error, self.errors.get(label, 0.0))

    def _check(self, name: str, call: AttentionCall, want: Tensor, layer: Layer) -> None:
        if self.torch_attention.backend is not None:
            self._note("torch sdpa", TorchAttention()(layer, call), want)
        dense = attend(call, None, impl=self.impl).out  # the calls that are timed, without lse and counts
        self.impl = backend_used() or self.impl
        check_close(dense, want, f"{name}, {self.impl}, dense")
        self._note("dense", dense, want)
        zero = self._at(call, 0.0, return_counts=True)
        if zero.counts is None or bool(zero.counts.skipped.any()):
            raise WrongResultError(f"{name}, {self.impl} at threshold 0: skipped tiles, or counted nothing")
        check_equal(zero.out, dense, f"{name}, threshold 0: must be the dense output, bit for bit")
        check_equal(self._at(call, 0.0).out, dense, f"{name}, threshold 0 without counts")
        self._note("threshold 0", zero.out, want)
        lse = attend(call, None, impl=self.impl, return_lse=True).lse
        largest = call.v.abs().amax((1, 3)).float()  # (batch, kv heads)
        largest = largest.repeat_interleave(dense.shape[2] // largest.shape[1], 1)[..., None]
        for label, threshold in self.thresholds.items():
            out = self._at(call, threshold).out
            skipped = -torch.expm1(
                self._at(call, threshold, return_lse=True).lse - lse
            )  # (batch, heads, rows)
            # Each kernel rounds weights and output: 2 eps of the largest value for both, twice that allowed.
            spare = 4 * torch.finfo(want.dtype).eps + 1e-5
            allowed = (2 * skipped.clamp(min=0) + spare) * largest
            pairs = zip(out.split(8192, 1), dense.split(8192, 1), allowed.split(8192, 2))
            if not all(bool(((a.float() - b).abs().amax(3).mT <= limit).all()) for a, b, limit in pairs):
                raise WrongResultError(
                    f"{name}, {label}: a row is further from dense than 2 * skipped weight * max|v|"
                )
            self._note(label, out, want)

    def _at(self, call: AttentionCall, threshold: float, **options: Any) -> Any:
        batch = call.q.shape[0]
        values = torch.full((batch,), threshold, dtype=torch.float32, device=call.q.device)
        return attend(call, values, impl=self.impl, **options)
