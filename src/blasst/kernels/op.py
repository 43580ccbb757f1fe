"""The torch op behind every public function: kernels for real tensors, shapes for the compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blasst.core.problem import AttentionProblem
from blasst.core.sequences import map_shape
from blasst.core.types import DECODE_TILE, PREFILL_TILE, AttentionOutput, SkipCounts
from blasst.kernels import select

#: Arguments of the op, in order: the fields of AttentionProblem, then the kernel's name.
_ARGUMENTS = {
    "q": "Tensor",
    "k": "Tensor",
    "v": "Tensor",
    "phase": "str",
    "threshold": "Tensor?",
    "softmax_scale": "float",
    "causal": "bool",
    "window_size": "SymInt[]",
    "softcap": "float",
    "sinks": "Tensor?",
    "max_skipped_mass": "float?",
    "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k": "Tensor?",
    "seqused_k": "Tensor?",
    "leftpad_k": "Tensor?",
    "block_table": "Tensor?",
    "max_seqlen_q": "SymInt",
    "max_seqlen_k": "SymInt",
    "k_descale": "Tensor?",
    "v_descale": "Tensor?",
    "block_mask": "Tensor?",
    "dense_tail": "int",
    "screen": "Tensor[]",
    "int8_screen": "bool",
    "progressive": "bool",
    "want_counts": "bool",
    "want_mass_bound": "bool",
    "want_kept_tiles": "bool",
    "impl": "str",
}
_SCHEMA = (
    f"({', '.join(f'{kind} {name}' for name, kind in _ARGUMENTS.items())})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)

_Flat = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

torch.library.define("blasst::attention", _SCHEMA)


def _problem(args: tuple[Any, ...]) -> tuple[AttentionProblem, str]:
    values = dict(zip(_ARGUMENTS, args, strict=True))
    impl = values.pop("impl")
    values["window_size"] = tuple(values["window_size"])
    for name in ("q", "k", "v"):
        if values[name].stride(-1) != 1:
            values[name] = values[name].contiguous()
    return AttentionProblem(**values), impl


def _attention(*args: Any) -> _Flat:
    problem, impl = _problem(args)
    device = problem.q.device.type
    if torch.is_autocast_enabled(device):  # for the caller's products, not for those inside
        with torch.autocast(device, enabled=False):
            result = select.run(problem, impl)
    else:
        result = select.run(problem, impl)
    nothing = problem.q.new_empty(0, dtype=torch.float32)
    no_count = problem.q.new_empty(0, dtype=torch.int64)
    screened = None if result.counts is None else result.counts.screened
    if result.lse is None:
        raise RuntimeError("a kernel returned no lse")
    skipped, visited = (
        (no_count, torch.empty_like(no_count)) if result.counts is None else _apart(result.counts)
    )
    return (
        result.out,
        result.lse,
        skipped,
        visited,
        torch.empty_like(no_count) if screened is None else screened,
        nothing if result.mass_bound is None else result.mass_bound,
        problem.q.new_empty(0, dtype=torch.bool) if result.kept_tiles is None else result.kept_tiles,
    )


torch.library.impl("blasst::attention", "CompositeExplicitAutograd", _attention)


def _apart(counts: SkipCounts) -> tuple[Tensor, Tensor]:
    """Skipped and visited in memory of their own: a kernel may fill one tensor, outputs share none."""
    skipped, visited = counts.skipped, counts.visited
    if skipped.untyped_storage().data_ptr() == visited.untyped_storage().data_ptr():
        visited = visited.clone()
    return skipped, visited


@torch.library.register_fake("blasst::attention")
def _attention_shapes(*args: Any) -> _Flat:
    problem, _ = _problem(args)
    q = problem.q
    tile = PREFILL_TILE if problem.phase == "prefill" else DECODE_TILE
    map_size = map_shape(problem, tile)
    count_size = map_size[:2] if problem.want_counts else (0,)
    rows = (q.shape[1], q.shape[0]) if problem.packed else (q.shape[0], q.shape[2], q.shape[1])
    return (
        q.new_empty(*q.shape[:-1], problem.head_dim_v),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty(count_size, dtype=torch.int64),
        q.new_empty(count_size, dtype=torch.int64),
        q.new_empty(count_size if problem.screened else (0,), dtype=torch.int64),
        q.new_empty(rows if problem.want_mass_bound else (0,), dtype=torch.float32),
        q.new_empty(map_size if problem.want_kept_tiles else (0,), dtype=torch.bool),
    )


def call(problem: AttentionProblem, impl: str, return_lse: bool) -> AttentionOutput:
    """Run a checked problem through the op; what was not asked for comes back as None."""
    args = [getattr(problem, name) for name in _ARGUMENTS if name != "impl"]
    out, lse, skipped, visited, screened, mass_bound, kept_tiles = torch.ops.blasst.attention(*args, impl)
    return AttentionOutput(
        out,
        lse if return_lse else None,
        SkipCounts(skipped, visited, screened if problem.screened else None) if problem.want_counts else None,
        mass_bound if problem.want_mass_bound else None,
        kept_tiles if problem.want_kept_tiles else None,
    )
