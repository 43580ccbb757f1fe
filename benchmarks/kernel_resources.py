"""Registers, memory and compile time of every build of the Hopper kernel, as a table; needs no GPU.

python benchmarks/kernel_resources.py [--head-dim 128]
"""

from __future__ import annotations

import argparse
import time

from blasst.kernels.hopper import HEAD_DIMS, compiler_reason, prefill
from blasst.kernels.hopper.compile import compile_source, compiler_version
from blasst.kernels.hopper.resources import read_log

COLUMNS = ("build", "registers", "shared", "stack", "spill stores", "spill loads", "remarks", "seconds")


def main() -> None:
    """Compile and print; the exit status says whether every build is clean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, help="only builds of this one")
    head_dim = parser.parse_args().head_dim
    reason = compiler_reason()
    if reason is not None:
        raise SystemExit(reason)
    print(
        f"NVRTC {compiler_version()}; bytes of shared memory of a launch; registers of a thread at launch\n"
    )
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    clean = True
    for build in prefill.builds():
        if head_dim not in (None, build["HEAD_DIM"]):
            continue
        start = time.perf_counter()
        made = read_log(compile_source(prefill.FILE, build, verbose=True)[1])
        seconds = time.perf_counter() - start
        rule = [name.lower() for name in ("SKIP", "MASS", "BUDGET", "SOFTCAP", "PAGED") if build[name]]
        name = f"{'bf16' if build['BF16'] else 'fp16'} {build['HEAD_DIM']} {' '.join(rule) or 'dense'}"
        shared = made.shared + prefill.shared_bytes(build)
        numbers = (made.registers, shared, made.stack + made.local, made.spill_stores, made.spill_loads)
        print(
            f"| {name} | {' | '.join(map(str, numbers))} | {' '.join(made.remarks) or '-'} | {seconds:.1f} |"
        )
        clean &= made.clean
    raise SystemExit(0 if clean else "not every build is clean")


if __name__ == "__main__":
    main()
