"""The mask function registered with transformers, and the record of one mask that its tensor carries.

transformers builds one mask per forward and hands it to every layer. Ours is a bool tensor (batch, keys),
True = a key that exists, with a `MaskRecord` attached: which pattern was asked for, where each sequence's
keys stand, and everything the layers of this forward share (packing indices, thresholds), so that lengths
are read on the host once per forward and not once per layer.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import masking_utils

#: Attribute of the mask tensor that holds its record.
_RECORD = "blasst_record"


@dataclass(frozen=True)
class MaskPattern:
    """A pattern that the kernels can express.

    Attributes:
        causal: bottom-right aligned causal, otherwise every key is visible.
        window: keys a row sees including its own position, or None = all.
    """

    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class Packing:
    """Where the real rows and keys of a padded batch stand; all on the device of the mask.

    Attributes:
        rows: int64, index of each real query row in (batch * q_length).
        keys: int64, index of each real key in (batch * kv_length).
        cu_rows: int32 (batch + 1,) starts of the sequences in `rows`.
        cu_keys: int32 (batch + 1,) starts of the sequences in `keys`.
        row_counts: query rows of each sequence, on the host.
        key_counts: keys of each sequence, on the host.
    """

    rows: Tensor
    keys: Tensor
    cu_rows: Tensor
    cu_keys: Tensor
    row_counts: list[int]
    key_counts: list[int]

    def sequences(self, kv_length: int, q_length: int) -> list[tuple[int, Tensor, Tensor]]:
        """(batch index, rows within its sequence, keys within its sequence) of every sequence with rows."""
        rows = self.rows.split(self.row_counts)
        keys = self.keys.split(self.key_counts)
        return [
            (b, rows[b] - b * q_length, keys[b] - b * kv_length) for b in range(len(rows)) if len(rows[b])
        ]


@dataclass(eq=False)
class MaskRecord:
    """What one call of the mask function asked for; shared by all layers of a forward.

    Attributes:
        batch_size: sequences.
        q_length: new tokens per sequence, padding included.
        kv_length: key slots per sequence.
        pattern: None when the kernels cannot express the mask.
        arguments: the call, to build another implementation's mask from it.
        key_mask: bool (batch, kv_length), True = a key that exists; None = all slots exist.
        used: slots written so far; rows are aligned with its end. Host integer.
        plain: no padding: the keys are slots 0 to used.
        left_only: padding, if any, stands before the first real token of each sequence.
        one_run: the keys of each sequence stand next to each other, so slots and positions differ by a shift.
        seqused: int32 (batch,) slots in use; None = not made yet, `used` for all.
        leftpad: int32 (batch,) first real slot, or None = 0.
        lengths: int32 (batch,) real keys, or None when plain.
        thresholds: cache of the layers: (rule, phase) to a float32 (batch,) tensor.
    """

    batch_size: int
    q_length: int
    kv_length: int
    pattern: MaskPattern | None
    arguments: dict[str, Any]
    key_mask: Tensor | None
    used: int
    plain: bool
    left_only: bool
    one_run: bool
    seqused: Tensor | None
    leftpad: Tensor | None
    lengths: Tensor | None
    thresholds: dict[Any, Tensor] = field(default_factory=dict)
    _moved: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)
    _native: dict[str, Tensor | None] = field(default_factory=dict)
    _packing: dict[torch.device, Packing] = field(default_factory=dict)

    def native(self, implementation: str) -> Tensor | None:
        """The mask that another attention implementation would have got from this call."""
        if implementation not in self._native:
            build = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[implementation]
            self._native[implementation] = build(**self.arguments)
        return self._native[implementation]

    def on_device(
        self, name: Literal["seqused", "leftpad", "lengths"], device: torch.device
    ) -> Tensor | None:
        """One of the length tensors on the device of a layer; copied once where a model spans several."""
        value: Tensor | None = getattr(self, name)
        if value is None or value.device == device:
            return value
        if (name, device) not in self._moved:
            self._moved[name, device] = value.to(device)
        return self._moved[name, device]

    def cache_seqlens(self, device: torch.device) -> Tensor:
        """int32 (batch,) slots in use, padding included, on the device of a layer."""
        if self.seqused is None:
            self.seqused = torch.full((self.batch_size,), self.used, dtype=torch.int32, device=device)
        return self.seqused if self.seqused.device == device else self.on_device("seqused", device)  # type: ignore[return-value]

    def packing(self, device: torch.device) -> Packing:
        """Indices of the real rows and keys; reads lengths on the host once."""
        if device not in self._packing:
            assert self.key_mask is not None
            key_mask = self.key_mask.to(device)
            row_mask = key_mask[:, max(self.used - self.q_length, 0) : self.used]
            counts = torch.stack([row_mask.sum(1), key_mask.sum(1)])
            ends = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).to(torch.int32)
            row_counts, key_counts = counts.tolist()
            self._packing[device] = Packing(
                row_mask.flatten().nonzero().flatten(),
                key_mask.flatten().nonzero().flatten(),
                ends[0],
                ends[1],
                row_counts,
                key_counts,
            )
        return self._packing[device]


def _code(function: Callable[..., Any] | None) -> Any:
    return getattr(function, "__code__", None)


def classify(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """The pattern of a transformers mask function, or None for anything that is not known to the last part.

    Known are causal, bidirectional and causal with a sliding window, as transformers composes them. A custom,
    packed, blockwise or chunked mask is a different composition, hence None: never taken for plain causal.
    """
    if mask_function is masking_utils.causal_mask_function:
        return MaskPattern(causal=True)
    if mask_function is masking_utils.bidirectional_mask_function:
        return MaskPattern(causal=False)
    example = masking_utils.sliding_window_causal_mask_function(2)
    if _code(mask_function) is None or _code(mask_function) is not _code(example):
        return None
    parts = inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not masking_utils.causal_mask_function:
        return None
    if _code(parts[0]) is not _code(masking_utils.sliding_window_overlay(2)):
        return None
    window = inspect.getclosurevars(parts[0]).nonlocals.get("sliding_window")
    return MaskPattern(causal=True, window=window) if isinstance(window, int) and window > 0 else None


def _existing_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Cut or extend a (batch, tokens seen) padding mask to the key slots of a layer."""
    if attention_mask is None:
        return None
    mask = attention_mask.to(torch.bool)
    # A sliding cache holds the last keys, and a mask that was cut before stays as it is.
    mask = mask[:, -kv_length:] if kv_offset > 0 else mask[:, :kv_length]
    if (missing := kv_length - mask.shape[1]) > 0:
        mask = torch.nn.functional.pad(mask, (0, missing), value=False)
    return mask


