"""How many of the tiles that prefill skips are known from 8-bit copies of Q and K? On captured tensors.

`python benchmarks/screened_prefill.py pre.pt --length 8192 --every 4`

The capture is what benchmarks/capture_qkv.py writes. For each threshold: the share of visited tiles that the
rule skips against the running maximum, against the row's final maximum, and what `screen="int8"` and other
ways to round and to bound skip of it. That each of these tiles goes against the final maximum too is checked.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from blasst.bench.inputs import captured_inputs
from blasst.core.int8_screen import Int8Keys, Int8Recipe, Int8Rows, score_bounds
from blasst.core.sequences import visible_range, visited_tiles
from blasst.core.types import PREFILL_TILE
from blasst.kernels.eager import prefill_margins

ROWS, KEYS = 64, PREFILL_TILE.key
DEFAULT = Int8Recipe()
RECIPES = {
    'screen="int8"': DEFAULT,
    "channel scales from K alone": replace(DEFAULT, balance="keys"),
    "no channel scales": replace(DEFAULT, balance="none"),
    "no rotation": replace(DEFAULT, rotate=False),
    "neither": replace(DEFAULT, rotate=False, balance="none"),
    "no mean taken off": replace(DEFAULT, center="none"),
    "mean of each tile": replace(DEFAULT, center="tile"),
    "a step for 64 keys": replace(DEFAULT, keys_per_step=64),
    "a step for 64 rows": replace(DEFAULT, step_per_row=False),
    "L1 bound": replace(DEFAULT, bound="l1"),
    "L2 bound": replace(DEFAULT, bound="l2"),
}


def running_margins(q: Tensor, k: Tensor, scale: float, every: int) -> Tensor:
    """Margins of the rule as it is served, of the visited tiles of every n-th query tile."""
    margins = prefill_margins(q, k, softmax_scale=scale, causal=True)
    return torch.cat([m.flatten() for i, _, m in margins if (i + 1) % every == 0])


def margins_of(q: Tensor, k: Tensor, scale: float, every: int, recipe: Int8Recipe | None) -> Tensor:
    """The same against the final maximum, by the bounds of a recipe; None = of the scores themselves."""
    coded = None if recipe is None else Int8Keys.of(k, q, torch.float32, recipe)
    found = []
    group = q.shape[1] // k.shape[1]
    for first in range((every - 1) * ROWS, q.shape[0], every * ROWS):
        rows = q[first : first + ROWS].transpose(0, 1)
        row = torch.arange(first, first + rows.shape[1])
        begin, end = visible_range(row, q.shape[0], k.shape[0], True, (-1, -1))
        tiles = visited_tiles(begin, end, KEYS)
        visible = torch.arange(tiles.stop * KEYS) < end[:, None]
        if coded is None:
            width = min(tiles.stop * KEYS, k.shape[0])
            scores = (rows * scale) @ k[:width].permute(1, 2, 0).repeat_interleave(group, 0)
            scores = torch.nn.functional.pad(scores, (0, tiles.stop * KEYS - width))
            upper = scores.masked_fill_(~visible, -math.inf).unflatten(-1, (-1, KEYS)).amax(-1)
            lower = upper
        else:
            upper, lower = score_bounds(Int8Rows.of(rows, scale, coded), coded, tiles, visible, 0.0)
        gap = upper - lower.amax(-1, keepdim=True)
        found.append(gap.nan_to_num(nan=math.inf, neginf=-math.inf).amax(1).flatten())
    return torch.cat(found)


def line(name: str, margins: Tensor, thresholds: list[float]) -> str:
    """A row of the table: the share of tiles below each cut."""
    shares = ((margins < math.log(t)).float().mean().item() for t in thresholds)
    return f"{name:30}" + "".join(f"{share:9.1%}" for share in shares)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("capture", type=Path)
    parser.add_argument("--length", type=int, help="first tokens of the capture (default: all)")
    parser.add_argument("--every", type=int, default=1, help="look at every n-th query tile (default: 1)")
    parser.add_argument("--thresholds", default="0.003,0.01,0.03,0.1", help="default: 0.003,0.01,0.03,0.1")
    options = parser.parse_args()
    inputs = captured_inputs(options.capture, dtype=torch.bfloat16, device=torch.device("cpu"))
    length = options.length or inputs.k.shape[1]
    thresholds = [float(t) for t in options.thresholds.split(",")]
    q, k = inputs.q[0, :length].float(), inputs.k[0, :length].float()
    given = q, k, inputs.softmax_scale, options.every
    print(f"{inputs.name}, first {length} tokens, every {options.every}. query tile")
    print(f"{'threshold':30}" + "".join(f"{t:9g}" for t in thresholds))
    print(line("rule, running maximum", running_margins(*given), thresholds))
    exact = margins_of(*given, None)
    print(line("rule, final maximum", exact, thresholds))
    for name, recipe in RECIPES.items():
        margins = margins_of(*given, recipe)
        if bool((margins < exact).any()):
            raise RuntimeError(f"{name}: a bound lies below a score")
        print(line(name, margins, thresholds), flush=True)


if __name__ == "__main__":
    main()
