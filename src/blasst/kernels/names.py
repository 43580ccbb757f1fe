"""Names of the kernels, in a file that needs no torch."""

from __future__ import annotations

from typing import Literal, get_args

Impl = Literal["auto", "hopper", "triton", "eager", "reference"]

IMPLS: tuple[Impl, ...] = get_args(Impl)
