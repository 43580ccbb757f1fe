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
from vllm_parts import environment


@pytest.fixture(scope="session")
def run_engine(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    folder, number = tmp_path_factory.mktemp("jobs"), itertools.count()

    def run(
        rounds: list[list[list[int]]],
        options: dict[str, Any] | None = None,
        max_tokens: int = 16,
        variables: dict[str, str] | None = None,
        **engine: Any,
    ) -> Result:
        name = folder / f"{next(number)}"
        job = {
            "model": str(model_folder),
            "options": options,
            "rounds": rounds,
            "max_tokens": max_tokens,
            "ignore_eos": engine.pop("ignore_eos", False),
            "engine": {"dtype": "float32", "enable_chunked_prefill": True, **engine},
        }
        name.with_suffix(".job").write_text(json.dumps(job))
        command = [sys.executable, str(Path(__file__).with_name("engine_job.py"))]
        done = subprocess.run(
            [*command, str(name.with_suffix(".job")), str(name.with_suffix(".result"))],
            env=environment(**(variables or {})),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        result = json.loads(name.with_suffix(".result").read_text())
        return Result(result["rounds"], result["totals"], done.stdout)

    return run
