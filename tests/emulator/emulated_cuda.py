"""A pytest plugin: every test runs with emulated Hopper kernels, and device="cuda" is the CPU.

It must not be loaded without --noconftest: the record of device runs is not for emulated ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from run_hopper import cuda_is_the_cpu, emulated


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run beside tests/gpu/conftest.py, which would record the run as one of a device."""
    if not config.option.noconftest:
        raise pytest.UsageError("emulated_cuda wants --noconftest")


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with emulated(int(os.environ.get("BLASST_SEED", "0"))), cuda_is_the_cpu():
        yield
