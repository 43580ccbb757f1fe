"""Models that join text and image tokens: Flux without a mask is served, HunyuanVideo brings a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, HunyuanVideoTransformer3DModel

from blasst.core.errors import UnsupportedError
from blasst.integrations.diffusers import attention_stats, enable

TOKENS, TEXT = 1024, 48


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def flux() -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    ids = torch.stack([torch.zeros(TOKENS), torch.arange(TOKENS) // 32, torch.arange(TOKENS) % 32], 1)
    return model.eval(), {
        "hidden_states": torch.randn(1, TOKENS, 4),
        "encoder_hidden_states": torch.randn(1, TEXT, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.4]),
        "img_ids": ids,
        "txt_ids": torch.zeros(TEXT, 3),
    }


def test_joint_attention_of_flux_is_served_and_its_timestep_is_already_divided() -> None:
    model, inputs = flux()
    dense = model(**inputs).sample
    enabled = enable(
        model, threshold=0.0, disabled_until_timestep=0.5, num_train_timesteps=1.0, collect_counts=True
    )
    assert enabled.served == ("transformer_blocks.0.attn", "single_transformer_blocks.0.attn")
    out = model(**inputs).sample
    visited = 2 * -(-(TOKENS + TEXT) // 64) * -(-(TOKENS + TEXT) // 128)
    assert [int(stats.visited.sum()) for stats in attention_stats(model)] == [visited, visited]
    # float32 sums of 1072 products in another order
    assert float((out - dense).abs().max()) < 1e-5 * float(dense.abs().max())
    enable(model, threshold=0.0, disabled_until_timestep=0.4, num_train_timesteps=1.0)
    assert torch.equal(model(**inputs).sample, dense)


def test_hunyuan_video_brings_a_mask_and_is_refused() -> None:
    torch.manual_seed(0)
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    ).eval()
    inputs = {
        "hidden_states": torch.randn(1, 4, 4, 16, 16),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "encoder_attention_mask": torch.ones(1, 12),
        "pooled_projections": torch.randn(1, 8),
        "guidance": torch.tensor([1000.0]),
    }
    dense = model(**inputs).sample
    enabled = enable(model, threshold=0.5)
    refiner, reason = enabled.unserved[0]
    assert refiner.endswith("refiner_blocks.0.attn") and "takes no attention backend" in reason
    with pytest.raises(UnsupportedError, match="attention mask"):
        model(**inputs)
    enable(model, threshold=0.5, unsupported="native")
    with pytest.warns(UserWarning, match="attention mask"):
        assert torch.equal(model(**inputs).sample, dense)