def _record(arguments: dict[str, Any], device: torch.device) -> MaskRecord:
    q_length, kv_length = int(arguments["q_length"]), int(arguments["kv_length"])
    batch_size = int(arguments["batch_size"])
    kv_offset = arguments.get("kv_offset", 0)
    pattern = classify(arguments["mask_function"])
    used: int | Tensor = arguments.get("q_offset", 0) + q_length - kv_offset
    keys = _existing_keys(arguments.get("attention_mask"), kv_length, int(kv_offset))
    if pattern is not None and not pattern.causal:
        used = kv_length  # an encoder's queries are not aligned with the end of the keys
    if keys is None and isinstance(used, int) and used >= kv_length:
        return MaskRecord(
            batch_size,
            q_length,
            kv_length,
            pattern,
            arguments,
            None,
            kv_length,
            True,
            True,
            True,
            None,
            None,
            None,
        )
    slot = torch.arange(kv_length, device=device)
    if keys is None:
        keys = (slot < used).expand(batch_size, kv_length)
    elif not isinstance(used, int) or used < kv_length:
        keys = keys & (slot < used)
    keys = keys.contiguous()
    lengths = keys.sum(1, dtype=torch.int32)
    end = torch.as_tensor(used, dtype=torch.int32, device=device).clamp(max=kv_length)
    first = keys.to(torch.int32).argmax(1)
    starts = (keys[:, 1:] & ~keys[:, :-1]).sum(1) + keys[:, :1].sum(1)
    tests = [lengths == end, lengths == end - first, starts <= 1]
    last, all_real, left_only, one_run = torch.stack([end.long(), *(t.all().long() for t in tests)]).tolist()
    return MaskRecord(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        pattern=pattern,
        arguments=arguments,
        key_mask=keys,
        used=last,
        plain=bool(all_real),
        left_only=bool(left_only),
        one_run=bool(one_run),
        seqused=end.expand(batch_size).contiguous(),
        leftpad=None if all_real else end - lengths,
        lengths=lengths,
    )


class _Recent(threading.local):
    """Records of the masks of this thread's last forwards, for masks that lost theirs on the way."""

    def __init__(self) -> None:
        self.records: deque[weakref.ref[MaskRecord]] = deque(maxlen=8)


_recent = _Recent()


@torch.compiler.disable
def blasst_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Mask for blasst layers: bool (batch, keys), True = the key exists, with its `MaskRecord` attached.

    Besides padding it excludes the slots of a static cache that are not written yet. Causality and windows
    are in the record. Registered with `AttentionMaskInterface`; runs outside compiled graphs.

    Args:
        batch_size: sequences.
        q_length: new tokens per sequence.
        kv_length: key slots of the layers that will use the mask.
        q_offset: position of the first new token; a tensor for static caches.
        kv_offset: position of the first key slot (sliding caches).
        mask_function: the pattern, as transformers composes it.
        attention_mask: bool (batch, tokens seen), True = real token; None = all real.
        **kwargs: further arguments for other implementations' mask functions.
    """
    arguments = dict(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        # A static cache moves its own counter on; the mask belongs to where it stands now.
        q_offset=q_offset.clone() if isinstance(q_offset, Tensor) else q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    device = (
        attention_mask.device if attention_mask is not None else torch.device(kwargs.get("device", "cpu"))
    )
    record = _record(arguments, device)
    # Contiguous, because generate() makes it so and would drop the record with the copy.
    if record.key_mask is None:
        mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    else:  # a view: the user's tensor keeps no record, and no cycle outlives the forward
        mask = record.key_mask.view_as(record.key_mask)
    setattr(mask, _RECORD, record)
    _recent.records.append(weakref.ref(record))
    return mask


def record_of(mask: Tensor | None, batch_size: int, q_length: int, window: int | None) -> MaskRecord | None:
    """The record of a mask, also when moving it to another device has dropped the attribute.

    Args:
        mask: what the attention function got; only a 2-D bool mask can be one of ours.
        batch_size: sequences of the call.
        q_length: new tokens of the call.
        window: the sliding window that the layer named, to tell two masks of one shape apart.

    Returns:
        None when the mask is not one of ours.
    """
    if mask is None or mask.dim() != 2:
        return None
    record = getattr(mask, _RECORD, None)
    if record is not None:
        return record
    candidates: dict[MaskPattern | None, MaskRecord] = {}
    for reference in _recent.records:
        known = reference()
        if known is not None and (known.batch_size, known.q_length, known.kv_length) == (
            batch_size,
            q_length,
            mask.shape[1],
        ):
            candidates[known.pattern] = known  # the latest of each pattern
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    return candidates.get(MaskPattern(causal=True, window=window))
