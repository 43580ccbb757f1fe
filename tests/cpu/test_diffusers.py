"""The diffusers backend against a stand-in for its dispatcher; the real one is in tests/serving/diffusers."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blasst.calibrate.collect_diffusers import collect_diffusers
from blasst.core.errors import UnsupportedError
from blasst.core.profile import ModelInfo, load_profile
from blasst.integrations.diffusers import attention_stats, disable, enable, fingerprint_of
from blasst.testing import heavy_tailed_inputs


class Processor:
    _attention_backend = None

    def __call__(self, attn: Attention, q: Tensor, **options: Any) -> Tensor:
        dispatch = sys.modules["diffusers.models.attention_dispatch"].dispatch_attention_fn
        out: Tensor = dispatch(q, attn.k, attn.v, backend=self._attention_backend, **options)
        return out


class Attention(nn.Module):
    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.k, self.v, self.processor = k, v, Processor()

    def forward(self, q: Tensor, **options: Any) -> Tensor:
        return self.processor(self, q, **options)


class Model(nn.Module):
    def __init__(self, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.attn = Attention(k, v)

    def forward(self, q: Tensor, timestep: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.attn(q, **options)
        return out


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with the parts of diffusers.models.attention_dispatch that are used."""

    class AttentionBackendName(str, Enum):  # noqa: UP042
        NATIVE = "native"

    class Registry:
        backends: dict[Any, Any] = {}  # noqa: RUF012

        @classmethod
        def register(cls, name: Any) -> Any:
            return lambda function: cls.backends.setdefault(name, function)

        @classmethod
        def get_active_backend(cls) -> Any:
            return AttentionBackendName.NATIVE, cls.backends[AttentionBackendName.NATIVE]

    def native(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        mask = options.get("attn_mask")
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def dispatch_attention_fn(*tensors: Tensor, backend: Any = None, **options: Any) -> Tensor:
        options.pop("parallel_config", None)
        out: Tensor = Registry.backends[backend or AttentionBackendName.NATIVE](*tensors, **options)
        return out

    Registry.backends[AttentionBackendName.NATIVE] = native
    module = ModuleType("diffusers.models.attention_dispatch")
    module.AttentionBackendName = AttentionBackendName  # type: ignore[attr-defined]
    module._AttentionBackendRegistry = Registry  # type: ignore[attr-defined]
    module.dispatch_attention_fn = dispatch_attention_fn  # type: ignore[attr-defined]
    for name in ("diffusers", "diffusers.models"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", module)
    return module


@pytest.fixture
def inputs() -> Any:
    return heavy_tailed_inputs(1, 700, 700, 2, 2, 32, seed=3, noise=2.0, drop=(1.0, 12.0))


def test_late_steps_skip_early_ones_are_dense_and_disable_restores(dispatch: ModuleType, inputs: Any) -> None:
    model, step = Model(inputs.k, inputs.v), torch.tensor
    dense = model(inputs.q, step(900))
    enabled = enable(model, threshold=0.1, disabled_until_timestep=0.5, collect_counts=True)
    assert torch.equal(model(inputs.q, step(900)), dense)
    assert not torch.equal(model(inputs.q, step(100)), dense)
    (stats,) = attention_stats(model)
    assert enabled.steps == (1, 1) and 0 < stats.sparsity < 1
    disable(model)
    assert torch.equal(model(inputs.q, step(100)), dense)


def test_counts_at_a_threshold_are_those_of_the_kernel(dispatch: ModuleType, inputs: Any) -> None:
    model = Model(inputs.k, inputs.v)
    table = collect_diffusers(
        model, [("noise", lambda: model(inputs.q, torch.tensor(1)))], thresholds=[0.1, 0.5]
    )
    assert table.rules["prefill"].dense_tail == 0
    enable(model, threshold=0.1, collect_counts=True)
    model(inputs.q, torch.tensor(1))
    assert table.records[0].skipped[0, 0].tolist() == attention_stats(model)[0].skipped.tolist()


def test_a_profile_with_a_dense_tail_is_refused(dispatch: ModuleType, inputs: Any) -> None:
    model = Model(inputs.k, inputs.v)
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_smollm2" / "profile.json"
    profile = replace(load_profile(path), model=ModelInfo("m", fingerprint_of(model)))
    with pytest.raises(ValueError, match="the last 64 rows dense"):
        enable(model, profile=profile, target_sparsity=0.5)


def test_a_mask_is_refused_or_runs_native_with_one_warning(dispatch: ModuleType, inputs: Any) -> None:
    model, mask = Model(inputs.k, inputs.v), torch.ones(700, 700, dtype=torch.bool)
    mask[:, 600:] = False
    dense = model(inputs.q, torch.tensor(1), attn_mask=mask)
    enable(model, threshold=0.1)
    with pytest.raises(UnsupportedError, match="attention mask"):
        model(inputs.q, torch.tensor(1), attn_mask=mask)
    enabled = enable(model, threshold=0.1, unsupported="native")
    with pytest.warns(UserWarning, match="attention mask"):
        assert torch.equal(model(inputs.q, torch.tensor(1), attn_mask=mask), dense)
    assert enabled.unserved == (("attn", "the call has an attention mask (in some calls)"),)


def test_without_diffusers_or_with_another_one_the_reason_is_given(
    monkeypatch: pytest.MonkeyPatch, inputs: Any
) -> None:
    model = Model(inputs.k, inputs.v)
    for name in ("diffusers", "diffusers.models", "diffusers.models.attention_dispatch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"diffusers: wants 0\.42"):
        enable(model, threshold=0.1)
    assert not model._forward_pre_hooks and not model.attn._forward_pre_hooks
