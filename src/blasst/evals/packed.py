"""A GGUF model in parts of a wanted size, and back into a model folder where gguf is not installed.

A machine without network gets a model in pieces, and may have transformers but no gguf. The quantised blocks
travel as they are, in the order of rows that transformers wants, and are dequantised when they are unpacked.
The parts are one stream, cut anywhere: 8 bytes length of a JSON header, the header, the small files of the
model folder (zlib), the tensors.
"""

from __future__ import annotations

import hashlib
import json
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blasst.evals.models import load_model

FORMAT = "blasst-packed-model"
VERSION = 1

#: GGUF names of a layer's tensors and what transformers calls them (Llama, SmolLM2, Qwen2).
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def _half(blocks: Tensor, first: int) -> Tensor:
    """The float16 at a byte of each block, as float32 (blocks, 1)."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(values: Tensor) -> Tensor:
    """Low halves of the bytes, then the high ones."""
    return torch.cat([values & 15, values >> 4], dim=-1)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:34].view(torch.int8).float() * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:20]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    bit = torch.arange(8, device=blocks.device, dtype=torch.uint8)
    high = ((blocks[:, 2:6, None] >> bit) & 1).flatten(1)  # [blocks, 32]
    return ((_nibbles(blocks[:, 6:22]) | high << 4).float() - 16.0) * _half(blocks, 0)


def _q4_k(blocks: Tensor) -> Tensor:
    """256 values: 8 groups of 32 with 6-bit scales and minima."""
    packed, quants = blocks[:, 4:16], blocks[:, 16:144]
    low, mid, top = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scale = torch.cat([low & 63, (top & 15) | (low >> 6) << 4], dim=1).float()
    least = torch.cat([mid & 63, (top >> 4) | (mid >> 6) << 4], dim=1).float()
    values = _nibbles(quants.unflatten(1, (4, 32))).reshape(-1, 8, 32).float()
    found = values * (_half(blocks, 0) * scale)[..., None] - (_half(blocks, 2) * least)[..., None]
    return found.flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    """256 values in two halves of 128: 4 low bits, 2 high bits, 16 scales of 16 values."""
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))  # [blocks, 2, 128]
    shift = torch.tensor([0, 2, 4, 6], device=blocks.device, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shift) & 3  # [blocks, 2, 4, 32]
    values = (low | high.flatten(2) << 4).float() - 32.0
    scale = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return (values.reshape(-1, 16, 16) * scale[..., None]).flatten(1)


#: Bytes of a block and how it becomes float32.
_TYPES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "F32": (4, lambda blocks: blocks.view(torch.float32)),
    "F16": (2, lambda blocks: blocks.view(torch.float16).float()),
    "Q8_0": (34, _q8_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q4_K": (144, _q4_k),
    "Q6_K": (210, _q6_k),
}


def dequantized(raw: Tensor, kind: str, shape: Sequence[int]) -> Tensor:
    """Float32 values of quantised blocks.

    Args:
        raw: uint8 (bytes,).
        kind: GGUF's name of the type.
        shape: of the result.

    Raises:
        ValueError: a type that is not known here.
    """
    if kind not in _TYPES:
        raise ValueError(f"tensor type {kind}: known are {', '.join(_TYPES)}")
    size, convert = _TYPES[kind]
    return convert(raw.view(-1, size)).reshape(tuple(shape))


def _row_orders(rows: int, head_dim: int) -> Iterable[Tensor]:
    """Orders of rows that a converter may have left: as they are, or halves of a head interleaved."""
    yield torch.arange(rows)
    if rows % head_dim == 0:
        yield torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()


def _hf_name(name: str) -> str | None:
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    parts = name.split(".")
    if parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def _packed_tensor(raw: Tensor, kind: str, wanted: Tensor, head_dim: int) -> Tensor | None:
    """The blocks with rows in the order of the loaded weight, or None when none gives its values."""
    by_row = raw.view(wanted.shape[0], -1)
    for order in _row_orders(wanted.shape[0], head_dim):
        found = by_row[order].contiguous().flatten()
        if torch.equal(dequantized(found, kind, wanted.shape), wanted):
            return found
    return None


def pack(path: Path, folder: Path, *, part_bytes: int, tie: bool = False) -> list[Path]:
    """Write the parts of a GGUF file; every tensor is compared with what transformers loads, bit for bit.

    Args:
        path: the file.
        folder: gets part-000.bin and so on.
        part_bytes: largest size of a part.
        tie: write one matrix for the embedding and the output, the output's: smaller, and another model
            where the file quantises the two differently.

    Raises:
        ValueError: a tensor that is not known, or whose values are not those that transformers loads.
    """
    import gguf
    import numpy as np

    loaded = load_model(path, dtype=torch.float32)
    state, config = loaded.model.state_dict(), loaded.model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tensors: list[dict[str, Any]] = []
    bodies: list[bytes] = []
    for tensor in gguf.GGUFReader(path).tensors:
        name, kind = _hf_name(tensor.name), tensor.tensor_type.name
        if name is None or name not in state:
            raise ValueError(f"{path}: tensor {tensor.name} has no place in {type(loaded.model).__name__}")
        raw = torch.from_numpy(np.array(tensor.data)).contiguous().view(torch.uint8).flatten()
        found = _packed_tensor(raw, kind, state[name], head_dim)
        if found is None:
            raise ValueError(f"{path}: tensor {tensor.name} ({kind}) is not what transformers loads")
        tensors.append({"name": name, "type": kind, "shape": list(state[name].shape)})
        bodies.append(found.numpy().tobytes())
    names = [entry["name"] for entry in tensors]
    if tie and "lm_head.weight" in names:
        drop, keep = names.index("model.embed_tokens.weight"), names.index("lm_head.weight")
        tensors[keep]["name"] = names[drop]
        del tensors[drop], bodies[drop]
        config.tie_word_embeddings = True
    missing = set(state) - set(names) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if missing:
        raise ValueError(f"{path}: nothing in it for {sorted(missing)}")
    with tempfile.TemporaryDirectory() as temporary:
        config.save_pretrained(temporary)
        loaded.model.generation_config.save_pretrained(temporary)
        loaded.tokenizer.save_pretrained(temporary)
        files = {file.name: zlib.compress(file.read_bytes(), 9) for file in sorted(Path(temporary).iterdir())}
    for entry, body in zip(tensors, bodies):
        entry["bytes"] = len(body)
    body = b"".join([*files.values(), *bodies])
    header = json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "name": path.stem,
            "files": {name: len(content) for name, content in files.items()},
            "tensors": tensors,
            "sha256": hashlib.sha256(body).hexdigest(),
        }
    ).encode()
    stream = struct.pack("<Q", len(header)) + header + body
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, start in enumerate(range(0, len(stream), part_bytes)):
        parts.append(folder / f"part-{number:03d}.bin")
        parts[-1].write_bytes(stream[start : start + part_bytes])
    return parts


def unpack(parts: Sequence[Path], folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> str:
    """Write a model folder, as transformers saves it, from all parts of a model.

    Args:
        parts: in order.
        folder: to write; what `load_model` takes.
        dtype: of the weights.

    Returns:
        The name of the file that was packed.

    Raises:
        ValueError: the parts are not all there, or not what was packed.
    """
    from safetensors.torch import save_file

    stream = b"".join(part.read_bytes() for part in parts)
    length = struct.unpack("<Q", stream[:8])[0] if len(stream) >= 8 else 0
    try:
        header = json.loads(stream[8 : 8 + length])
        known = (header["format"], header["version"]) == (FORMAT, VERSION)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(f"{parts[0] if parts else 'no part'}: not the beginning of a packed model")
    body = stream[8 + length :]
    if hashlib.sha256(body).hexdigest() != header["sha256"]:
        raise ValueError(f"{len(parts)} parts: bytes missing or changed (sha256 differs)")
    folder.mkdir(parents=True, exist_ok=True)
    at = 0
    for name, size in header["files"].items():
        (folder / Path(name).name).write_bytes(zlib.decompress(body[at : at + size]))
        at += size
    weights = {}
    for entry in header["tensors"]:
        raw = torch.frombuffer(bytearray(body[at : at + entry["bytes"]]), dtype=torch.uint8)
        weights[entry["name"]] = dequantized(raw, entry["type"], entry["shape"]).to(dtype)
        at += entry["bytes"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(header["name"])
