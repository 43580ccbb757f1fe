"""Methods inside a model, shared prompt passes, and the files that a stopped run goes on with."""

import json

import numpy as np
import pytest
import torch
from quality_parts import write_tiny_model

from blasst.calibrate.counts import CountPoint
from blasst.calibrate.linear_fit import fit_linear_space
from blasst.evals.methods import Method, MethodHandler, masked_attention, method_session, prefill_dials
from blasst.evals.models import load_model
from blasst.evals.rows import RowFile, TimeLimit
from blasst.evals.run import run_tasks
from blasst.evals.shared import Block, SharedRun, Variant, blocks_of, make_prompts
from blasst.functional import blasst_attn_func, blasst_attn_with_kvcache
from blasst.integrations.threshold_rules import resolve_rules
from blasst.selectors import H2O, Quest, SnapKV, XAttention
from blasst.testing import heavy_tailed_inputs

THRESHOLD = 0.5


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"), dtype=torch.float32)


def rule(phase):
    return Method(resolve_rules(None, None, THRESHOLD, None)[phase])


def test_shared_prompt_passes_give_the_answers_and_counts_of_separate_runs(loaded, tmp_path):
    variants = {
        "dense": Variant(),
        "prefill": Variant(prefill=rule("prefill")),
        "decode": Variant(decode=rule("decode")),
        "both": Variant(rule("prefill"), rule("decode")),
    }
    run = SharedRun(loaded, variants, tmp_path / "rows.jsonl")
    block = Block("niah_multikey_1", 512, 0, 3)
    prompts = make_prompts(loaded.tokenizer, block, 0)
    assert len({len(prompt.tokens) for prompt in prompts}) > 1  # so that the batch is padded
    assert run.answer(block, prompts) and not run.missing(block)
    settings = {"prefill": {"prefill": THRESHOLD}, "decode": {"decode": THRESHOLD}, "both": THRESHOLD}
    conditions = {n: {"threshold": value, "collect_counts": True} for n, value in settings.items()}
    separate = run_tasks(
        loaded.model,
        loaded.tokenizer,
        {"dense": None, **conditions},
        tasks=["niah_multikey_1"],
        seqlens=[512],
        num_items=3,
    )
    assert len(separate.rows) == 12
    for row in separate.rows:
        own = run.known[row.key]
        assert (own.text, own.score, own.prompt_hash) == (row.text, row.score, row.prompt_hash)
    lines = [json.loads(line) for line in (tmp_path / "rows.sparsity.jsonl").read_text().splitlines()]
    for line in lines:
        wanted = separate.sparsity[line["condition"], 512, line["phase"]]
        assert line["skipped"] / line["visited"] == pytest.approx(wanted, abs=1e-12) and wanted > 0
    assert len(lines) == 4


def test_rows_of_other_settings_are_refused_and_known_ones_kept(loaded, tmp_path):
    block, out = Block("niah_single_1", 384, 0, 1), tmp_path / "rows.jsonl"
    prompts = make_prompts(loaded.tokenizer, block, 0)
    SharedRun(loaded, {"x": Variant(decode=rule("decode"))}, out).answer(block, prompts)
    before = out.read_text()
    again = SharedRun(loaded, {"x": Variant(decode=rule("decode"))}, out)
    assert not again.missing(block) and again.answer(block, prompts) and out.read_text() == before
    late = SharedRun(loaded, {"y": Variant()}, out)
    assert not late.answer(block, prompts, deadline=0.0) and late.missing(block) == ["y"]
    other = SharedRun(loaded, {"x": Variant(prefill=rule("prefill"))}, out)
    with pytest.raises(ValueError, match="other settings"):
        other.answer(
            Block("niah_single_1", 384, 0, 2),
            make_prompts(loaded.tokenizer, Block("niah_single_1", 384, 0, 2), 0),
        )


def test_blocks_take_all_kinds_before_further_items():
    found = blocks_of(["a", "b"], 4096, 5, 2, first=10)
    assert [(b.task, b.first, b.count) for b in found] == [
        ("a", 10, 2),
        ("b", 10, 2),
        ("a", 12, 2),
        ("b", 12, 2),
        ("a", 14, 1),
        ("b", 14, 1),
    ]


