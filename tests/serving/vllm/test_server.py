"""Load on the OpenAI server over loopback: mixed lengths, four at a time, some of them cancelled."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from vllm_parts import PROFILE, SERVER, environment

REQUESTS = 50
#: Every seventh request is given up after its first piece of answer.
CANCELLED = range(3, REQUESTS, 7)
LENGTHS = (12, 40, 90, 300, 700, 1500, 3000)
NEW_TOKENS = 24


class Server(NamedTuple):
    port: int
    log: Path
    process: subprocess.Popen[bytes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


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
        yield Server(port, log, process)
    finally:
        process.terminate()
        process.wait(timeout=120)


def ask(port: int, tokens: list[int], cancel: bool) -> tuple[int, list[float], int]:
    """(status, log probabilities of the answer, its tokens); a cancelled request ends after one piece."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {
        "model": "smollm2",
        "prompt": tokens,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "stream": True,
        "ignore_eos": True,
    }
    logprobs: list[float] = []
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        for line in answer:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            piece = json.loads(data)
            assert "error" not in piece, piece
            logprobs += piece["choices"][0]["logprobs"]["token_logprobs"]
            if cancel:
                break
        return answer.status, logprobs, len(logprobs)


def tiles(port: int) -> dict[tuple[str, str], int]:
    text = get(port, "/metrics")[1]
    found = re.findall(r'^blasst_tiles_(\w+)_total\{phase="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {(name, phase): int(float(value)) for name, phase, value in found}


def test_load_with_cancelled_requests(server: Server, prose: list[int]) -> None:
    before = tiles(server.port)
    assert set(before) == {(n, p) for n in ("skipped", "visited") for p in ("prefill", "decode")}

    def one(index: int) -> tuple[int, list[float], int]:
        length = LENGTHS[index % len(LENGTHS)]
        start = 500 * index if index % 2 else 0
        return ask(server.port, prose[start : start + length], index in CANCELLED)

    begin = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(one, range(REQUESTS)))
    print(f"{REQUESTS} requests in {time.monotonic() - begin:.0f} s")
    for index, (status, logprobs, new) in enumerate(answers):
        assert status == 200
        assert all(math.isfinite(value) for value in logprobs)
        assert new == NEW_TOKENS if index not in CANCELLED else 0 < new <= NEW_TOKENS
    time.sleep(3)
    assert get(server.port, "/health")[0] == 200
    after = tiles(server.port)
    print(after)
    for phase in ("prefill", "decode"):
        assert 0 < after["skipped", phase] < after["visited", phase]
        assert after["visited", phase] > before["visited", phase]
    last = tiles(server.port)
    server.process.terminate()
    server.process.wait(timeout=120)
    log = server.log.read_text()
    assert "Traceback" not in log and "ERROR" not in log, log[-6000:]
    # the lines of the log add up to the metrics
    for phase in ("prefill", "decode"):
        logged = re.findall(rf"{phase} \d+\.\d% of (\d+) tiles skipped", log)
        assert sum(map(int, logged)) == last["visited", phase]
