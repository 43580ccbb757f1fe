"""`blasst bench end-to-end`: parses, calls, prints. Heavy imports happen inside the command."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from blasst.cli_arguments import Json, SparsityList, StepList, model_argument, step_list
from blasst.cli_bench import DTYPES, Device, Dtype, Rows, Seed, Sparsities, measure_all, torch_device
from blasst.cli_output import error_console
from blasst.kernels.names import Impl

if TYPE_CHECKING:
    from blasst.bench.end_to_end import Curve
    from blasst.bench.steps import Step
    from blasst.bench.variants import BenchmarkResult

_SPARSITIES = SparsityList((0.5, 0.7))
_USUAL_STEPS = step_list("32K,64K,128K"), step_list("64K,64Kx8")
_USUAL_STEPS_OF_A_MODEL = step_list("8K,16K,32K,8Kx8,16Kx8,32Kx8"), step_list("8K,16K,32K,8Kx8,16Kx8,32Kx8")
_Steps = Annotated[
    StepList | None,
    typer.Option(parser=step_list, metavar="LxB,LxB", help="Tokens x sequences of each step, or none."),
]


def end_to_end(
    model: Annotated[
        str | None,
        typer.Option(
            parser=model_argument, metavar="PATH", help="A model folder or .gguf file, in place of a shape."
        ),
    ] = None,
    shape: Annotated[
        Literal["llama-3.1-8b", "tiny"], typer.Option(help="Random weights in the shape of this model.")
    ] = "llama-3.1-8b",
    prefill: _Steps = None,
    decode: _Steps = None,
    sparsities: Sparsities = _SPARSITIES,
    attention_gain: Annotated[
        float, typer.Option(min=0.1, max=4.0, help="Random weights: spread of the attention scores.")
    ] = 1.0,
    dtype: Dtype = "bf16",
    impl: Annotated[Impl, typer.Option(help="Kernel, as in blasst_attn_func.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of all contestants.")] = 3,
    step_limit: Annotated[
        float, typer.Option(min=1.0, help="Seconds of a step after which no further round begins.")
    ] = 120.0,
    seed: Seed = 0,
    device: Device = None,
    out: Rows = None,
    json_output: Json = False,
) -> None:
    """A whole model through transformers: time to the first token (prefill) and per output token (decode).

    Steps whose rows are in the file of --out already are left out.
    """
    import torch

    from blasst.bench.end_to_end import measure_step
    from blasst.bench.model import local_model, random_model
    from blasst.bench.record import environment
    from blasst.bench.steps import Step, check_steps, missing_steps
    from blasst.bench.variants import BenchmarkResult
    from blasst.core.errors import BlasstError

    usual = _USUAL_STEPS if model is None else _USUAL_STEPS_OF_A_MODEL
    steps = [
        Step("decode", *pair) for pair in (usual[1] if decode is None else decode)
    ]  # the short ones first
    steps += [Step("prefill", *pair) for pair in (usual[0] if prefill is None else prefill)]
    where, torch_dtype = torch_device(device), getattr(torch, DTYPES[dtype])
    if model is None and shape != "tiny" and where.type == "cpu":
        raise typer.BadParameter(f"--shape {shape} needs a GPU; --shape tiny tries the command without one")
    if model is None:
        runs = random_model(shape, dtype=torch_dtype, device=where, attention_gain=attention_gain, seed=seed)
    else:
        runs = local_model(model, dtype=torch_dtype, device=where, seed=seed)
    check_steps(steps, runs)
    missing = missing_steps(out, steps, runs, sparsities, environment()["gpu"], impl)
    failed: list[Step] = []
    curves: dict[str, Curve] = {}

    def measure(step: Step) -> BenchmarkResult:
        try:
            done = measure_step(
                runs,
                step,
                sparsities,
                impl=impl,
                repeats=repeats,
                limit_s=step_limit,
                curve=curves.get(step.phase),
            )
        except (BlasstError, RuntimeError) as error:  # the other steps may still run
            failed.append(step)
            return BenchmarkResult([], [f"failed, {type(error).__name__}: {error}"])
        curves[step.phase] = done.curve
        return BenchmarkResult(done.rows, done.notes)

    for step in steps:
        if step not in missing:
            error_console.print(f"{step}: its rows are in the file already", markup=False)
    shown = {"contestant": "contestant", "phase": "phase", "tokens": "seqlen_k", "batch": "batch"}
    shown |= {"sparsity": "sparsity", "ms": "ms", "x cudnn": "ratio_to_cudnn"}
    cases = [(str(step), partial(measure, step)) for step in missing]
    measure_all("bench end-to-end", cases, f"End to end, {runs.name}", shown, out, json_output)
    if failed:
        raise typer.Exit(1)
