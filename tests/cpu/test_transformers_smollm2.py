"""The transformers integration and the counting on a real model, SmolLM2-135M; loaded once."""

import pytest
import torch

pytest.importorskip("transformers")

from blasst.calibrate.collect import collect
from blasst.calibrate.prompts import calibration_prompts
from blasst.evals.models import load_smollm2
from blasst.integrations.transformers import attention_stats, skipped_mass_summary, sparse_attention


@pytest.fixture(scope="module")
def smollm2():
    return load_smollm2()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_threshold_zero_gives_the_tokens_of_dense(smollm2):
    model, tokenizer, _ = smollm2
    settings = {"max_new_tokens": 12, "do_sample": False}
    texts = ["The capital of France is", "Python is a programming language that lets you work quickly and"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    dense = model.generate(**batch, **settings)
    with sparse_attention(model, threshold=0.0) as enabled:
        assert len(enabled.served) == 30 and enabled.unserved == ()
        assert torch.equal(model.generate(**batch, **settings), dense)


def test_sparse_prefill_stays_close_to_dense_and_loses_little_mass(smollm2):
    model, tokenizer, _ = smollm2
    (prompt,) = calibration_prompts(tokenizer, [900], kinds=["prose"], split="heldout")
    ids = torch.tensor([prompt.token_ids])
    dense = model(ids, logits_to_keep=200).logits.float().log_softmax(-1)
    with sparse_attention(model, threshold=0.05, collect_counts=True, measure_skipped_mass=True):
        sparse = model(ids, logits_to_keep=200).logits.float().log_softmax(-1)
        stats, mass = attention_stats(model), skipped_mass_summary(model)["prefill"]
    visited = sum(int(r.visited.sum()) for r in stats)
    assert visited == 30 * 9 * sum(min(8, (64 * i + 63) // 128 + 1) for i in range(15))
    assert 0.03 < sum(int(r.skipped.sum()) for r in stats) / visited < 0.9
    assert 0 < mass["mean"] < 0.02 and mass["rows"] == 30 * 9 * 900
    assert (dense.exp() * (dense - sparse)).sum(-1).mean() < 0.02


def test_counts_of_a_dense_pass_foretell_the_sparsity_of_a_sparse_run(smollm2):
    model, tokenizer, _ = smollm2
    prompts = calibration_prompts(tokenizer, [700], kinds=["noise"], split="heldout")
    table = collect(model, tokenizer, prompts, thresholds=[0.05, 0.3, 1.0], decode_tokens=2)
    for phase, threshold in (("prefill", 0.3), ("decode", 0.05)):
        (point,) = table.points(phase)
        j = point.threshold.tolist().index(threshold)
        assert 0.03 < point.skipped[j] / point.visited < 0.95
    with sparse_attention(model, threshold={"prefill": 0.3}, collect_counts=True, dense_tail=64):
        model(torch.tensor([prompts[0].token_ids]), logits_to_keep=1)
        stats = attention_stats(model)
    achieved = sum(int(r.skipped.sum()) for r in stats) / sum(int(r.visited.sum()) for r in stats)
    (point,) = table.points("prefill")
    assert achieved == pytest.approx(point.skipped[1] / point.visited, abs=0.03)
