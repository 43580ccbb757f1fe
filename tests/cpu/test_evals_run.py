import json

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from blasst.evals.chat import answer_batch, newline_tokens
from blasst.evals.models import find_smollm2
from blasst.evals.run import run_tasks
from blasst.integrations.transformers import sparse_attention

CONDITIONS = {
    "dense": None,
    "nothing": {"threshold": 0.0, "collect_counts": True},
    "sparse": {"threshold": {"decode": 1.0}, "collect_counts": True},
}


@pytest.fixture(scope="module")
def tokenizer():
    path = find_smollm2()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=49152,
        max_position_embeddings=1024,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


def run(model, tokenizer, out=None, **options):
    options = {
        "tasks": ["niah_single_1", "qa_1"],
        "seqlens": [512],
        "num_items": 3,
        "batch_size": 2,
    } | options
    conditions = options.pop("conditions", CONDITIONS)
    return run_tasks(model, tokenizer, conditions, out=out, model_name="tiny", **options)


def test_every_condition_answers_the_same_items_and_threshold_zero_answers_as_dense(model, tokenizer):
    calls = []
    results = run(model, tokenizer, progress=lambda *call: calls.append(call))
    by_condition = {
        name: {(r.task, r.index): r for r in results.rows if r.condition == name} for name in CONDITIONS
    }
    assert all(len(rows) == 6 for rows in by_condition.values())
    for key, dense in by_condition["dense"].items():
        others = [by_condition[name][key] for name in ("nothing", "sparse")]
        assert all(other.prompt_hash == dense.prompt_hash for other in others)
        assert by_condition["nothing"][key].text == dense.text
    assert calls[-1][:2] == (18, 18)
    assert results.sparsity["nothing", 512, "prefill"] == results.sparsity["nothing", 512, "decode"] == 0.0
    assert 0.0 < results.sparsity["sparse", 512, "decode"] < 1.0
    assert ("sparse", 512, "prefill") not in results.sparsity


def test_summary_pairs_tasks_and_ends_with_their_mean(model, tokenizer):
    summary = run(model, tokenizer).summary()
    assert [(row.condition, row.task, row.n) for row in summary] == [
        *(("nothing", "niah_single_1", 3), ("nothing", "qa_1", 3), ("nothing", "mean", 6)),
        *(("sparse", "niah_single_1", 3), ("sparse", "qa_1", 3), ("sparse", "mean", 6)),
    ]
    assert all(row.low <= row.difference <= row.high for row in summary)
    assert all(row.difference == 0.0 for row in summary if row.condition == "nothing")


def test_a_results_file_resumes_where_a_killed_run_stopped(model, tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    whole = run(model, tokenizer, out)
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(lines) == len(whole.rows) == 18
    out.write_text("".join(lines[:16]) + lines[16][:40], encoding="utf-8")
    again = run(model, tokenizer, out)
    assert again.rows == whole.rows
    assert sorted(out.read_text(encoding="utf-8").splitlines(keepends=True)) == sorted(lines)

    def refuse(*args, **kwargs):
        raise AssertionError("a known row was run again")

    monkeypatch.setattr(model, "generate", refuse)
    assert run(model, tokenizer, out).rows == whole.rows
    with pytest.raises(AssertionError, match="run again"):
        run(model, tokenizer, out, num_items=5)


def test_a_results_file_of_other_settings_is_refused(model, tokenizer, tmp_path):
    out = tmp_path / "rows.jsonl"
    options = {"tasks": ["niah_single_1"], "num_items": 1}
    run(model, tokenizer, out, conditions={"dense": None, "x": {"threshold": 0.1}}, **options)
    with pytest.raises(ValueError, match="other settings"):
        run(model, tokenizer, out, conditions={"dense": None, "x": {"threshold": 0.2}}, **options)
    run(model, tokenizer, out, conditions={"x": {"threshold": 0.1, "collect_counts": True}}, **options)
    out.write_text(json.dumps({"task": "niah_single_1"}) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 1: not a row"):
        run(model, tokenizer, out, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["niah"]}, "niah unknown"),
        ({"seqlens": [4096]}, "longer than the model takes"),
        ({"num_items": 0}, "num_items"),
        ({"conditions": {}}, "conditions"),
    ],
)
def test_bad_arguments_are_named_before_anything_runs(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        run(model, tokenizer, **options)


def test_an_enabled_model_is_refused_since_no_condition_would_be_dense(model, tokenizer):
    with sparse_attention(model, threshold=0.5), pytest.raises(ValueError, match="enabled on it"):
        run(model, tokenizer)


def test_summary_without_the_baseline_is_an_error(model, tokenizer):
    results = run(model, tokenizer, conditions={"x": {"threshold": 0.1}}, tasks=["qa_1"], num_items=1)
    with pytest.raises(ValueError, match="'dense' was not run"):
        results.summary()


def test_answers_end_after_their_lines_each_in_its_own_row(model, tokenizer, monkeypatch):
    newlines = newline_tokens(tokenizer)
    newline, word = tokenizer("\n").input_ids[0], tokenizer(" word").input_ids[0]
    assert newline in newlines and word not in newlines
    scripts = torch.tensor([[word, newline, word, newline, word], [newline, newline, word, word, word]])
    step = 0

    def scripted(*args, **kwargs):
        nonlocal step
        output = forward(*args, **kwargs)
        output.logits = torch.nn.functional.one_hot(scripts[:, step], 49152).float()[:, None]
        step += 1
        return output

    forward = model.forward
    monkeypatch.setattr(model, "forward", scripted)
    texts = answer_batch(
        model, tokenizer, [[5, 6, 7], [8]], max_new_tokens=5, newlines=newlines, answer_lines=2
    )
    assert texts == [" word\n word\n", "\n\n"]
    assert step == 4
