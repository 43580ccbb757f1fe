"""The command line: parses, calls, prints. Heavy imports happen inside a command, after its checks."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from blasst._version import __version__
from blasst.calibrate.engines import TILE_NAMES, Engine
from blasst.cli_arguments import (
    DEFAULT_MODEL,
    INSTALL_MODEL,
    Json,
    LengthList,
    Lengths,
    Thresholds,
    TileChoice,
    device_name,
    existing_file,
    existing_folder,
    export_output,
    model_argument,
    model_config_file,
    output_file,
    output_folder,
    profile_file,
    sparse_settings,
    sparsity_target,
    tile_choice,
)
from blasst.cli_bench import bench_app
from blasst.cli_end_to_end import end_to_end
from blasst.cli_output import error_console, print_json, print_table, progress_bar
from blasst.core.errors import BlasstError

app = typer.Typer(
    name="blasst",
    help="Sparse attention that skips tiles of keys which cannot matter.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app.command()(end_to_end)
app.add_typer(bench_app, name="bench")

Model = Annotated[
    str,
    typer.Argument(
        callback=model_argument, help=f'"{DEFAULT_MODEL}" (in a wheel), a model folder, or a .gguf file.'
    ),
]
Device = Annotated[str, typer.Option(parser=device_name, metavar="DEVICE", help="torch device to run on.")]
Profile = Annotated[
    Path | None, typer.Option(parser=profile_file, metavar="FILE", help="Calibration file; needs --target.")
]
Targets = Annotated[
    list[float] | None,
    typer.Option(
        "--target", parser=sparsity_target, metavar="S", help="Target sparsity in [0, 1); repeatable."
    ),
]
Screen = Annotated[
    Literal["int8"] | None, typer.Option(help="Also count prefill as blasst.enable(screen=...) skips in it.")
]
_CALIBRATION_LENGTHS = LengthList((1024, 2048, 4096, 8192))
_EVAL_LENGTHS = LengthList((4096,))
_OWN_TILES = TileChoice(("blasst",))

_show_traceback = False


def _print_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"blasst {__version__}\n")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="On an error, print where it happened.")
    ] = False,
) -> None:
    global _show_traceback
    _show_traceback = show_traceback
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched at run time


@app.command()
def doctor(json_output: Json = False) -> None:
    """What this machine can run, and why not the rest."""
    from blasst.report.doctor import examine

    rows = [asdict(finding) for finding in examine(INSTALL_MODEL)]
    if json_output:
        print_json({"findings": rows})
    else:
        print_table("This machine", rows)


def _load_model(name: str, device: str) -> Any:
    """The packaged model, a folder or a GGUF file, as a blasst.evals.models.LoadedModel."""
    from blasst.evals.models import load_model, load_smollm2

    if name == DEFAULT_MODEL:
        return load_smollm2(device=device)
    return load_model(name, device=device)


@app.command()
def calibrate(
    model: Model = DEFAULT_MODEL,
    out: Annotated[Path, typer.Option(parser=output_file, metavar="FILE", help="Profile to write.")] = Path(
        "profile.json"
    ),
    lengths: Lengths = _CALIBRATION_LENGTHS,
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts per kind of text and length.")] = 1,
    decode_tokens: Annotated[
        int, typer.Option(min=0, help="Decode steps after each prompt; 0 = prefill only.")
    ] = 16,
    target: Annotated[
        float | None,
        typer.Option(parser=sparsity_target, metavar="S", help="Default target to keep in the profile."),
    ] = None,
    tiles: Annotated[
        TileChoice,
        typer.Option(
            parser=tile_choice,
            metavar="T,T",
            help=f"Count as these kernels vote, for an export to their engine: {', '.join(TILE_NAMES)}.",
        ),
    ] = _OWN_TILES,
    splits: Annotated[int, typer.Option(min=1, help="KV splits of xqa.")] = 1,
    screen: Screen = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """Count skipped tiles in one pass per prompt and fit the threshold for any target and length."""
    if splits != 1 and "xqa" not in tiles:
        raise typer.BadParameter("--splits is for --tiles xqa")
    if screen is not None and tiles != _OWN_TILES:
        raise typer.BadParameter("--screen is for --tiles blasst")
    if tiles == ("xqa",) and decode_tokens == 0:
        raise typer.BadParameter("--tiles xqa counts decode, so --decode-tokens must be at least 1")
    from blasst.calibrate.tiles import counting_rules
    from blasst.report.calibration import CalibrationPlan, calibrate_model, profile_summary

    rules = counting_rules(tiles, splits=splits)
    plan = CalibrationPlan(tuple(lengths), per_kind, decode_tokens, seed, target, rules, screen)
    loaded = _load_model(model, device)
    with progress_bar("calibrate") as progress:
        profile = calibrate_model(loaded, plan, progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    profile.save(out)
    rows = profile_summary(profile)
    if not json_output:
        print_table(f"Calibration of {loaded.name}", rows)
    print_json({"profile": str(out), "phases": rows})


@app.command("eval")
def evaluate(
    model: Model = DEFAULT_MODEL,
    profile: Profile = None,
    target: Targets = None,
    threshold: Thresholds = None,
    task: Annotated[list[str] | None, typer.Option(help="Task kind; repeatable. Default: all 13.")] = None,
    lengths: Lengths = _EVAL_LENGTHS,
    items: Annotated[int, typer.Option(min=1, help="Items per task and length.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Device = "cpu",
    out: Annotated[
        Path | None, typer.Option(parser=output_file, metavar="FILE", help="Answers as JSON lines; resumed.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Answer the same long-context items dense and sparse, and report paired differences."""
    settings = sparse_settings(profile, target or (), threshold or ())
    from blasst.evals.tasks import TASKS

    unknown = set(task or ()) - set(TASKS)
    if unknown:
        raise typer.BadParameter(f"unknown task {', '.join(sorted(unknown))}; known: {', '.join(TASKS)}")
    from blasst.evals.run import run_tasks

    if profile is not None:
        from blasst.core.profile import load_profile

        load_profile(profile)
    loaded = _load_model(model, device)
    with progress_bar("eval") as progress:
        results = run_tasks(
            loaded.model,
            loaded.tokenizer,
            {"dense": None, **{name: {**value, "collect_counts": True} for name, value in settings.items()}},
            tasks=task,
            seqlens=lengths,
            num_items=items,
            seed=seed,
            batch_size=batch_size,
            out=out,
            model_name=loaded.name,
            progress=progress,
        )
    summary = [asdict(row) for row in results.summary()]
    sparsity = [
        {"condition": condition, "seqlen": seqlen, "phase": phase, "sparsity": value}
        for (condition, seqlen, phase), value in results.sparsity.items()
    ]
    if not json_output:
        print_table("Scores, sparse beside dense on the same items (95% interval of the difference)", summary)
        print_table("Realised sparsity", sparsity)
    print_json({"summary": summary, "sparsity": sparsity, "seconds": dict(results.seconds)})


