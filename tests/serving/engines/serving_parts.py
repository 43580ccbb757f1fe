"""What the tests of the serving plugins share: prompts, what is to be expected, load on a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

import blasst
from blasst.core.types import PHASES
from blasst.evals.models import LoadedModel
from blasst.integrations.transformers import attention_stats

ROOT = Path(__file__).parents[3]
#: Counted in bfloat16 with the GPU kernels; the test compares with the transformers integration, not with it.
PROFILE = ROOT / "benchmarks" / "results" / "h200_smollm2" / "profile.json"

#: Two of three prompts begin the same text, so that the prefix cache serves a part of them.
LENGTHS = [
    10,
    14,
    22,
    35,
    57,
    64,
    100,
    129,
    250,
    400,
    513,
    700,
    1000,
    1300,
    1700,
    2049,
    2600,
    3300,
    4500,
    6000,
]

NEW_TOKENS = 16

#: Load on a server; every seventh request is given up after its first piece of answer.
REQUESTS = 50
CANCELLED = range(3, REQUESTS, 7)
LOAD_LENGTHS = (12, 40, 90, 300, 700, 1500, 3000)
LOAD_NEW_TOKENS = 24


def prompts(prose: list[int]) -> list[list[int]]:
    return [
        prose[:length] if index % 3 else prose[700 * index + 50 : 700 * index + 50 + length]
        for index, length in enumerate(LENGTHS)
    ]


class Result(NamedTuple):
    """What an engine answered, its tile counts (or None) and everything it logged."""

    rounds: list[dict[str, Any]]
    totals: dict[str, list[int]] | None
    log: str


def expected_tiles(config: Any, length: int, new: int) -> dict[str, int]:
    """Tiles that a prompt taken at once and `new` tokens after it visit, by the definition."""
    tiles = sum(-(-min(first + 64, length) // 128) for first in range(0, length, 64))
    steps = sum(-(-(length + step) // 64) for step in range(1, new))
    return {
        "prefill": config.num_hidden_layers * config.num_attention_heads * tiles,
        "decode": config.num_hidden_layers * config.num_key_value_heads * steps,
    }


def transformers_sparsity(loaded: LoadedModel, prompt: list[int], chunk: int) -> dict[str, float]:
    """Of the transformers integration, per phase, for a prompt that is fed in chunks and then continued."""
    from transformers import DynamicCache

    model, ids, cache = loaded.model, torch.tensor([prompt]), DynamicCache()
    with blasst.sparse_attention(model, profile=PROFILE, target_sparsity=0.5, collect_counts=True):
        for begin in range(0, len(prompt), chunk):
            piece = ids[:, begin : begin + chunk]
            out = model(piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for _ in range(NEW_TOKENS - 1):
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(token, past_key_values=cache, use_cache=True)
        records = attention_stats(model)
    return {
        phase: sum(int(r.skipped.sum()) for r in records if r.phase == phase)
        / sum(int(r.visited.sum()) for r in records if r.phase == phase)
        for phase in PHASES
    }


def assert_sparsity_of_transformers(
    engine: str, result: Result, loaded: LoadedModel, prompt: list[int], chunk: int
) -> None:
    """The engine, fed in such chunks, skipped what the transformers integration skips with the same ones."""
    wanted = transformers_sparsity(loaded, prompt, chunk)
    assert result.totals is not None
    for phase in PHASES:
        skipped, visited = result.totals[phase]
        print(f"chunk {chunk}, {phase}: {engine} {skipped / visited:.4f}, transformers {wanted[phase]:.4f}")
        assert abs(skipped / visited - wanted[phase]) <= 0.05
        assert skipped > 0.3 * visited


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


def ask(port: int, tokens: list[int], cancel: bool) -> tuple[int, list[float], int]:
    """(status, log probabilities of the answer, its tokens); a cancelled request ends after one piece."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {
        "model": "smollm2",
        "prompt": tokens,
        "max_tokens": LOAD_NEW_TOKENS,
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


def put_load(port: int, prose: list[int]) -> None:
    """Prompts of mixed lengths, four at a time, some of them cancelled; all answers must be sound."""

    def one(index: int) -> tuple[int, list[float], int]:
        length = LOAD_LENGTHS[index % len(LOAD_LENGTHS)]
        start = 500 * index if index % 2 else 0
        return ask(port, prose[start : start + length], index in CANCELLED)

    begin = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(one, range(REQUESTS)))
    print(f"{REQUESTS} requests in {time.monotonic() - begin:.0f} s")
    for index, (status, logprobs, new) in enumerate(answers):
        assert status == 200
        assert all(math.isfinite(value) for value in logprobs)
        assert new == LOAD_NEW_TOKENS if index not in CANCELLED else 0 < new <= LOAD_NEW_TOKENS


def tiles(port: int) -> dict[tuple[str, str], int]:
    text = get(port, "/metrics")[1]
    found = re.findall(r'^blasst_tiles_(\w+)_total\{phase="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {(name, phase): int(float(value)) for name, phase, value in found}


def cases_of(
    program: str, cases: dict[str, Any], model: Path, folder: Path, environment: dict[str, str]
) -> dict[str, str]:
    """What a program, run in a process of its own, says of each case in its lines CASE [name, text]."""
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder / "cases.json"), str(model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line.removeprefix("CASE ") for line in done.stdout.splitlines() if line.startswith("CASE ")]
    return dict(json.loads(line) for line in lines)
