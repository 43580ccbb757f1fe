"""Skipped mass and output error of blasst and other methods at equal sparsity, on captured q, k and v.

python benchmarks/capture_qkv.py smollm2 qkv.pt --length 4096 --layer 10
python benchmarks/selector_quality.py qkv.pt --out rows.jsonl

The prompt is compared whole; for decode its last positions (--steps) are steps behind the others. One line
per method and wanted sparsity: the fields of blasst.evals.selector_quality.SelectorRow, schema, command and
environment.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from blasst.bench.record import environment
from blasst.evals.selector_quality import SelectorRow, decode_quality, prefill_quality

#: Version of the line format.
SCHEMA_VERSION = 1


def compare(capture: Path, options: argparse.Namespace) -> list[SelectorRow]:
    """Rows of one captured layer.

    Args:
        capture: torch file with q, k, v, and perhaps name and softmax_scale.
        options: parsed arguments.
    """
    content = torch.load(capture, weights_only=True)
    q, k, v = (content[key].float() for key in "qkv")
    name, scale = content.get("name", capture.stem), content.get("softmax_scale")
    rows: list[SelectorRow] = []
    if "prefill" in options.phases:
        rows += prefill_quality(q, k, v, sparsities=options.sparsities, name=name, softmax_scale=scale)
    if "decode" in options.phases:
        rows += decode_quality(
            q,
            k,
            v,
            prompt=q.shape[1] - options.steps * options.stride,
            stride=options.stride,
            sparsities=options.sparsities,
            name=name,
            softmax_scale=scale,
        )
    return rows


def main() -> None:
    """Parse, compare, append, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("captures", type=Path, nargs="+", help="files of benchmarks/capture_qkv.py")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to append to")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.5, 0.7, 0.8])
    parser.add_argument("--phases", nargs="+", choices=["prefill", "decode"], default=["prefill", "decode"])
    parser.add_argument("--steps", type=int, default=16, help="decode steps that are measured")
    parser.add_argument("--stride", type=int, default=4, help="positions between them")
    options = parser.parse_args()
    command = (
        f"python benchmarks/selector_quality.py {' '.join(p.name for p in options.captures)} "
        f"--sparsities {' '.join(map(str, options.sparsities))} --phases {' '.join(options.phases)} "
        f"--steps {options.steps} --stride {options.stride}"
    )
    block = environment()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for capture in options.captures:
        start = time.monotonic()
        rows = compare(capture, options)
        with options.out.open("a", encoding="utf-8") as file:
            for row in rows:
                line = {"schema": SCHEMA_VERSION, **asdict(row), "command": command, "environment": block}
                file.write(json.dumps(line, allow_nan=False) + "\n")
        for row in rows:
            print(
                f"{row.phase:8}{row.method:22}{row.wanted:5.2f}{row.sparsity:8.3f} mass {row.mass_mean:.4f} "
                f"{row.mass_p99:.4f} {row.mass_max:.4f} error {row.error:.4f}"
            )
        print(f"{capture.name}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
