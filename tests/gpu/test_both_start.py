"""Processes and threads that start at once with an empty folder of compiled kernels, or a broken one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PROCESSES, THREADS = 8, 4
#: Seconds for all of them, compilation included.
LIMIT = 180


def bits(impls: tuple[str, ...] = ("hopper", "triton")) -> str:
    """What a prompt and a step give."""
    import hashlib

    import torch

    from blasst import blasst_attn_func, blasst_attn_with_kvcache
    from blasst.testing import heavy_tailed_inputs

    digest = hashlib.sha256()
    for impl in impls:
        prompt = heavy_tailed_inputs(1, 300, 1000, 4, 2, 64, dtype=torch.float16, device="cuda", block=128)
        step = heavy_tailed_inputs(2, 1, 3000, 4, 2, 64, dtype=torch.float16, device="cuda")
        used = torch.tensor([3000, 700], dtype=torch.int32, device="cuda")
        for got in (
            blasst_attn_func(*prompt, threshold=0.05, causal=True, return_counts=True, impl=impl),
            blasst_attn_with_kvcache(
                *step, cache_seqlens=used, threshold=0.05, return_counts=True, impl=impl
            ),
        ):
            assert int(got.counts.skipped.sum()) > 0
            digest.update(got.out.cpu().numpy().tobytes() + got.counts.skipped.cpu().numpy().tobytes())
    return digest.hexdigest()


def work() -> None:
    """All threads of a process begin together; whether Triton compiles in threads is its own affair."""
    bits(("triton",))
    together = threading.Barrier(THREADS)

    def one(_: int) -> str:
        together.wait()
        return bits()

    with ThreadPoolExecutor(THREADS) as pool:
        (result,) = set(pool.map(one, range(THREADS)))
    print(result)


def start_all(folder: Path, processes: int = PROCESSES) -> str:
    """Results of processes that share a folder; all must be the same."""
    environment = {
        **os.environ,
        "BLASST_CACHE_DIR": str(folder / "blasst"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    running = [
        subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    results = set()
    try:
        for process in running:
            out, err = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, err[-2000:]
            results.add(out.strip())
    finally:
        for process in running:
            process.kill()
    (result,) = results
    return result


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("kernels")
    return folder, start_all(folder)


def test_eight_processes_start_at_once(filled: tuple[Path, str]) -> None:
    folder, _ = filled
    files = [path.name for path in (folder / "blasst").iterdir()]
    assert len(files) == 2 and all(name.endswith(".cubin") for name in files), "one for each kernel, no parts"


def test_broken_files_are_compiled_again(filled: tuple[Path, str]) -> None:
    folder, expected = filled
    for i, path in enumerate(sorted((folder / "blasst").iterdir())):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if i == 0 else content[:-4] + b"\0\1\2\3")
    assert start_all(folder) == expected


def test_a_folder_that_cannot_be_made_costs_time_only(filled: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "blasst").write_text("a file in the way")
    assert start_all(tmp_path, processes=2) == filled[1]


if __name__ == "__main__":
    work()
