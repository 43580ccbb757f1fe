"""Which modules of a transformers model are attention layers that blasst can serve."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


def _uses_interface(cls: type) -> bool:
    """Whether a module class calls transformers' attention interface."""
    for owner in cls.__mro__:
        for member in vars(owner).values():
            code = getattr(inspect.unwrap(member), "__code__", None) if inspect.isfunction(member) else None
            if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                return True
    return False


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Innermost modules whose class name says attention, in model order."""
    found = [(name, m) for name, m in model.named_modules() if "attention" in type(m).__name__.lower()]
    outer = {
        id(m) for _, m in found for inner in m.modules() if inner is not m and _is_interface_module(inner)
    }
    return [(name, m) for name, m in found if id(m) not in outer]


def _is_interface_module(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() and _uses_interface(type(module))


def unserved_reason(name: str, module: nn.Module, ignore: Sequence[str]) -> str | None:
    """Why an attention module stays on the model's own attention; None = it is served."""
    for pattern in ignore:
        if fnmatch.fnmatchcase(name, pattern):
            return f"ignored by pattern {pattern!r}"
    if not _uses_interface(type(module)) or not hasattr(
        getattr(module, "config", None), "_attn_implementation"
    ):
        return "does not call the attention interface of transformers"
    if getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower():
        return "cross-attention"
    if not getattr(module, "is_causal", False):
        return "not causal (encoder, vision or cross-attention)"
    return None


def configs_below(config: Any) -> Iterator[Any]:
    """A config and its sub-configs, parents first."""
    yield config
    for key in getattr(config, "sub_configs", None) or {}:
        if (child := getattr(config, key, None)) is not None:
            yield from configs_below(child)


def distinct(configs: Iterator[Any]) -> list[Any]:
    """Configs without repetition, by identity (they are not hashable)."""
    return list({id(config): config for config in configs}.values())
