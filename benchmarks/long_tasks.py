"""Long-context tasks, dense against skipping and against other methods, with prompt passes shared.

python benchmarks/long_tasks.py MODEL --profile profile.json --out tasks.jsonl --seqlen 16384 --items 25
python benchmarks/long_tasks.py MODEL --profile profile.json --out methods.jsonl --seqlen 8192 --phases none
    --methods XAttention,FlexPrefill,MInference,SpargeAttention,Quest,RocketKV,SnapKV,H2O --composed Quest

Conditions are named by target ("0.5" both phases, "prefill 0.5", "decode 0.5") or "METHOD 0.5"; a method
works in its own phase, the other stays dense. Prefill methods get one dial per target, measured on
calibration prompts of the length and kept in dials.json beside the rows, and as many last rows dense as
blasst has; decode methods keep that share of the tiles. "METHOD + blasst" leaves out half by the method, and
blasst has its threshold of the target in what is left. Items that have rows are not run again; --minutes
ends a run cleanly. benchmarks/quality_tables.py reads the rows.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from blasst import selectors
from blasst.bench.record import environment
from blasst.calibrate.prompts import calibration_prompts
from blasst.core.profile import Profile, load_profile
from blasst.core.types import PHASES, Phase
from blasst.evals.methods import Method, decode_dial, prefill_dials
from blasst.evals.models import LoadedModel, load_model
from blasst.evals.rows import TimeLimit
from blasst.evals.selector_quality import DECODE_SELECTORS, PREFILL_SELECTORS
from blasst.evals.shared import SharedRun, Variant, blocks_of, prompt_source
from blasst.evals.tasks import TASKS
from blasst.integrations.threshold_rules import resolve_rules

_PREFILL = tuple(type(selector).__name__ for selector in PREFILL_SELECTORS)
_DECODE = tuple(type(selector).__name__ for selector in DECODE_SELECTORS)


def blasst_method(profile: Profile, phase: Phase, target: float) -> Method:
    """blasst at a target, as `blasst.enable` would run it."""
    rule = resolve_rules(profile, target, None, None)[phase]
    return Method(rule=rule, dense_tail=rule.dense_tail if phase == "prefill" else 0)


def dials_of(
    loaded: LoadedModel, options: argparse.Namespace, names: list[str]
) -> dict[str, dict[str, float]]:
    """Dial of each prefill method at each share to leave out; measured once per length, then read."""
    path = options.out.with_name("dials.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    own = known.setdefault(str(options.seqlen), {})
    shares = sorted({share for target in options.targets for share in (target, target / 2)})
    wanted = [n for n in names if n in _PREFILL and {str(s) for s in shares} - set(own.get(n, {}))]
    if wanted:
        prompts = calibration_prompts(loaded.tokenizer, [options.seqlen], per_kind=1, seed=options.seed)
        kinds = {name: getattr(selectors, name)() for name in wanted}
        found = prefill_dials(loaded.model, [p.ids(loaded.tokenizer) for p in prompts], kinds, shares)
        for name, dials in found.items():
            own.setdefault(name, {}).update({str(share): dial for share, dial in dials.items()})
        path.write_text(json.dumps(known, indent=1) + "\n")
    return dict(own)


def variants_of(loaded: LoadedModel, options: argparse.Namespace, profile: Profile) -> dict[str, Variant]:
    """All conditions by name, dense first."""
    found = {"dense": Variant()}
    for target in options.targets:
        own = {p: blasst_method(profile, p, target) for p in PHASES}
        for phases in options.phases:
            if phases == "both":
                found[f"{target:g}"] = Variant(own["prefill"], own["decode"])
            elif phases != "none":
                found[f"{phases} {target:g}"] = Variant(**{phases: own[phases]})
    tail = blasst_method(profile, "prefill", options.targets[0]).dense_tail
    names = [name for name in options.methods.split(",") if name]
    composed = [name for name in options.composed.split(",") if name]
    dials = dials_of(loaded, options, [*names, *composed])
    for name in (*names, *composed):
        if name not in (*_PREFILL, *_DECODE):
            raise SystemExit(f"method {name!r}: known are {', '.join((*_PREFILL, *_DECODE))}")
    for target in options.targets:
        for name in names:
            plain = Method(dense_tail=tail if name in _PREFILL else 0)
            found[f"{name} {target:g}"] = method_variant(name, target, dials, plain)
        for name in composed:
            phase: Phase = "prefill" if name in _PREFILL else "decode"
            inside = blasst_method(profile, phase, target)
            found[f"{name} + blasst {target:g}"] = method_variant(name, target / 2, dials, inside)
    return found


def method_variant(name: str, share: float, dials: dict[str, dict[str, float]], inside: Method) -> Variant:
    """A selector that leaves out a share, and what happens in the tiles it leaves."""
    phase, dial = "decode", 0.0
    if name in _PREFILL:
        phase, dial = "prefill", dials[name][str(share)]
    else:
        dial = decode_dial(share)
    selector: Any = getattr(selectors, name)(dial=dial)
    return Variant(**{phase: replace(inside, selector=selector)})


def estimate(run: SharedRun, options: argparse.Namespace, blocks: list[Any], source: Any) -> None:
    """Answer the first two blocks' worth of one item each, and scale up."""
    one = replace(blocks[0], count=1)
    prompts = source(one)
    probe = SharedRun(run.loaded, {"dense": Variant()}, options.out.with_suffix(".probe.jsonl"), -1, run.impl)
    times = []
    for repeat in range(2):  # the first one compiles
        start = time.perf_counter()
        probe.answer(replace(one, first=repeat), prompts)
        times.append(time.perf_counter() - start)
    probe.out.unlink()
    probe.out.with_suffix(".sparsity.jsonl").unlink(missing_ok=True)
    passes = len({variant.prefill for variant in run.variants.values()})
    print(
        f"{len(blocks)} blocks of {options.block}: {len(run.variants)} conditions, {passes} prompt passes "
        f"per item; one dense item takes {times[1]:.2f} s ({times[0]:.1f} s the first), so not more than "
        f"{len(blocks) * (options.block * passes + len(run.variants)) * times[1] / 60:.1f} minutes"
    )


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.5, 0.7])
    parser.add_argument("--phases", nargs="+", choices=[*PHASES, "both", "none"], default=["both"])
    parser.add_argument("--methods", default="", help="other methods, comma-separated")
    parser.add_argument("--composed", default="", help="other methods with blasst inside")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--items", type=int, default=25, help="per task kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first item")
    parser.add_argument("--block", type=int, default=25, help="items that decode together")
    parser.add_argument("--min-dense", type=float, default=0.0, help="kinds below it get one block only")
    parser.add_argument("--minutes", type=float, help="begin nothing after so long")
    parser.add_argument("--workers", type=int, default=0, help="processes that make items ahead")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="time one item, say what would run")
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    limit = TimeLimit(options.minutes)
    loaded = load_model(options.model, device=options.device)
    variants = variants_of(loaded, options, load_profile(options.profile))
    run = SharedRun(loaded, variants, options.out, options.seed, options.impl)
    names = options.tasks.split(",")
    blocks = blocks_of(names, options.seqlen, options.items, options.block, options.first)
    missing = [block for block in blocks if run.missing(block)]
    workers = 0 if options.dry_run else options.workers
    with prompt_source(loaded, options.model, missing, options.seed, workers) as source:
        if options.dry_run:
            estimate(run, options, missing or blocks, source)
            return
        with options.out.with_suffix(".environment.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"environment": environment()}) + "\n")
        for done, block in enumerate(missing):
            dense = run.mean(block.task, block.seqlen)
            if block.first > options.first and dense is not None and dense < options.min_dense:
                continue
            if limit.over or not run.answer(block, source(block), limit.end):
                print(f"stopped at block {done} of {len(missing)}, run again to go on")
                return
            score = run.mean(block.task, block.seqlen)
            print(f"{limit.seconds:6.0f} s  {block.task} {block.first}: dense {score:.3f}", flush=True)
    print(f"complete, {limit.seconds:.0f} s")


if __name__ == "__main__":
    main()
