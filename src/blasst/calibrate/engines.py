"""Engines that a profile can be exported to, kernels whose tiles can be counted; this file needs no torch."""

from __future__ import annotations

from typing import Literal, get_args

Engine = Literal["modelopt", "tensorrt-llm", "sglang", "flashinfer"]

ENGINES: tuple[Engine, ...] = get_args(Engine)

#: Kernels of `blasst.calibrate.tiles.TILES`.
Tiles = Literal["blasst", "fmha_v2", "xqa", "modelopt"]

TILE_NAMES: tuple[Tiles, ...] = get_args(Tiles)
