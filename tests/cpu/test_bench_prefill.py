"""The prefill benchmark: its rows, the dial for sparsity, what it refuses to time, and the plot."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from bench_parts import CPU, KEYS, TINY, counting_wrong, forbid_timing, run_inside, with_nan

from blasst import blasst_attn_func
from blasst.bench import prefill
from blasst.bench.check import WrongResultError
from blasst.bench.dial import dial_sparsity
from blasst.bench.inputs import Inputs, captured_inputs, hot_and_cold_inputs
from blasst.bench.published import (
    FLASH_ATTENTION_3,
    MATMUL_TFLOPS_H200,
    TRTLLM_SKIP,
    peer_ratios,
    roofline_tflops,
)
from blasst.bench.record import BenchmarkRow, append_rows, command_line, environment, read_rows
from blasst.core.types import AttentionOutput, SkipCounts
from blasst.evals.models import LoadedModel
from blasst.report.speed import speed_figure


def tiny(seqlen: int = 1024, dtype: torch.dtype = torch.float32) -> Inputs:
    return hot_and_cold_inputs(1, seqlen, 4, 2, 16, dtype=dtype, device=CPU)


def test_command_writes_rows_with_exactly_the_keys_of_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "rows.jsonl"
    options = ("--seqlens", "1K,500", "--sparsities", "0.5", "--out", str(out), "--json")
    assert run_inside(monkeypatch, "bench", "prefill", *TINY, *options) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(set(line) == KEYS for line in lines)
    long = [line for line in lines if line["seqlen_k"] == 1024]
    assert [line["kernel"] for line in long] == ["torch sdpa", *["blasst eager"] * 3]
    assert [line["threshold"] for line in long[:3]] == [None, None, 0.0]
    assert all(line["ratio_to_cudnn"] is None and line["gpu"] is None for line in lines)
    assert long[1]["ratio_to_own_dense"] == 1.0
    assert long[0]["ratio_to_own_dense"] == pytest.approx(long[1]["ms"] / long[0]["ms"])
    assert long[3]["sparsity"] == pytest.approx(0.5, abs=0.05)
    shown = json.loads(capfd.readouterr().out)
    assert [row["ms"] for row in shown["rows"]] == [line["ms"] for line in lines]
    assert [row.ms for row, _ in read_rows(out)] == [line["ms"] for line in lines]


def test_bisection_reaches_the_wanted_sparsity_on_the_kernel_s_own_counts() -> None:
    inputs = hot_and_cold_inputs(1, 4096, 4, 4, 16, dtype=torch.float32, device=CPU)
    calls = 0

    def sparsity_of(threshold: float) -> float:
        nonlocal calls
        calls += 1
        counts = blasst_attn_func(
            *inputs_of(inputs), threshold=threshold, causal=True, return_counts=True
        ).counts
        assert counts is not None
        return float(counts.sparsity)

    wanted = (0.25, 0.5, 0.7, 0.8)
    for goal, found in zip(wanted, dial_sparsity(sparsity_of, wanted)):
        assert found.wanted == goal
        assert found.sparsity == pytest.approx(goal, abs=0.01)
        assert sparsity_of(found.threshold) == found.sparsity
    assert calls < 60


def inputs_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.q, inputs.k, inputs.v


def test_bisection_says_what_no_threshold_reaches() -> None:
    low, high = dial_sparsity(lambda t: 0.2 + 0.4 * (math.log(t) > -5), (0.1, 0.9))
    assert (low.sparsity, high.sparsity) == (0.2, pytest.approx(0.6))
    (step,) = dial_sparsity(lambda t: 0.2 + 0.4 * (math.log(t) > -5), (0.45,))
    assert step.sparsity == pytest.approx(0.6)
    notes = prefill.measure_prefill(tiny(512), [0.99], repeats=1).notes
    assert len(notes) == 1 and "0.99 was not met" in notes[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_right_kernel_passes_in_every_dtype_and_mask(dtype: torch.dtype, causal: bool) -> None:
    rows = prefill.measure_prefill(tiny(700, dtype), [0.5], causal=causal, repeats=1).rows
    assert rows[-1].sparsity > 0.3
    assert rows[-1].causal is causal
    # 4 * heads * head_dim operations for each of the n (n + 1) / 2, or n * n, visible pairs
    pairs = 700 * 701 / 2 if causal else 700 * 700
    assert rows[0].tflops == pytest.approx(4 * 4 * 16 * pairs / (rows[0].ms * 1e-3) / 1e12)


def shifted(result: AttentionOutput) -> AttentionOutput:
    """One query tile of one head is off by 5%."""
    out = result.out.clone()
    out[:, 128:192, 1] *= 1.05
    return result._replace(out=out)


def every_last_tile(result: AttentionOutput) -> AttentionOutput:
    """The last query tile is off in all heads, where the reference looks."""
    out = result.out.clone()
    out[:, -64:] += 0.01
    return result._replace(out=out)


def other_map(result: AttentionOutput) -> AttentionOutput:
    """A map that says that one more tile of each row was kept, with counts to match."""
    if result.kept_tiles is None or result.counts is None:
        return result
    kept = result.kept_tiles.clone()
    visited = torch.ones_like(kept[0, 0]).tril_().repeat_interleave(2, 0)[: kept.shape[2], : kept.shape[3]]
    kept |= visited
    counts = SkipCounts(result.counts.visited - kept.sum((2, 3)), result.counts.visited)
    return result._replace(kept_tiles=kept, counts=counts)


@pytest.mark.parametrize(
    ("break_it", "when", "message"),
    [
        (shifted, "dense", "query tiles differ from the other dense kernel"),
        (with_nan, "dense", "query tiles differ from the other dense kernel"),
        (every_last_tile, "zero", "bit for bit"),
        (every_last_tile, "skipping", "query tile"),
        (counting_wrong, "skipping", "counts.skipped"),
        (other_map, "skipping", "kept_tiles"),
    ],
)
def test_wrong_kernel_is_refused_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, break_it, when: str, message: str
) -> None:
    right = prefill.blasst_attn_func

    def wrong(*args: object, threshold: float | None, **options: object) -> AttentionOutput:
        result = right(*args, threshold=threshold, **options)
        now = "dense" if threshold is None else "skipping" if threshold else "zero"
        return break_it(result) if now == when else result

    monkeypatch.setattr(prefill, "blasst_attn_func", wrong)
    forbid_timing(monkeypatch)
    with pytest.raises(WrongResultError, match=message):
        prefill.measure_prefill(tiny(), [0.5], repeats=1)


def test_wrong_kernel_ends_the_command_with_an_error_and_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    right = prefill.blasst_attn_func
    monkeypatch.setattr(prefill, "blasst_attn_func", lambda *a, **o: shifted(right(*a, **o)))
    out = tmp_path / "rows.jsonl"
    assert run_inside(monkeypatch, "bench", "prefill", *TINY, "--seqlens", "512", "--out", str(out)) == 1
    assert not out.exists()
    assert "query tiles differ" in capfd.readouterr().err


def test_generated_inputs_have_hot_and_cold_tiles_and_repeat() -> None:
    inputs = hot_and_cold_inputs(1, 4096, 2, 2, 64, dtype=torch.float32, device=CPU, seed=3)
    scores = torch.einsum("qd,kd->qk", inputs.q[0, -64:, 0], inputs.k[0, :, 0]) * inputs.softmax_scale
    tile_means = scores.unflatten(1, (-1, 128)).mean((0, 2))
    # The mean of 64 x 128 scores of spread 0.5 is within 0.1 of the level.
    hot = tile_means > -0.1
    assert bool(hot[0]) and 1 <= int(hot.sum()) < 8
    assert bool(((tile_means > -40.1) & (tile_means < -7.9))[~hot].all())
    again = hot_and_cold_inputs(1, 4096, 2, 2, 64, dtype=torch.float32, device=CPU, seed=3)
    assert torch.equal(inputs.k, again.k)


def test_captured_inputs_are_measured_at_the_lengths_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = tiny(600)
    file = tmp_path / "layer.pt"
    torch.save({"q": made.q, "k": made.k, "v": made.v, "name": "some layer", "softmax_scale": 0.2}, file)
    options = ("--capture", str(file), "--dtype", "fp32", "--repeats", "1", "--sparsities", "0.4", "--json")
    assert run_inside(monkeypatch, "bench", "prefill", *options, "--seqlens", "300,600") == 0
    rows = json.loads(capfd.readouterr().out)["rows"]
    assert {row["inputs"] for row in rows} == {"captured: some layer"}
    assert [row["seqlen_k"] for row in rows if row["threshold"] == 0.0] == [300, 600]
    assert run_inside(monkeypatch, "bench", "prefill", *options, "--seqlens", "1K") == 2
    assert captured_inputs(file, dtype=torch.float32, device=CPU).softmax_scale == 0.2


@pytest.mark.parametrize("wrong", [{}, {"k": torch.zeros(1, 9, 2, 16)}, {"v": torch.zeros(1, 8, 3, 16)}])
def test_captured_inputs_that_do_not_fit_are_refused(tmp_path: Path, wrong: dict[str, torch.Tensor]) -> None:
    file = tmp_path / "layer.pt"
    content = {name: torch.zeros(1, 8, 2, 16) for name in "qkv"} | wrong if wrong else {"q": torch.zeros(1)}
    torch.save(content, file)
    with pytest.raises(ValueError, match=r"layer\.pt: wants"):
        captured_inputs(file, dtype=torch.float32, device=CPU)


def invented_row(kernel: str, threshold: float | None, sparsity: float, ms: float) -> BenchmarkRow:
    return BenchmarkRow(
        bench="prefill",
        kernel=kernel,
        inputs="invented",
        dtype="bfloat16",
        batch=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        seqlen_q=65536,
        seqlen_k=65536,
        causal=True,
        threshold=threshold,
        sparsity=sparsity,
        ms=ms,
        ms_low=ms,
        ms_high=ms,
        repeats=1,
        tflops=35184.0 / ms,
        ratio_to_cudnn=58.0 / ms,
        ratio_to_own_dense=52.0 / ms,
        max_error=0.0,
        command="none",
    )


def test_plot_is_written_and_shows_published_figures_only_beside_an_h200(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [invented_row("cudnn", None, 0.0, 58.0), invented_row("blasst any", None, 0.0, 52.0)]
    rows += [invented_row("blasst any", s / 10, s, 58.0 - 20 * s) for s in (0.0, 0.5, 0.9)]
    file, out = tmp_path / "rows.jsonl", tmp_path / "sub" / "plot.png"
    append_rows(file, rows, {**environment(), "gpu": "NVIDIA H200"})
    assert run_inside(monkeypatch, "bench", "plot", str(file), "--out", str(out)) == 0
    assert out.read_bytes()[:4] == b"\x89PNG"

    def labels(gpu: str) -> str:
        (ax,) = speed_figure([(row, {"gpu": gpu}) for row in rows]).axes[:1]
        return " ".join(ax.get_legend_handles_labels()[1])

    for text in ("TensorRT-LLM", "paper", "roofline"):
        assert text in labels("NVIDIA H200")
        assert text not in labels("another")
    assert "blasst any" in labels("another")


def test_published_ratios_are_those_of_their_own_run() -> None:
    assert peer_ratios(FLASH_ATTENTION_3, 65536) == [(0.0, pytest.approx(57.855 / 52.298))]
    assert peer_ratios(TRTLLM_SKIP, 16384)[-1] == (0.895, pytest.approx(3.320 / 2.176))
    assert peer_ratios(TRTLLM_SKIP, 1024) == []
    assert roofline_tflops(0.0) == MATMUL_TFLOPS_H200
    assert roofline_tflops(1.0) == 2 * MATMUL_TFLOPS_H200


def test_rows_of_another_schema_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for text, message in (
        ('{"schema": 1}', "schema 2"),
        ("nonsense", "not a line of JSON"),
        ('{"schema": 2}', "fields"),
    ):
        file.write_text(text + "\n")
        with pytest.raises(ValueError, match=message):
            read_rows(file)


def test_capture_script_keeps_what_attention_is_given() -> None:
    transformers = pytest.importorskip("transformers")
    script = Path(__file__).parents[2] / "benchmarks" / "capture_qkv.py"
    spec = importlib.util.spec_from_file_location("capture_qkv", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    seen = {}
    attention = model.model.layers[1].self_attn
    attention.o_proj.register_forward_pre_hook(lambda _, arguments: seen.update(out=arguments[0]))
    content = module.capture(LoadedModel(model, None, "tiny"), tuple(range(20)), 1, "tiny")
    assert (content["q"].shape, content["k"].shape) == ((1, 20, 4, 16), (1, 20, 2, 16))
    assert content["softmax_scale"] == 0.25
    out = blasst_attn_func(content["q"], content["k"], content["v"], causal=True).out
    # float32 rounding of two ways to compute the same 20 keys, values of size 0.1
    assert (out.flatten(2) - seen["out"]).abs().max() < 1e-6
    assert model.config._attn_implementation != "blasst"
    with pytest.raises(ValueError, match="layer 2"):
        module.capture(LoadedModel(model, None, "tiny"), (1, 2), 2, "tiny")


def test_a_row_names_files_without_the_folders_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "x",
        "bench",
        "decode",
        "--out",
        "/somewhere/rows.jsonl",
        "--capture=/elsewhere/qkv.pt",
        "--seqlens",
        "1,2",
    ]
    monkeypatch.setattr("sys.argv", [*words, "here/too.jsonl"])
    wanted = "blasst bench decode --out rows.jsonl --capture=qkv.pt --seqlens 1,2 here/too.jsonl"
    assert command_line() == wanted