@app.command()
def inspect(
    model: Model = DEFAULT_MODEL,
    profile: Profile = None,
    target: Targets = None,
    threshold: Thresholds = None,
    prompt: Annotated[
        Path | None,
        typer.Option(parser=existing_file, metavar="FILE", help="Text file; default: prose of --length."),
    ] = None,
    length: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 2048,
    decode_tokens: Annotated[int, typer.Option(min=0, help="Tokens fed one at a time at the end.")] = 16,
    layer: Annotated[int, typer.Option(min=0, help="Layer of the skip map.")] = 0,
    head: Annotated[int, typer.Option(min=0, help="Query head of the skip map.")] = 0,
    out: Annotated[
        Path | None, typer.Option(parser=output_folder, metavar="DIR", help="Write the pictures there.")
    ] = None,
    device: Device = "cpu",
    json_output: Json = False,
) -> None:
    """What every layer and head skips for one prompt, and the skip map of one head."""
    if len(target or ()) + len(threshold or ()) > 1:
        raise typer.BadParameter("inspect takes one --target or one --threshold")
    if decode_tokens >= length:
        raise typer.BadParameter("--decode-tokens must be below --length")
    settings = next(iter(sparse_settings(profile, target or (), threshold or ()).values()))
    from blasst.report.inspect import inspect_prompt

    inspection = inspect_prompt(
        _load_model(model, device),
        settings,
        prompt=prompt,
        length=length,
        decode_tokens=decode_tokens,
        layer=layer,
        head=head,
        out=out,
    )
    if not json_output:
        error_console.print(inspection.rules, markup=False)
        print_table(f"Layers, {inspection.seqlen} tokens", [asdict(row) for row in inspection.layers])
    print_json(inspection.summary())


