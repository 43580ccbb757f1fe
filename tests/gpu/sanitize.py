"""compute-sanitizer over small calls of the Hopper kernels; needs a machine where the tool works.

PYTHONPATH=src python3 tests/gpu/sanitize.py [memcheck racecheck synccheck] [--kernels prefill decode]
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck")


KERNELS = ("prefill", "decode")


def decode_calls() -> None:
    """Every kind of decode build: one and two warpgroups, 16 bits and fp8, pages, bounds, many anchors."""
    import torch

    from blasst import blasst_attn_with_kvcache
    from blasst.testing import heavy_tailed_inputs, pages_from

    lengths = torch.tensor([700, 1], dtype=torch.int32, device="cuda")
    for heads, tokens, dim in ((8, 1, 128), (8, 4, 64), (14, 3, 96), (16, 8, 64), (32, 8, 128)):
        x = heavy_tailed_inputs(2, tokens, 900, heads, 2, dim, dtype=torch.bfloat16, device="cuda", block=64)
        (pages_k, table), (pages_v, _) = (pages_from(t, 16, fill=math.nan) for t in (x.k, x.v))
        narrow = [t.to(torch.float8_e4m3fn) for t in (x.k, x.v)]
        everything = {"return_counts": True, "return_kept_tiles": True, "impl": "hopper"}
        for threshold in (None, 0.05):
            options = {"threshold": threshold, "causal": True, **everything}
            blasst_attn_with_kvcache(*x, **options)
            blasst_attn_with_kvcache(x.q, *narrow, cache_seqlens=lengths, k_descale=0.5, **options)
            paged = {"cache_seqlens": lengths, "block_table": table}
            blasst_attn_with_kvcache(x.q, pages_k, pages_v, **paged, window_size=(200, 0), **options)
        bounds = {"return_mass_bound": True, "max_skipped_mass": 0.1, "threshold": 0.5}
        blasst_attn_with_kvcache(*x, **bounds, **everything)
    torch.cuda.synchronize()


def prefill_calls() -> None:
    """Every kind of build once, on a few tiles: packed, paged, batched, with and without options."""
    import torch

    from blasst import blasst_attn_func, blasst_attn_varlen_func
    from blasst.testing import heavy_tailed_inputs, pages_from

    def inputs(rows: int, keys: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        return heavy_tailed_inputs(2, rows, keys, 4, 2, dim, dtype=dtype, device="cuda", block=128)

    everything = {
        "return_lse": True,
        "return_counts": True,
        "return_mass_bound": True,
        "return_kept_tiles": True,
        "impl": "hopper",
    }
    for dim, dtype in ((64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16)):
        q, k, v = inputs(200, 900, dim, dtype)
        blasst_attn_func(q, k, v, causal=True, impl="hopper")
        blasst_attn_func(q, k, v, threshold=0.05, causal=True, impl="hopper")
        blasst_attn_func(q, k, v, threshold=0.05, window_size=(300, 40), **everything)
    sinks = torch.linspace(-2, 4, 4, device="cuda")
    blasst_attn_func(q, k, v, threshold=0.5, max_skipped_mass=0.1, softcap=20.0, sinks=sinks, **everything)
    cu_q = torch.tensor([0, 1, 130, 400], dtype=torch.int32, device="cuda")
    cu_k = torch.tensor([0, 0, 777, 1800], dtype=torch.int32, device="cuda")
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    options = {"threshold": 0.05, "causal": True, **everything}
    blasst_attn_varlen_func(*packed, cu_q, cu_k, 270, 1023, **options)
    for page_size in (16, 128):
        (pages_k, table), (pages_v, _) = (pages_from(x, page_size, fill=math.nan) for x in (k, v))
        cu = torch.tensor([0, 200, 400], dtype=torch.int32, device="cuda")
        lengths = torch.tensor([0, 900, 1033], dtype=torch.int32, device="cuda")
        blasst_attn_varlen_func(
            packed[0], pages_k, pages_v, cu, lengths, 200, 900, block_table=table, **options
        )
    torch.cuda.synchronize()


def main() -> None:
    """Run the tools one after the other; the exit status says whether all of them are content."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tools", nargs="*", help=f"some of {', '.join(TOOLS)}; default all")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of each tool")
    parser.add_argument("--kernels", nargs="*", choices=KERNELS, default=KERNELS, help="default both")
    parser.add_argument("--calls", choices=KERNELS, help="only make the calls (what the tools run)")
    chosen = parser.parse_args()
    if chosen.calls:
        {"prefill": prefill_calls, "decode": decode_calls}[chosen.calls]()
        return
    tools = chosen.tools or TOOLS
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"unknown tools: {', '.join(sorted(unknown))}")
    program = shutil.which("compute-sanitizer")
    if program is None:
        sys.exit("compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)")
    # without torch's own pool of memory every tensor has its own bounds
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    failed = []
    for kernel in chosen.kernels:
        child = [sys.executable, __file__, "--calls", kernel]
        subprocess.run(child, check=True, timeout=chosen.seconds)  # compiles everything, without a tool
        for tool in tools:
            command = [program, "--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
            command += ["--kernel-name", f"kns={kernel}", *child]
            try:
                done = subprocess.run(command, env=environment, timeout=chosen.seconds, check=False)
                state = "clean" if done.returncode == 0 else f"exit status {done.returncode}"
            except subprocess.TimeoutExpired:
                state = f"not done after {chosen.seconds:.0f} s"
            print(f"{kernel}, {tool}: {state}", flush=True)
            failed += [f"{kernel} {tool}"] * (state != "clean")
    sys.exit(f"not clean: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
