"""Engines run in processes of their own; the model is SmolLM2-135M from its wheel, in float32."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_parts import Result, environment

from blasst.evals.models import LoadedModel, load_smollm2


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_smollm2(dtype=torch.float32, cache_dir=tmp_path_factory.getbasetemp() / "model")


@pytest.fixture(scope="session")
def model_folder(smollm2: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return next((tmp_path_factory.getbasetemp() / "model").iterdir())


@pytest.fixture(scope="session")
def prose(smollm2: LoadedModel) -> list[int]:
    """Token ids of English prose from the standard library."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))[:200_000]
    return list(smollm2.tokenizer(text, verbose=False).input_ids)


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