@pytest.mark.parametrize("seqlen_q", [300, 77])
def test_masked_attention_is_that_of_a_block_mask(seqlen_q):
    q, k, v = heavy_tailed_inputs(1, seqlen_q, 300, 4, 2, 16, block=128, noise=1.0, drop=(1, 8), seed=3)
    mask = XAttention(dial=0.6).select(q, k)
    assert not bool(mask.all())
    wanted = blasst_attn_func(q, k, v, causal=True, block_mask=mask, impl="eager").out
    found = masked_attention(q, k, v, mask, q.shape[-1] ** -0.5, "prefill")
    # float32 sums of at most 300 products in another order
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    step = q[:, -1:]
    mask = Quest(dial=0.5).select(step, k)
    wanted = blasst_attn_with_kvcache(step, k, v, causal=True, block_mask=mask, impl="eager").out
    found = masked_attention(step, k, v, mask, q.shape[-1] ** -0.5, "decode")
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_selectors_leave_out_what_their_dial_says_and_keep_the_dense_tail(loaded):
    ids = torch.randint(1000, 9000, (1, 700), generator=torch.Generator().manual_seed(0))
    dials = prefill_dials(loaded.model, [ids[0].tolist()], {"XAttention": XAttention()}, [0.2, 0.4])
    handler = MethodHandler()
    with torch.no_grad(), method_session(loaded.model, handler):
        left_out = {}
        for tail in (0, 256):
            for wanted, dial in dials["XAttention"].items():
                handler.use("prefill", Method(selector=XAttention(dial=dial), dense_tail=tail))
                loaded.model(ids)
                skipped, visible = handler.take("prefill")
                left_out[tail, wanted] = skipped / visible
        handler.use("prefill", Method(selector=XAttention(dial=1.0)))
        everything = loaded.model(ids).logits
        assert handler.take("prefill")[0] == 0
    # a dial between two measured ones: within the step of a few tiles of 288 visible ones
    assert left_out[0, 0.4] == pytest.approx(0.4, abs=0.08) and left_out[0, 0.2] == pytest.approx(
        0.2, abs=0.08
    )
    assert left_out[256, 0.4] < left_out[0, 0.4]
    with torch.no_grad():
        torch.testing.assert_close(everything, loaded.model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("selector", [SnapKV(dial=0.4), H2O(dial=0.4)])
def test_methods_that_evict_choose_once_and_see_their_own_prompt(loaded, tmp_path, monkeypatch, selector):
    calls = []
    plain = type(selector).select

    def counting(self, q, k, *, past_q=None, softmax_scale=None):
        calls.append((past_q.shape[1], k.shape[1]))
        return plain(self, q, k, past_q=past_q, softmax_scale=softmax_scale)

    monkeypatch.setattr(type(selector), "select", counting)
    block = Block("niah_single_1", 512, 0, 2)
    prompts = make_prompts(loaded.tokenizer, block, 0)
    run = SharedRun(loaded, {"x": Variant(decode=Method(selector=selector))}, tmp_path / "rows.jsonl")
    run.answer(block, prompts)
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert sorted(calls) == sorted((n, n + 1) for n in lengths for _ in range(2))  # once per layer
    line = json.loads((tmp_path / "rows.sparsity.jsonl").read_text())
    assert 0.4 < line["skipped"] / line["visited"] <= 0.6


def test_fit_in_linear_space_finds_an_exponential():
    thresholds = np.logspace(-4, 0, 30)
    points = []
    for length in (4096, 16384):
        share = np.clip(np.log(thresholds * length / 3.0) / 7.0, 0, 1)
        skipped = np.round(share * 10**9).astype(np.int64)
        points.append(CountPoint("prose", length, thresholds, skipped, 10**9))
    a, b = fit_linear_space(points)
    assert a == pytest.approx(3.0, rel=0.02) and b == pytest.approx(7.0, rel=0.005)


def test_a_row_file_goes_on_after_a_torn_line(tmp_path):
    file = RowFile(tmp_path / "rows.jsonl", ("a", "b"), {"model": "m"})
    file.append({"a": 1, "b": 2, "value": 3})
    with file.path.open("a") as torn:
        torn.write('{"a": 1, "b"')
    again = RowFile(file.path, ("a", "b"), {})
    assert again.rows == [{"model": "m", "a": 1, "b": 2, "value": 3}]
    assert again.has(a=1, b=2) and not again.has(a=1, b=3)
    with pytest.raises(ValueError, match="there is a row"):
        again.append({"a": 1, "b": 2})
    again.append({"a": 1, "b": 3})
    assert len(file.path.read_text().splitlines()) == 2
    assert TimeLimit(0).over and not TimeLimit(None).over
