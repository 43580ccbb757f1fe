"""The demo: calibrate a small real model, run it dense and sparse, and report what happened."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blasst.bench.record import environment
from blasst.calibrate.collect import CountTable, collect
from blasst.calibrate.prompts import PROMPT_KINDS, Prompt, calibration_prompts, prompts_hash
from blasst.core.profile import Profile
from blasst.core.types import PHASES, PREFILL_TILE
from blasst.evals.compare import compare_conditions
from blasst.evals.comparison import Comparison
from blasst.evals.models import LoadedModel, load_smollm2
from blasst.evals.run import TaskResults, run_tasks
from blasst.report.calibration import fit_table
from blasst.report.contents import FigureData, Report, Row
from blasst.report.curves import calibration_rows, kind_rows
from blasst.report.inspect import Inspection, SkipMap, inspect_sequence, mass_histogram, skip_map
from blasst.report.workers import Job, WorkerPool

Progress = Callable[[int, int, str], None]

PROFILE_FILE = "profile.json"

#: Most worker processes; each holds the model and up to about 2 GiB of activations.
_MAX_WORKERS = 8


@dataclass(frozen=True)
class DemoPlan:
    """What the demo runs.

    Attributes:
        calibration_lengths: tokens of the calibration prompts, one prompt of each kind per length.
        heldout_lengths: tokens of the prompts that check the profile, one of each kind per length.
        mass_lengths: those of them at which the skipped mass is measured too (a second dense attention).
        targets: target sparsities.
        decode_tokens: decode steps after each prompt.
        nll_tokens: last predictions of each held-out prompt that enter the loss.
        tasks: task kinds.
        task_length: token budget of a task item.
        items: items per task.
        inspect_length: tokens of the prompt whose layers and heads are shown.
    """

    calibration_lengths: tuple[int, ...]
    heldout_lengths: tuple[int, ...]
    mass_lengths: tuple[int, ...]
    targets: tuple[float, ...] = (0.5, 0.7)
    decode_tokens: int = 16
    nll_tokens: int = 512
    tasks: tuple[str, ...] = ("niah_single_1", "niah_multikey_1", "vt", "qa_1")
    task_length: int = 2048
    items: int = 4
    inspect_length: int = 4096


FULL = DemoPlan(
    calibration_lengths=(1024, 2048, 4096, 8192), heldout_lengths=(4096, 8192), mass_lengths=(4096,)
)
QUICK = DemoPlan(
    calibration_lengths=(512, 1024, 2048),
    heldout_lengths=(2048,),
    mass_lengths=(2048,),
    decode_tokens=8,
    tasks=("niah_single_1", "vt"),
    task_length=1024,
    items=2,
    inspect_length=2048,
)


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo measured.

    Attributes:
        profile: the calibration.
        report: the measured rows.
        figures: numbers behind the figures.
    """

    profile: Profile
    report: Report
    figures: FigureData


def _count(loaded: LoadedModel, prompt: Prompt, decode_tokens: int) -> CountTable:
    return collect(loaded.model, loaded.tokenizer, [prompt], decode_tokens=decode_tokens)


def _compare(
    loaded: LoadedModel,
    sequences: Sequence[Sequence[int]],
    conditions: dict[str, dict[str, Any]],
    options: dict[str, Any],
) -> dict[str, Comparison]:
    return compare_conditions(loaded.model, sequences, conditions, **options)


def _answer(loaded: LoadedModel, conditions: dict[str, Any], options: dict[str, Any]) -> TaskResults:
    return run_tasks(loaded.model, loaded.tokenizer, conditions, model_name=loaded.name, **options)


def _inspect(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    profile: Profile,
    target: float,
    decode_tokens: int,
    with_map: bool,
) -> tuple[Inspection, SkipMap | None]:
    """One prompt in detail; with_map adds the skip map of the head with sparsity nearest to the target."""
    settings = {"profile": profile, "target_sparsity": target}
    seen = inspect_sequence(loaded.model, token_ids, settings, decode_tokens=decode_tokens)
    if not with_map:
        return seen, None
    heads = seen.head_sparsity["prefill"]
    layer, head = np.unravel_index(np.abs(heads - target).argmin(), heads.shape)
    threshold = profile.threshold("prefill", target, len(token_ids))
    tail = profile.phase_fit("prefill").dense_tail
    place = {"layer": int(layer), "head": int(head)}
    return seen, skip_map(loaded.model, token_ids, threshold=threshold, dense_tail=tail, **place)


