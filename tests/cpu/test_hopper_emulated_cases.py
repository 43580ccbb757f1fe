"""The cases of test_cases_*.py on the emulated Hopper kernels, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

from test_both_cases import REFUSALS

FOLDER = Path(__file__).parent
CASES = sorted(str(path) for path in FOLDER.glob("test_cases_*.py"))


def test_every_case_passes_or_is_refused_with_a_reason():
    environment = {**os.environ, "BLASST_CASES": "emulated", "OMP_NUM_THREADS": "1"}
    environment = {name: x for name, x in environment.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *CASES]
    done = subprocess.run(
        command, cwd=FOLDER.parents[1], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    skipped = re.findall(r"^SKIPPED \[\d+\] (.*)$", done.stdout, re.MULTILINE)
    strange = [reason for reason in skipped if not re.search(REFUSALS["hopper"], reason)]
    assert not strange, strange
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 110
