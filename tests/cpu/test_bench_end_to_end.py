"""The benchmark of whole models: rows, thresholds found in the model, resumption, and what it refuses."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_parts import CPU, KEYS, counting_wrong, forbid_timing, run_inside, with_nan
from torch import Tensor

import blasst
from blasst.bench import contestants, end_to_end, model
from blasst.bench.check import WrongResultError
from blasst.bench.contestants import TorchAttention, run_with
from blasst.bench.dial import dial_sparsity_from
from blasst.bench.end_to_end import measure_step
from blasst.bench.model import BenchmarkModel, local_model, random_model
from blasst.bench.record import read_rows
from blasst.bench.steps import Step, check_steps, labels, missing_steps
from blasst.core.types import AttentionOutput
from blasst.evals.models import LoadedModel

ROW_KEYS = KEYS | {
    *("phase", "contestant", "model", "num_layers", "hidden_size", "intermediate_size", "vocab_size"),
    "attention_gain",
}
TINY = ("--shape", "tiny", "--dtype", "fp32", "--device", "cpu", "--repeats", "1")
WANTED = (0.5, 0.7)


@pytest.fixture(scope="module")
def tiny() -> BenchmarkModel:
    return random_model("tiny", dtype=torch.float32, device=CPU)


def public_sparsity(tiny: BenchmarkModel, step: Step, threshold: float) -> float:
    """What `blasst.enable` counts, on transformers' own cache."""
    tokens = tiny.prompts(step.batch if step.phase == "prefill" else 1, step.seqlen)
    network = tiny.model
    with torch.no_grad():
        if step.phase == "prefill":
            with blasst.sparse_attention(network, threshold={"prefill": threshold}, collect_counts=True):
                network(input_ids=tokens, logits_to_keep=1)
                stats = blasst.attention_stats(network)
        else:
            before = network(input_ids=tokens[:, :-1], logits_to_keep=1, use_cache=True)
            name = "cache" if "cache" in before else "past_key_values"
            with blasst.sparse_attention(network, threshold={"decode": threshold}, collect_counts=True):
                network(input_ids=tokens[:, -1:], use_cache=True, **{name: before[name]})
                stats = blasst.attention_stats(network)
    assert len(stats) == 2
    return sum(int(s.skipped.sum()) for s in stats) / sum(int(s.visited.sum()) for s in stats)


