"""Registers, memory and compile time of every build of the Hopper kernels, as a table; needs no GPU.

python benchmarks/kernel_resources.py [--kernel decode] [--head-dim 128]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from blasst.kernels.hopper import HEAD_DIMS, compiler_reason, decode, prefill
from blasst.kernels.hopper.compile import compile_source, compiler_version
from blasst.kernels.hopper.resources import read_log

COLUMNS = ("build", "registers", "shared", "stack", "spill stores", "spill loads", "remarks", "seconds")
RULES = ("SKIP", "MASS", "BUDGET", "SOFTCAP", "PAGED", "FP8")


def dynamic_shared(file: str, build: dict[str, int]) -> int:
    """Bytes of shared memory that a launch asks for: decode with as many CTAs as it is for."""
    if file == prefill.FILE:
        return prefill.shared_bytes(build)
    few = build["SLOTS"] == decode.SLOTS_ALONE
    return decode.shared_bytes(build, decode.stages(build, 1 if few else 1_000_000))


def name_of(build: dict[str, int]) -> str:
    """Dtype of q, head_dim, rows where the build says them, rule."""
    rows = [f"{build['ROWS']} rows"] if "ROWS" in build else []
    rule = [name.lower() for name in RULES if build.get(name)]
    if not build["SKIP"]:
        rule = ["dense", *rule]
    return " ".join(["bf16" if build["BF16"] else "fp16", str(build["HEAD_DIM"]), *rows, *rule])


def chosen_builds(kernel: str | None, head_dim: int | None) -> Iterator[tuple[str, dict[str, int]]]:
    """(file, build), of one kernel or head_dim where they are given."""
    for name, module in (("prefill", prefill), ("decode", decode)):
        for build in module.builds():
            if kernel in (None, name) and head_dim in (None, build["HEAD_DIM"]):
                yield module.FILE, build


def main() -> None:
    """Compile and print; the exit status says whether every build is clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=("prefill", "decode"), help="only builds of this one")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, help="only builds of this one")
    chosen = parser.parse_args()
    reason = compiler_reason()
    if reason is not None:
        raise SystemExit(reason)
    print(
        f"NVRTC {compiler_version()}; bytes of shared memory of a launch; registers of a thread at launch\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    clean = True
    for file, build in chosen_builds(chosen.kernel, chosen.head_dim):
        start = time.perf_counter()
        made = read_log(compile_source(file, build, verbose=True)[1])
        seconds = time.perf_counter() - start
        name = f"{file.removesuffix('.cu')} {name_of(build)}"
        shared = made.shared + dynamic_shared(file, build)
        numbers = (made.registers, shared, made.stack + made.local, made.spill_stores, made.spill_loads)
        print(
            f"| {name} | {' | '.join(map(str, numbers))} | {' '.join(made.remarks) or '-'} | {seconds:.1f} |",
            flush=True,
        )
        clean &= made.clean
    raise SystemExit(0 if clean else "not every build is clean")


if __name__ == "__main__":
    main()
