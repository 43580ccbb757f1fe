"""NLL, agreement with dense, skipped mass and its certified bound against sparsity and against error budgets.

python benchmarks/nll_mass.py MODEL --profile profile.json --out nll.jsonl --lengths 4096 16384 [--minutes N]

One line per length and condition, over held-out prompts of all kinds (--per-kind of each): the fields of
blasst.evals.compare.Comparison, layers included. Conditions: each target, in both phases, and each error
budget at threshold 1. Lines that exist are kept. benchmarks/quality_tables.py reads them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blasst.bench.record import environment
from blasst.calibrate.prompts import PROMPT_KINDS, calibration_prompts
from blasst.core.phase_fit import SERVING_RULES
from blasst.core.profile import Profile, load_profile
from blasst.evals.compare import compare
from blasst.evals.models import load_model
from blasst.evals.rows import RowFile, TimeLimit


def conditions(options: argparse.Namespace, profile: Profile) -> dict[str, dict[str, Any]]:
    """Settings by name."""
    common = {"dense_tail": SERVING_RULES["prefill"].dense_tail, "impl": options.impl}
    found: dict[str, dict[str, Any]] = {}
    for target in options.targets:
        found[f"{target:g}"] = {"profile": profile, "target_sparsity": target, **common}
    for budget in options.budgets:
        found[f"budget {budget:g}"] = {"threshold": 1.0, "max_skipped_mass": budget, **common}
    return found


def main() -> None:
    """Parse, compare, append."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--targets", type=float, nargs="+", default=[0.3, 0.5, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.01, 0.03, 0.1])
    parser.add_argument("--by-kind", action="store_true", help="also one line per kind of prompt")
    parser.add_argument("--per-kind", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--decode-tokens", type=int, default=16)
    parser.add_argument("--last-tokens", type=int, help="only so many last predictions of a prompt count")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, help="begin nothing after so long")
    parser.add_argument("--dry-run", action="store_true", help="time one comparison, say what would run")
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    limit = TimeLimit(options.minutes)
    loaded = load_model(options.model, device=options.device)
    settings = conditions(options, load_profile(options.profile))
    common = {"model": loaded.name, "environment": environment()}
    file = RowFile(options.out, ("seqlen", "kind", "condition"), common)
    for length in options.lengths:
        prompts = calibration_prompts(
            loaded.tokenizer, [length], per_kind=options.per_kind, split="heldout", seed=options.seed
        )
        kinds = ("all", *PROMPT_KINDS) if options.by_kind else ("all",)
        for kind in kinds:
            chosen = [p.ids(loaded.tokenizer) for p in prompts if kind in ("all", p.kind)]
            for name, setting in settings.items():
                if file.has(seqlen=length, kind=kind, condition=name):
                    continue
                if limit.over:
                    print("stopped, run again to go on")
                    return
                start = time.perf_counter()
                found = compare(
                    loaded.model,
                    chosen[:1] if options.dry_run else chosen,
                    setting,
                    last_tokens=options.last_tokens,
                    decode_tokens=options.decode_tokens,
                )
                seconds = time.perf_counter() - start
                if options.dry_run:
                    runs = len(options.lengths) * len(kinds) * len(settings) * len(chosen)
                    print(f"{runs} comparisons of one prompt; the first, at {length}, took {seconds:.1f} s")
                    return
                row = {"seqlen": length, "kind": kind, "condition": name, "prompts": len(chosen)}
                file.append(json.loads(json.dumps({**row, **asdict(found)})))
                shares = {phase: round(value, 3) for phase, value in found.sparsity.items()}
                print(
                    f"{limit.seconds:6.0f} s  {length} {kind} {name}: nll {found.nll_difference:+.4f} "
                    f"kl {found.kl:.4f} sparsity {shares}",
                    flush=True,
                )
    print(f"complete, {limit.seconds:.0f} s")


if __name__ == "__main__":
    main()
