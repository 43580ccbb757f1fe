"""The vLLM plugin: `register` is the entry point that every vLLM process calls.

Without options it changes nothing. With options it checks them when the engine's configuration is made, so
that a mistake ends the start, and switches the decoder's attention to blasst: on a CPU by taking the place of
vLLM's CPU_ATTN, elsewhere as the backend CUSTOM. A worker checks its layers once they are loaded. Written for
vLLM 0.32; the KV cache it expects is checked, not assumed.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blasst.core.errors import UnsupportedError
from blasst.core.profile import model_fingerprint
from blasst.core.types import MAX_DECODE_TOKENS
from blasst.integrations.serving_counts import SkipMeter, line_logger, open_metrics
from blasst.integrations.serving_options import VARIABLES, ServingOptions, ServingRules

#: Key of the options in --additional-config, and of the mark that is added to a configuration once checked.
CONFIG_KEY = "blasst"
_PREPARED_KEY = "blasst_prepared"

#: Tells workers the folder for counts. In --additional-config it would change the key of the compile cache.
FOLDER_VARIABLE = "BLASST_COUNTS_FOLDER"

#: vLLM shows loggers below its own name.
LOGGER_NAME = "vllm.plugins.blasst"

_BACKENDS = "blasst.integrations.vllm_backend"

#: Names of sizes of keys and values in the configurations of models whose values may have another size.
_SIZES = (
    "head_dim",
    "v_head_dim",
    "swa_head_dim",
    "swa_v_head_dim",
    "qk_nope_dim",
    "qk_rope_dim",
    "v_channels",
)

#: Why blasst cannot be loaded into this vLLM, or None.
_unloadable: str | None = None


def register() -> None:
    """Entry point of the group vllm.general_plugins; may be called more than once.

    Raises:
        UnsupportedError: another version of vLLM, and options in the environment; without them it is only
            logged.
    """
    try:
        from vllm.platforms import current_platform

        platform = type(current_platform)
        _call_before(platform, "check_and_update_config", _prepare_on)
        _call_before(platform, "update_block_size_for_backend", _require_layers)
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        if current_platform.is_cpu():
            register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.CPU_BACKEND")
        else:
            register_backend(AttentionBackendEnum.CUSTOM, f"{_BACKENDS}.BlasstBackend")
    except (ImportError, AttributeError, TypeError) as error:
        _give_up(error)


def _give_up(error: Exception) -> None:
    """Leave engines without options alone in a vLLM that is not ours; those with options must not start."""
    global _unloadable
    _unloadable = f"blasst cannot be loaded into this version of vLLM, wants 0.32: {error}"
    if any(os.environ.get(variable) for variable in VARIABLES.values()):
        raise UnsupportedError(_unloadable) from error
    logging.getLogger(LOGGER_NAME).warning("%s", _unloadable)


def __getattr__(name: str) -> Any:
    """CPU_BACKEND, what vLLM loads as its CPU_ATTN: our backend, or its own if ours cannot be loaded."""
    if name != "CPU_BACKEND":
        raise AttributeError(name)
    try:
        return importlib.import_module(_BACKENDS).BlasstCPUBackend
    except ImportError as error:
        _give_up(error)  # options in the configuration end the start in _require_layers
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    module, _, own = AttentionBackendEnum.CPU_ATTN.value.rpartition(".")
    return getattr(importlib.import_module(module), own)


def options_of(vllm_config: Any) -> ServingOptions | None:
    """Options of an engine; None = blasst was not asked for.

    Args:
        vllm_config: vLLM's VllmConfig.

    Raises:
        ValueError: an unknown option or a wrong value.
    """
    additional = vllm_config.additional_config
    return ServingOptions.read(additional.get(CONFIG_KEY) if isinstance(additional, dict) else None)


def rules_of(vllm_config: Any, options: ServingOptions) -> ServingRules:
    """The threshold rules of an engine.

    Args:
        vllm_config: vLLM's VllmConfig.
        options: what `options_of` gave.

    Raises:
        ValueError: options that conflict or are out of range, or an unreachable target.
        ProfileError: the profile is broken, or belongs to another model.
    """
    model = vllm_config.model_config
    fingerprint = None if options.profile is None else model_fingerprint(model.hf_config.to_dict())
    return options.rules(fingerprint, model.max_model_len)


def _call_before(platform: type[Any], name: str, check: Callable[[type[Any], Any], None]) -> None:
    """Have a class method of vLLM's platform that takes a VllmConfig call ours first; once per process."""
    original = getattr(platform, name).__func__
    if hasattr(original, "__wrapped__"):
        return

    @classmethod  # type: ignore[misc]
    @functools.wraps(original)
    def checked(cls: type[Any], vllm_config: Any) -> None:
        check(cls, vllm_config)
        original(cls, vllm_config)

    setattr(platform, name, checked)


def _prepare_on(platform: type[Any], vllm_config: Any) -> None:
    """vLLM's last step of making a configuration."""
    if vllm_config.model_config is not None:
        prepare(vllm_config, on_cpu=platform._enum.name == "CPU")


def _require_layers(platform: type[Any], vllm_config: Any) -> None:
    """The step of every vLLM executor that follows the loading of the model in a worker."""
    if vllm_config.model_config is None or options_of(vllm_config) is None:
        return
    from blasst.integrations.vllm_backend import require_layers

    require_layers(vllm_config)