def _merged(tables: Sequence[CountTable], prompts: Sequence[Prompt]) -> CountTable:
    """One table from the tables of single prompts."""
    return CountTable(
        thresholds=tables[0].thresholds,
        layers=tables[0].layers,
        records=tuple(record for table in tables for record in table.records),
        data_hash=prompts_hash([prompt.ids(None) for prompt in prompts]),
        num_prompts=len(prompts),
    )


def _calibrate(pool: WorkerPool, loaded: LoadedModel, plan: DemoPlan, progress: Progress) -> Profile:
    limit = loaded.model.config.max_position_embeddings - plan.decode_tokens
    lengths = [min(length, limit) for length in plan.calibration_lengths]
    prompts = calibration_prompts(loaded.tokenizer, sorted(lengths, reverse=True))
    jobs = [
        Job(
            f"calibrate on {prompt.kind}, {len(prompt.ids(None))} tokens",
            _count,
            {"prompt": prompt, "decode_tokens": plan.decode_tokens},
        )
        for prompt in prompts
    ]
    return fit_table(_merged(pool.run(jobs, progress), prompts), loaded, PROMPT_KINDS)


def _heldout_jobs(loaded: LoadedModel, plan: DemoPlan, conditions: dict[str, Any]) -> list[Job]:
    """One job per prompt where that is enough; where masses are pooled, one for all kinds of a length."""
    jobs = []
    for length in sorted(plan.heldout_lengths, reverse=True):
        prompts = calibration_prompts(loaded.tokenizer, [length], split="heldout")
        with_mass = length in plan.mass_lengths
        for group in [prompts] if with_mass else [[prompt] for prompt in prompts]:
            kinds = ", ".join(prompt.kind for prompt in group)
            arguments = {
                "sequences": [prompt.ids(None) for prompt in group],
                "conditions": conditions,
                "options": {
                    "last_tokens": plan.nll_tokens,
                    "decode_tokens": plan.decode_tokens,
                    "measure_skipped_mass": with_mass,
                },
            }
            jobs.append(Job(f"held-out {kinds}, {length} tokens", _compare, arguments))
    return jobs


def _task_jobs(plan: DemoPlan, conditions: dict[str, Any]) -> list[Job]:
    return [
        Job(
            f"{plan.items} items of {task}, {plan.task_length} tokens",
            _answer,
            {
                "conditions": {"dense": None, **conditions},
                "options": {
                    "tasks": [task],
                    "seqlens": [plan.task_length],
                    "num_items": plan.items,
                    "batch_size": plan.items,
                },
            },
        )
        for task in plan.tasks
    ]


def _inspect_jobs(loaded: LoadedModel, plan: DemoPlan, profile: Profile) -> list[Job]:
    prompt = calibration_prompts(loaded.tokenizer, [plan.inspect_length], kinds=["prose"], split="heldout")[0]
    return [
        Job(
            f"layers and heads at {target:.0%}, {plan.inspect_length} tokens",
            _inspect,
            {
                "token_ids": prompt.ids(None),
                "profile": profile,
                "target": target,
                "decode_tokens": plan.decode_tokens,
                "with_map": target == plan.targets[0],
            },
        )
        for target in plan.targets
    ]


