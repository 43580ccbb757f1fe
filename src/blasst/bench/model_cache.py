"""A key-value cache of fixed size for timing transformers models: nothing is allocated or moved per token.

transformers' growing cache copies all keys and values for each new token, and its static one hands out slots
that are not written yet, so that torch needs a mask and cuDNN cannot serve. Here a call gets exactly the keys
that it attends to, as a view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


def key_sizes(config: Any) -> tuple[int, int]:
    """KV heads and head_dim of a transformers config, which leaves out what follows from the rest.

    Args:
        config: of a model.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


class _FixedLayer(DynamicLayer):
    """Keys and values of one layer, (batch, num_kv_heads, slots, head_dim) each."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True
        self.position = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens at the position; one sequence goes into every sequence of the cache."""
        batch, _, new, _ = key_states.shape
        end = self.position + new
        self.keys[:, :, self.position : end].copy_(key_states)
        self.values[:, :, self.position : end].copy_(value_states)
        return self.keys[:batch, :, :end], self.values[:batch, :, :end]

    def get_seq_length(self) -> int:
        """Tokens before the next ones."""
        return self.position


class FixedCache(Cache):
    """A cache whose position is set by hand: the same call again does the same work on the same memory."""

    def __init__(
        self, config: Any, batch: int, slots: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        kv_heads, head_dim = key_sizes(config)
        shape = (batch, kv_heads, slots, head_dim)
        super().__init__(
            layers=[
                _FixedLayer(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
                for _ in range(config.num_hidden_layers)
            ]
        )

    def go_to(self, position: int) -> None:
        """The next tokens are written from this slot on and see the slots before it."""
        for layer in self.layers:
            layer.position = position
