"""vLLM's attention backend made of blasst's public functions; imported by vLLM when a model is built.

The logical KV cache of a layer in vLLM 0.32 is (blocks, num_kv_heads, block_size, 2 * head_size), strided as
the backend's layout says; we keep keys in the first half of the last dimension and values in the second, as
vLLM's own GPU backends do, and write both ourselves, since CPU_ATTN packs keys for its own kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import AttentionSpec, ChunkedLocalAttentionSpec, KVCacheLayout

from blasst.core.errors import UnsupportedError
from blasst.integrations.serving_batch import LayerOptions, PagedStep, require_kernels
from blasst.integrations.vllm import meter_of, options_of, rules_of

#: KV cache types that hold plain numbers.
_PLAIN_CACHES = ("auto", "float16", "bfloat16", "float32")


@dataclass(eq=False)
class BlasstMetadata(AttentionMetadata):
    """A step as every layer of a KV cache group sees it.

    Attributes:
        num_actual_tokens: rows of q that hold tokens.
        page_size: tokens of a block of the KV cache.
        step: the sequences, split by rule.
    """

    num_actual_tokens: int
    page_size: int
    step: PagedStep


class BlasstMetadataBuilder(AttentionMetadataBuilder[BlasstMetadata]):
    """Builds the metadata of a step; no CUDA graphs around attention, whose calls depend on the batch."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        options = options_of(vllm_config)
        if options is None:
            raise ValueError("blasst: the attention backend was chosen without an option")
        self._require_plain_steps(layer_names)
        self.rules = rules_of(vllm_config, options)

    def _require_plain_steps(self, layer_names: list[str]) -> None:
        """Refuse layers whose steps are not those of whole sequences with causal attention."""
        spec, reason = self.kv_cache_spec, None
        if isinstance(spec, ChunkedLocalAttentionSpec):
            reason = f"attend in chunks of {spec.attention_chunk_size} tokens"
        elif getattr(spec, "non_causal", False):
            reason = "are not causal"
        elif type(self) is not BlasstMetadataBuilder:  # vLLM derives backends that change each step first
            reason = f"have steps of their own ({type(self).__name__})"
        if reason is not None:
            raise UnsupportedError(f"blasst cannot serve layers that {reason}: {_named(layer_names)}")

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BlasstMetadata:
        """Split a step by rule; see AttentionMetadataBuilder.build."""
        common = common_attn_metadata
        if common.causal is not True:
            raise UnsupportedError("blasst: this step's attention is not causal")
        step = PagedStep.split(
            common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            common.seq_lens[: common.num_reqs],
            common.block_table_tensor[: common.num_reqs],
            common.max_seq_len,
            self.kv_cache_spec.block_size,
            self.rules,
        )
        return BlasstMetadata(common.num_actual_tokens, self.kv_cache_spec.block_size, step)


class BlasstImpl(AttentionImpl[BlasstMetadata]):
    """Attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        refused = {
            f"attention type {attn_type}": attn_type != AttentionType.DECODER,
            "ALiBi": alibi_slopes is not None,
            f"KV cache type {kv_cache_dtype}": kv_cache_dtype not in _PLAIN_CACHES,
            f"options {', '.join(sorted(unknown))}": any(
                v not in (None, False, -1) for v in unknown.values()
            ),
        }
        if any(refused.values()):
            found = "; ".join(name for name, there in refused.items() if there)
            raise UnsupportedError(f"blasst cannot serve a layer with {found}")
        vllm_config = get_current_vllm_config()
        options = options_of(vllm_config)
        if options is None:
            raise ValueError(
                "blasst: the attention backend CUSTOM was chosen without an option that says what is skipped"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.layer_options = LayerOptions(
            self.scale,
            (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            float(logits_soft_cap or 0.0),
            None,
            options.impl,
        )
        self.meter = meter_of(options)
        require_kernels(
            num_heads,
            self.num_kv_heads,
            head_size,
            head_size,
            vllm_config.cache_config.block_size or 16,
            torch.get_default_dtype(),
            torch.empty(0).device,
            self.layer_options,
        )

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: BlasstMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step; see AttentionImpl.forward.

        query is (tokens, num_heads, head_size), output the same; key and value are in the cache already.
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("blasst: fused quantization of the output is not served")
        if attn_metadata is None:  # the engine measures memory
            return output.zero_()
        k_pages, v_pages = split_cache(
            kv_cache, self.num_kv_heads, self.head_size, attn_metadata.page_size, query.dtype
        )
        tokens = attn_metadata.num_actual_tokens
        options = self.layer_options
        if self.sinks is not None:
            options = options._replace(sinks=self.sinks)
        counts = attn_metadata.step.attend(
            query[:tokens], k_pages, v_pages, output.view(-1, self.num_heads, self.head_size), options
        )
        for phase, tiles in counts:
            self.meter.add(phase, tiles)
        return output

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to their slots; a slot of -1 is padding."""
        k_pages, v_pages = split_cache(kv_cache, self.num_kv_heads, self.head_size, None, key.dtype)
        if key.device.type != "cpu":
            from vllm._custom_ops import reshape_and_cache_flash

            unit = torch.ones((), dtype=torch.float32, device=key.device)
            reshape_and_cache_flash(key, value, k_pages, v_pages, slot_mapping, "auto", unit, unit)
            return
        used = (slot_mapping >= 0).nonzero().flatten()
        page = slot_mapping[used].div(k_pages.shape[1], rounding_mode="floor")
        slot = slot_mapping[used] % k_pages.shape[1]
        k_pages[page, slot] = key[used]
        v_pages[page, slot] = value[used]