def _heldout_rows(
    jobs: Sequence[Job], results: Sequence[Any], plan: DemoPlan
) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows of calibration, nll and skipped_mass.

    Prompts of one length visit the same tiles, so the mean of their sparsities is the pooled sparsity.
    """
    calibration, nll, masses = [], [], []
    for length in plan.heldout_lengths:
        for target in plan.targets:
            found: list[Comparison] = [
                result[f"{target:g}"]
                for job, result in zip(jobs, results)
                if len(job.arguments["sequences"][0]) == length
            ]
            weights = [comparison.num_tokens for comparison in found]
            calibration += [
                {
                    "phase": phase,
                    "seqlen": length,
                    "target": target,
                    "achieved": float(np.mean([comparison.sparsity[phase] for comparison in found])),
                }
                for phase in PHASES
                if all(phase in comparison.sparsity for comparison in found)
            ]
            nll.append(
                {
                    "seqlen": length,
                    "target": target,
                    "dense": float(np.average([c.nll_dense for c in found], weights=weights)),
                    "sparse": float(np.average([c.nll_sparse for c in found], weights=weights)),
                }
            )
            if length in plan.mass_lengths:
                masses += [
                    {
                        "phase": phase,
                        "seqlen": length,
                        "target": target,
                        "mean": mass.mean,
                        "p99": mass.p99,
                        "max": mass.max,
                    }
                    for phase, mass in found[0].skipped_mass.items()
                ]
    return calibration, nll, masses


def _quality_rows(results: Sequence[Any], plan: DemoPlan) -> list[Row]:
    rows = []
    for result in results:
        for row in result.summary():
            if row.task != "mean":
                rows.append(
                    {
                        "phase": "both",
                        "seqlen": row.seqlen,
                        "target": float(row.condition),
                        "task": row.task,
                        "n": row.n,
                        "dense": row.dense,
                        "sparse": row.sparse,
                    }
                )
    return rows


def _figure_data(profile: Profile, seen: Sequence[Any], plan: DemoPlan) -> FigureData:
    points, curves = calibration_rows(profile)
    first, tiles = seen[0]
    return FigureData(
        points=points,
        curves=curves,
        head_sparsity={phase: heads.tolist() for phase, heads in first.head_sparsity.items()},
        head_target=plan.targets[0],
        skip_map={
            "kept": tiles.kept.astype(int).tolist(),
            "visited": tiles.visited.astype(int).tolist(),
            "tile": [PREFILL_TILE.query, PREFILL_TILE.key],
            "title": tiles.title,
        },
        histograms=[
            {"phase": phase, "seqlen": plan.inspect_length, "target": target, **mass_histogram(samples)}
            for target, result in zip(plan.targets, seen)
            for phase, samples in result[0].mass_samples.items()
        ],
        kinds=kind_rows(profile),
        notes=_out_of_reach(profile, plan),
    )


def _out_of_reach(profile: Profile, plan: DemoPlan) -> list[str]:
    """A sentence for each phase and length at which a target lies above everything that was counted."""
    lengths = sorted({plan.task_length, plan.inspect_length, *plan.heldout_lengths})
    return [
        f"{phase} at {length} tokens: the target of {target:.0%} is out of reach; no threshold up to 1 skips "
        f"more than {reachable:.0%} of the tiles of the calibration prompts there."
        for phase, fit in profile.phases.items()
        for length in lengths
        for target in plan.targets
        if target > (reachable := fit.reachable_sparsity(length))
    ]


def run_demo(plan: DemoPlan, progress: Progress) -> DemoResult:
    """Calibrate SmolLM2, then measure achieved sparsity, loss, skipped mass and task scores.

    Args:
        plan: FULL, QUICK, or one of your own.
        progress: called with jobs done, jobs in all and a label; for the calibration, then for the rest.

    Raises:
        FileNotFoundError: the model's wheel is not installed.
        CalibrationError: the counts cannot be fitted.
    """
    started = time.monotonic()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = max(1, min(cores, _MAX_WORKERS))
    progress(0, 1, "load the model")
    with tempfile.TemporaryDirectory(prefix="blasst-demo-") as folder:
        loaded = load_smollm2(cache_dir=folder)
        model_folder = next(path for path in Path(folder).iterdir() if path.is_dir())
        with WorkerPool(model_folder, loaded.name, workers=workers) as pool:
            profile = _calibrate(pool, loaded, plan, progress)
            conditions = {
                f"{target:g}": {"profile": profile, "target_sparsity": target} for target in plan.targets
            }
            heldout = _heldout_jobs(loaded, plan, conditions)
            tasks = _task_jobs(plan, conditions)
            inspections = _inspect_jobs(loaded, plan, profile)
            results = pool.run([*heldout, *inspections, *tasks], progress)
    compared = results[: len(heldout)]
    seen = results[len(heldout) : len(heldout) + len(inspections)]
    calibration, nll, masses = _heldout_rows(heldout, compared, plan)
    block = {
        **environment(),
        "model": loaded.name,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "workers": workers,
        "seconds": round(time.monotonic() - started, 1),
        **{f"plan: {key}": _plain(value) for key, value in asdict(plan).items()},
    }
    report = Report(calibration, _quality_rows(results[-len(tasks) :], plan), nll, masses, block)
    return DemoResult(profile, report, _figure_data(profile, seen, plan))


def _plain(value: Any) -> Any:
    """A plan's value as the environment table shows it."""
    return ", ".join(f"{part}" for part in value) if isinstance(value, tuple) else value
