"""The SGLang plugin: `register` is the entry point that every SGLang process calls.

Without options it only adds a name to the attention backends. With options it selects that backend when the
engine's arguments are resolved, and checks options and arguments there, so that a mistake ends the start.
Arguments that were resolved before the plugin was loaded are checked when they are next asked for: every
process that is to serve does so. SGLang logs and ignores what a plugin raises while it is loaded, so nothing
is decided there. Written for SGLang 0.5.23.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final

from blasst.core.errors import UnsupportedError
from blasst.core.profile import model_fingerprint
from blasst.integrations.serving_counts import SkipMeter, engine_counters, line_logger
from blasst.integrations.serving_options import VARIABLES, ServingOptions, ServingRules

#: Name of the attention backend.
BACKEND: Final = "blasst"

#: SGLang shows all loggers.
LOGGER_NAME = "sglang.srt.plugins.blasst"

#: Arguments of SGLang that choose an attention backend.
_CHOICES = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")

#: KV cache types that hold plain numbers.
_PLAIN_CACHES = ("auto", "bf16", "bfloat16")

#: Arguments that must be off, with what stands against them.
_REFUSED = {
    "speculative_algorithm": "drafted tokens are verified with masks of their own",
    "dllm_algorithm": "diffusion models attend in both directions",
    "enable_mis": "items of a request must not see each other",
    "enable_two_batch_overlap": "a step is split behind the backend's back",
    "enable_pdmux": "prefill is split by layers",
    "enable_page_major_kv_layout": "the KV cache is laid out in another way",
    "enable_unified_memory": "the KV cache is addressed in another way",
    "enable_hisparse": "keys of a sequence may be out of reach",
    "enable_kv_cache_sharding": "the keys of a sequence are spread over ranks",
    "prefill_only_disable_kv_cache": "keys and values are read from the KV cache",
    "enable_torch_compile": "attention depends on the batch",
    "enable_nvidia_megakernel": "its kernels do their own attention",
    "enable_amd_monokernel": "its kernels do their own attention",
}

#: Its image tokens attend in both directions, by a mask that SGLang hands to its Triton backend only; others
#: would be causal without a word. For Gemma 4 SGLang itself refuses our backend.
_BOTH_WAYS = "Gemma3ForConditionalGeneration"

#: Arguments that must be 1.
_SINGLE = {
    "dcp_size": "context parallelism splits the keys of a sequence",
    "attn_cp_size": "context parallelism splits the keys of a sequence",
    "attn_dp_size": "data-parallel attention pads batches",
}


def register() -> None:
    """Entry point of the group sglang.srt.plugins; may be called more than once."""
    try:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.server_args import ServerArgs, add_attention_backend_choices

        add_attention_backend_choices([BACKEND])
        register_attention_backend(BACKEND)(_make_backend)
        _check_arguments(ServerArgs)
    except (ImportError, AttributeError, TypeError) as error:
        if any(os.environ.get(variable) for variable in VARIABLES.values()):
            # SGLang would log an ordinary exception, and run dense
            raise SystemExit(
                f"blasst cannot be loaded into this version of SGLang, wants 0.5.23: {error}"
            ) from error
        raise


def _make_backend(model_runner: Any) -> Any:
    from blasst.integrations.sglang_backend import BlasstAttnBackend

    return BlasstAttnBackend(model_runner)


def _check_arguments(server_args: type[Any]) -> None:
    """Have the step in which SGLang resolves its arguments check ours too; once per process."""
    original: Callable[[Any], None] = server_args.resolve_once
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def resolve_once(self: Any) -> None:
        # a process may have resolved them without the plugin, as sglang.Runtime does
        late = getattr(self, "_resolution_finished", False)
        options = ServingOptions.read() if late else choose_backend(self)
        original(self)
        if options is None:
            return
        if late:
            require_chosen(self)
        if not getattr(self, "_blasst_checked", False):
            check_resolved(self, options)
            self._blasst_checked = True  # goes to other processes with the arguments

    server_args.resolve_once = resolve_once


def choose_backend(server_args: Any) -> ServingOptions | None:
    """Select the backend of an engine with options, before its arguments are resolved.

    Args:
        server_args: SGLang's ServerArgs; its attention backend and CUDA graphs may change.

    Returns:
        The options; None = blasst was not asked for.

    Raises:
        ValueError: wrong options, another backend beside options, or our backend without.
    """
    options = ServingOptions.read()
    chosen = {name: getattr(server_args, name) for name in _CHOICES if getattr(server_args, name) is not None}
    if options is None:
        if BACKEND in chosen.values():
            raise ValueError(
                f"attention backend {BACKEND}: chosen without an option that says what is skipped; want one "
                f"of {', '.join(VARIABLES.values())} in the environment"
            )
        return None
    for name, value in chosen.items():
        if value != BACKEND:
            raise ValueError(f"{name}: got {value}, wants {BACKEND} or none beside blasst's options")
    server_args.attention_backend = BACKEND
    server_args.disable_cuda_graph = True
    return options


def rules_of(model_config: Any, options: ServingOptions) -> ServingRules:
    """The threshold rules of an engine.

    Args:
        model_config: SGLang's ModelConfig.
        options: what `choose_backend` gave.

    Raises:
        ValueError: options that conflict or are out of range, or an unreachable target.
        ProfileError: the profile is broken, or belongs to another model.
    """
    fingerprint = None if options.profile is None else model_fingerprint(model_config.hf_config.to_dict())
    return options.rules(fingerprint, model_config.context_len)


def require_chosen(server_args: Any) -> None:
    """Refuse arguments that were resolved without the plugin, to other backends.

    Args:
        server_args: SGLang's ServerArgs, resolved.

    Raises:
        UnsupportedError: the engine would run dense although there are options.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    backends = _backends(resolved_view(server_args))
    if backends != {BACKEND}:
        raise UnsupportedError(
            "blasst cannot serve this engine: its arguments were resolved before SGLang loaded its plugins, "
            f"to the attention backend {', '.join(sorted(backends))}; wants {BACKEND}: call "
            "sglang.srt.plugins.load_plugins() before they are resolved, or give "
            f"attention_backend={BACKEND!r} and disable_cuda_graph=True"
        )