def test_command_writes_rows_counts_in_the_model_and_resumes(
    tiny: BenchmarkModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    command = ("bench", "end-to-end", *TINY, "--out", str(out))
    first = (*command, "--prefill", "1K", "--decode", "2Kx3")
    assert run_inside(monkeypatch, *first, "--json") == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(set(line) == ROW_KEYS for line in lines)
    assert [line["contestant"] for line in lines] == labels(WANTED) * 2
    assert [line["kernel"] for line in lines[:5]] == ["torch sdpa", *["blasst eager"] * 4]
    assert [line["threshold"] for line in lines[:3]] == [None, None, 0.0]
    for line, wanted in zip((*lines[3:5], *lines[8:]), WANTED * 2):
        assert line["sparsity"] == pytest.approx(wanted, abs=0.02)
        step = Step(line["phase"], line["seqlen_k"], line["batch"])
        assert line["sparsity"] == public_sparsity(tiny, step, line["threshold"])
    shapes = {(x["bench"], x["phase"], x["seqlen_q"], x["seqlen_k"], x["batch"]) for x in lines}
    assert shapes == {("end_to_end", "prefill", 1024, 1024, 1), ("end_to_end", "decode", 1, 2048, 3)}
    shown = json.loads(capfd.readouterr().out)
    assert len(shown["rows"]) == 10 and shown["notes"] == []

    forbid_timing(monkeypatch, end_to_end)
    assert run_inside(monkeypatch, *first) == 0  # all there
    assert out.read_text().splitlines() == [json.dumps(line) for line in lines]
    assert "in the file already" in capfd.readouterr().err
    monkeypatch.undo()
    assert run_inside(monkeypatch, *command, "--prefill", "1K,512x2", "--decode", "2Kx3") == 0
    rows = [row for row, _ in read_rows(out)]
    assert [(row.seqlen_k, row.batch) for row in rows[10:]] == [(512, 2)] * 5
    assert "50% skipped" in capfd.readouterr().out


def test_an_interrupted_file_lacks_its_last_step_only(tiny: BenchmarkModel, tmp_path: Path) -> None:
    from blasst.bench.record import append_rows, environment

    step, other, out = Step("decode", 512, 1), Step("decode", 512, 2), tmp_path / "rows.jsonl"
    result = measure_step(tiny, step, WANTED, repeats=1)
    block = environment()

    def missing(sparsities: tuple[float, ...] = WANTED, gpu: str | None = None) -> list[Step]:
        return missing_steps(out, [step, other], tiny, sparsities, gpu)

    assert missing() == [step, other]
    append_rows(out, result.rows[:-1], block)
    assert missing() == [step, other]
    append_rows(out, result.rows[-1:], block)
    assert missing() == [other]
    assert missing((0.5,)) == [other]
    assert missing((0.5, 0.6)) == [step, other]
    assert missing(gpu="another") == [step, other]
    assert missing_steps(out, [step], tiny, WANTED, None, "eager") == []
    assert missing_steps(out, [step], tiny, WANTED, None, "triton") == [step]
    namesake = replace(
        tiny, model=SimpleNamespace(config=copy.copy(tiny.config), parameters=tiny.model.parameters)
    )
    assert missing_steps(out, [step], namesake, WANTED, None) == []
    namesake.config.num_hidden_layers += 1
    assert missing_steps(out, [step], namesake, WANTED, None) == [step]


@pytest.mark.parametrize("cut", [1, 2, 300])
def test_a_torn_last_line_stops_no_resume(tiny: BenchmarkModel, tmp_path: Path, cut: int) -> None:
    from blasst.bench.record import append_rows, environment

    block, step = environment(), Step("decode", 512, 1)
    result = measure_step(tiny, step, (0.5,), repeats=1)
    out = tmp_path / "rows.jsonl"
    append_rows(out, result.rows, block)
    whole = out.read_bytes()
    out.write_bytes(whole[:-cut])
    torn = cut > 1  # 1: only the end of the line is gone
    assert missing_steps(out, [step], tiny, (0.5,), block["gpu"]) == ([step] if torn else [])
    append_rows(out, result.rows[-1:], block)
    assert [row for row, _ in read_rows(out)] == [*result.rows, *([] if torn else result.rows[-1:])]
    assert missing_steps(out, [step], tiny, (0.5,), block["gpu"]) == []


def test_a_failing_step_is_told_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = end_to_end._checked_contestants

    def failing(model: BenchmarkModel, forward: end_to_end._Forward, *rest: object) -> object:
        if forward.step.seqlen == 512:
            raise WrongResultError("a layer is wrong")
        return real(model, forward, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(end_to_end, "_checked_contestants", failing)
    out = tmp_path / "rows.jsonl"
    options = ("--prefill", "512,1K", "--decode", "none", "--out", str(out))
    assert run_inside(monkeypatch, "bench", "end-to-end", *TINY, *options) == 1
    assert {row.seqlen_k for row, _ in read_rows(out)} == {1024}
    assert "failed, WrongResultError: a layer is wrong" in capfd.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_fixed_cache_gives_the_logits_of_a_plain_forward(tiny: BenchmarkModel, phase: str) -> None:
    forward = end_to_end._Forward(tiny, Step("prefill" if phase == "prefill" else "decode", 700, 3))
    tokens = tiny.prompts(3 if phase == "prefill" else 1, 700)
    with torch.no_grad():
        want = tiny.model(input_ids=tokens, use_cache=False).logits[:, -1]
    for _ in range(2):  # the same call again does the same
        got = run_with(tiny.model, TorchAttention(), forward.logits)
        assert got.shape == (3, 1024)
        # Other kernels and shapes of float32 matrix products over at most 2048 terms of size about 1.
        assert torch.allclose(got, want.expand(3, -1), atol=1e-4)
    assert forward.cache.layers[0].keys.shape[2] == 700  # nothing grew
    assert torch.equal(forward.token(), got.argmax(-1))


def wrong(change: Callable[[AttentionOutput], AttentionOutput], at: Callable[[float | None], bool]) -> object:
    """`attend` with some outputs changed."""
    real = contestants.attend

    def attend(call: object, threshold: Tensor | None, **options: object) -> AttentionOutput:
        out = real(call, threshold, **options)  # type: ignore[arg-type]
        return change(out) if at(None if threshold is None else float(threshold[0])) else out

    return attend


def shifted(result: AttentionOutput) -> AttentionOutput:
    """One number of one row is off by 3."""
    out = result.out.clone()
    out[0, -1, 0, 0] += 3.0
    return result._replace(out=out)


def nudged(result: AttentionOutput) -> AttentionOutput:
    """The next number, for one."""
    out = result.out.clone()
    out[0, -1, 0, 0] = torch.nextafter(out[0, -1, 0, 0], torch.tensor(math.inf))
    return result._replace(out=out)


@pytest.mark.parametrize(
    ("change", "at", "message"),
    [
        (with_nan, lambda t: t is None, "differ from the other dense kernel"),
        (shifted, lambda t: t is None, "differ from the other dense kernel"),
        (nudged, lambda t: t == 0.0, "bit for bit"),
        (counting_wrong, lambda t: t == 0.0, "skipped tiles"),
        (shifted, lambda t: t is not None and t > 0.0, "further from dense"),
        (with_nan, lambda t: t is not None and t > 0.0, "further from dense"),
    ],
)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_wrong_kernel_is_not_timed(
    tiny: BenchmarkModel,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    change: Callable[[AttentionOutput], AttentionOutput],
    at: Callable[[float | None], bool],
    message: str,
) -> None:
    forbid_timing(monkeypatch, end_to_end)
    monkeypatch.setattr(contestants, "attend", wrong(change, at))
    with pytest.raises(WrongResultError, match=message):
        measure_step(tiny, Step("prefill" if phase == "prefill" else "decode", 512, 1), (0.5,))


def test_a_model_that_does_not_run_through_the_kernels_is_not_timed(
    tiny: BenchmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_timing(monkeypatch, end_to_end)
    monkeypatch.setattr(contestants, "run_with", lambda model, handler, forward: forward())
    with pytest.raises(WrongResultError, match="no tile was counted"):
        measure_step(tiny, Step("prefill", 512, 1), (0.5,))


def test_a_sparsity_out_of_reach_is_noted(tiny: BenchmarkModel) -> None:
    result = measure_step(tiny, Step("decode", 512, 1), (0.5, 0.99), repeats=1)
    assert any("sparsity 0.99 was not met" in note for note in result.notes)
    assert result.rows[-1].threshold == 1.0 and result.rows[-1].sparsity < 0.9


def test_a_step_stops_at_its_time_limit_after_one_round(tiny: BenchmarkModel) -> None:
    result = measure_step(tiny, Step("decode", 512, 1), (0.5,), repeats=50, limit_s=0.0)
    assert {row.repeats for row in result.rows} == {1}
    assert any("room for 1 of 50 rounds" in note for note in result.notes)


def test_a_graph_that_cannot_be_captured_is_noted_and_nobody_has_one(
    tiny: BenchmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens on a GPU, as far as it can be seen without one."""

    step, notes = Step("decode", 512, 1), []
    forward = end_to_end._Forward(tiny, step)
    found = end_to_end._checked_contestants(tiny, forward, [], "auto", notes)

    def refuse(*_: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(end_to_end, "_captured", refuse)
    tokens, forward.ids = forward.ids, SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    calls = end_to_end._calls(found, forward, notes)
    forward.ids = tokens
    assert calls.graphs is False and calls.forwards == 8 and list(calls.by_label) == labels(())
    assert len(notes) == 1 and "not permitted" in notes[0]
    for call in calls.by_label.values():
        call()


@pytest.mark.parametrize(
    ("step", "message"),
    [(Step("prefill", 16384, 1), "end at 8192"), (Step("decode", 500, 8), "shorter than 512")],
)
def test_a_length_that_cannot_be_measured_is_refused(tiny: BenchmarkModel, step: Step, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_steps([step], tiny)


def test_command_refuses_a_large_shape_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_inside(monkeypatch, "bench", "end-to-end", "--device", "cpu") == 2
    assert "needs a GPU" in capfd.readouterr().err


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
@pytest.mark.parametrize("bench", ["end-to-end", "prefill", "decode", "portable"])
def test_a_device_that_is_not_there_is_told(
    bench: str, device: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_inside(monkeypatch, "bench", bench, "--device", device) == 2
    assert device in capfd.readouterr().err


class Words:
    """A tokenizer: one token per character."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(c) % 1000 for c in text])


def local(monkeypatch: pytest.MonkeyPatch, tiny: BenchmarkModel) -> BenchmarkModel:
    monkeypatch.setattr(model, "load_model", lambda path, **_: LoadedModel(tiny.model, Words(), "mine"))
    return local_model("mine", dtype=torch.float32, device=CPU)


def test_a_local_model_runs_on_prose(tiny: BenchmarkModel, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = local(monkeypatch, tiny)
    assert mine.prompts(2, 600).shape == (2, 600)
    rows = measure_step(mine, Step("decode", 600, 2), (0.3,), repeats=1).rows
    assert {(row.model, row.inputs, row.attention_gain) for row in rows} == {("mine", "held-out prose", None)}


def test_a_config_may_leave_out_what_follows_from_the_rest(
    tiny: BenchmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    config = GPTNeoXConfig(vocab_size=1024, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    neox = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    rows = measure_step(replace(tiny, model=neox), Step("decode", 512, 1), (0.5,), repeats=1).rows
    assert {(row.num_kv_heads, row.head_dim) for row in rows} == {(2, 32)}


def test_a_local_model_with_sliding_layers_is_refused(
    tiny: BenchmarkModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.config, "layer_types", ["full_attention", "sliding_attention"], raising=False)
    with pytest.raises(ValueError, match="sliding_attention"):
        local(monkeypatch, tiny)


@pytest.mark.parametrize("curve", [((-30.0, 0.0), (-5.0, 0.9)), ((-3.0, 0.1), (-1.0, 0.9))])
def test_a_search_begins_where_the_answer_is_expected(curve: tuple[tuple[float, float], ...]) -> None:
    calls = []

    def sparsity_of(threshold: float) -> float:
        calls.append(math.log(threshold))
        return min(max((math.log(threshold) + 30.0) / 27.0, 0.0), 1.0)

    found, counted = dial_sparsity_from(sparsity_of, (0.5, 0.7), curve)
    assert [entry.sparsity for entry in found] == [pytest.approx(s, abs=0.01) for s in (0.5, 0.7)]
    assert len(calls) <= (4 if curve[0][0] == -30.0 else 10)
    assert counted == sorted(counted) and len(counted) == len(calls)
    calls.clear()
    dial_sparsity_from(sparsity_of, (0.5, 0.7), counted)  # what was counted is the best curve
    assert len(calls) <= 2


def test_a_search_ends_at_threshold_one_and_on_steps() -> None:
    found, _ = dial_sparsity_from(lambda t: 0.3 * t, (0.5,), ((-9.0, 0.1), (0.0, 0.9)))
    assert found[0].threshold == 1.0 and found[0].sparsity == 0.3
    calls = []

    def jump(threshold: float) -> float:
        calls.append(threshold)
        return 0.4 if math.log(threshold) < -7.0 else 0.6

    found, _ = dial_sparsity_from(jump, (0.5,), ((-9.0, 0.1), (0.0, 0.9)))
    assert found[0].sparsity in (0.4, 0.6) and len(calls) == 8


def test_prompts_are_blocks_of_one_kind_and_levels_stay_through_the_layers(tiny: BenchmarkModel) -> None:
    tokens = tiny.prompts(2, 1000)
    assert (tokens[:, :128] % 256 == 0).all()
    assert all(len(block.unique()) == 1 for row in tokens % 256 for block in row.split(128))
    assert (tokens % 256).unique().numel() > 5
    with torch.no_grad():
        states = tiny.model.model(tokens, output_hidden_states=True).hidden_states
    assert torch.equal(states[0][..., :3], states[1][..., :3])  # no layer writes the reserved channels
    assert (states[0][..., 0] == 1).all() and (states[0][:, :128, 1:3] == 0).all()
    assert not torch.equal(states[0], states[1])
