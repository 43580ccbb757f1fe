"""Attention that skips key tiles it does not need: BLASST (arXiv:2512.12087) for existing models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blasst._version import __version__ as __version__
from blasst.core.errors import BlasstError as BlasstError
from blasst.core.errors import CalibrationError as CalibrationError
from blasst.core.errors import ProfileError as ProfileError
from blasst.core.errors import UnsupportedError as UnsupportedError
from blasst.core.merge import merge_attention as merge_attention
from blasst.core.types import AttentionOutput as AttentionOutput
from blasst.core.types import SkipCounts as SkipCounts
from blasst.functional import blasst_attn_func as blasst_attn_func
from blasst.functional import blasst_attn_varlen_func as blasst_attn_varlen_func
from blasst.functional import blasst_attn_with_kvcache as blasst_attn_with_kvcache
from blasst.kernels.select import backend_used as backend_used
from blasst.sdpa import attention as attention

if TYPE_CHECKING:
    from blasst.core.profile import load_profile as load_profile
    from blasst.integrations.transformers import attention_stats as attention_stats
    from blasst.integrations.transformers import disable as disable
    from blasst.integrations.transformers import enable as enable
    from blasst.integrations.transformers import reset_stats as reset_stats
    from blasst.integrations.transformers import skipped_mass_samples as skipped_mass_samples
    from blasst.integrations.transformers import skipped_mass_summary as skipped_mass_summary
    from blasst.integrations.transformers import sparse_attention as sparse_attention

#: Names that need transformers, imported when first used so that `import blasst` stays light.
_LAZY = {
    "attention_stats": "blasst.integrations.transformers",
    "disable": "blasst.integrations.transformers",
    "enable": "blasst.integrations.transformers",
    "load_profile": "blasst.core.profile",
    "reset_stats": "blasst.integrations.transformers",
    "skipped_mass_samples": "blasst.integrations.transformers",
    "skipped_mass_summary": "blasst.integrations.transformers",
    "sparse_attention": "blasst.integrations.transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'blasst' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
