"""The table of docs/support.md: asked of the code, call by call, with the tests that hold it to it.

`PYTHONPATH=src python tests/cpu/support_parts.py` writes it; test_support.py fails while it is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from blasst import (
    KeyCodes,
    ProgressiveKeys,
    UnsupportedError,
    blasst_attn_func,
    blasst_attn_varlen_func,
    blasst_attn_with_kvcache,
)
from blasst.core.problem import AttentionProblem
from blasst.core.types import FP8
from blasst.kernels import hopper, op, select
from blasst.testing import pages_from

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- written by tests/cpu/support_parts.py -->\n", "<!-- end -->\n"
BACKENDS = ("reference", "eager", "triton", "hopper")
HALF = torch.float16
MASKS, SHARING = "cpu/test_cases_masks.py", "cpu/test_cases_sharing.py"
OPTIONS, RANDOM = "gpu/test_triton_options.py", "gpu/test_hopper_random.py"


class OnGpu:
    """A CPU tensor that says it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> object:
        return getattr(self.tensor, name)


@contextmanager
def hopper_gpu():
    """A machine that looks as if it had an H200 and all that compiles for it."""
    with (
        mock.patch.object(torch.version, "hip", None),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200"),
        mock.patch.object(hopper, "compiler_reason", lambda: None),
        mock.patch.object(hopper, "driver_reason", lambda: None),
    ):
        yield


class _Stop(Exception):
    """Carries the problem of a call that is not run."""


def problem_of(call: Callable[..., object]) -> AttentionProblem:
    """What the public function would hand to a kernel."""

    def stop(problem: AttentionProblem, impl: str, return_lse: bool) -> None:
        raise _Stop(problem)

    with mock.patch.object(op, "call", stop):
        try:
            call(impl="auto")
        except _Stop as found:
            return found.args[0]
    raise AssertionError("the call reached no kernel")


def serves(backend: str, call: Callable[..., object]) -> bool:
    """Whether a backend takes a call: the portable ones run it, those of a GPU are asked for their reason."""
    if backend in ("reference", "eager"):
        try:
            call(impl=backend)
        except UnsupportedError:
            return False
        return True
    problem = problem_of(call)
    problem = replace(problem, **{name: OnGpu(getattr(problem, name)) for name in "qkv"})
    with hopper_gpu():
        return select.KERNELS[backend].unsupported_reason(problem) is None


def tensors(
    tokens: int, dim: int = 64, dim_v: int = 0, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = HALF
) -> list[torch.Tensor]:
    """q, k, v of two sequences with 128 keys."""
    shapes = ((tokens, heads, dim), (128, kv_heads, dim), (128, kv_heads, dim_v or dim))
    return [torch.randn(2, *shape).to(dtype) for shape in shapes]


def attend(tokens: int, shape: dict | None = None, **options: object) -> Callable[..., object]:
    """A call with 9 or more new tokens is prefill; with a cache of its own where options ask for one."""
    x = tensors(tokens, **(shape or {}))
    options = {"threshold": 0.1, "causal": True} | options
    cached = tokens <= 8 or any(name in options for name in ("cache_leftpad", "k_descale"))
    return partial(blasst_attn_with_kvcache if cached else blasst_attn_func, *x, **options)


def packed(tokens: int) -> Callable[..., object]:
    q, k, v = (x.flatten(0, 1) for x in tensors(tokens))
    ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (tokens, 128)]
    return partial(blasst_attn_varlen_func, q, k, v, *ends, tokens, 128, threshold=0.1)


def paged(tokens: int, page: int, **options: object) -> Callable[..., object]:
    q, *cache = tensors(tokens)
    (k, table), (v, _) = (pages_from(x, page, fill=0.0) for x in cache)
    used = torch.tensor([128, 70], dtype=torch.int32)
    options = {"cache_seqlens": used, "block_table": table, "threshold": 0.1} | options
    return partial(blasst_attn_with_kvcache, q, k, v, **options)


def padded(tokens: int, **options: object) -> Callable[..., object]:
    return attend(tokens, cache_leftpad=torch.tensor([3, 0], dtype=torch.int32), **options)


def eighths(tokens: int, dtype: torch.dtype = HALF) -> Callable[..., object]:
    q, *cache = tensors(tokens, dtype=dtype)
    return partial(blasst_attn_with_kvcache, q, *(x.to(FP8) for x in cache), k_descale=0.5, threshold=0.1)


def masked(tokens: int) -> Callable[..., object]:
    mask = torch.ones((2, 2, 1, 2) if tokens <= 8 else (2, 4, 1, 1), dtype=torch.bool)
    return attend(tokens, block_mask=mask)


def screened(tokens: int) -> Callable[..., object]:
    x = tensors(tokens)
    return partial(blasst_attn_with_kvcache, *x, screen=KeyCodes.from_keys(x[1], 4), threshold=0.1)