@app.command()
def export(
    profile: Annotated[
        Path, typer.Argument(parser=profile_file, metavar="PROFILE", help="Calibration file.")
    ],
    to: Annotated[Engine, typer.Option("--to", help="Engine to write for.")],
    target: Annotated[
        float | None,
        typer.Option(parser=sparsity_target, metavar="S", help="Default: the targets in the profile."),
    ] = None,
    decode_target: Annotated[
        float | None,
        typer.Option(parser=sparsity_target, metavar="S", help="Another target for decode than --target."),
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Keys at which the factors shall be exact; not for modelopt.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Module pattern that stays dense; modelopt only; repeatable.")
    ] = None,
    attention_class: Annotated[
        list[str] | None, typer.Option(help="Class name of attention modules; modelopt only; repeatable.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=model_config_file,
            metavar="FILE",
            help="config.json of the model, or its folder: write a copy with the setting; modelopt only.",
        ),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Write into --config itself instead of a copy.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(parser=output_file, metavar="FILE", help="Write there; default: print.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Write a calibration as the setting of another engine, and say where that engine differs."""
    out = export_output(to, config, in_place, out)
    if decode_target is not None and target is None:
        raise typer.BadParameter("--decode-target needs --target, which is then that of prefill")
    from blasst.calibrate.checkpoint import replace_file
    from blasst.calibrate.export import export_profile
    from blasst.core.profile import load_profile

    setting = export_profile(
        load_profile(profile, serving=False),
        to,
        target_sparsity=target if decode_target is None else {"prefill": target, "decode": decode_target},
        kv_len=length,
        targets=attention_class or (),
        ignore=ignore or (),
        model_config=config,
    )
    if out is not None:
        replace_file(out, setting.text)
    if json_output:
        print_json({**asdict(setting), "file": None if out is None else str(out)})
        return
    for note in setting.notes:
        error_console.print(f"note: {note}", markup=False)
    if out is None:
        sys.stdout.write(setting.text)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(parser=existing_folder, metavar="DIR", help="Folder of a demo.")],
    json_output: Json = False,
) -> None:
    """Draw the pictures and the page again from the JSON files of a folder."""
    from blasst.report.write import redraw_report

    files = [str(path) for path in redraw_report(folder)]
    if not json_output:
        print_table("Written", [{"file": name} for name in files])
    print_json({"files": files})


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(parser=output_folder, metavar="DIR", help="Folder for the report.")
    ] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Shorter prompts and fewer items.")] = False,
    json_output: Json = False,
) -> None:
    """Calibrate a small real model, run it dense and sparse, and write a report with pictures."""
    model_argument(DEFAULT_MODEL)
    from blasst.report.demo import FULL, PROFILE_FILE, QUICK, run_demo
    from blasst.report.write import write_report

    with progress_bar("demo") as progress:
        result = run_demo(QUICK if quick else FULL, progress)
    files = write_report(out, result.report, result.figures)
    result.profile.save(out / PROFILE_FILE)
    if not json_output:
        print_table("Held-out prompts: target and achieved sparsity", result.report.calibration)
        print_table("Loss, nats per token", result.report.nll)
        print_table("Task scores", result.report.quality)
        print_table("Skipped softmax mass", result.report.skipped_mass)
        for note in result.figures.notes:
            error_console.print(f"note: {note}", markup=False)
    print_json({"report": str(files[-1]), "seconds": result.report.environment["seconds"]})


def run() -> int:
    """Run the command line; an error of ours is one line on stderr.

    Returns:
        0 = done, 1 = failed, 2 = bad arguments.
    """
    try:
        app()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except (BlasstError, ValueError, OSError, ImportError) as error:
        if _show_traceback:
            traceback.print_exc()
        error_console.print(f"error: {error}", markup=False)
        return 2 if isinstance(error, ValueError) else 1
    return 0
