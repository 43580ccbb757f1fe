"""A tiny random Wan transformer (video), dense and skipping; runs where diffusers is (docs/serving.md)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    attention_backend,
    dispatch_attention_fn,
)

from blasst.calibrate.collect_diffusers import calibrate_diffusers, collect_diffusers
from blasst.core.errors import CalibrationError, ProfileError, UnsupportedError
from blasst.integrations.diffusers import attention_stats, disable, enable, reset_stats
from blasst.integrations.diffusers_session import BACKEND, register_backend
from blasst.testing import assert_within_budget

TOKENS = 4 * 16 * 16  # frames x (height / 2) x (width / 2)
SELF = ("blocks.0.attn1", "blocks.1.attn1")


def make_wan(**changes: Any) -> WanTransformer3DModel:
    """Constant biases on queries and keys: with rotary positions attention then fades with distance."""
    torch.manual_seed(0)
    settings = {
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 32,
        "ffn_dim": 64,
        "num_layers": 2,
        "rope_max_seq_len": 64,
    }
    model = WanTransformer3DModel(**{**settings, **changes}).eval()
    for block in model.blocks:
        for projection, norm in (("to_q", "norm_q"), ("to_k", "norm_k")):
            torch.nn.init.normal_(getattr(block.attn1, projection).weight, std=0.02)
            torch.nn.init.constant_(getattr(block.attn1, projection).bias, 3.0)
            torch.nn.init.constant_(getattr(block.attn1, norm).weight, 3.0)
    return model


def inputs(timestep: float = 500.0, batch: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 4, 4, 32, 32, generator=generator),
        "timestep": torch.full((batch,), timestep),
        "encoder_hidden_states": torch.randn(batch, 24, 16, generator=generator),
    }


@pytest.fixture
def model() -> Iterator[WanTransformer3DModel]:
    active = _AttentionBackendRegistry._active_backend
    made = make_wan()
    with torch.no_grad():
        yield made
    assert _AttentionBackendRegistry._active_backend == active


def run(model: WanTransformer3DModel, *args: Any, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = model(**inputs(*args, **kwargs)).sample
    return out


def sparsity(model: WanTransformer3DModel) -> float:
    stats = attention_stats(model)
    return sum(int(s.skipped.sum()) for s in stats) / sum(int(s.visited.sum()) for s in stats)


def test_the_member_is_one_of_the_enum_and_added_once() -> None:
    member = register_backend()
    assert register_backend() is member and AttentionBackendName(BACKEND) is member
    assert isinstance(member, AttentionBackendName) and member.value == "blasst" and member.name == "BLASST"
    assert [m.value for m in AttentionBackendName].count("blasst") == 1
    assert "blasst" in {m.value for m in AttentionBackendName.__members__.values()}


def test_threshold_zero_is_the_native_backend_within_rounding(model: WanTransformer3DModel) -> None:
    dense = run(model, batch=2)
    enabled = enable(model, threshold=0.0, collect_counts=True)
    assert enabled.served == SELF
    assert dict(enabled.unserved) == dict.fromkeys(("blocks.0.attn2", "blocks.1.attn2"), "cross-attention")
    out = run(model, batch=2)
    assert sparsity(model) == 0.0
    assert attention_stats(model)[0].visited.tolist() == [2 * TOKENS // 64 * TOKENS // 128] * 2
    disable(model)
    truth = make_wan().double()(**{k: v.double() for k, v in inputs(batch=2).items()}).sample
    assert_within_budget(out, truth, dense)


def test_a_threshold_skips_and_stays_near_dense(model: WanTransformer3DModel) -> None:
    dense = run(model)
    enable(model, threshold=0.02, collect_counts=True)
    out = run(model)
    assert 0.05 < sparsity(model) < 0.95
    assert not torch.equal(out, dense)
    # the tiles that went hold little: the output moves by far less than it is large
    assert float((out - dense).abs().max()) < 0.1 * float(dense.abs().max())
    low = sparsity(model)
    enable(model, threshold=0.5, collect_counts=True)
    run(model)
    assert sparsity(model) > low


def test_a_scale_factor_divides_by_the_number_of_tokens(model: WanTransformer3DModel) -> None:
    enable(model, threshold=0.25)
    direct = run(model)
    enable(model, threshold_scale_factor=0.25 * TOKENS)
    assert torch.equal(run(model), direct)


def test_steps_above_the_timestep_are_dense_and_later_ones_skip(model: WanTransformer3DModel) -> None:
    dense = {t: run(model, t) for t in (1000.0, 860.0, 859.0, 0.0)}
    enabled = enable(model, threshold=0.5, disabled_until_timestep=0.86, collect_counts=True)
    for t in (1000.0, 860.0):
        assert torch.equal(run(model, t), dense[t])
    assert enabled.steps == (2, 0) and attention_stats(model) == []
    for t in (859.0, 0.0):
        assert not torch.equal(run(model, t), dense[t])
    assert enabled.steps == (2, 2) and sparsity(model) > 0
    reset_stats(model)
    assert enabled.steps == (0, 0)


def test_the_noisiest_of_several_timesteps_decides(model: WanTransformer3DModel) -> None:
    enabled = enable(model, threshold=0.5, disabled_until_timestep=0.5)
    model(**{**inputs(batch=2), "timestep": torch.tensor([0.0, 900.0])})
    model(inputs()["hidden_states"], torch.tensor([100]), inputs()["encoder_hidden_states"])
    assert enabled.steps == (1, 1)
    enable(model, threshold=0.5, disabled_until_timestep=0.5, num_train_timesteps=1.0)
    with pytest.raises(ValueError, match="num_train_timesteps"):
        run(model)


def test_disable_puts_everything_back(model: WanTransformer3DModel) -> None:
    before = [(m, m.processor, m.processor._attention_backend) for _, m in attentions(model)]
    dense = run(model)
    enable(model, threshold=0.5)
    enable(model, threshold=0.3)
    disable(model)
    disable(model)
    assert [(m, m.processor, m.processor._attention_backend) for _, m in attentions(model)] == before
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert torch.equal(run(model), dense)


def attentions(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, m) for name, m in model.named_modules() if hasattr(m, "processor")]


def test_a_shared_processor_does_not_carry_the_backend_to_cross_attention(
    model: WanTransformer3DModel,
) -> None:
    dense = run(model)
    shared = model.blocks[0].attn1.processor
    for _, module in attentions(model):
        module.processor = shared
    enable(model, threshold=0.0)
    run(model)
    assert model.blocks[0].attn2.processor is shared and shared._attention_backend is None
    disable(model)
    assert all(module.processor is shared for _, module in attentions(model))
    assert torch.equal(run(model), dense)


def masked_call(model: WanTransformer3DModel, **call: Any) -> torch.Tensor:
    """A forward whose self-attention calls the dispatcher with something that cannot be served."""
    processor = type(model.blocks[0].attn1.processor)

    class Masked(processor):  # type: ignore[valid-type, misc]
        def __call__(self, attn: Any, hidden_states: Any, *args: Any) -> Any:
            q, k, v = (
                p(hidden_states).unflatten(2, (attn.heads, -1)) for p in (attn.to_q, attn.to_k, attn.to_v)
            )
            keys = call.get("keys", TOKENS)
            rest = {name: value for name, value in call.items() if name != "keys"}
            out = dispatch_attention_fn(q, k[:, :keys], v[:, :keys], backend=self._attention_backend, **rest)
            return attn.to_out[0](out.flatten(2, 3))

    for block in model.blocks:
        block.attn1.processor = Masked()
    return run(model)


UNSUPPORTED = {
    "attention mask": {"attn_mask": torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)},
    "causal": {"is_causal": True},
    "cross-attention": {"keys": 512},
    "dropout": {"dropout_p": 1e-9},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_cannot_be_served_is_refused_or_runs_native_with_a_warning(
    reason: str, model: WanTransformer3DModel
) -> None:
    call = UNSUPPORTED[reason]
    native = masked_call(model, **call)
    enable(model, threshold=0.5)
    with pytest.raises(UnsupportedError, match=rf"blocks\.0\.attn1: .*{reason}.*unsupported="):
        run(model)
    enabled = enable(model, threshold=0.5, unsupported="native", collect_counts=True)
    with pytest.warns(UserWarning, match=f"own attention: .*{reason}") as seen:
        out = run(model)
    assert len(seen) == 1 and torch.equal(out, native)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model)
    assert attention_stats(model) == []
    names = [name for name, why in enabled.unserved if reason in why and "some calls" in why]
    assert names == list(SELF)


def test_the_backend_alone_is_no_silent_choice(model: WanTransformer3DModel) -> None:
    register_backend()
    with attention_backend(BACKEND), pytest.raises(UnsupportedError, match="not enabled for"):
        run(model)


def test_dense_steps_do_not_recurse_when_the_backend_is_active_everywhere(
    model: WanTransformer3DModel,
) -> None:
    dense = run(model)
    enable(model, threshold=0.5, disabled_until_timestep=0.0)
    for block in model.blocks:
        block.attn2.processor._attention_backend = AttentionBackendName.NATIVE
    with attention_backend(BACKEND):
        assert torch.equal(run(model), dense)


def test_layers_can_be_left_out_and_no_layer_is_an_error(model: WanTransformer3DModel) -> None:
    enabled = enable(model, threshold=0.5, ignore=["blocks.0.*"])
    assert enabled.served == SELF[1:] and ("blocks.0.attn1", "ignored") in enabled.unserved
    with pytest.raises(ValueError, match="no attention layer"):
        enable(model, threshold=0.5, ignore=["*"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "nothing to enable"),
        ({"threshold": 0.1, "threshold_scale_factor": 5.0}, "give one of them"),
        ({"threshold": 2.0}, "threshold"),
        ({"target_sparsity": 0.5}, "profile"),
        ({"threshold": 0.1, "unsupported": "dense"}, "unsupported"),
        ({"threshold": 0.1, "disabled_until_timestep": 860}, "disabled_until_timestep"),
        ({"threshold": 0.1, "num_train_timesteps": 0}, "num_train_timesteps"),
        ({"threshold": 0.1, "impl": "cudnn"}, "impl"),
        ({"threshold": 0.1, "ignore": "blocks.0.*"}, "ignore"),
    ],
)
def test_bad_arguments_are_refused_and_change_nothing(
    settings: dict[str, Any], message: str, model: WanTransformer3DModel
) -> None:
    with pytest.raises(ValueError, match=message):
        enable(model, **settings)
    assert not model._forward_pre_hooks


def step_at(model: WanTransformer3DModel, size: int, seed: int = 1, timestep: float = 500.0) -> Any:
    """One denoising step of 4 frames of size x size."""
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 4, 4, size, size, generator=generator)
    return lambda: model(**{**inputs(timestep), "hidden_states": latents})


def test_counts_are_those_of_the_skipping_kernel(model: WanTransformer3DModel) -> None:
    ladder = [0.001, 0.1, 0.5, 1.0]
    before = [(m.processor, m.processor._attention_backend) for _, m in attentions(model)]
    table = collect_diffusers(model, [("noise", step_at(model, 32))], thresholds=ladder)
    assert [(m.processor, m.processor._attention_backend) for _, m in attentions(model)] == before
    (record,) = table.records
    assert (record.kv_len, record.phase, table.layers) == (TOKENS, "prefill", SELF)
    for j in (1, 3):
        enable(model, threshold=ladder[j], collect_counts=True)
        step_at(model, 32)()
        first = attention_stats(model)[0]  # the second layer sees other inputs once tiles are skipped
        assert first.skipped.tolist() == record.skipped[j, 0].tolist() and int(first.skipped.sum()) > 0
        assert first.visited.tolist() == record.visited[0].tolist()


def test_a_calibrated_target_is_met(model: WanTransformer3DModel, tmp_path: Path) -> None:
    # four frames whatever the size: what a threshold skips hardly depends on the length here
    runs = [("noise", step_at(model, size, seed)) for size in (24, 32, 40) for seed in (1, 2)]
    profile = calibrate_diffusers(model, runs, target_sparsity=0.3)
    profile.save(tmp_path / "wan.json")
    enabled = enable(model, profile=tmp_path / "wan.json", target_sparsity=0.3, collect_counts=True)
    assert "wan.json" in enabled.threshold.origin
    for size in (24, 32, 40):
        step_at(model, size, seed=7)()
    assert sparsity(model) == pytest.approx(0.3, abs=0.05)
    other = make_wan(num_layers=3)
    with pytest.raises(ProfileError, match="another model"):
        enable(other, profile=tmp_path / "wan.json", target_sparsity=0.3)


def test_steps_that_stay_dense_are_not_counted(model: WanTransformer3DModel) -> None:
    late, early = step_at(model, 32, timestep=100.0), step_at(model, 32, timestep=900.0)
    one = collect_diffusers(model, [("noise", late)], disabled_until_timestep=0.5)
    both = collect_diffusers(model, [("noise", lambda: (early(), late()))], disabled_until_timestep=0.5)
    assert both.records[0].skipped.tolist() == one.records[0].skipped.tolist()
    with pytest.raises(CalibrationError, match="counted calls of no tokens"):
        collect_diffusers(model, [("noise", early)], disabled_until_timestep=0.5)
    with pytest.raises(CalibrationError, match=r"counted calls of \[576, 1024\] tokens"):
        collect_diffusers(model, [("noise", lambda: (late(), step_at(model, 24)()))])
    with pytest.raises(CalibrationError, match="got none"):
        collect_diffusers(model, [])
