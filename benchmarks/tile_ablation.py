"""What tile shape and visiting order do to sparsity, and what an error budget leaves; on captured attention.

python benchmarks/tile_ablation.py qkv.pt --length 8192 [--heads 4] [--mass 0.01] [--out rows.jsonl]

Every (shape, order) gets the threshold at which a row loses `--mass` of its softmax weight in the mean; what
is compared is the sparsity there. Causal, exact scores in float32; no times. `benchmarks/capture_qkv.py`
makes the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blasst import blasst_attn_func
from blasst.bench.inputs import Inputs, captured_inputs
from blasst.bench.record import environment

SHAPES = ((64, 128), (64, 64), (128, 128), (16, 128), (64, 256))
ORDERS = ("first tile, then leftwards", "ascending", "descending")


class Tiles(NamedTuple):
    """All visited tiles of all heads, in no order.

    Attributes:
        margin: ln of the threshold above which a tile is skipped, (tiles,).
        mass: softmax weight in it, mean over its rows times their number, (tiles,).
        rows: rows of all heads.
    """

    margin: Tensor
    mass: Tensor
    rows: int


def order_of(name: str, tiles: int) -> list[int]:
    """Tile numbers in the order in which a row of tiles is visited."""
    if name == "ascending":
        return list(range(tiles))
    if name == "descending":
        return list(range(tiles - 1, -1, -1))
    return [0, *range(tiles - 1, 0, -1)]


def margins(maxima: Tensor, order: list[int]) -> Tensor:
    """Largest tile maximum minus running maximum over rows, by tile; inf for the tile visited first."""
    visited = maxima[:, order]
    before = visited.cummax(dim=1).values[:, :-1]
    found = maxima.new_full((len(order),), math.inf)
    found[torch.tensor(order[1:], dtype=torch.int64)] = (visited[:, 1:] - before).amax(dim=0)
    return found


def look(inputs: Inputs, shape: tuple[int, int], heads: list[int]) -> dict[str, Tiles]:
    """Tiles of a shape by order."""
    rows, keys = shape
    length, group = inputs.q.shape[1], inputs.q.shape[2] // inputs.k.shape[2]
    positions = torch.arange(length)
    found: dict[str, list[Tensor]] = {name: [] for name in ORDERS}
    masses = []
    for head in heads:
        q = inputs.q[0, :, head].float() * inputs.softmax_scale
        k = inputs.k[0, :, head // group].float()
        for start in range(0, length, rows):
            end = min(start + rows, length)
            scores = q[start:end] @ k[:end].T
            scores.masked_fill_(positions[:end] > positions[start:end, None], -math.inf)
            scores = torch.nn.functional.pad(scores, (0, -end % keys), value=-math.inf)
            tiles = scores.unflatten(1, (-1, keys))
            weight = (tiles - scores.logsumexp(dim=1)[:, None, None]).exp()
            masses.append(weight.sum(dim=(0, 2)))
            maxima = tiles.amax(dim=2)
            for name in ORDERS:
                found[name].append(margins(maxima, order_of(name, maxima.shape[1])))
    mass = torch.cat(masses).double()
    return {name: Tiles(torch.cat(parts), mass, length * len(heads)) for name, parts in found.items()}


def at_mass(tiles: Tiles, mass: float) -> tuple[float, float]:
    """(sparsity, threshold) at which the mean row has lost so much; the threshold at most 1."""
    order = tiles.margin.argsort()
    lost = tiles.mass[order].cumsum(0) / tiles.rows
    count = min(int((lost <= mass).sum()), int((tiles.margin < 0).sum()))
    return count / len(order), min(1.0, math.exp(float(tiles.margin[order[count]])))


def budget(inputs: Inputs, eps: float, heads: list[int]) -> tuple[float, float, float]:
    """(sparsity, mean and largest skipped mass of a row) with max_skipped_mass and threshold 1."""
    group = inputs.q.shape[2] // inputs.k.shape[2]
    q = inputs.q[:, :, heads].float()
    k, v = (x[:, :, [head // group for head in heads]].float() for x in (inputs.k, inputs.v))
    options = {"causal": True, "softmax_scale": inputs.softmax_scale, "return_lse": True, "impl": "eager"}
    dense = blasst_attn_func(q, k, v, **options)
    got = blasst_attn_func(q, k, v, threshold=1.0, max_skipped_mass=eps, return_counts=True, **options)
    skipped = (1 - (got.lse.double() - dense.lse.double()).exp()).clamp_min(0)
    return float(got.counts.sparsity), float(skipped.mean()), float(skipped.max())


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("capture", type=Path)
    parser.add_argument("--length", type=int, help="first tokens of the capture (default: all)")
    parser.add_argument("--heads", type=int, help="query heads, evenly spread (default: all)")
    parser.add_argument("--mass", type=float, default=0.01, help="mean skipped mass (default: 0.01)")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--budgets", default="0.01,0.03,0.1", help="default: 0.01,0.03,0.1")
    options = parser.parse_args()
    whole = captured_inputs(options.capture, dtype=torch.bfloat16, device=torch.device("cpu"))
    length = options.length or whole.q.shape[1]
    inputs = dataclasses.replace(whole, q=whole.q[:, :length], k=whole.k[:, :length], v=whole.v[:, :length])
    count = whole.q.shape[2]
    heads = sorted({i * count // (options.heads or count) for i in range(options.heads or count)})
    print(f"{inputs.name}, {length} tokens, {len(heads)} heads; mean skipped mass {options.mass:g}")
    print("| rows x keys | " + " | ".join(ORDERS) + " |\n|---|" + "---|" * len(ORDERS))
    about = {"bench": "tile_ablation", "inputs": inputs.name, "seqlen": length, "heads": len(heads)}
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        cells = []
        for order, tiles in look(inputs, shape, heads).items():
            sparsity, threshold = at_mass(tiles, options.mass)
            cells.append(f"{sparsity:.1%} (threshold {threshold:.2e})")
            found = {"sparsity": sparsity, "threshold": threshold, "mean_skipped_mass": options.mass}
            rows.append(about | {"query_tile": shape[0], "key_tile": shape[1], "order": order} | found)
        told = " | ".join(cells)
        print(f"| {shape[0]} x {shape[1]} | {told} |", flush=True)
    print("\n| max_skipped_mass | skipped | mean skipped mass | largest |\n|---|---|---|---|")
    for eps in map(float, options.budgets.split(",")):
        sparsity, mean, worst = budget(inputs, eps, heads)
        print(f"| {eps:g} | {sparsity:.1%} | {mean:.2%} | {worst:.2%} |", flush=True)
        found = {"sparsity": sparsity, "mean_skipped_mass": mean, "largest_skipped_mass": worst}
        rows.append(about | {"max_skipped_mass": eps} | found)
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row | {"environment": environment()}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
