"""Load on the OpenAI server over loopback: mixed lengths, four at a time, some of them cancelled."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from serving_parts import PROFILE, free_port, get, put_load, tiles
from vllm_parts import SERVER, environment


class Server(NamedTuple):
    port: int
    log: Path


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    options = ["--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "4", "--enforce-eager"]
    options += ["--max-num-batched-tokens", "1024", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--served-model-name", "smollm2"]
    variables = environment(
        BLASST_PROFILE=str(PROFILE), BLASST_TARGET_SPARSITY="prefill=0.5,decode=0.4", BLASST_LOG_INTERVAL="5"
    )
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*SERVER, "--model", str(model_folder), *options], env=variables, stdout=file, stderr=file
        )
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(OSError):
                if get(port, "/health")[0] == 200:
                    break
            time.sleep(1)
        yield Server(port, log)
    finally:
        process.terminate()
        process.wait(timeout=120)


def test_load_with_cancelled_requests(server: Server, prose: list[int]) -> None:
    before = tiles(server.port)
    assert set(before) == {(n, p) for n in ("skipped", "visited") for p in ("prefill", "decode")}

    put_load(server.port, prose)
    time.sleep(8)  # longer than a count waits for its line
    after, log = tiles(server.port), server.log.read_text()  # later vLLM may kill its own worker, and say so
    print(after)
    for phase in ("prefill", "decode"):
        assert 0 < after["skipped", phase] < after["visited", phase]
        assert after["visited", phase] > before["visited", phase]
        # the lines of the log add up to the metrics
        logged = re.findall(rf"{phase} \d+\.\d% of (\d+) tiles skipped", log)
        assert sum(map(int, logged)) == after["visited", phase]
    assert get(server.port, "/health")[0] == 200
    assert "Traceback" not in log and "ERROR" not in log, log[-6000:]
