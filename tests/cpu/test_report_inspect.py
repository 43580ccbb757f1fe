"""Inspection of one prompt, and the parts of the demo, on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from blasst.evals.comparison import Comparison, MassSummary
from blasst.report import demo
from blasst.report.inspect import inspect_sequence, mass_histogram, skip_map
from blasst.report.workers import Job, WorkerPool

LENGTH, DECODE = 700, 3


def make_model(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    model = make_model()
    for layer in model.model.layers:  # flat attention would skip nothing
        layer.self_attn.q_proj.weight.data *= 40.0
        layer.self_attn.k_proj.weight.data *= 40.0
    return model


@pytest.fixture(scope="module")
def token_ids() -> list[int]:
    return torch.randint(0, 64, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()


def test_inspection_counts_every_layer_and_head(model: Any, token_ids: list[int]) -> None:
    seen = inspect_sequence(model, token_ids, {"threshold": 0.9}, decode_tokens=DECODE)
    assert seen.seqlen == LENGTH
    assert {phase: heads.shape for phase, heads in seen.head_sparsity.items()} == {
        "prefill": (2, 4),
        "decode": (2, 2),
    }
    prompt = LENGTH - DECODE
    tiles = sum(min(row + 63, prompt - 1) // 128 + 1 for row in range(0, prompt, 64))
    prefill = [row for row in seen.layers if row.phase == "prefill"]
    assert [row.visited for row in prefill] == [4 * tiles] * 2
    assert sum(row.skipped for row in seen.layers) > 0
    for phase, share in seen.sparsity.items():
        rows = [row for row in seen.layers if row.phase == phase]
        assert share == sum(row.skipped for row in rows) / sum(row.visited for row in rows)
    assert seen.sparsity["decode"] > 0
    assert 0.0 < seen.skipped_mass["decode"]["max"] <= 1.0
    assert "threshold 0.9" in "\n".join(seen.summary()["rules"])


def test_inspection_leaves_the_model_as_it_was(model: Any, token_ids: list[int]) -> None:
    before = model.config._attn_implementation
    inspect_sequence(model, token_ids, {"threshold": 0.5}, decode_tokens=1)
    skip_map(model, token_ids, threshold=0.5, layer=0, head=0)
    assert model.config._attn_implementation == before


def test_skip_map_marks_visited_tiles_and_keeps_the_first_and_the_diagonal(
    model: Any, token_ids: list[int]
) -> None:
    tiles = skip_map(model, token_ids, threshold=1.0, layer=1, head=3)
    rows, keys = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    visible = keys <= rows
    expected = np.array(
        [
            [visible[r : r + 64, k : k + 128].any() for k in range(0, LENGTH, 128)]
            for r in range(0, LENGTH, 64)
        ]
    )
    assert (tiles.visited == expected).all()
    assert not (tiles.kept & ~tiles.visited).any()
    assert tiles.kept[:, 0].all()  # the first visited tile always sets a maximum
    assert "Layer 1, query head 3" in tiles.title


def test_skip_map_at_zero_keeps_all_and_wrong_heads_are_refused(model: Any, token_ids: list[int]) -> None:
    tiles = skip_map(model, token_ids, threshold=0.0, layer=0, head=0)
    assert (tiles.kept == tiles.visited).all()
    with pytest.raises(ValueError, match="layers 0 to 1"):
        skip_map(model, token_ids, threshold=0.1, layer=2, head=0)
    with pytest.raises(ValueError, match="heads 0 to 3"):
        skip_map(model, token_ids, threshold=0.1, layer=0, head=4)


def test_skip_map_shows_the_dense_tail(token_ids: list[int]) -> None:
    model = make_model(attention_bias=True)
    for projection in (model.model.layers[0].self_attn.q_proj, model.model.layers[0].self_attn.k_proj):
        projection.bias.data.fill_(2.0)  # attention fades with distance
    bare, tail = (skip_map(model, token_ids, threshold=1.0, layer=0, head=0, dense_tail=n) for n in (0, 64))
    last = 2  # query tiles that hold one of the last rows
    assert (tail.kept[-last:] == tail.visited[-last:]).all() and (
        tail.kept[:-last] == bare.kept[:-last]
    ).all()
    assert (bare.visited & ~bare.kept)[-last:].any() and (bare.visited & ~bare.kept)[:-last].any()


def test_decode_tokens_must_leave_a_prompt(model: Any) -> None:
    with pytest.raises(ValueError, match="decode_tokens"):
        inspect_sequence(model, [1, 2, 3], {"threshold": 0.1}, decode_tokens=3)


def test_mass_histogram_counts_every_sample_once() -> None:
    samples = torch.tensor([0.0, 1e-9, 2e-6, 0.003, 0.5, 1.0])
    histogram = mass_histogram(samples)
    assert histogram["below"] + sum(histogram["counts"]) == len(samples)
    assert histogram["below"] == 2
    assert histogram["edges"][0] == 1e-6 and histogram["edges"][-1] == 1.0


def comparison(prefill: float, nll_sparse: float, mass: dict[str, MassSummary]) -> Comparison:
    return Comparison(
        num_tokens=100,
        nll_dense=2.0,
        nll_sparse=nll_sparse,
        kl=0.0,
        top1_agreement=1.0,
        skipped_mass=mass,
        sparsity={"prefill": prefill, "decode": 0.5},
    )


def test_heldout_rows_pool_the_prompts_of_a_length() -> None:
    plan = demo.DemoPlan(
        calibration_lengths=(8,), heldout_lengths=(4, 8), mass_lengths=(4,), targets=(0.5,), nll_tokens=4
    )
    mass = {"prefill": MassSummary(10, 0.01, 0.1, 0.3)}
    jobs = [
        Job("", demo._compare, {"sequences": [[0] * 8]}),
        Job("", demo._compare, {"sequences": [[0] * 8]}),
        Job("", demo._compare, {"sequences": [[0] * 4, [0] * 4]}),
    ]
    results = [
        {"0.5": comparison(0.4, 2.1, {})},
        {"0.5": comparison(0.6, 2.3, {})},
        {"0.5": comparison(0.3, 2.0, mass)},
    ]
    calibration, nll, masses = demo._heldout_rows(jobs, results, plan)
    achieved = {(row["phase"], row["seqlen"]): row["achieved"] for row in calibration}
    assert achieved == {
        ("prefill", 4): 0.3,
        ("decode", 4): 0.5,
        ("prefill", 8): pytest.approx(0.5),
        ("decode", 8): 0.5,
    }
    assert [(row["seqlen"], row["dense"], row["sparse"]) for row in nll] == [
        (4, 2.0, 2.0),
        (8, 2.0, pytest.approx(2.2)),
    ]
    assert masses == [{"phase": "prefill", "seqlen": 4, "target": 0.5, "mean": 0.01, "p99": 0.1, "max": 0.3}]


def _layers_plus(loaded: Any, number: int) -> int:
    if number < 0:
        raise ValueError("negative")
    return loaded.model.config.num_hidden_layers + number


def test_workers_hold_the_model_and_return_results_in_order(model: Any, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<unk>").save_pretrained(tmp_path)
    reports: list[tuple[int, int, str]] = []
    with WorkerPool(tmp_path, "tiny", workers=2) as pool:
        jobs = [Job(f"job {n}", _layers_plus, {"number": n}) for n in range(4)]
        assert pool.run(jobs, lambda *report: reports.append(report)) == [2, 3, 4, 5]
        assert reports[0][:2] == (0, 4) and reports[-1][:2] == (4, 4)
        with pytest.raises(ValueError, match="negative"):
            pool.run([Job("bad", _layers_plus, {"number": -1})])
