"""The large quality measurement of one model: calibrate, check on held-out prompts, score tasks, compare NLL.

python benchmarks/model_quality.py MODEL --out DIR [--stages calibrate,heldout,tasks,nll] [--device cuda]

MODEL is a folder of a transformers model or a GGUF file. Stages write their own files into DIR and the later
ones read profile.json, so a run can be cut into short pieces; rows of tasks.jsonl that exist are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from blasst.bench.record import environment
from blasst.calibrate.measure import measure_sparsity, pooled_sparsity
from blasst.calibrate.prompts import calibration_prompts
from blasst.core.phase_fit import SERVING_RULES
from blasst.core.profile import load_profile
from blasst.evals.compare import compare_conditions
from blasst.evals.models import LoadedModel, load_model
from blasst.evals.run import run_tasks
from blasst.report.calibration import CalibrationPlan, calibrate_model

STAGES = ("calibrate", "heldout", "tasks", "nll")
#: Tasks that dense solves less often than this say nothing about skipping.
MIN_DENSE_SCORE = 0.2


def numbers(text: str) -> list[int]:
    """Comma-separated integers."""
    return [int(part) for part in text.split(",")]


def conditions(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Settings of each target under its name, in both phases or in one, and of the control.

    Raises:
        ValueError: a target per phase is to run in one phase.
    """
    profile = load_profile(options.out / "profile.json")
    settings: dict[str, dict[str, Any]] = {}
    for phases in options.phases.split(","):
        for target in options.targets:
            name = "/".join(f"{value:g}" for value in target)
            if phases == "both":
                wanted = dict(zip(("prefill", "decode"), target)) if len(target) == 2 else target[0]
            elif len(target) == 1:
                name, wanted = f"{phases} {name}", {phases: target[0]}
            else:
                raise ValueError(f"target {name} names both phases; --phases {phases} wants one number")
            settings[name] = {"profile": profile, "target_sparsity": wanted}
            if options.ignore:
                patterns = options.ignore.split(",")
                settings[f"{name} ignore {options.ignore}"] = {**settings.pop(name), "ignore": patterns}
    if options.control:
        settings["threshold 0"] = {"threshold": 0.0}
    common = {"impl": options.impl, "screen": options.screen}
    if options.dense_tail is not None:
        common["dense_tail"] = options.dense_tail
    return {name: {**value, **common} for name, value in settings.items()}


