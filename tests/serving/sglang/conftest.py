"""Engines run in processes of their own."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving_parts import Result
from sglang_parts import environment


@pytest.fixture(scope="session")
def run_engine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    folder, number = tmp_path_factory.mktemp("jobs"), itertools.count()

    def run(
        rounds: list[list[list[int]]],
        variables: dict[str, str],
        max_tokens: int = 16,
        ignore_eos: bool = False,
        **engine: Any,
    ) -> Result:
        name = folder / f"{next(number)}"
        job = {
            "model": str(model_folder),
            "rounds": rounds,
            "max_tokens": max_tokens,
            "ignore_eos": ignore_eos,
            "engine": engine,
        }
        name.with_suffix(".job").write_text(json.dumps(job))
        command = [sys.executable, str(Path(__file__).with_name("engine_job.py"))]
        done = subprocess.run(
            [*command, str(name.with_suffix(".job")), str(name.with_suffix(".result"))],
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
            check=False,
        )
        assert name.with_suffix(".result").exists(), done.stdout[-6000:]
        result = json.loads(name.with_suffix(".result").read_text())
        return Result(result["rounds"], result["totals"], done.stdout)

    return run
