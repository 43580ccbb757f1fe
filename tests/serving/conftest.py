"""The model of the tests with serving engines: SmolLM2-135M from its wheel, in float32."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

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