def calibrate(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """One pass per calibration prompt, then profile.json."""
    rules = dict(SERVING_RULES)
    if options.dense_tail is not None:
        rules["prefill"] = replace(rules["prefill"], dense_tail=options.dense_tail)
    shape = tuple(options.lengths), options.per_kind, options.decode_tokens, options.seed
    plan = CalibrationPlan(*shape, rules=rules, screen=options.screen)
    calibrate_model(loaded, plan).save(options.out / "profile.json")


def heldout(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """Sparsity that the kernels really reach on held-out prompts."""
    prompts = calibration_prompts(
        loaded.tokenizer, options.check_lengths, per_kind=options.per_kind, split="heldout", seed=options.seed
    )
    rows = []
    for name, settings in conditions(options).items():
        records = measure_sparsity(
            loaded.model, loaded.tokenizer, prompts, decode_tokens=options.decode_tokens, **settings
        )
        for phase in ("prefill", "decode"):
            for seqlen in options.check_lengths:
                achieved = pooled_sparsity(records, phase, seqlen)
                rows.append({"phase": phase, "seqlen": seqlen, "condition": name, "achieved": achieved})
                print(rows[-1], flush=True)
        rows += [{"condition": name, **asdict(record)} for record in records]
    write_rows(options.out / "heldout.jsonl", rows)


def tasks(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """All task kinds, dense and at each target, on the same items."""
    settings = {name: {**value, "collect_counts": True} for name, value in conditions(options).items()}
    results = run_tasks(
        loaded.model,
        loaded.tokenizer,
        {"dense": None, **settings},
        tasks=options.tasks.split(",") if options.tasks else None,
        seqlens=options.task_lengths,
        num_items=options.items,
        seed=options.seed,
        batch_size=options.batch_size,
        out=options.out / "tasks.jsonl",
        model_name=loaded.name,
    )
    rows = [asdict(row) for row in results.summary(min_dense_score=MIN_DENSE_SCORE)]
    for row in rows:
        print(
            f"{row['seqlen']} {row['task']:16s} {row['condition']:12s} n={row['n']} dense {row['dense']:.3f} "
            f"sparse {row['sparse']:.3f} difference {row['difference']:+.3f} "
            f"[{row['low']:+.3f}, {row['high']:+.3f}]",
            flush=True,
        )
    rows += [
        {"condition": condition, "seqlen": seqlen, "phase": phase, "sparsity": value}
        for (condition, seqlen, phase), value in results.sparsity.items()
    ]
    print({name: round(value, 1) for name, value in results.seconds.items()}, flush=True)
    write_rows(options.out / "tasks_summary.jsonl", rows)


def nll(loaded: LoadedModel, options: argparse.Namespace) -> None:
    """NLL, agreement with dense and skipped mass on held-out prompts."""
    rows = []
    for seqlen in options.check_lengths:
        prompts = calibration_prompts(
            loaded.tokenizer, [seqlen], per_kind=options.per_kind, split="heldout", seed=options.seed + 1
        )
        kinds = dict.fromkeys(prompt.kind for prompt in prompts) if options.by_kind else ()
        for kind in ("all", *kinds):
            chosen = [p.ids(loaded.tokenizer) for p in prompts if kind in ("all", p.kind)]
            compared = compare_conditions(
                loaded.model,
                chosen,
                conditions(options),
                decode_tokens=options.decode_tokens,
                measure_skipped_mass=kind == "all",
            )
            for name, found in compared.items():
                rows.append({"seqlen": seqlen, "kind": kind, "condition": name, **asdict(found)})
                print(
                    f"{seqlen} {kind:9s} {name} nll {found.nll_dense:.4f} {found.nll_sparse:.4f} "
                    f"({found.nll_difference:+.4f}) kl {found.kl:.4f} top1 {found.top1_agreement:.3f} "
                    f"sparsity {found.sparsity}",
                    flush=True,
                )
    write_rows(options.out / "nll.jsonl", rows)


def targets(text: str) -> list[tuple[float, ...]]:
    """Comma-separated targets: a number for all phases that run, or prefill/decode as in 0.5/0.4."""
    found = [tuple(float(value) for value in part.split("/")) for part in text.split(",")]
    if any(len(target) > 2 for target in found):
        raise ValueError(f"targets {text!r}: want a number or prefill/decode")
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """One JSON object per line, the environment first."""
    lines = [{"environment": environment()}, *rows]
    path.write_text("".join(json.dumps(line, default=dict) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Parse and run the stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--lengths", type=numbers, default=[1024, 2048, 4096, 8176], help="to calibrate on")
    parser.add_argument("--check-lengths", type=numbers, default=[4096, 8176], help="held-out prompts")
    parser.add_argument("--per-kind", type=int, default=3, help="prompts per kind and length")
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--by-kind", action="store_true", help="also compare NLL per kind of prompt")
    parser.add_argument("--targets", type=targets, default=[(0.5,), (0.7,)], help="for example 0.5,0.5/0.4")
    parser.add_argument("--ignore", default="", help="module patterns that stay dense: model.layers.0.*,...")
    parser.add_argument("--phases", default="both", help="both, prefill, decode, or several of them")
    parser.add_argument("--impl", default="auto", help="kernels of the sparse runs")
    parser.add_argument("--dense-tail", type=int, help="last rows dense; default as the profile says")
    parser.add_argument("--screen", choices=["int8"], help="count prefill for it too, and run with it")
    parser.add_argument("--control", action="store_true", help="also run threshold 0: rounding alone")
    parser.add_argument("--task-lengths", type=numbers, default=[4096])
    parser.add_argument("--tasks", default="", help="task kinds; default all")
    parser.add_argument("--items", type=int, default=50, help="per task kind")
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    loaded = load_model(options.model, device=options.device)
    for stage in options.stages.split(","):
        begin = time.perf_counter()
        {"calibrate": calibrate, "heldout": heldout, "tasks": tasks, "nll": nll}[stage](loaded, options)
        print(f"{stage}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
