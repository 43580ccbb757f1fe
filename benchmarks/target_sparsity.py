"""Achieved against target sparsity: our calibration, both exponentials, fixed thresholds; by length and kind.

python benchmarks/target_sparsity.py MODEL --out DIR [--stages counts,achieved] [--minutes N] [--dry-run]

Stage counts runs calibration prompts densely and writes counts.jsonl, one line per prompt and phase: skipped
tiles at each of 64 thresholds. From those profile.json is fitted; fits.json holds what ModelOpt's way to fit
makes of the same points, and thresholds that reach the target at the shortest length. Stage achieved runs
held-out prompts with the skipping kernels and writes achieved.jsonl, one line per prompt, phase and
condition. Lines that exist are kept; --minutes ends a run cleanly. benchmarks/quality_tables.py reads DIR.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blasst.bench.record import environment
from blasst.calibrate.assemble import build_profile
from blasst.calibrate.collect import collect
from blasst.calibrate.counts import CountPoint, count_points, group_by_length, pool
from blasst.calibrate.linear_fit import fit_linear_space
from blasst.calibrate.measure import measure_sparsity
from blasst.calibrate.prompts import PROMPT_KINDS, SPLITS, Prompt, calibration_prompts
from blasst.core.phase_fit import SERVING_RULES
from blasst.core.profile import DataInfo, ModelInfo, Profile, load_profile, model_fingerprint
from blasst.core.types import PHASES, Phase
from blasst.evals.models import LoadedModel, load_model
from blasst.evals.rows import RowFile, TimeLimit


@dataclass(frozen=True)
class CountedRows:
    """Lines of counts.jsonl as the fit takes them."""

    rows: Sequence[dict[str, Any]]

    def points(self, phase: Phase) -> list[CountPoint]:
        """One per line of the phase."""
        return count_points(self.rows, phase)


def prompts_of(loaded: LoadedModel, options: argparse.Namespace, split: str, length: int) -> list[Prompt]:
    """The prompts of one split and length, by kind."""
    return calibration_prompts(
        loaded.tokenizer, [length], per_kind=options.per_kind, split=split, seed=options.seed
    )


def count(loaded: LoadedModel, options: argparse.Namespace, limit: TimeLimit, common: dict[str, Any]) -> bool:
    """Counts of all prompts, then the fits; False when time ran out."""
    keys = ("split", "seqlen", "kind", "index", "phase")
    file = RowFile(options.out / "counts.jsonl", keys, common)
    for length in options.lengths:
        for split in options.splits:
            for number, prompt in enumerate(prompts_of(loaded, options, split, length)):
                if file.has(**name_of(prompt, number, length, options), split=split, phase="decode"):
                    continue
                if limit.over:
                    return False
                tokens = options.decode_tokens
                table = collect(loaded.model, loaded.tokenizer, [prompt], decode_tokens=tokens)
                for record in table.records:
                    file.append(
                        {
                            "split": split,
                            **name_of(prompt, number, length, options),
                            "phase": record.phase,
                            "kv_len": record.kv_len,
                            "visited": int(record.visited.sum()),
                            "thresholds": table.thresholds.tolist(),
                            "skipped": record.skipped.sum(axis=(1, 2)).tolist(),
                            "data_hash": table.data_hash,
                        }
                    )
            print(f"counts {length} {split}: {limit.seconds:.0f} s", flush=True)
    fit(loaded, options, [row for row in file.rows if row["split"] == "calibration"])
    return True


def name_of(prompt: Prompt, number: int, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """The fields by which rows of a prompt are found."""
    return {"seqlen": length, "kind": prompt.kind, "index": number % options.per_kind}


def fit(loaded: LoadedModel, options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write profile.json, and fits.json with what it is compared with."""
    counted, prompts = CountedRows(rows), [row for row in rows if row["phase"] == "prefill"]
    profile = build_profile(
        counted,
        model_info=ModelInfo(loaded.name, model_fingerprint(loaded.model.config.to_dict())),
        data_info=DataInfo(prompts[0]["data_hash"], len(prompts), tuple(sorted(PROMPT_KINDS))),
    )
    profile.save(options.out / "profile.json")
    fits: dict[str, Any] = {"exponential": {}, "linear space": {}, "fixed": {}}
    for phase in PHASES:
        model, points = profile.phase_fit(phase).exponential, counted.points(phase)
        fits["exponential"][phase] = [model.a, model.b]
        fits["linear space"][phase] = list(fit_linear_space(points))
        curve = pool(group_by_length(points)[0])
        fits["fixed"][phase] = {
            str(target): math.exp(np.interp(target, curve.sparsity, np.log(curve.threshold)))
            for target in options.targets
        }
    (options.out / "fits.json").write_text(json.dumps(fits, indent=1) + "\n")