def check_resolved(server_args: Any, options: ServingOptions) -> None:
    """Check an engine that is about to start.

    Args:
        server_args: SGLang's ServerArgs, resolved.
        options: what `choose_backend` gave.

    Raises:
        ValueError: wrong options.
        ProfileError: the profile is broken, or belongs to another model.
        UnsupportedError: the engine is to run in a way that blasst does not serve.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    arguments = resolved_view(server_args)
    model_config = model_config_of(server_args)
    reason = unsupported_reason(arguments, model_config)
    if reason is not None:
        raise UnsupportedError(f"blasst cannot serve this engine: {reason}")
    rules_of(model_config, options)


def _backends(arguments: Any) -> set[str]:
    return {getattr(arguments, name) for name in _CHOICES} - {None}


def unsupported_reason(arguments: Any, model_config: Any) -> str | None:
    """Why an engine cannot be served, or None; layers and KV cache are checked when they are there.

    Args:
        arguments: SGLang's resolved arguments.
        model_config: SGLang's ModelConfig.
    """
    backends = _backends(arguments)
    if backends != {BACKEND}:
        return f"SGLang chose the attention backends {', '.join(sorted(backends))} for it"
    if model_config.attention_arch.name != "MHA":
        return f"its attention is {model_config.attention_arch.name}, wants MHA (with any grouping of heads)"
    if model_config.is_encoder_decoder:
        return "the model has cross-attention"
    if _BOTH_WAYS in (model_config.hf_config.architectures or ()) and model_config.is_multimodal:
        return f"image tokens of {_BOTH_WAYS} attend in both directions; want it without --enable-multimodal"
    if model_config.attention_chunk_size is not None:
        return "the model attends in chunks"
    if model_config.is_hybrid_swa and not arguments.disable_hybrid_swa_memory:
        return "layers with a sliding window have a KV cache of their own; want --disable-hybrid-swa-memory"
    if arguments.kv_cache_dtype not in _PLAIN_CACHES:
        return f"kv_cache_dtype is {arguments.kv_cache_dtype}; wants auto or an unquantized type"
    for name, why in _REFUSED.items():
        value = getattr(arguments, name)
        if value:
            return f"{name} is {value}: {why}"
    for name, why in _SINGLE.items():
        value = getattr(arguments, name)
        if value > 1:
            return f"{name} is {value}: {why}"
    graphs = arguments.cuda_graph_config
    for phase in ("prefill", "decode"):
        if getattr(graphs, phase).backend != "disabled":
            return f"CUDA graphs of {phase} were asked for: attention depends on the batch"
    return None


@functools.cache
def meter(log_interval: float, metrics: bool) -> SkipMeter:
    """The meter of this scheduler process, started when first asked for.

    Args:
        log_interval: seconds between two lines of the log; 0 = none.
        metrics: whether the engine shows metrics.
    """
    publish = engine_counters() if metrics else None
    found = SkipMeter(line_logger(LOGGER_NAME), log_interval, publish=publish)
    found.start()
    return found
