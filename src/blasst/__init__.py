"""Attention that skips key tiles it does not need: BLASST (arXiv:2512.12087) for existing models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blasst._version import __version__
from blasst.core.errors import BlasstError, CalibrationError, ProfileError, UnsupportedError

if TYPE_CHECKING:
    from blasst.core.key_codes import KeyCodes
    from blasst.core.merge import merge_attention
    from blasst.core.profile import load_profile
    from blasst.core.progressive_keys import ProgressiveKeys
    from blasst.core.types import AttentionOutput, SkipCounts
    from blasst.functional import blasst_attn_func, blasst_attn_varlen_func, blasst_attn_with_kvcache
    from blasst.integrations.transformers import (
        attention_stats,
        disable,
        enable,
        reset_stats,
        skipped_mass_samples,
        skipped_mass_summary,
        sparse_attention,
    )
    from blasst.integrations.transformers_cache import ScreenedCache
    from blasst.kernels.select import backend_used
    from blasst.sdpa import attention

__all__ = [
    "AttentionOutput",
    "BlasstError",
    "CalibrationError",
    "KeyCodes",
    "ProfileError",
    "ProgressiveKeys",
    "ScreenedCache",
    "SkipCounts",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_stats",
    "backend_used",
    "blasst_attn_func",
    "blasst_attn_varlen_func",
    "blasst_attn_with_kvcache",
    "disable",
    "enable",
    "load_profile",
    "merge_attention",
    "reset_stats",
    "skipped_mass_samples",
    "skipped_mass_summary",
    "sparse_attention",
]

#: Where names are that need torch or transformers. They are imported when first used, so that the command
#: line can refuse bad arguments before torch is loaded.
_LAZY = {
    "AttentionOutput": "blasst.core.types",
    "KeyCodes": "blasst.core.key_codes",
    "ProgressiveKeys": "blasst.core.progressive_keys",
    "ScreenedCache": "blasst.integrations.transformers_cache",
    "SkipCounts": "blasst.core.types",
    "attention": "blasst.sdpa",
    "attention_stats": "blasst.integrations.transformers",
    "backend_used": "blasst.kernels.select",
    "blasst_attn_func": "blasst.functional",
    "blasst_attn_varlen_func": "blasst.functional",
    "blasst_attn_with_kvcache": "blasst.functional",
    "disable": "blasst.integrations.transformers",
    "enable": "blasst.integrations.transformers",
    "load_profile": "blasst.core.profile",
    "merge_attention": "blasst.core.merge",
    "reset_stats": "blasst.integrations.transformers",
    "skipped_mass_samples": "blasst.integrations.transformers",
    "skipped_mass_summary": "blasst.integrations.transformers",
    "sparse_attention": "blasst.integrations.transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'blasst' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
