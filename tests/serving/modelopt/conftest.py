"""Tests of files against ModelOpt's own code; they run in an environment that has it (docs/serving.md)."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about versions of transformers, and extensions that are not there
    import modelopt.torch.sparsity.attention_sparsity  # noqa: F401
