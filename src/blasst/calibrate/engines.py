"""The engines that a profile can be exported to, in a file that needs no torch."""

from __future__ import annotations

from typing import Literal, get_args

Engine = Literal["modelopt", "tensorrt-llm", "sglang", "flashinfer"]

ENGINES: tuple[Engine, ...] = get_args(Engine)
