"""A KV cache for transformers whose decode steps blasst can screen: codes beside the keys, or in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from blasst.core.errors import UnsupportedError
from blasst.core.key_codes import CODE_BITS, KeyCodes
from blasst.core.progressive_keys import ProgressiveKeys
from blasst.core.types import DECODE_TILE, MAX_DECODE_TOKENS

#: Where keys of a cache may be stored.
STORAGES = ("side", "progressive")

#: Attribute of the keys that a layer hands to attention; it goes with that tensor.
_CODES = "_blasst_key_codes"


def codes_of(keys: Tensor) -> KeyCodes | None:
    """The codes of keys that come from a `ScreenedCache`, or None.

    Args:
        keys: as the attention function got them.
    """
    return getattr(keys, _CODES, None)


def _with_codes(keys: Tensor, codes: KeyCodes) -> Tensor:
    """The same keys, as another tensor, with their codes."""
    keys = keys.view_as(keys)
    setattr(keys, _CODES, codes)
    return keys


def _removed(tokens_to_remove: int) -> int:
    """How many tokens a call of `crop` takes back."""
    if tokens_to_remove > 0:
        raise ValueError(f"tokens_to_remove: got {tokens_to_remove}, want minus the number of tokens")
    return -tokens_to_remove


class _SelectingLayer(DynamicLayer):
    """A layer to which beams and repeats are choices among its sequences."""

    @property
    def _held(self) -> KeyCodes | ProgressiveKeys | None:
        """What has a row for each sequence; None before the first keys."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give each beam the cache of another.

        Args:
            beam_idx: int64 (batch,).
        """
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence.

        Args:
            repeats: how many times.
        """
        if self._held is not None:
            sequences = torch.arange(self._held.low.shape[0], device=self._held.low.device)
            self.batch_select_indices(sequences.repeat_interleave(repeats))


class CodedLayer(_SelectingLayer):
    """Keys and values as they are, and `KeyCodes` of the keys.

    Args:
        bits: of a code.
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.codes: KeyCodes | None = None

    @property
    def _held(self) -> KeyCodes | None:
        return self.codes

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append and return all, as `DynamicLayer` does; encodes the tiles that became complete.

        Args:
            key_states: (batch, num_kv_heads, new, head_dim).
            value_states: (batch, num_kv_heads, new, head_dim_v).
            *args: for other layers.
            **kwargs: for other layers.
        """
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        slots = keys.transpose(1, 2)
        batch, length, heads, dim = slots.shape
        if self.codes is None:
            self.codes = KeyCodes.empty(
                *(batch, length, heads, dim, self.bits), dtype=keys.dtype, device=keys.device
            )
        elif length // DECODE_TILE.key > self.codes.low.shape[1]:
            self.codes = self.codes.grown(length)
        self.codes.append(slots, length)
        return _with_codes(keys, self.codes), values

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back.

        Args:
            tokens_to_remove: minus their number.
        """
        super().crop(-_removed(tokens_to_remove))
        if self.codes is not None:
            self.codes.truncate(self.get_seq_length())

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.codes = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep chosen sequences, in their order.

        Args:
            indices: int64 or bool, as torch indexes.
        """
        if self.codes is not None:
            batch, device = self.codes.codes.shape[0], self.codes.codes.device
            chosen = torch.arange(batch, device=device)[indices.to(device)]
            super().batch_select_indices(chosen)
            self.codes = self.codes.select(chosen)

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and codes."""
        return 0 if self.codes is None else self.keys.nbytes + self.values.nbytes + self.codes.nbytes


class ProgressiveLayer(_SelectingLayer):
    """Keys as `ProgressiveKeys`, values as they are.

    A decode step gets the keys as stored. A prefill gets its own as they came, and those before as stored.

    Args:
        bits: upper bits of a key.
    """

    def __init__(self, bits: int) -> None:
        self.bits, self.length = bits, 0
        self.store: ProgressiveKeys | None = None
        super().__init__()

    @property
    def _held(self) -> ProgressiveKeys | None:
        return self.store

    @property
    def keys(self) -> Tensor | None:
        """The keys as stored, (batch, num_kv_heads, tokens, head_dim); expanded at each look."""
        return None if self.store is None else self._stored()

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        if value is not None:
            raise UnsupportedError("keys: progressive keys are not replaced or moved (offloading)")

    def _stored(self) -> Tensor:
        assert self.store is not None
        return self.store.keys()[:, : self.length].transpose(1, 2)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for nothing yet, of the right kind.

        Args:
            key_states: the first keys.
            value_states: the first values.
        """
        batch, heads, _, dim = key_states.shape
        self.device = key_states.device
        self.store = ProgressiveKeys.empty(
            *(batch, 0, heads, dim, self.bits), dtype=key_states.dtype, device=self.device
        )
        self.values = value_states[..., :0, :]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append, and return keys and values for this call.

        Args:
            key_states: (batch, num_kv_heads, new, head_dim), float16 or bfloat16.
            value_states: (batch, num_kv_heads, new, head_dim_v).
            *args: for other layers.
            **kwargs: for other layers.
        """
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
            assert self.store is not None
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise NotImplementedError(
                "ScreenedCache: progressive keys have no gradients, use torch.no_grad()"
            )
        before, new = self.length, key_states.shape[-2]
        decode = before > 0 and new <= MAX_DECODE_TOKENS
        keys = key_states if before == 0 or decode else torch.cat([self._stored(), key_states], -2)
        if before + new > self.store.capacity:
            self.store = self.store.grown(-(-(before + new) // DECODE_TILE.key) * DECODE_TILE.key)
        self.store.append(key_states.transpose(1, 2), before)
        self.length = before + new
        self.values = torch.cat([self.values, value_states], -2)
        if decode:
            unread = torch.zeros(key_states.shape[0], dtype=torch.int64, device="cpu")
            codes = KeyCodes(self.bits, self.store.dtype, *self.store.upper(), unread)
            keys = _with_codes(self._stored(), codes)
        return keys, self.values

    def get_seq_length(self) -> int:
        """Tokens in the cache."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back.

        Args:
            tokens_to_remove: minus their number.
        """
        count = min(_removed(tokens_to_remove), self.length)
        if count:
            self.length -= count
            self.values = self.values[..., : self.length, :]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.store, self.length = None, 0

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep chosen sequences, in their order.

        Args:
            indices: int64 or bool, as torch indexes.
        """
        if self.store is not None:
            indices = indices.to(self.device)
            self.store, self.values = self.store.select(indices), self.values[indices]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 0 if self.store is None else self.store.nbytes + self.values.nbytes


