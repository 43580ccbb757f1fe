"""The steps of `blasst bench end-to-end`: what is timed in one go, and which of it a file has already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from blasst.bench.model import BenchmarkModel
from blasst.bench.record import read_rows
from blasst.bench.variants import TORCH_SDPA
from blasst.core.types import Phase
from blasst.kernels.names import Impl

#: What the rows say.
BENCH = "end_to_end"

#: Fewer tokens than this are refused: next to nothing can be skipped.
_SHORTEST = 512


class Step(NamedTuple):
    """What is timed in one go.

    Attributes:
        phase: "prefill" = time to the first token, "decode" = time per output token.
        seqlen: tokens of the prompt; in decode keys of the cache, the new token's among them.
        batch: sequences.
    """

    phase: Phase
    seqlen: int
    batch: int

    def __str__(self) -> str:
        return f"{self.phase} {self.batch} x {self.seqlen}"


def dtype_name(dtype: torch.dtype) -> str:
    """As rows have it.

    Args:
        dtype: for example torch.bfloat16.
    """
    return str(dtype).removeprefix("torch.")


def labels(sparsities: Sequence[float]) -> list[str]:
    """Contestants that every step has, whatever torch can serve.

    Args:
        sparsities: wanted.
    """
    return [TORCH_SDPA, "dense", "threshold 0", *(f"{100 * s:g}% skipped" for s in sparsities)]


def missing_steps(
    path: Path | None,
    steps: Iterable[Step],
    model: BenchmarkModel,
    sparsities: Sequence[float],
    gpu: str | None,
    impl: Impl = "auto",
) -> list[Step]:
    """The steps whose rows, all of one GPU, model, input set and kernel, are not in a file yet.

    Models are told apart by name and sizes: folders of two models may have one name.

    Args:
        path: JSONL file; None or not there = nothing is.
        steps: wanted.
        model: whose rows.
        sparsities: wanted.
        gpu: name of this machine's, as rows have it.
        impl: kernel that was asked for; "auto" = rows of any.
    """
    config = model.config
    wanted = (model.name, model.inputs, dtype_name(model.dtype))
    inner = getattr(config, "intermediate_size", None)
    sizes = (config.num_hidden_layers, config.hidden_size, inner, config.vocab_size)
    known: dict[tuple[str | None, int, int], set[str | None]] = {}
    if path is not None and path.exists():
        for row, block in read_rows(path):
            same = (row.model, row.inputs, row.dtype) == wanted
            same &= (row.num_layers, row.hidden_size, row.intermediate_size, row.vocab_size) == sizes
            other = row.kernel.startswith("blasst ") and impl not in ("auto", row.kernel.split(" ")[1])
            if row.bench == BENCH and same and block.get("gpu") == gpu and not other:
                known.setdefault((row.phase, row.seqlen_k, row.batch), set()).add(row.contestant)
    return [step for step in steps if not set(labels(sparsities)) <= known.get((*step,), set())]


def check_steps(steps: Iterable[Step], model: BenchmarkModel) -> None:
    """Fail before anything is run.

    Args:
        steps: wanted.
        model: that shall run them.

    Raises:
        ValueError: a length that the model's positions do not reach, or too short for more than one tile.
    """
    longest = model.config.max_position_embeddings
    for step in steps:
        if step.seqlen > longest:
            raise ValueError(f"{step}: the positions of {model.name} end at {longest}")
        if step.seqlen < _SHORTEST:
            raise ValueError(
                f"{step}: shorter than {_SHORTEST} tokens, where there is next to nothing to skip"
            )
