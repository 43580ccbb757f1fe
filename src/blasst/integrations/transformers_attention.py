"""The attention function registered with transformers, and the session that puts a model on it.

`Session` switches the served layers of a model to it and puts everything back. What happens in a served
layer is the session's handler: sparse attention (`transformers_sparse`), or counting for a calibration.
"""

from __future__ import annotations

import fnmatch
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from blasst.core.errors import BlasstError, UnsupportedError
from blasst.core.key_codes import KeyCodes
from blasst.core.types import MAX_DECODE_TOKENS, Phase
from blasst.integrations.transformers_cache import codes_of
from blasst.integrations.transformers_layers import (
    attention_modules,
    configs_below,
    distinct,
    unserved_reason,
)
from blasst.integrations.transformers_mask import MaskPattern, MaskRecord, blasst_mask, record_of

#: Name of our attention in a transformers config.
IMPLEMENTATION = "blasst"

#: Attribute of an attention module that holds its layer; `Session.deactivate` removes it.
_LAYER = "_blasst_layer"

#: Arguments that change what attention computes and that no kernel takes.
_FOREIGN_ARGUMENTS = ("position_bias", "head_mask", "alibi")

#: Arguments that say where the sequences of a packed or paged batch stand, instead of a mask.
_PACKED_ARGUMENTS = ("cu_seq_lens_q", "block_table")


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of a served layer.

    Attributes:
        module: the attention module.
        q: (batch, seqlen_q, num_heads, head_dim), a view.
        k: (batch, key slots, num_kv_heads, head_dim), a view.
        v: (batch, key slots, num_kv_heads, head_dim_v), a view.
        phase: decode for 1 to 8 new tokens against more key slots, prefill otherwise.
        record: padding and lengths; None = every slot is a key.
        softmax_scale: None = head_dim ** -0.5.
        window_size: (left, right), -1 = unlimited.
        softcap: 0 = none.
        sinks: (num_heads,) or None.
        native: runs the model's own attention: (batch, seqlen_q, num_heads, head_dim_v).
        codes: of the keys, or None.
    """

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    phase: Phase
    record: MaskRecord | None
    softmax_scale: float | None
    window_size: tuple[int, int]
    softcap: float
    sinks: Tensor | None
    native: Callable[[], Tensor]
    codes: KeyCodes | None = None

    @property
    def scale(self) -> float:
        """The factor on q . k in force."""
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def sequences(self) -> Iterator[tuple[int, Tensor | slice, Tensor | slice]]:
        """(batch index, its real rows, its real keys) of each sequence of the call."""
        if self.record is not None and not self.record.plain:
            yield from self.record.packing(self.q.device).sequences(self.k.shape[1], self.q.shape[1])
            return
        used = self.k.shape[1] if self.record is None else self.record.used
        for index in range(self.q.shape[0]):
            yield index, slice(None), slice(0, used)


class Handler(Protocol):
    """Computes the attention of a served layer."""

    def __call__(self, layer: Layer, call: AttentionCall) -> Tensor:
        """Output (batch, seqlen_q, num_heads, head_dim_v); padding rows may hold anything finite."""
        ...


@dataclass(eq=False)
class Layer:
    """One attention module of a session.

    Attributes:
        name: module name in the model.
        index: position among the served layers, or -1.
        session: the session it belongs to.
        original: the attention implementation that the model used before.
        reason: why it is not served; None = served.
    """

    name: str
    index: int
    session: Session
    original: str
    reason: str | None


@dataclass(eq=False)
class Session:
    """The attention modules of one model while blasst is in charge of them.

    Attributes:
        handler: what served layers compute.
        layers: every attention module with its layer, in model order.
        configs: each config that is switched and the implementation it had.
        runtime_reasons: layers that met a call they could not serve, by reason.
        cast_warned: whether the one warning about mixed dtypes was given.
    """

    handler: Handler
    layers: list[tuple[nn.Module, Layer]]
    configs: list[tuple[Any, str | None]]
    runtime_reasons: dict[str, list[str]] = field(default_factory=dict)
    cast_warned: bool = False

    @staticmethod
    def create(model: nn.Module, handler: Handler, ignore: Sequence[str] = ()) -> Session:
        """Find the layers of a model; changes nothing yet.

        Args:
            model: a transformers model, or a module that contains one.
            handler: what served layers compute.
            ignore: fnmatch patterns on module names.

        Raises:
            ValueError: no layer would be served, or a pattern matches no module.
        """
        names = [name for name, _ in model.named_modules()]
        for pattern in ignore:
            if not fnmatch.filter(names, pattern):
                raise ValueError(f"ignore: pattern {pattern!r} matches no module of the model")
        session = Session(handler, [], [])
        known = session_of(model)
        before = {} if known is None else {id(config): original for config, original in known.configs}
        served: list[Any] = []
        for name, module in attention_modules(model):
            reason = unserved_reason(name, module, ignore)
            config = getattr(module, "config", None)
            original = before.get(id(config), getattr(config, "_attn_implementation", None)) or "eager"
            if original == IMPLEMENTATION:  # loaded with attn_implementation="blasst"
                original = "sdpa"
            index = len(served) if reason is None else -1
            session.layers.append((module, Layer(name, index, session, original, reason)))
            if reason is None:
                served.append(config)
        if not served:
            why = "; ".join(sorted({f"{layer.name}: {layer.reason}" for _, layer in session.layers}))
            raise ValueError(
                f"model: no attention layer can be served ({why or 'no attention module found'})"
            )
        configs = distinct(c for config in served for c in configs_below(config))
        if any(getattr(config, "output_attentions", False) for config in configs):
            raise ValueError(
                "model.config.output_attentions is True: tiles that are skipped have no weights to return"
            )
        for config in configs:
            original = before.get(id(config), getattr(config, "_attn_implementation", None))
            session.configs.append((config, "sdpa" if original == IMPLEMENTATION else original))
        return session

    @property
    def served(self) -> tuple[str, ...]:
        """Names of the served layers; a layer's index is its position here."""
        return tuple(layer.name for _, layer in self.layers if layer.reason is None)

    def activate(self) -> None:
        """Switch the model over."""
        AttentionInterface.register(IMPLEMENTATION, blasst_attention)
        AttentionMaskInterface.register(IMPLEMENTATION, blasst_mask)
        for module, layer in self.layers:
            setattr(module, _LAYER, layer)
        for config, _ in self.configs:
            config._attn_implementation = IMPLEMENTATION

    def deactivate(self) -> None:
        """Put the model back as it was."""
        for module, _ in self.layers:
            module.__dict__.pop(_LAYER, None)
        for config, original in self.configs:
            config._attn_implementation = original

    def note(self, layer: Layer, reason: str) -> None:
        """List a layer that runs on the model's own attention; warns once per reason."""
        names = self.runtime_reasons.get(reason)
        if names is None:
            self.runtime_reasons[reason] = names = []
            warnings.warn(
                f"blasst: {layer.name} (and maybe others) runs on the model's own attention: {reason}",
                stacklevel=4,
            )
        if layer.name not in names:
            names.append(layer.name)


