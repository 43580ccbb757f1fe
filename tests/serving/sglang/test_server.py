"""Load on the OpenAI server over loopback: mixed lengths, four at a time, some of them cancelled."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from serving_parts import PROFILE, free_port, get, put_load, tiles
from sglang_parts import SERVER, environment


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """(port, log) of a server that runs."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    options = ["--device", "cpu", "--dtype", "float32", "--context-length", "8192", "--enable-metrics"]
    options += ["--max-running-requests", "4", "--max-total-tokens", "40000", "--enable-mixed-chunk"]
    options += ["--chunked-prefill-size", "1024", "--served-model-name", "smollm2"]
    options += ["--host", "127.0.0.1", "--port", str(port)]
    variables = environment(
        BLASST_PROFILE=str(PROFILE), BLASST_TARGET_SPARSITY="prefill=0.5,decode=0.4", BLASST_LOG_INTERVAL="5"
    )
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*SERVER, "--model-path", str(model_folder), *options], env=variables, stdout=file, stderr=file
        )
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text()[-4000:]
            with contextlib.suppress(OSError):
                if get(port, "/health_generate")[0] == 200:
                    break
            time.sleep(1)
        yield port, log
    finally:
        process.terminate()
        process.wait(timeout=120)


def test_load_with_cancelled_requests(server: tuple[int, Path], prose: list[int]) -> None:
    port, log = server
    before = tiles(port)
    assert set(before) == {(n, p) for n in ("skipped", "visited") for p in ("prefill", "decode")}
    put_load(port, prose)
    time.sleep(7)  # the longest that a count waits for its line
    after, lines = tiles(port), log.read_text()
    print(after)
    for phase in ("prefill", "decode"):
        assert 0 < after["skipped", phase] < after["visited", phase]
        assert after["visited", phase] > before["visited", phase]
        # the lines of the log add up to the metrics
        logged = re.findall(rf"{phase} \d+\.\d% of (\d+) tiles skipped", lines)
        assert sum(map(int, logged)) == after["visited", phase]
    assert get(port, "/health")[0] == 200  # last, since it generates a token
    assert "Traceback" not in log.read_text(), log.read_text()[-6000:]