class ScreenedCache(DynamicCache):
    """A KV cache from which decode can tell that tiles need no scores; for `generate(past_key_values=)`.

    In a model with `blasst.enable` each decode step with a threshold is screened, which changes no bit of it
    against the same step on the same keys; `attention_stats` counts the tiles. In other models, and in steps
    that cannot be screened (padded batches, max_skipped_mass), it is an ordinary cache. So far the eager
    kernel screens, also on a GPU, where it is slower than the kernels that it takes the place of.

    Layers with a sliding window, and whatever is not plain attention, keep the layer of `DynamicCache`.

    Args:
        config: of the model.
        storage: "side" (default): keys as they are, and codes of them, which cost bits / 32 + 1 / 64 of a
            16-bit cache more. "progressive": keys in 16-bit fixed point (`ProgressiveKeys`), 1 / 64 more;
            float16 and bfloat16. Decode steps see the keys as stored, a prompt its own as they came.
        bits: of a code, 4, 5 or 6 (default).

    Raises:
        ValueError: another storage or number of bits, or a model without a layer that this is for.
    """

    def __init__(self, config: Any, *, storage: str = "side", bits: int = 6) -> None:
        if storage not in STORAGES:
            raise ValueError(f"storage: got {storage!r}, want one of {', '.join(STORAGES)}")
        if type(bits) is not int or bits not in CODE_BITS:
            raise ValueError(f"bits: got {bits!r}, want one of {', '.join(map(str, CODE_BITS))}")
        super().__init__(config=config)
        layer_class = CodedLayer if storage == "side" else ProgressiveLayer
        layers: list[Any] = self.layers
        plain = [type(layer) is DynamicLayer for layer in layers]
        if not any(plain):
            raise ValueError(
                "config: got a model without layers of full attention, whose keys could have codes"
            )
        self.layers: list[Any] = [
            layer_class(bits) if ours else layer for layer, ours in zip(layers, plain, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and codes of the layers that have codes."""
        layers = (x for x in self.layers if isinstance(x, CodedLayer | ProgressiveLayer))
        return sum(layer.nbytes for layer in layers)
