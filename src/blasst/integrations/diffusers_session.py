"""Which layers of a diffusers model blasst serves, the backend that they get, and which steps stay dense."""

from __future__ import annotations

import copy
import fnmatch
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blasst.core.errors import UnsupportedError
from blasst.integrations.sessions import in_place_of

#: Value of the enum member that is added to diffusers' AttentionBackendName.
BACKEND = "blasst"

#: What happens to a call that cannot be served.
Unsupported = Literal["error", "native"]

SESSION_ATTRIBUTE = "_blasst_diffusers_session"


@dataclass(frozen=True, eq=False)
class DiffusersCall:
    """One attention call of a served layer.

    Attributes:
        layer: number of the layer among the served ones.
        q: (batch, seqlen, num_heads, head_dim).
        k: the same shape, or with fewer heads.
        v: like k.
        softmax_scale: factor on q . k, or None for head_dim ** -0.5.
        native: runs the call on the backend that the layer had.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float | None
    native: Callable[[], Tensor]


@dataclass(eq=False)
class ServedLayer:
    """A served attention module, and what it had.

    Attributes:
        index: its number among the served ones.
        name: module name.
        module: the module.
        processor: the processor it had.
        backend: the backend that its processor had; None = the one that is active.
        own_processor: the processor it has while it is served.
    """

    index: int
    name: str
    module: nn.Module
    processor: Any
    backend: Any
    own_processor: Any = None


@dataclass(eq=False)
class DiffusersSession:
    """The layers of a model that blasst serves, and whether it does so in the current step.

    Attributes:
        model: the model.
        handler: takes a `DiffusersCall` and returns (batch, seqlen, num_heads, head_dim_v).
        layers: served layers.
        unserved: (module name, reason) of attention modules on their own backend.
        unsupported: what happens to a call that cannot be served.
        disabled_until_timestep: steps run dense until the timestep over num_train_timesteps is below it.
        num_train_timesteps: the timestep that stands for pure noise.
        dense_step: whether the current step stays dense.
        dense_steps: forward passes that stayed dense.
        sparse_steps: forward passes that did not.
        met: (reason, layer names) of calls that ran on the native backend.
    """

    model: nn.Module
    handler: Callable[[DiffusersCall], Tensor]
    layers: tuple[ServedLayer, ...]
    unserved: tuple[tuple[str, str], ...]
    unsupported: Unsupported = "error"
    disabled_until_timestep: float | None = None
    num_train_timesteps: float = 1000.0
    dense_step: bool = False
    dense_steps: int = 0
    sparse_steps: int = 0
    met: dict[str, list[str]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)

    def activate(self) -> None:
        """Hand the backend to the layers."""
        member = register_backend()
        self._handles = [self.model.register_forward_pre_hook(self._begin_step, with_kwargs=True)]
        shared: dict[int, int] = {}
        for module in self.model.modules():
            processor = getattr(module, "processor", None)
            if processor is not None:
                shared[id(processor)] = shared.get(id(processor), 0) + 1
        for layer in self.layers:
            # one processor may serve several modules, of which not all are served
            own = layer.processor if shared[id(layer.processor)] == 1 else copy.copy(layer.processor)
            own._attention_backend = member
            layer.own_processor, layer.module.processor = own, own
            self._handles += [
                layer.module.register_forward_pre_hook(self._enter(layer)),
                layer.module.register_forward_hook(self._leave, always_call=True),
            ]
        setattr(self.model, SESSION_ATTRIBUTE, self)

    def deactivate(self) -> None:
        """Put processors and backends back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for layer in self.layers:
            if layer.module.processor is layer.own_processor:
                layer.module.processor = layer.processor
            layer.processor._attention_backend = layer.backend
        if getattr(self.model, SESSION_ATTRIBUTE, None) is self:
            delattr(self.model, SESSION_ATTRIBUTE)

    def _enter(self, layer: ServedLayer) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            _CURRENT.set((self, layer))

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        _CURRENT.set(None)

    def _begin_step(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.dense_step = self.disabled_until_timestep is not None and not self._late_enough(args, kwargs)
        self.dense_steps += self.dense_step
        self.sparse_steps += not self.dense_step

    def _late_enough(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        timestep = (
            inspect.signature(self.model.forward).bind_partial(*args, **kwargs).arguments.get("timestep")
        )
        if timestep is None:
            raise ValueError("disabled_until_timestep: the model was called without its argument timestep")
        # a number per sequence or token: the noisiest decides
        latest = float(torch.as_tensor(timestep).max()) / self.num_train_timesteps
        if not 0.0 <= latest <= 1.0:
            raise ValueError(
                f"num_train_timesteps: got {self.num_train_timesteps:g}, but the model is called with "
                f"timestep {latest * self.num_train_timesteps:g}"
            )
        assert self.disabled_until_timestep is not None
        return latest < self.disabled_until_timestep

    def refuse(self, layer: ServedLayer, reason: str) -> None:
        """An error, or a warning once per reason, and the reason is kept."""
        if self.unsupported == "error":
            raise UnsupportedError(
                f"{layer.name}: {reason}; leave the layer out with ignore, or let such calls run on the "
                'model\'s own backend with unsupported="native"'
            )
        names = self.met.setdefault(reason, [])
        if not names:
            warnings.warn(
                f"blasst: {layer.name} and layers like it run on the model's own attention: {reason}",
                stacklevel=2,
            )
        if layer.name not in names:
            names.append(layer.name)


#: The session and the layer whose forward is running.
_CURRENT: ContextVar[tuple[DiffusersSession, ServedLayer] | None] = ContextVar("blasst", default=None)


def _reason_against(q: Tensor, k: Tensor, mask: Any, dropout: float, causal: bool, parallel: Any) -> str:
    """Why a call cannot be served; empty when it can."""
    if mask is not None:
        return "the call has an attention mask"
    if causal:
        return "the call is causal"
    if q.shape[1] != k.shape[1]:
        return f"the call is cross-attention ({q.shape[1]} rows, {k.shape[1]} keys)"
    if dropout:
        return f"the call has dropout {dropout:g}"
    if parallel is not None:
        return "the call is context parallel"
    return ""


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The backend; argument names and layout (batch, seqlen, heads, head_dim) are diffusers'."""
    current = _CURRENT.get()
    if current is None:
        raise UnsupportedError(
            'the attention backend "blasst" was called by a layer that it was not enabled for: use '
            "blasst.integrations.diffusers.enable(model, ...) instead of set_attention_backend"
        )
    session, layer = current

    def native() -> Tensor:
        from diffusers.models.attention_dispatch import (
            AttentionBackendName,
            _AttentionBackendRegistry,
            dispatch_attention_fn,
        )

        backend = layer.backend or _AttentionBackendRegistry.get_active_backend()[0]
        out: Tensor = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            backend=AttentionBackendName.NATIVE if backend == BACKEND else backend,
            parallel_config=_parallel_config,
        )
        return out

    if session.dense_step:
        return native()
    reason = _reason_against(query, key, attn_mask, dropout_p, is_causal, _parallel_config)
    if reason:
        session.refuse(layer, reason)
        return native()
    return session.handler(DiffusersCall(layer.index, query, key, value, scale, native))


def register_backend() -> Any:
    """Add "blasst" to diffusers' attention backends, once.

    Returns:
        The member of diffusers' AttentionBackendName.

    Raises:
        UnsupportedError: this diffusers keeps its backends in another way.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        if BACKEND in AttentionBackendName._value2member_map_:
            return AttentionBackendName(BACKEND)
        member = str.__new__(AttentionBackendName, BACKEND)
        member._name_, member._value_ = BACKEND.upper(), BACKEND
        member._sort_order_ = len(AttentionBackendName._member_names_)
        _AttentionBackendRegistry.register(member)(_attention)
        AttentionBackendName._member_map_[BACKEND.upper()] = member
        AttentionBackendName._member_names_.append(BACKEND.upper())
        AttentionBackendName._value2member_map_[BACKEND] = member
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"diffusers: wants 0.42, whose attention backends can be added to: {error}"
        ) from error
    return member


def find_layers(
    model: nn.Module, ignore: Sequence[str] = ()
) -> tuple[tuple[ServedLayer, ...], tuple[tuple[str, str], ...]]:
    """Self-attention layers that can be served, and (name, reason) of the attention modules that cannot.

    Args:
        model: a diffusers transformer.
        ignore: fnmatch patterns on module names.
    """
    served: list[ServedLayer] = []
    others: list[tuple[str, str]] = []
    for name, module in model.named_modules():
        processor = getattr(module, "processor", None)
        if processor is None:
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
            others.append((name, "ignored"))
        elif getattr(module, "is_cross_attention", False):
            others.append((name, "cross-attention"))
        elif not hasattr(processor, "_attention_backend"):
            others.append((name, f"its processor {type(processor).__name__} takes no attention backend"))
        else:
            served.append(ServedLayer(len(served), name, module, processor, processor._attention_backend))
    return tuple(served), tuple(others)


@contextmanager
def session_for(
    model: nn.Module, handler: Callable[[DiffusersCall], Tensor], ignore: Sequence[str] = ()
) -> Iterator[DiffusersSession]:
    """A session with another handler, for counting; afterwards the model is as before.

    Args:
        model: a diffusers transformer.
        handler: what the served layers run.
        ignore: fnmatch patterns on module names.

    Raises:
        ValueError: no layer can be served.
    """

    def make() -> DiffusersSession:
        layers, others = find_layers(model, ignore)
        if not layers:
            raise ValueError(f"model: no attention layer can be served: {others[:3]}")
        return DiffusersSession(model, handler, layers, others)

    with in_place_of(getattr(model, SESSION_ATTRIBUTE, None), make) as session:
        yield session