def conditions(options: argparse.Namespace, profile: Profile) -> dict[tuple[str, float], dict[str, Any]]:
    """Settings by method and target."""
    fits = json.loads((options.out / "fits.json").read_text())
    tail = {"dense_tail": SERVING_RULES["prefill"].dense_tail, "impl": options.impl}
    found: dict[tuple[str, float], dict[str, Any]] = {}
    for target in options.targets:
        found["blasst", target] = {"profile": profile, "target_sparsity": target, **tail}
        for name in ("exponential", "linear space"):
            factors = {p: a * math.exp(b * target) for p, (a, b) in fits[name].items()}
            found[name, target] = {"threshold_scale_factor": factors, **tail}
        fixed = {phase: values[str(target)] for phase, values in fits["fixed"].items()}
        found["fixed", target] = {"threshold": fixed, **tail}
    return found


def achieve(
    loaded: LoadedModel, options: argparse.Namespace, limit: TimeLimit, common: dict[str, Any]
) -> bool:
    """Sparsity of the kernels on held-out prompts; False when time ran out."""
    keys = ("method", "target", "seqlen", "kind", "index", "phase")
    file = RowFile(options.out / "achieved.jsonl", keys, common)
    settings = conditions(options, load_profile(options.out / "profile.json"))
    for length in options.lengths:
        prompts = prompts_of(loaded, options, "heldout", length)
        for number, prompt in enumerate(prompts):
            name = name_of(prompt, number, length, options)
            for (method, target), chosen in settings.items():
                if file.has(**name, method=method, target=target, phase="decode"):
                    continue
                if limit.over:
                    return False
                records = measure_sparsity(
                    loaded.model, None, [prompt], decode_tokens=options.decode_tokens, **chosen
                )
                for r in records:
                    counted = {"phase": r.phase, "skipped": r.skipped, "visited": r.visited}
                    file.append({**name, "method": method, "target": target, **counted})
        print(f"achieved {length}: {limit.seconds:.0f} s", flush=True)
    return True


def main() -> None:
    """Parse and run the stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default="counts,achieved")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32752])
    parser.add_argument("--targets", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["calibration"], help="to count")
    parser.add_argument("--per-kind", type=int, default=2, help="prompts per kind, length and split")
    parser.add_argument("--decode-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="begin nothing after so long")
    parser.add_argument("--dry-run", action="store_true", help="say what would run; time a prompt")
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    limit = TimeLimit(options.minutes)
    loaded = load_model(options.model, device=options.device)
    if options.dry_run:
        prompt = prompts_of(loaded, options, "heldout", options.lengths[0])[0]
        limit = TimeLimit(None)
        collect(loaded.model, None, [prompt], decode_tokens=options.decode_tokens)
        prompts = len(options.lengths) * len(PROMPT_KINDS) * options.per_kind
        print(
            f"{len(options.splits) * prompts} counting passes, {prompts * len(options.targets) * 4} sparse "
            f"ones; the first counting pass takes {limit.seconds:.1f} s at {options.lengths[0]}, compiling "
            "included"
        )
        return
    common = {"model": loaded.name, "environment": environment()}
    for stage in options.stages.split(","):
        done = {"counts": count, "achieved": achieve}[stage](loaded, options, limit, common)
        print(f"{stage}: {'complete' if done else 'stopped, run again to go on'}, {limit.seconds:.0f} s")
        if not done:
            return


if __name__ == "__main__":
    main()
