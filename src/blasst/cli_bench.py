"""`blasst bench`: parses, calls, prints. Heavy imports happen inside a command, after its checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from blasst.cli_arguments import (
    HeadCounts,
    Json,
    LengthList,
    Lengths,
    SparsityList,
    Thresholds,
    device_name,
    existing_file,
    head_counts,
    output_file,
    sequence_lengths,
    sparsity_list,
)
from blasst.cli_output import error_console, print_json, print_table, progress_bar
from blasst.kernels.names import Impl

if TYPE_CHECKING:
    import torch

    from blasst.bench.inputs import Inputs
    from blasst.bench.record import BenchmarkRow
    from blasst.bench.variants import BenchmarkResult

bench_app = typer.Typer(
    help="Time kernels, dense and sparse, on the same inputs; correctness first.", no_args_is_help=True
)

Rows = Annotated[
    Path | None, typer.Option(parser=output_file, metavar="FILE", help="Append the rows as JSON lines.")
]

Dtype = Annotated[Literal["bf16", "fp16", "fp32"], typer.Option()]
Repeats = Annotated[
    int | None, typer.Option(min=1, help="Timed calls; default: about 200 ms of each variant.")
]
Seed = Annotated[int, typer.Option(min=0)]
Device = Annotated[
    str | None,
    typer.Option(parser=device_name, metavar="DEVICE", help="torch device; default cuda if there is one."),
]
Sparsities = Annotated[
    SparsityList, typer.Option(parser=sparsity_list, metavar="S,S", help="Wanted sparsities.")
]

_PORTABLE_LENGTHS = LengthList((1024, 4096))
_PREFILL_LENGTHS = LengthList((16384, 65536))
_PREFILL_HEADS = HeadCounts(32, 8)
_SPARSITIES = SparsityList((0.25, 0.5, 0.7, 0.8, 0.9))
_DECODE_LENGTHS = LengthList((16384, 65536))
_DECODE_BATCHES = LengthList((1, 4, 16, 64))
_DECODE_SPARSITIES = SparsityList((0.5, 0.8, 0.95))
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _table(rows: list[BenchmarkRow], names: dict[str, str]) -> list[dict[str, Any]]:
    """Rows with the shown columns only: title -> field."""
    return [{title: asdict(row)[field] for title, field in names.items()} for row in rows]


def measure_all(
    bench: str,
    cases: Sequence[tuple[str, Callable[[], BenchmarkResult]]],
    title: str,
    names: dict[str, str],
    out: Path | None,
    json_output: bool,
) -> None:
    """Measure each case (label, call), add its rows to the file, and print all of them.

    Args:
        bench: for the progress bar.
        cases: each makes its own inputs, so that only one is in memory.
        title: of the table.
        names: columns of the table: title -> field.
        out: JSONL file.
        json_output: one JSON line in place of notes and table.
    """
    from blasst.bench.record import append_rows, environment, row_fields

    block = environment()
    rows: list[BenchmarkRow] = []
    notes: list[str] = []
    with progress_bar(bench) as progress:
        for done, (label, measure) in enumerate(cases):
            progress(done, len(cases), label)
            result = measure()
            rows += result.rows
            notes += [f"{label}: {note}" for note in result.notes]
            if out is not None:  # at once: a later case may fail
                append_rows(out, result.rows, block)
    if json_output:
        print_json({"rows": [row_fields(row) for row in rows], "notes": notes, "environment": block})
        return
    for note in notes:
        error_console.print(f"note: {note}", markup=False)
    print_table(f"{title}; {rows[0].inputs}" if rows else title, _table(rows, names))


@bench_app.command()
def portable(
    phase: Annotated[Literal["prefill", "decode", "both"], typer.Option(help="What to time.")] = "both",
    lengths: Lengths = _PORTABLE_LENGTHS,
    threshold: Thresholds = None,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 2,
    head_dim: Annotated[int, typer.Option(min=16, max=256)] = 64,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option()] = "float32",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each variant, interleaved.")] = 5,
    device: Annotated[str, typer.Option(parser=device_name, metavar="DEVICE", help="torch device.")] = "cpu",
    out: Rows = None,
    json_output: Json = False,
) -> None:
    """Small sizes of both phases at given thresholds, every output against the float64 reference."""
    if heads % kv_heads:
        raise typer.BadParameter(f"--kv-heads {kv_heads} does not divide --heads {heads}")
    import torch

    from blasst.bench.portable import Setting, measure
    from blasst.bench.record import append_rows, environment, row_fields

    phases: list[Literal["prefill", "decode"]] = ["prefill", "decode"] if phase == "both" else [phase]
    settings = [Setting(p, n, batch, heads, kv_heads, head_dim) for p in phases for n in lengths]
    rows = []
    with progress_bar("bench") as progress:
        for done, setting in enumerate(settings):
            progress(done, len(settings), f"{setting.phase} {setting.seqlen}")
            rows += measure(
                setting,
                threshold or [1e-4, 1e-2],
                device=torch_device(device),
                dtype=getattr(torch, dtype),
                repeats=repeats,
            )
    block = environment()
    if out is not None:
        append_rows(out, rows, block)
    if not json_output:
        shown = {"kernel": "kernel", "bench": "bench", "keys": "seqlen_k", "threshold": "threshold"}
        shown |= {"sparsity": "sparsity", "ms": "ms", "ms low": "ms_low", "ms high": "ms_high"}
        print_table(f"Median times; inputs: {rows[0].inputs}", _table(rows, shown))
    print_json({"rows": [row_fields(row) for row in rows], "environment": block})


def _lengths_of_capture(wanted: LengthList | None, whole: Inputs) -> LengthList:
    """The lengths to measure of captured inputs: all of them, or what was asked for."""
    longest = whole.q.shape[1]
    if wanted is not None and wanted[-1] > longest:
        raise typer.BadParameter(f"--seqlens {wanted[-1]}: the capture holds {longest} tokens")
    return wanted or LengthList((longest,))


def _check_capture(**others: object) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]
    if given:
        raise typer.BadParameter(f"{', '.join(given)}: with --capture the file gives the shape")


def torch_device(name: str | None) -> torch.device:
    """The device of that name, or the GPU if there is one.

    Args:
        name: what was typed.

    Raises:
        typer.BadParameter: a GPU that is not there.
    """
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


@bench_app.command()
def prefill(
    seqlens: Annotated[
        LengthList | None,
        typer.Option(
            parser=sequence_lengths, metavar="L,L", help="Tokens; default 16K,64K or the capture's."
        ),
    ] = None,
    heads: Annotated[
        HeadCounts | None,
        typer.Option(parser=head_counts, metavar="Q/KV", help="Query and KV heads; default 32/8."),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=2, help="Default 128.")] = None,
    dtype: Dtype = "bf16",
    batch: Annotated[int | None, typer.Option(min=1, help="Default 1.")] = None,
    non_causal: Annotated[bool, typer.Option("--non-causal", help="Every row sees every key.")] = False,
    impl: Annotated[Impl, typer.Option(help="Kernel, as in blasst_attn_func.")] = "auto",
    sparsities: Sparsities = _SPARSITIES,
    capture: Annotated[
        Path | None,
        typer.Option(
            parser=existing_file, metavar="FILE", help="torch file with q, k and v of a real model."
        ),
    ] = None,
    repeats: Repeats = None,
    seed: Seed = 0,
    device: Device = None,
    out: Rows = None,
    json_output: Json = False,
) -> None:
    """Long prefill: ours dense, at threshold 0 and at wanted sparsities, beside cuDNN."""
    if capture is not None:
        _check_capture(heads=heads, head_dim=head_dim, batch=batch)
    import torch

    from blasst.bench.inputs import captured_inputs, hot_and_cold_inputs
    from blasst.bench.prefill import measure_prefill

    where, torch_dtype = torch_device(device), getattr(torch, DTYPES[dtype])
    whole = None if capture is None else captured_inputs(capture, dtype=torch_dtype, device=where)
    lengths = (seqlens or _PREFILL_LENGTHS) if whole is None else _lengths_of_capture(seqlens, whole)

    def measure(seqlen: int) -> BenchmarkResult:
        if whole is None:
            counts = heads or _PREFILL_HEADS
            inputs = hot_and_cold_inputs(
                batch or 1, seqlen, *counts, head_dim or 128, dtype=torch_dtype, device=where, seed=seed
            )
        else:
            inputs = whole.first(seqlen)
        return measure_prefill(
            inputs, sparsities, causal=not non_causal, impl=impl, repeats=repeats, seed=seed
        )

    shown = {"kernel": "kernel", "tokens": "seqlen_k", "threshold": "threshold", "sparsity": "sparsity"}
    shown |= {"ms": "ms", "TFLOP/s": "tflops", "x cudnn": "ratio_to_cudnn", "x dense": "ratio_to_own_dense"}
    cases = [(f"{seqlen} tokens", partial(measure, seqlen)) for seqlen in lengths]
    title = "Prefill, dense-equivalent TFLOP/s"
    measure_all("bench prefill", cases, title, shown, out, json_output)


@bench_app.command()
def decode(
    seqlens: Annotated[
        LengthList | None,
        typer.Option(
            parser=sequence_lengths,
            metavar="L,L",
            help="Keys of the cache; default 16K,64K or the capture's.",
        ),
    ] = None,
    batch: Annotated[
        LengthList, typer.Option(parser=sequence_lengths, metavar="B,B", help="Sequences.")
    ] = _DECODE_BATCHES,
    heads: Annotated[
        HeadCounts | None,
        typer.Option(parser=head_counts, metavar="Q/KV", help="Query and KV heads; default 32/8."),
    ] = None,
    head_dim: Annotated[int | None, typer.Option(min=2, help="Default 128.")] = None,
    dtype: Dtype = "bf16",
    new_tokens: Annotated[  # at most MAX_DECODE_TOKENS, whose file loads torch
        int, typer.Option(min=1, max=8, help="Query rows of a sequence.")
    ] = 1,
    page_size: Annotated[int, typer.Option(min=0, help="Slots of a page; 0 = contiguous.")] = 0,
    fp8: Annotated[bool, typer.Option("--fp8", help="A float8_e4m3fn cache.")] = False,
    impl: Annotated[Impl, typer.Option(help="Kernel, as in blasst_attn_with_kvcache.")] = "auto",
    sparsities: Sparsities = _DECODE_SPARSITIES,
    capture: Annotated[
        Path | None,
        typer.Option(
            parser=existing_file,
            metavar="FILE",
            help="torch file with q, k and v of a real model; each sequence is a copy of it.",
        ),
    ] = None,
    repeats: Repeats = None,
    seed: Seed = 0,
    device: Device = None,
    out: Rows = None,
    json_output: Json = False,
) -> None:
    """New tokens against a KV cache: ours dense, at threshold 0 and at wanted sparsities, beside cuDNN."""
    if capture is not None:
        _check_capture(heads=heads, head_dim=head_dim)
    import torch

    from blasst.bench.decode import measure_decode
    from blasst.bench.inputs import captured_inputs, hot_and_cold_inputs

    where, torch_dtype = torch_device(device), getattr(torch, DTYPES[dtype])
    whole = None if capture is None else captured_inputs(capture, dtype=torch_dtype, device=where)
    lengths = (seqlens or _DECODE_LENGTHS) if whole is None else _lengths_of_capture(seqlens, whole)

    def measure(seqlen: int, sequences: int) -> BenchmarkResult:
        if whole is None:
            inputs = hot_and_cold_inputs(
                sequences,
                seqlen,
                *(heads or _PREFILL_HEADS),
                head_dim or 128,
                dtype=torch_dtype,
                device=where,
                seed=seed,
                new_tokens=new_tokens,
            )
        else:
            inputs = whole.decode_step(seqlen, new_tokens, sequences)
        return measure_decode(
            inputs, sparsities, page_size=page_size, fp8=fp8, impl=impl, repeats=repeats, seed=seed
        )

    shown = {"kernel": "kernel", "keys": "seqlen_k", "batch": "batch", "threshold": "threshold"}
    shown |= {"sparsity": "sparsity", "us": "us", "TB/s": "tbps", "host us": "host_us"}
    shown |= {"x cudnn": "ratio_to_cudnn", "x dense": "ratio_to_own_dense"}
    cases = [(f"{n} x {seqlen} keys", partial(measure, seqlen, n)) for seqlen in lengths for n in batch]
    measure_all("bench decode", cases, "Decode", shown, out, json_output)


@bench_app.command()
def plot(
    files: Annotated[
        list[Path],
        typer.Argument(parser=existing_file, metavar="FILE...", help="JSON lines of `blasst bench prefill`."),
    ],
    out: Annotated[Path, typer.Option(parser=output_file, metavar="FILE", help="PNG to write.")],
    json_output: Json = False,
) -> None:
    """Speed-up over the dense baseline against sparsity, beside published figures and the roofline."""
    from blasst.bench.record import read_rows
    from blasst.report.speed import speed_figure
    from blasst.report.style import save_png

    figure = speed_figure([pair for file in files for pair in read_rows(file)])
    out.parent.mkdir(parents=True, exist_ok=True)
    save_png(figure, out)
    if json_output:
        print_json({"file": str(out)})
    else:
        print_table("Written", [{"file": str(out)}])
