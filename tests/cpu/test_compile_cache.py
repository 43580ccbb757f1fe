"""Eight processes of several threads that fill one folder of compiled kernels; the compiler is a stand-in."""

import os
import subprocess
import sys

PROCESSES = 8
CODE = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from blasst.kernels.hopper import compile as compiler

compiler.compiler_version = lambda: "1.0"

def compile_source(file, macros, **_):
    text = f"{file} {sorted(macros.items())}".encode()
    return (text * (2**18 // len(text) + 1)), ""

compiler.compile_source, real = compile_source, compiler.compile_source
folder, me = Path(sys.argv[1]), sys.argv[2]
(folder / f"ready-{me}").touch()
while len(list(folder.glob("ready-*"))) < int(sys.argv[3]):
    time.sleep(0.001)

def one(thread):
    for turn in range(30):
        macros = {"N": turn % 10}
        got = compiler.cached_cubin("decode.cu", macros)
        assert got == compile_source("decode.cu", macros)[0], (me, thread, turn)

with ThreadPoolExecutor(4) as pool:
    list(pool.map(one, range(4)))
"""


def test_processes_and_threads_that_start_at_once_read_whole_files_only(tmp_path):
    environment = os.environ | {"BLASST_CACHE_DIR": str(tmp_path / "kernels")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(tmp_path), str(i), str(PROCESSES)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    try:
        for process in running:
            _, error = process.communicate(timeout=120)
            assert process.returncode == 0, error[-2000:]
    finally:
        for process in running:
            process.kill()
    files = list((tmp_path / "kernels").iterdir())
    assert len(files) == 10 and all(path.suffix == ".cubin" for path in files)