def progressive(tokens: int) -> Callable[..., object]:
    q, k, v = tensors(tokens)
    return partial(blasst_attn_with_kvcache, q, ProgressiveKeys.from_keys(k), v, threshold=0.1)


@dataclass(frozen=True)
class Row:
    """One line: a feature, its calls of each phase, and where it is tested.

    Attributes:
        name: of the feature.
        calls: number of new tokens -> a call; or a list of (value, such a function): those served are named.
        tests: "folder/file::function", or a file.
        phases: new tokens of the phases that have it.
    """

    name: str
    calls: (
        Callable[[int], Callable[..., object]] | list[tuple[object, Callable[[int], Callable[..., object]]]]
    )
    tests: tuple[str, ...]
    phases: tuple[int, ...] = (40, 2)


def of(shape: dict | None = None, **options: object) -> Callable[[int], Callable[..., object]]:
    return lambda tokens: attend(tokens, shape, **options)


DIMS = (8, 16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 160, 192, 224, 256, 320)
PAGES = (1, 4, 8, 16, 32, 48, 64, 128)
ROWS = [
    Row(
        "dtype of q",
        [(str(t).removeprefix("torch."), of({"dtype": t})) for t in (HALF, torch.bfloat16, torch.float32)],
        (OPTIONS + "::test_every_head_dim_in_prefill_and_decode", RANDOM),
    ),
    Row(
        "head_dim, of " + ", ".join(map(str, DIMS)),
        [(d, of({"dim": d})) for d in DIMS],
        (MASKS + "::test_head_dims_with_nan_in_the_lanes_beyond",),
    ),
    Row(
        "head_dim and head_dim_v",
        [(f"{d}/{e}", of({"dim": d, "dim_v": e})) for d, e in ((32, 64), (64, 128), (192, 128), (576, 512))],
        (
            MASKS + "::test_value_head_dim_may_differ",
            MASKS + "::test_mla_decode_shares_storage_between_keys_and_values",
        ),
    ),
    Row(
        "query heads / KV heads",
        [(f"{h}/{k}", of({"heads": h, "kv_heads": k})) for h, k in ((4, 4), (28, 4), (64, 1), (128, 1))],
        ("gpu/test_hopper_batches.py::test_random_batches", OPTIONS),
    ),
    Row(
        "packed sequences",
        packed,
        (MASKS + "::test_sequences_of_length_zero",),
        phases=(40,),
    ),
    Row(
        "pages, of " + ", ".join(map(str, PAGES)) + " slots",
        [(p, partial(lambda page, tokens: paged(tokens, page), p)) for p in PAGES],
        (MASKS + "::test_pages_of_any_size_equal_the_contiguous_cache",),
    ),
    Row("`cache_leftpad`", padded, (MASKS + "::test_left_padding_shifts_the_tile_grid_not_the_result",)),
    Row(
        "`cache_leftpad` with pages",
        lambda tokens: paged(tokens, 16, cache_leftpad=torch.tensor([3, 0], dtype=torch.int32)),
        ("gpu/test_hopper_host.py::test_auto_takes_this_kernel_where_it_can_and_says_when_not",),
    ),
    Row(
        "float8_e4m3fn cache",
        eighths,
        (OPTIONS + "::test_an_fp8_cache_with_scales", "gpu/test_hopper_batches.py"),
    ),
    Row("causal", of(causal=True), (MASKS + "::test_causal_is_bottom_right_aligned",)),
    Row(
        "window",
        of(window_size=(30, 5), causal=False),
        (SHARING + "::test_a_window_to_both_sides_equals_its_mask",),
    ),
    Row("softcap", of(softcap=20.0), (MASKS + "::test_softcap_acts_before_the_mask_and_on_the_vote",)),
    Row("sinks", of(sinks=torch.zeros(4)), (MASKS + "::test_sinks_join_the_denominator_once",)),
    Row(
        "`softmax_scale` of 0.1, 0, -0.1",
        [(s, of(softmax_scale=s)) for s in (0.1, 0.0, -0.1)],
        ("cpu/test_hopper_compile.py::test_reasons_name_what_is_wrong",),
    ),
    Row(
        "`return_lse`",
        of(return_lse=True),
        (MASKS + "::test_lse_is_the_natural_logarithm_in_float32_and_its_layout_is_fixed",),
    ),
    Row(
        "`return_counts`, `return_kept_tiles`",
        of(return_counts=True, return_kept_tiles=True),
        ("cpu/test_cases_threshold.py::test_measuring_does_not_change_the_result",),
    ),
    Row(
        "`return_mass_bound`, `max_skipped_mass`",
        of(return_mass_bound=True, max_skipped_mass=0.1),
        (
            "gpu/test_hopper.py::test_error_budget_and_mass_bound_hold_for_every_row",
            OPTIONS + "::test_error_budget_holds_for_every_row",
        ),
    ),
    Row(
        "`dense_tail`",
        of(dense_tail=3),
        (RANDOM, "gpu/test_triton_device.py::test_all_options_at_once"),
        phases=(40,),
    ),
    Row("`block_mask`", masked, ("cpu/test_block_mask.py",)),
    Row("`screen`, which saves nothing there yet", screened, ("cpu/test_screen.py",), phases=(2,)),
    Row("`ProgressiveKeys`, likewise", progressive, ("cpu/test_progressive_keys.py",)),
    Row('`screen="int8"`, likewise', of(screen="int8"), ("cpu/test_int8_screen.py",), phases=(40,)),
    Row(
        '`screen="int8"` with pages, and with `cache_leftpad`',
        [
            ("pages", lambda tokens: paged(tokens, 16, screen="int8")),
            ("`cache_leftpad`", lambda tokens: padded(tokens, screen="int8")),
        ],
        (
            "cpu/test_int8_caches.py::test_pages_are_the_contiguous_cache_in_both_functions",
            "cpu/test_int8_caches.py::test_left_padding_shifts_the_tile_grid",
        ),
        phases=(40,),
    ),
]