def require_layers(vllm_config: VllmConfig) -> None:
    """Refuse a loaded model with attention that is not ours, or without attention.

    Args:
        vllm_config: vLLM's VllmConfig; its compilation_config names the layers of this worker.

    Raises:
        UnsupportedError: a layer with another implementation, or none with ours.
    """
    found = {
        name: layer.impl
        for name, layer in vllm_config.compilation_config.static_forward_context.items()
        if isinstance(getattr(layer, "impl", None), AttentionImplBase)
    }
    others = [
        f"{name} ({type(impl).__name__})" for name, impl in found.items() if not isinstance(impl, BlasstImpl)
    ]
    if others:
        raise UnsupportedError(
            f"blasst cannot serve this model: layers with another attention backend: {_named(others)}"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if not found and not (stages > 1 and vllm_config.model_config.is_hybrid):
        raise UnsupportedError("blasst cannot serve this model: it has no attention layer of vLLM's")


def _named(layers: list[str]) -> str:
    """The first three layers, and how many there are."""
    return ", ".join(layers[:3]) + (f", ... ({len(layers)})" if len(layers) > 3 else "")


def split_cache(
    kv_cache: Tensor, num_kv_heads: int, head_size: int, page_size: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer's KV cache as (pages, page_size, num_kv_heads, head_size) views.

    Args:
        kv_cache: (blocks, num_kv_heads, block_size, 2 * head_size).
        num_kv_heads: heads of the cache.
        head_size: size of one key.
        page_size: tokens of a block, None = not compared.
        dtype: of the keys.

    Raises:
        UnsupportedError: any other shape or dtype.
    """
    shape = tuple(kv_cache.shape)
    fits = len(shape) == 4 and shape[1] == num_kv_heads and shape[3] == 2 * head_size
    if not fits or page_size not in (None, shape[2]) or kv_cache.dtype != dtype:
        raise UnsupportedError(
            f"kv_cache: got shape {shape} of {kv_cache.dtype}, wants (blocks, {num_kv_heads}, "
            f"{page_size or 'block_size'}, {2 * head_size}) of {dtype}: this version of vLLM keeps its KV "
            "cache in a way that blasst does not know"
        )
    k_pages, v_pages = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return k_pages, v_pages


class BlasstBackend(AttentionBackend):
    """The backend CUSTOM, on anything but vLLM's CPU platform."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(_PLAIN_CACHES)

    @staticmethod
    def get_name() -> str:
        """Name of the member of vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[BlasstImpl]:
        """Attention of one layer."""
        return BlasstImpl

    @staticmethod
    def get_builder_cls() -> type[BlasstMetadataBuilder]:
        """Builder of a step's metadata."""
        return BlasstMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Pages of 16 tokens and multiples."""
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Token-major blocks, which the Hopper kernel addresses best."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """A step is split on the host, by the host's query lengths."""
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks are served."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows are served."""
        return True


class BlasstCPUBackend(CPUAttentionBackend):
    """Takes the place of CPU_ATTN and is CPU_ATTN for an engine without options."""

    #: Whether the engine that this process built last has options.
    _active: ClassVar[bool] = False

    @classmethod
    def _decide(cls) -> bool:
        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is not None:
            BlasstCPUBackend._active = options_of(vllm_config) is not None
        return BlasstCPUBackend._active

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Attention of one layer: ours with options, else vLLM's."""
        return BlasstImpl if BlasstCPUBackend._decide() else CPUAttentionBackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Builder of a step's metadata: ours with options, else vLLM's."""
        if BlasstCPUBackend._decide():
            return BlasstMetadataBuilder
        return CPUAttentionBackend.get_builder_cls()