def session_of(model: nn.Module) -> Session | None:
    """The session in charge of a model (or of a part of it), or None."""
    for module in model.modules():
        layer = module.__dict__.get(_LAYER)
        if layer is not None:
            return layer.session
    return None


def _native_function(layer: Layer, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The attention function that the model would have called without us."""
    for owner in type(module).__mro__:
        source = sys.modules.get(owner.__module__)
        interface = getattr(source, "ALL_ATTENTION_FUNCTIONS", None)
        if interface is not None:
            own = interface.get(layer.original) or getattr(source, "eager_attention_forward", None)
            if own is not None:
                return own
    raise UnsupportedError(f"{layer.name}: its own attention {layer.original!r} was not found")


def _native_attention(
    layer: Layer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    record: MaskRecord | None,
    options: dict[str, Any],
) -> Tensor:
    """Run the model's own attention with the mask that it would have got."""
    own_mask = mask if record is None else record.native(layer.original)
    if own_mask is not None:
        own_mask = own_mask.to(query.device)
    return _native_function(layer, module)(module, query, key, value, own_mask, **options)[0]


def _native_reason(
    layer: Layer,
    module: nn.Module,
    mask: Tensor | None,
    record: MaskRecord | None,
    is_causal: bool | None,
    arguments: dict[str, Any],
) -> str | None:
    """Why this call goes to the model's own attention; None = the handler serves it."""
    if layer.reason is not None:
        return layer.reason
    for name in _FOREIGN_ARGUMENTS:
        if arguments.get(name) is not None:
            return f"{name} is passed"
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        return "the call is not causal"
    if record is None and mask is not None:
        return f"a custom {mask.dim()}-D attention mask"
    if record is not None and record.pattern is None:
        return "a mask other than causal, sliding window and padding (packed, chunked or custom)"
    for name in _PACKED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise UnsupportedError(f"{name}: packed and paged batches without a mask (continuous batching)")
    if record is None or record.pattern is None:
        return None
    if not record.pattern.causal:
        return "the mask is not causal"
    if record.pattern.window is None or record.plain or record.left_only:
        return None
    if record.kv_length > record.q_length:
        return "a sliding window over a cache with padding inside"
    # The model's window counts slots, padding included; packed keys would count real tokens.
    return None if record.one_run else "a sliding window over padding between real tokens"


@torch.compiler.disable
def _note(layer: Layer, reason: str) -> None:
    if layer.reason is None:
        layer.session.note(layer, reason)


@torch.compiler.disable
def _warn_cast(layer: Layer, found: torch.dtype, wanted: torch.dtype) -> None:
    message = f"blasst: {layer.name} (and maybe others) casts queries or keys from {found} to {wanted}"
    if not layer.session.cast_warned:
        layer.session.cast_warned = True
        warnings.warn(message, stacklevel=4)


def _in_dtype(layer: Layer, tensor: Tensor, value: Tensor) -> Tensor:
    """Queries or keys in the dtype of the values; a norm in float32 may have widened them."""
    if tensor.dtype == value.dtype:
        return tensor
    _warn_cast(layer, tensor.dtype, value.dtype)
    return tensor.to(value.dtype)


def _check_other_length(layer: Layer, record: MaskRecord, slots: int) -> None:
    """A layer whose cache is not as long as the mask says: its own length counts when nothing is padded."""
    if not record.plain or record.used != record.kv_length:
        raise UnsupportedError(
            f"{layer.name}: its cache has {slots} key slots and the mask {record.kv_length}, with padding or "
            "unused slots that cannot be matched to it"
        )


def blasst_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' calling convention; registered with `AttentionInterface`.

    Args:
        module: the attention module; must belong to an enabled model.
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_kv_heads, key slots, head_dim).
        value: (batch, num_kv_heads, key slots, head_dim_v).
        attention_mask: from `blasst_mask`, or None; anything else goes to the model's own attention.
        dropout: must be 0 in a served layer.
        scaling: factor on q . k; None = head_dim ** -0.5.
        sliding_window: keys a row sees including itself; None = all.
        softcap: None or 0 = none.
        is_causal: wins over the module's attribute.
        s_aux: sink logits (num_heads,).
        **kwargs: passed on to the model's own attention where that is used.

    Returns:
        (batch, seqlen_q, num_heads, head_dim_v), and None for the weights.

    Raises:
        UnsupportedError: weights or dropout are asked for, or a packed batch comes without a mask.
        BlasstError: the module does not belong to an enabled model.
    """
    layer: Layer | None = module.__dict__.get(_LAYER)
    if layer is None:
        raise BlasstError(
            'attn_implementation="blasst" needs blasst.enable(model, ...) first, which says what to skip'
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions=True: skipped tiles have no weights to return; "
            "call blasst.disable(model) for that pass"
        )
    record = record_of(attention_mask, query.shape[0], query.shape[2], sliding_window)
    named = {"sliding_window": sliding_window, "softcap": softcap, "is_causal": is_causal, "s_aux": s_aux}
    options = {"dropout": dropout, "scaling": scaling, **kwargs}
    options |= {name: value for name, value in named.items() if value is not None}
    native = partial(_native_attention, layer, module, query, key, value, attention_mask, record, options)
    reason = _native_reason(layer, module, attention_mask, record, is_causal, kwargs)
    if reason is not None:
        _note(layer, reason)
        return native(), None
    if dropout:
        raise UnsupportedError(
            f"dropout={dropout}: call model.eval(), skipped tiles and dropout do not go together"
        )
    pattern = MaskPattern(causal=True, window=sliding_window) if record is None else record.pattern
    assert pattern is not None
    q_length, slots = query.shape[2], key.shape[2]
    if record is not None and record.kv_length != slots:
        _check_other_length(layer, record, slots)
        record = None
    call = AttentionCall(
        module=module,
        q=_in_dtype(layer, query, value).transpose(1, 2),
        k=_in_dtype(layer, key, value).transpose(1, 2),
        v=value.transpose(1, 2),
        phase="decode" if q_length <= MAX_DECODE_TOKENS and slots > q_length else "prefill",
        record=record,
        softmax_scale=scaling,
        window_size=(-1, -1) if pattern.window is None else (pattern.window - 1, 0),
        softcap=softcap or 0.0,
        sinks=s_aux,
        native=native,
        codes=codes_of(key) if key.dtype == value.dtype else None,  # a cast changes the keys
    )
    return layer.session.handler(layer, call).to(query.dtype), None
