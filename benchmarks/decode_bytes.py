"""Bytes that the Hopper decode kernel reads, counted by Nsight Compute, against K + (1 - sparsity) V.

python benchmarks/decode_bytes.py [--batch 16] [--seqlen 65536] [--out rows.jsonl]

Needs a Hopper GPU, `ncu` on the PATH and the right to read hardware counters. The script starts itself
under ncu, which empties the L2 cache before each of the counted launches.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

import torch

from blasst import blasst_attn_with_kvcache
from blasst.bench.dial import dial_sparsity
from blasst.bench.inputs import hot_and_cold_inputs
from blasst.bench.record import environment

METRIC = "dram__bytes_read.sum"
SPARSITIES = (0.5, 0.8, 0.95)
KV_HEADS, HEAD_DIM = 8, 128
#: In front of the line that tells the outer run what was counted.
MARK = "counted: "


def launch(batch: int, seqlen: int) -> None:
    """Dense, threshold 0 and every sparsity once each where ncu counts; their sparsities go to stdout."""
    device = torch.device("cuda")
    x = hot_and_cold_inputs(
        batch, seqlen, 32, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device, new_tokens=1
    )
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device=device)

    def attend(threshold: float | None, counts: bool = False) -> float:
        result = blasst_attn_with_kvcache(
            x.q,
            x.k,
            x.v,
            cache_seqlens=lengths,
            threshold=threshold,
            softmax_scale=x.softmax_scale,
            return_counts=counts,
            impl="hopper",
        )
        return float(result.counts.sparsity) if counts else 0.0

    points = dial_sparsity(lambda threshold: attend(threshold, counts=True), SPARSITIES)
    calls = [(None, 0.0), (0.0, 0.0), *((point.threshold, point.sparsity) for point in points)]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for threshold, _ in calls:
        attend(threshold)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    print(MARK + json.dumps(calls), flush=True)


def count(batch: int, seqlen: int) -> list[dict[str, object]]:
    """Run `launch` under ncu; a row for each of its calls.

    Raises:
        RuntimeError: ncu could not count, or not every launch was seen.
    """
    counting = ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off", "--clock-control", "none"]
    counting += ["--kernel-name", "decode", "--metrics", METRIC]
    inner = [sys.executable, __file__, "--inner", "--batch", str(batch), "--seqlen", str(seqlen)]
    done = subprocess.run([*counting, *inner], capture_output=True, text=True, check=False)
    calls = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    table = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode != 0 or not calls or not table:
        raise RuntimeError(f"ncu ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    units, *launches = csv.DictReader(table)
    scale = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}[units[METRIC]]
    expected = json.loads(calls[0].removeprefix(MARK))
    if len(launches) != len(expected):
        raise RuntimeError(f"ncu saw {len(launches)} launches of {len(expected)}")
    keys = 2.0 * batch * KV_HEADS * seqlen * HEAD_DIM  # bytes of K, and of V
    rows = []
    for (threshold, sparsity), seen in zip(expected, launches, strict=True):
        read, floor = float(seen[METRIC].replace(",", "")) * scale, keys * (2 - sparsity)
        rows.append(
            {
                "bench": "decode_bytes",
                "batch": batch,
                "seqlen_k": seqlen,
                "threshold": threshold,
                "sparsity": sparsity,
                "bytes_read": read,
                "bytes_expected": floor,
                "ratio": read / floor,
            }
        )
    return rows


def main() -> None:
    """Print a line for each call; append JSON lines where --out says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="sequences; default 16")
    parser.add_argument("--seqlen", type=int, default=65536, help="keys of each; default 65536")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inner:
        launch(chosen.batch, chosen.seqlen)
        return
    rows = count(chosen.batch, chosen.seqlen)
    for row in rows:
        print(
            f"threshold {row['threshold']}: {row['sparsity']:.3f} skipped, {row['bytes_read']:.4g} bytes, "
            f"{row['ratio']:.3f} of K + (1 - s) V"
        )
    if chosen.out is not None:
        with chosen.out.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({**row, "environment": environment()}) + "\n")


if __name__ == "__main__":
    main()
