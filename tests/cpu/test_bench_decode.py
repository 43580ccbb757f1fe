"""The decode benchmark: its rows, the sparsity it reaches, what it refuses to time, and paged caches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_parts import CPU, KEYS, TINY, counting_wrong, forbid_timing, run_inside, with_nan

from blasst import blasst_attn_with_kvcache
from blasst.bench import decode, variants
from blasst.bench.check import WrongResultError
from blasst.bench.inputs import Inputs, captured_inputs, hot_and_cold_inputs
from blasst.bench.record import append_rows, environment, read_rows
from blasst.bench.timing import host_microseconds
from blasst.core.types import AttentionOutput, SkipCounts
from blasst.testing import pages_from

DECODE_KEYS = KEYS | {"us", "tbps", "page_size", "new_tokens"}  # host_us: on a GPU only


def tiny(
    seqlen: int = 2000, batch: int = 2, new_tokens: int = 1, dtype: torch.dtype = torch.float32
) -> Inputs:
    return hot_and_cold_inputs(batch, seqlen, 4, 2, 16, dtype=dtype, device=CPU, new_tokens=new_tokens)


def test_command_writes_rows_with_exactly_the_keys_of_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.jsonl"
    options = ("--seqlens", "2K,500", "--batch", "1,3", "--sparsities", "0.5", "--out", str(out), "--json")
    assert run_inside(monkeypatch, "bench", "decode", *TINY, *options) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(set(line) == DECODE_KEYS for line in lines)
    assert [(line["seqlen_k"], line["batch"]) for line in lines[::4]] == [
        (500, 1),
        (500, 3),
        (2048, 1),
        (2048, 3),
    ]
    last = lines[-4:]
    assert [line["kernel"] for line in last] == ["torch sdpa", *["blasst eager"] * 3]
    assert [line["threshold"] for line in last[:3]] == [None, None, 0.0]
    assert all(line["bench"] == "decode" and line["schema"] == 2 for line in lines)
    assert all(line["ratio_to_cudnn"] is None and line["us"] == line["ms"] * 1e3 for line in lines)
    assert last[3]["sparsity"] == pytest.approx(0.5, abs=0.05)
    shown = json.loads(capfd.readouterr().out)
    assert [row["us"] for row in shown["rows"]] == [line["us"] for line in lines]
    assert [row.tbps for row, _ in read_rows(out)] == [line["tbps"] for line in lines]


def test_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--seqlens", "500", "--batch", "1", "--sparsities", "0.3", "--new-tokens", "2")
    assert run_inside(monkeypatch, "bench", "decode", *TINY, *options) == 0
    shown = capfd.readouterr()
    assert "TB/s" in shown.out
    assert "1 x 500 keys: the dense baseline reads its causal mask" in " ".join(shown.err.split())


def test_wanted_sparsities_are_reached_on_the_kernel_s_own_counts() -> None:
    inputs = tiny(8192, batch=4)
    rows = decode.measure_decode(inputs, [0.5, 0.8], repeats=1).rows
    assert [row.sparsity for row in rows[3:]] == [pytest.approx(0.5, abs=0.01), pytest.approx(0.8, abs=0.01)]
    for row in rows[3:]:
        counts = blasst_attn_with_kvcache(
            inputs.q, inputs.k, inputs.v, threshold=row.threshold, return_counts=True
        ).counts
        assert counts is not None and float(counts.sparsity) == row.sparsity


def test_bytes_are_those_of_all_k_and_of_the_kept_v() -> None:
    inputs = tiny(2000)
    dense, *_, skipping = decode.measure_decode(inputs, [0.5], repeats=1).rows[1:]
    size = 2 * 2000 * 2 * 16 * 4  # batch, keys, KV heads, head_dim, float32
    assert dense.tbps == pytest.approx(2 * size / (dense.ms * 1e-3) / 1e12)
    kept = blasst_attn_with_kvcache(
        inputs.q, inputs.k, inputs.v, threshold=skipping.threshold, return_kept_tiles=True
    ).kept_tiles
    assert kept is not None
    keys = torch.full((32,), 64)
    keys[-1] = 2000 - 31 * 64
    read = size + int((kept * keys).sum()) * 16 * 4
    assert skipping.tbps == pytest.approx(read / (skipping.ms * 1e-3) / 1e12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("new_tokens", [1, 5])
def test_right_kernel_passes_in_every_dtype_with_any_number_of_tokens(
    dtype: torch.dtype, new_tokens: int
) -> None:
    rows = decode.measure_decode(tiny(1500, new_tokens=new_tokens, dtype=dtype), [0.5], repeats=1).rows
    assert rows[-1].sparsity > 0.3
    assert {(row.new_tokens, row.seqlen_q, row.causal) for row in rows} == {
        (new_tokens, new_tokens, new_tokens > 1)
    }
    # 4 * batch * heads * head_dim operations for each visible pair; token i of n lacks the n - 1 - i after it
    pairs = new_tokens * 1500 - new_tokens * (new_tokens - 1) / 2
    assert rows[0].tflops == pytest.approx(4 * 2 * 4 * 16 * pairs / (rows[0].ms * 1e-3) / 1e12)


@pytest.mark.parametrize("page_size", [16, 48])
def test_paged_cache_gives_the_rows_of_the_contiguous_one(
    monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    tables = []
    right = decode.blasst_attn_with_kvcache

    def seen(*args: object, block_table: torch.Tensor | None, **options: object) -> AttentionOutput:
        tables.append(block_table)
        return right(*args, block_table=block_table, **options)

    monkeypatch.setattr(decode, "blasst_attn_with_kvcache", seen)
    flat = decode.measure_decode(tiny(), [0.5], repeats=1).rows
    assert set(tables) == {None}
    tables.clear()
    paged = decode.measure_decode(tiny(), [0.5], page_size=page_size, repeats=1).rows
    table = tables[0]
    assert table is not None and bool((table[0, 1:] - table[0, :-1] != 1).any())
    assert [row.page_size for row in paged] == [0, *[page_size] * 3]
    for name in ("threshold", "sparsity", "max_error"):
        assert [getattr(row, name) for row in paged] == [getattr(row, name) for row in flat]


@pytest.mark.parametrize("page_size", [0, 16])
def test_fp8_cache_is_half_the_bytes_of_the_same_values(
    monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    dtypes = set()
    right = decode.blasst_attn_with_kvcache

    def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> AttentionOutput:
        dtypes.update((k.dtype, v.dtype))
        return right(q, k, v, **options)

    monkeypatch.setattr(decode, "blasst_attn_with_kvcache", seen)
    inputs = tiny(dtype=torch.bfloat16)
    rows = decode.measure_decode(inputs, [0.5], page_size=page_size, fp8=True, repeats=1).rows
    assert dtypes == {torch.float8_e4m3fn}
    assert [row.cache_dtype for row in rows] == [None, *["float8_e4m3fn"] * 3]
    assert all("e4m3" in row.inputs for row in rows)
    whole = 2 * inputs.k.numel()  # elements of K and V
    for row, size in zip(rows, (2, 1), strict=False):
        assert row.tbps == pytest.approx(whole * size / (row.ms * 1e-3) / 1e12)


def test_a_captured_decode_step_is_measured_at_the_lengths_and_batches_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = hot_and_cold_inputs(1, 900, 4, 2, 16, dtype=torch.float32, device=CPU)
    file = tmp_path / "qkv.pt"
    torch.save({"q": whole.q, "k": whole.k, "v": whole.v, "name": "some layer", "softmax_scale": 0.2}, file)
    options = ("--capture", str(file), "--dtype", "fp32", "--repeats", "1", "--sparsities", "0.3", "--json")
    wanted = ("--seqlens", "700,900", "--batch", "1,2", "--new-tokens", "2")
    assert run_inside(monkeypatch, "bench", "decode", *options, *wanted) == 0
    rows = json.loads(capfd.readouterr().out)["rows"]
    shapes = [
        (row["inputs"], row["seqlen_k"], row["batch"], row["num_heads"], row["num_kv_heads"]) for row in rows
    ]
    assert shapes[::4] == [
        (f"captured: some layer, decode at {keys}", keys, batch, 4, 2)
        for keys in (700, 900)
        for batch in (1, 2)
    ]
    step = captured_inputs(file, dtype=torch.float32, device=CPU).decode_step(700, 2, 2)
    assert torch.equal(step.q[1], whole.q[0, 698:700])
    assert torch.equal(step.k[1], whole.k[0, :700])
    assert step.softmax_scale == 0.2
    assert run_inside(monkeypatch, "bench", "decode", *options, "--heads", "4/2") == 2
    assert run_inside(monkeypatch, "bench", "decode", *options, "--seqlens", "901") == 2


def test_pages_hold_the_cache_and_unused_slots_the_fill() -> None:
    cache = torch.randn(2, 50, 1, 3)
    pages, table = pages_from(cache, 16, fill=math.nan)
    found = pages[table.long()].flatten(1, 2)
    assert torch.equal(found[:, :50], cache)
    assert bool(found[:, 50:].isnan().all())
    assert int(pages.isnan().all((1, 2, 3)).sum()) == 3  # spare pages


def shifted(result: AttentionOutput) -> AttentionOutput:
    """Query head 1 of the last sequence is off by 5%."""
    out = result.out.clone()
    out[-1, :, 1] *= 1.05
    return result._replace(out=out)


def all_shifted(result: AttentionOutput) -> AttentionOutput:
    return result._replace(out=result.out + 0.01)


def visiting_wrong(result: AttentionOutput) -> AttentionOutput:
    if result.counts is None:
        return result
    return result._replace(counts=SkipCounts(result.counts.skipped, result.counts.visited - 1))


def keeping_all(result: AttentionOutput) -> AttentionOutput:
    """A map that says that every tile was kept, with counts to match."""
    if result.kept_tiles is None or result.counts is None:
        return result
    counts = SkipCounts(torch.zeros_like(result.counts.skipped), result.counts.visited)
    return result._replace(kept_tiles=torch.ones_like(result.kept_tiles), counts=counts)


@pytest.mark.parametrize(
    ("break_it", "when", "message"),
    [
        (shifted, "dense", "differ from the other dense kernel"),
        (with_nan, "dense", "differ from the other dense kernel"),
        (shifted, "zero", "bit for bit"),
        (all_shifted, "skipping", "max error"),
        (counting_wrong, "skipping", "counts.skipped"),
        (visiting_wrong, "skipping", "counts.visited"),
        (keeping_all, "skipping", "kept_tiles"),
    ],
)
@pytest.mark.parametrize("page_size", [0, 32])
def test_wrong_kernel_is_refused_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch, break_it, when: str, message: str, page_size: int
) -> None:
    right = decode.blasst_attn_with_kvcache

    def wrong(*args: object, threshold: torch.Tensor | None, **options: object) -> AttentionOutput:
        result = right(*args, threshold=threshold, **options)
        now = "dense" if threshold is None else "skipping" if bool(threshold.any()) else "zero"
        return break_it(result) if now == when else result

    monkeypatch.setattr(decode, "blasst_attn_with_kvcache", wrong)
    forbid_timing(monkeypatch)
    with pytest.raises(WrongResultError, match=message):
        decode.measure_decode(tiny(), [0.5], page_size=page_size, repeats=1)


def test_timed_call_that_differs_from_the_checked_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = decode.blasst_attn_with_kvcache

    def wrong(*args: object, return_counts: bool, **options: object) -> AttentionOutput:
        result = right(*args, return_counts=return_counts, **options)
        return result if return_counts or options["threshold"] is None else all_shifted(result)

    monkeypatch.setattr(decode, "blasst_attn_with_kvcache", wrong)
    with pytest.raises(WrongResultError, match="counting must not change"):
        decode.measure_decode(tiny(), [0.5], repeats=1)


def test_cold_l2_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    right = variants.interleaved

    def seen(*args, cold_l2: bool = False, **options):
        asked.append(cold_l2)
        return right(*args, cold_l2=cold_l2, **options)

    monkeypatch.setattr(variants, "interleaved", seen)
    decode.measure_decode(tiny(500), [0.3], repeats=1)
    assert asked == [True]


def test_time_of_the_host_is_taken_in_bursts_that_fit_the_launch_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: events.append("wait"))
    found = host_microseconds(lambda: events.append("call"), torch.device("cuda"))
    assert found is not None and 0 < found < 1e4
    bursts = "".join(event[0] for event in events).split("w")
    assert [len(burst) for burst in bursts] == [0, *[20] * 10, 0]
    assert host_microseconds(lambda: None, CPU) is None


def test_cache_has_levels_of_64_keys_and_few_query_rows() -> None:
    inputs = hot_and_cold_inputs(1, 4096, 2, 2, 64, dtype=torch.float32, device=CPU, seed=3, new_tokens=2)
    assert (inputs.q.shape, inputs.k.shape) == ((1, 2, 2, 64), (1, 4096, 2, 64))
    levels = inputs.k[0, :, 0, 0].unflatten(0, (64, 64))
    assert bool((levels == levels[:, :1]).all())
    assert bool((levels[1:, 0] != levels[:-1, 0]).any())
    assert 1 <= int((levels[:, 0] == 0).sum()) < 8


def test_optional_fields_are_written_only_when_set_and_read_back(tmp_path: Path) -> None:
    row = decode.measure_decode(tiny(500), [0.3], repeats=1).rows[1]
    plain = replace(row, us=None, tbps=None, page_size=None, new_tokens=None)
    file = tmp_path / "rows.jsonl"
    append_rows(file, [row, plain, replace(row, host_us=12.5)], environment())
    assert [pair[0] for pair in read_rows(file)] == [row, plain, replace(row, host_us=12.5)]
    lines = [set(json.loads(line)) for line in file.read_text().splitlines()]
    assert lines[0] == DECODE_KEYS and lines[2] == DECODE_KEYS | {"host_us"}
    assert lines[1] == KEYS


def test_committed_rows_stay_readable() -> None:
    files = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "h200").glob("*.jsonl"))
    assert files
    rows = [row for file in files for row, _ in read_rows(file)]
    assert {row.bench for row in rows} == {"prefill", "decode", "end_to_end"}
    assert all((row.us is None) == (row.bench != "decode") for row in rows)


@pytest.mark.parametrize("wrong", [("--new-tokens", "9"), ("--batch", "0"), ("--page-size", "-1")])
def test_options_out_of_range_are_refused(monkeypatch: pytest.MonkeyPatch, wrong: tuple[str, str]) -> None:
    assert run_inside(monkeypatch, "bench", "decode", *wrong) == 2