#: They read lengths on the host.
NO = "no"
#: What no call can be asked for: the tests say it, for each backend; None = there is none.
PROVEN = [
    (
        "`torch.compile(fullgraph=True)`, all sizes symbolic; `torch.export`",
        {
            "reference": None,
            "eager": "cpu/test_compile_dynamic.py::test_symbolic_sizes_are_one_graph",
            "triton": "gpu/test_both_torch.py::test_the_compiler_sees_one_graph_for_all_lengths",
            "hopper": "gpu/test_both_torch.py::test_the_compiler_sees_one_graph_for_all_lengths",
        },
    ),
    (
        "CUDA graphs that follow lengths, pages and thresholds",
        {
            "reference": NO,
            "eager": NO,
            "triton": "gpu/test_triton_device.py::test_a_decode_graph_follows_lengths_thresholds_and_pages",
            "hopper": "gpu/test_hopper_decode.py::test_a_graph_follows_lengths_thresholds_and_pages",
        },
    ),
    (
        "a GPU that is not the current one; whole groups of heads on each GPU with the bits of one",
        {
            "reference": None,
            "eager": None,
            "triton": "gpu/test_two_gpus.py::test_whole_groups_of_heads_on_each_gpu_give_the_bits_of_one",
            "hopper": "gpu/test_two_gpus.py::test_whole_groups_of_heads_on_each_gpu_give_the_bits_of_one",
        },
    ),
    (
        "tensors of more than 2^31 elements",
        {
            "reference": None,
            "eager": None,
            "triton": "gpu/test_both_memory.py::test_packed_tensors_of_more_than_two_billion_elements",
            "hopper": "gpu/test_both_memory.py::test_packed_tensors_of_more_than_two_billion_elements",
        },
    ),
]


def phase_of(tokens: int) -> str:
    return "decode" if tokens <= 8 else "prefill"


def cell(row: Row, backend: str) -> str:
    """What a backend serves of a row, in words."""
    if callable(row.calls):
        served = [phase_of(n) for n in row.phases if serves(backend, row.calls(n))]
        everywhere = len(served) == len(row.phases)
        return "yes" if everywhere else served[0] if served else "no"
    values = {
        phase_of(n): [str(value) for value, call in row.calls if serves(backend, call(n))] for n in row.phases
    }
    texts = {
        phase: "all" if len(found) == len(row.calls) else ", ".join(found) or "none"
        for phase, found in values.items()
    }
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{phase}: {text}" for phase, text in texts.items())


def table() -> str:
    """The lines between the marks."""
    lines = [f"| | {' | '.join(BACKENDS)} | tests |", "|---" * (len(BACKENDS) + 2) + "|"]
    for row in ROWS:
        cells = [cell(row, backend) for backend in BACKENDS]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {', '.join(f'`{t}`' for t in row.tests)} |")
    for name, proofs in PROVEN:
        cells = [{None: "not tested", NO: NO}.get(proofs[backend], "yes") for backend in BACKENDS]
        tests = dict.fromkeys(test for test in proofs.values() if test not in (None, NO))
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(f'`{t}`' for t in tests)} |")
    return "\n".join(lines) + "\n"


def tests_named() -> set[str]:
    """Every test that the table names."""
    rows = {test for row in ROWS for test in row.tests}
    return rows | {test for _, proofs in PROVEN for test in proofs.values() if test not in (None, NO)}


def written() -> str:
    """The document with the table of now."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return re.sub(f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda _: table(), text, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(written(), encoding="utf-8")