def prepare(vllm_config: Any, on_cpu: bool) -> None:
    """Check the options of an engine that is about to start, and write them into its configuration.

    Workers then read them from there, also on other machines. Does nothing without options.

    Args:
        vllm_config: vLLM's VllmConfig; its additional_config and attention backend may change.
        on_cpu: whether the engine runs on vLLM's CPU platform.

    Raises:
        ValueError: wrong options.
        ProfileError: the profile is broken, or belongs to another model.
        UnsupportedError: the engine is to run in a way that blasst does not serve.
    """
    options = options_of(vllm_config)
    if options is None:
        return
    if _unloadable is not None:
        raise UnsupportedError(_unloadable)
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise ValueError("additional_config: got an object, wants a JSON object beside blasst's options")
    reason = unsupported_reason(vllm_config, on_cpu)
    if reason is not None:
        raise UnsupportedError(f"blasst cannot serve this engine: {reason}")
    if _PREPARED_KEY in additional:  # vLLM copies a configuration for a part of the model
        return
    rules = rules_of(vllm_config, options)
    if not on_cpu:
        _choose_custom(vllm_config.attention_config)
    folder = open_metrics()
    if folder is None:
        os.environ.pop(FOLDER_VARIABLE, None)
    else:
        os.environ[FOLDER_VARIABLE] = str(folder)
    logging.getLogger(LOGGER_NAME).info("blasst is on (impl=%s): %s", options.impl, rules)
    vllm_config.additional_config = {**additional, CONFIG_KEY: options.as_config(), _PREPARED_KEY: True}


def _choose_custom(attention_config: Any) -> None:
    """Select the backend CUSTOM; any other choice beside our options is a contradiction."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = attention_config.backend
    if chosen not in (None, AttentionBackendEnum.CUSTOM) or attention_config.backend_per_kind:
        raise ValueError(
            f"attention backend: got {chosen or attention_config.backend_per_kind}, wants CUSTOM or none "
            "beside blasst's options"
        )
    attention_config.backend = AttentionBackendEnum.CUSTOM


def unsupported_reason(vllm_config: Any, on_cpu: bool) -> str | None:
    """Why an engine cannot be served, or None; what a single layer asks for is checked when it is made.

    Args:
        vllm_config: vLLM's VllmConfig.
        on_cpu: whether the engine runs on vLLM's CPU platform.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    if model.use_mla:
        return "multi-head latent attention (MLA) has its own backends in vLLM"
    if model.is_encoder_decoder:
        return "the model has cross-attention"
    if model.is_attention_free:
        return "the model has no attention layers"
    if model.attention_chunk_size:
        return f"the model attends in chunks (attention_chunk_size is {model.attention_chunk_size})"
    sizes = _value_size(model.hf_text_config)
    if sizes is not None:
        return f"{sizes}: layers whose values have another size than keys have their own backends in vLLM"
    if cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        return f"kv_cache_dtype is {cache_dtype}; wants auto or an unquantized type"
    if model.is_mm_prefix_lm or vllm_config.attention_config.use_non_causal:
        return "the model's attention is not causal everywhere"
    if vllm_config.diffusion_config is not None:
        return "diffusion models attend in both directions"
    if getattr(model, "rswa_window", None) is not None:
        return "the model has a sliding window with a global prefix (R-SWA)"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism splits the keys of a sequence"
    if vllm_config.cache_config.kv_sharing_fast_prefill:
        return "kv_sharing_fast_prefill: the query lengths of its steps may still be on their way to the host"
    if on_cpu and vllm_config.kv_transfer_config is not None:
        return "on a CPU its KV cache differs from the one that a KV connector expects"
    return _speculation(vllm_config.speculative_config)


def _value_size(text_config: Any) -> str | None:
    """The sizes of keys and values where a model's configuration names different ones, or None."""
    if getattr(text_config, "kv_lora_rank", None) is not None:
        return None  # without MLA, vLLM pads the values to the size of the keys
    named = {name: getattr(text_config, name, None) for name in _SIZES}
    pangu = (named["qk_nope_dim"] or 0) + (named["qk_rope_dim"] or 0)
    for keys, name in (
        (named["head_dim"], "v_head_dim"),
        (named["swa_head_dim"], "swa_v_head_dim"),
        (pangu, "v_channels"),
    ):
        if keys and named[name] and keys != named[name]:
            return f"{name} is {named[name]} beside keys of {keys}"
    return None


def _speculation(speculative: Any) -> str | None:
    """What stands against speculative decoding, or None; only drafts without a model are verified by us."""
    if speculative is None:
        return None
    if speculative.method != "ngram":
        return (
            f"speculative decoding by {speculative.method}: a draft model has thresholds of its own; "
            "only ngram is served"
        )
    if speculative.num_speculative_tokens >= MAX_DECODE_TOKENS:
        return (
            f"num_speculative_tokens is {speculative.num_speculative_tokens}, wants at most "
            f"{MAX_DECODE_TOKENS - 1}: a step with more new tokens follows the prefill rule"
        )
    return None


_meters: dict[str, SkipMeter] = {}


def meter(folder: str | None = None, log_interval: float = 0.0) -> SkipMeter:
    """The meter of this worker process, started when first asked for; a new folder gives a new one.

    Args:
        folder: where sums are written for the metrics page, or None.
        log_interval: seconds between two lines of the log; 0 = none.
    """
    key = folder or ""
    if key not in _meters:
        for old in _meters.values():
            old.stop()
        _meters.clear()
        found = SkipMeter(line_logger(LOGGER_NAME), log_interval, Path(folder) if folder else None)
        found.start()
        _meters[key] = found
    return _meters[key]


def meter_of(options: ServingOptions) -> SkipMeter:
    """The meter of the engine that this worker process belongs to.

    Args:
        options: what `options_of` gave.
    """
    return meter(os.environ.get(FOLDER_VARIABLE), options.log_interval)
