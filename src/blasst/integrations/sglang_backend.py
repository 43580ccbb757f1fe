"""SGLang's attention backend made of blasst's public functions; imported when an engine builds it.

SGLang 0.5.23 keeps the keys of a layer as (slots, num_kv_heads, head_dim) and the values alike, and the
slots of each request in a table; a page is page_size slots that follow each other, so both are the paged
cache of our functions without a copy.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor

from blasst.core.errors import UnsupportedError
from blasst.integrations.serving_batch import LayerOptions, PagedStep, require_kernels
from blasst.integrations.serving_options import ServingOptions
from blasst.integrations.sglang import LOGGER_NAME, meter, rules_of

#: Steps in which requests bring prompts, chunks of prompts or, in MIXED, one new token.
_EXTENDING = (ForwardMode.EXTEND, ForwardMode.MIXED)


class BlasstAttnBackend(AttentionBackend):
    """Attention of all layers of a worker."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        options = ServingOptions.read()
        if options is None:
            raise ValueError("blasst: the attention backend was chosen without an option")
        if model_runner.is_draft_worker:
            raise UnsupportedError("blasst cannot serve a draft model")
        self.rules = rules_of(model_runner.model_config, options)
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.page_size = int(model_runner.page_size)
        self.step: PagedStep | None = None
        self.num_rows = 0  # of q that belong to sequences; rows of padding follow
        _require_pool(self.token_to_kv_pool, model_runner.dtype)
        self.layer_options = self._options_of_layers(model_runner, options.impl)
        arguments = model_runner.server_args
        self.meter = meter(options.log_interval, bool(arguments.enable_metrics))
        logging.getLogger(LOGGER_NAME).info("blasst is on (impl=%s): %s", options.impl, self.rules)

    def _options_of_layers(self, model_runner: Any, impl: str) -> dict[int, LayerOptions]:
        """What each layer needs, by its number; a layer that cannot be served ends the start."""
        found: dict[int, LayerOptions] = {}
        for name, layer in model_runner.model.named_modules():
            if not isinstance(layer, RadixAttention):
                continue
            found[layer.layer_id] = layer_options(name, layer, impl)
            k_pages = self._pages(layer)[0]
            require_kernels(
                layer.tp_q_head_num,
                layer.tp_k_head_num,
                layer.qk_head_dim,
                layer.v_head_dim,
                self.page_size,
                k_pages.dtype,
                k_pages.device,
                found[layer.layer_id],
            )
        if not found:
            raise UnsupportedError("blasst cannot serve this model: it has no attention layer of SGLang's")
        return found

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Split a step by rule; see AttentionBackend.init_forward_metadata."""
        self.step = None
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        count = forward_batch.batch_size
        if forward_batch._original_batch_size is not None:
            count = min(count, forward_batch._original_batch_size)  # what follows is padding
        if mode.is_decode():
            starts = list(range(count + 1))
        elif mode in _EXTENDING:
            starts = [0, *accumulate(forward_batch.extend_seq_lens_cpu[:count])]
        else:
            raise UnsupportedError(f"blasst: steps of the mode {mode.name} are not served")
        seq_lens = forward_batch.seq_lens[:count]
        on_host = forward_batch.seq_lens_cpu
        longest = int((seq_lens if on_host is None else on_host[:count]).max())
        table = block_table(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices[:count],
            longest,
            self.page_size,
        )
        self.step = PagedStep.split(starts, seq_lens.int(), table, longest, self.page_size, self.rules)
        self.num_rows = starts[-1]

    def _pages(self, layer: RadixAttention) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as (pages, page_size, num_kv_heads, head_dim) views."""
        heads = layer.tp_k_head_num
        return (
            split_pages(
                self.token_to_kv_pool.get_key_buffer(layer.layer_id), self.page_size, heads, layer.qk_head_dim
            ),
            split_pages(
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
                self.page_size,
                heads,
                layer.v_head_dim,
            ),
        )

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        """Attention of one layer, by the phase of each sequence; see AttentionBackend.forward_extend."""
        sinks = extra.pop("sinks", None)
        unknown = sorted(name for name, value in extra.items() if value is not None and value is not False)
        if unknown:
            raise UnsupportedError(f"blasst: attention with {', '.join(unknown)} is not served")
        if self.step is None:
            raise RuntimeError("blasst: attention was called before its step was announced")
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        options = self.layer_options[layer.layer_id]
        if sinks is not None:
            options = options._replace(sinks=sinks)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = rows.new_empty(rows.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        out[self.num_rows :] = 0.0  # so that nothing undefined reaches what mixes rows
        k_pages, v_pages = self._pages(layer)
        for phase, tiles in self.step.attend(rows, k_pages, v_pages, out, options):
            self.meter.add(phase, tiles)
        return out.flatten(1)

    forward_decode = forward_extend

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a sequence that SGLang adds to fill a batch; they are not attended."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def support_triton(self) -> bool:
        """Whether SGLang may prepare a step with Triton; not on a CPU."""
        return self.req_to_token_pool.req_to_token.device.type != "cpu"


def layer_options(name: str, layer: RadixAttention, impl: str) -> LayerOptions:
    """What a layer needs from our functions.

    Args:
        name: of the layer, for people.
        layer: of the model.
        impl: kernel.

    Raises:
        UnsupportedError: the layer's attention is another one.
    """
    refused = {
        "cross-attention": layer.is_cross_attention,
        f"attention type {layer.attn_type.value}": layer.attn_type != AttentionType.DECODER,
        "attention in chunks": layer.use_irope,
        f"positions of the kind {layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
        f"softcap by {layer.logit_capping_method}": layer.logit_cap > 0
        and layer.logit_capping_method != "tanh",
        "a temperature that grows with the length": layer.xai_temperature_len > 0,
        "scales of a quantized KV cache": layer.k_scale is not None or layer.v_scale is not None,
    }
    if any(refused.values()):
        found = "; ".join(reason for reason, there in refused.items() if there)
        raise UnsupportedError(f"blasst cannot serve the layer {name} with {found}")
    window = layer.sliding_window_size
    return LayerOptions(
        float(layer.scaling),
        (-1, -1) if window is None or window < 0 else (int(window), 0),
        float(layer.logit_cap or 0.0),
        None,
        impl,
    )


def block_table(req_to_token: Tensor, requests: Tensor, longest: int, page_size: int) -> Tensor:
    """Pages of each request, int32 (requests, pages), from the slots of its tokens.

    Args:
        req_to_token: int32 (rows, tokens), slots of each row's tokens.
        requests: int (requests,), their rows.
        longest: tokens of the longest request.
        page_size: tokens of a page; those of a page have slots that follow each other.
    """
    firsts = req_to_token[:, :longest:page_size].index_select(0, requests.long())
    return firsts.div(page_size, rounding_mode="floor").int()


def split_pages(slots: Tensor, page_size: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Slots of a layer's KV cache as a (pages, page_size, num_kv_heads, head_dim) view.

    Args:
        slots: (slots, num_kv_heads, head_dim).
        page_size: tokens of a page.
        num_kv_heads: heads of the cache.
        head_dim: size of one key, or of one value.

    Raises:
        UnsupportedError: any other shape.
    """
    shape = tuple(slots.shape)
    if len(shape) != 3 or shape[1:] != (num_kv_heads, head_dim) or shape[0] < page_size:
        raise UnsupportedError(
            f"KV cache: got shape {shape}, wants (slots, {num_kv_heads}, {head_dim}): this version of SGLang "
            "keeps its KV cache in a way that blasst does not know"
        )
    pages = shape[0] // page_size
    return slots[: pages * page_size].unflatten(0, (pages, page_size))


def _require_pool(pool: Any, dtype: torch.dtype) -> None:
    """Refuse every KV cache but the plain one."""
    layout = getattr(pool, "kv_cache_layout", None)
    if (
        type(pool) is not MHATokenToKVPool
        or layout != "nhd"
        or pool.dtype != dtype
        or pool.store_dtype != dtype
    ):
        raise UnsupportedError(
            f"blasst cannot serve a KV cache of the kind {type(pool).__name__} with layout {layout} in "
            f"{getattr(pool, 'dtype', None)}, wants MHATokenToKVPool with layout nhd in {dtype}"
        )
