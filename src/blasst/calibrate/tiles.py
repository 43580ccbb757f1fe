"""How the kernels of other engines vote on Hopper, by the names of those kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from blasst.calibrate.engines import Engine, Tiles
from blasst.core.phase_fit import SERVING_RULES, CountingRule
from blasst.core.types import Phase, TileShape

#: fmha_v2 is TensorRT-LLM's prefill kernel, xqa its decode kernel: split i of n takes the tiles i, i + n, ...
TILES: Mapping[Tiles, Mapping[Phase, CountingRule]] = {
    "blasst": SERVING_RULES,
    "fmha_v2": {"prefill": CountingRule(TileShape(query=64, key=128), "ascending")},
    "xqa": {"decode": CountingRule(TileShape(query=None, key=64), "ascending")},
    "modelopt": {
        "prefill": CountingRule(TileShape(query=128, key=128), "ascending"),
        "decode": CountingRule(TileShape(query=1, key=128), "ascending"),
    },
}

_TENSORRT_LLM = {**TILES["fmha_v2"], **TILES["xqa"]}

#: Whose kernels an engine runs; SGLang and FlashInfer run TensorRT-LLM's.
ENGINE_RULES: Mapping[Engine, Mapping[Phase, CountingRule]] = {
    "modelopt": TILES["modelopt"],
    "tensorrt-llm": _TENSORRT_LLM,
    "sglang": _TENSORRT_LLM,
    "flashinfer": _TENSORRT_LLM,
}


def counting_rules(names: Sequence[Tiles], *, splits: int = 1) -> dict[Phase, CountingRule]:
    """The rule of each phase that the named kernels have; a phase that none of them has is not counted.

    Args:
        names: keys of `TILES`.
        splits: KV splits of xqa, which depend on the batch, the KV heads and the GPU.

    Raises:
        ValueError: an unknown name, two kernels for one phase, or splits without xqa.
    """
    rules: dict[Phase, CountingRule] = {}
    for name in names:
        if name not in TILES:
            raise ValueError(f"tiles must be of {list(TILES)}, got {name!r}")
        for phase, rule in TILES[name].items():
            if phase in rules:
                raise ValueError(f"tiles: {list(names)} name two ways to count {phase}, wanted one")
            rules[phase] = replace(rule, splits=splits) if name == "xqa" else rule
    if splits != 1 and "xqa" not in names:
        raise ValueError(f"splits: got {splits} without xqa; only its splits restart the running maximum")
    return rules
