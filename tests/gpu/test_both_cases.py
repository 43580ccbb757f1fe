"""The cases from the field and the rule by hand (tests/cpu) on the kernels of a GPU, in other processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "cpu"
CASES = sorted(path.name for path in FOLDER.glob("test_cases_*.py"))
#: What a kernel may refuse, by the words of its reason; everything else runs.
REFUSALS = {
    "triton": r"head dims are \(\d+, \d+\)",
    "hopper": r"head dims are|page_size is (1|4|48),|has dtype torch.float32|is empty|there is no sequence"
    r"|with strides \(0,",
}
#: Seconds, compilation included; a kernel that hangs does not end.
LIMIT = 300


def run(files: list[str], impl: str) -> tuple[int, list[str]]:
    """Passed tests and the reasons of skipped ones; fails where a test failed."""
    workers = min(8, max(1, (os.cpu_count() or 1) // 2))
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["-p", "no:benchmark", "-n", str(workers)]  # a plugin that warns beside xdist, if it is there
    command += [str(FOLDER / file) for file in files]
    environment = {**os.environ, "BLASST_CASES": impl, "OMP_NUM_THREADS": "1"}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
        environment.pop(name, None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode != 0:
        pytest.fail(done.stdout[-8000:] + done.stderr[-2000:])
    skipped = re.findall(r"^SKIPPED \[\d+\] (.*)$", done.stdout, re.MULTILINE)
    passed = re.search(r"(\d+) passed", done.stdout)
    return int(passed[1]) if passed else 0, skipped


@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_every_case_passes_or_is_refused_with_a_reason(impl: str) -> None:
    passed, skipped = run(CASES, impl)
    strange = [reason for reason in skipped if not re.search(REFUSALS[impl], reason)]
    assert not strange, strange
    assert passed >= {"hopper": 110, "triton": 140}[impl]


def test_the_rule_by_hand() -> None:
    passed, skipped = run(["test_rule_by_hand.py"], "triton")
    assert passed >= 15 and not skipped
