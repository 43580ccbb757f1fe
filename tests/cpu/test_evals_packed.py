"""Models in parts: blocks as gguf reads them, and the same weights after packing and unpacking."""

import gguf
import numpy as np
import pytest
import torch
from quality_parts import run_script, write_tiny_model

from blasst.evals import packed
from blasst.evals.models import load_model

#: Bytes of a block in which a float16 stands; random bytes there could be infinite.
HALVES = {"Q8_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}


@pytest.mark.parametrize("kind", HALVES)
def test_blocks_have_the_values_that_gguf_reads(kind):
    rng = np.random.default_rng(0)
    size = packed._TYPES[kind][0]
    blocks = rng.integers(0, 256, (50, size), dtype=np.uint8)
    for first in HALVES[kind]:
        blocks[:, first : first + 2] = rng.normal(size=(50, 1)).astype(np.float16).view(np.uint8)
    wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    found = packed.dequantized(torch.from_numpy(blocks.copy()).flatten(), kind, wanted.shape)
    assert np.array_equal(found.numpy(), wanted) and np.isfinite(wanted).all() and np.ptp(wanted) > 0


def test_an_unknown_type_is_an_error():
    with pytest.raises(ValueError, match="IQ2_XS"):
        packed.dequantized(torch.zeros(8, dtype=torch.uint8), "IQ2_XS", (8,))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tie=False)


def write_gguf(path, loaded):
    """The tiny model as llama.cpp keeps it: Q8_0 matrices, halves of q and k heads interleaved."""
    writer = gguf.GGUFWriter(path, "llama")
    state = loaded.model.state_dict()
    names = {hf: name for name, hf in packed._OTHER_NAMES.items()}
    for name, weight in state.items():
        if name not in names:
            _, _, layer, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            own = next(key for key, value in packed._LAYER_NAMES.items() if value == module)
            names[name] = f"blk.{layer}.{own}.{kind}"
        values = weight.float()
        if "q_proj" in name or "k_proj" in name:
            values = values.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)
        data = values.numpy()
        if weight.dim() == 2:
            raw = gguf.quantize(data, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(names[name], raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            back = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType.Q8_0).copy())
            if "q_proj" in name or "k_proj" in name:
                back = back.unflatten(0, (-1, 8, 2)).transpose(1, 2).flatten(0, 2)
            weight.copy_(back)
        else:
            writer.add_tensor(names[name], data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tie", [False, True])
def test_a_packed_model_is_the_model(model, tmp_path, monkeypatch, tie):
    loaded = load_model(model, dtype=torch.float32)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, loaded)
    monkeypatch.setattr(packed, "load_model", lambda *_, **__: loaded)  # the file has no tokenizer
    parts = packed.pack(path, tmp_path / "parts", part_bytes=1_500_000, tie=tie)
    assert len(parts) > 2 and all(part.stat().st_size <= 1_500_000 for part in parts)
    arguments = ("unpack", tmp_path / "parts", tmp_path / "back", "--dtype", "float32")
    run_script("pack_model", monkeypatch, *arguments)
    back = load_model(tmp_path / "back", dtype=torch.float32)
    state, found = loaded.model.state_dict(), back.model.state_dict()
    assert set(found) == set(state)
    for name, weight in state.items():
        wanted = state["lm_head.weight"] if tie and name == "model.embed_tokens.weight" else weight
        assert torch.equal(found[name], wanted), name
    assert back.tokenizer("one two").input_ids == loaded.tokenizer("one two").input_ids
    parts[1].write_bytes(parts[1].read_bytes()[:-1])
    with pytest.raises(ValueError, match="missing or changed"):
        packed.unpack(parts, tmp_path / "bad")
    with pytest.raises(ValueError, match="not the beginning"):
        packed.unpack(parts[1:], tmp_path / "bad")
