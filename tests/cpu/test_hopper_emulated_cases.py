"""The cases of test_cases_*.py on the emulated Hopper kernels, in a process of their own.

BLASST_EMULATED_CASES=all runs all of them; without it those of masks, lengths, pages and shapes.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from test_both_cases import REFUSALS

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ALL = os.environ.get("BLASST_EMULATED_CASES") == "all"
CASES = sorted(str(path) for path in FOLDER.glob("test_cases_*.py" if ALL else "test_cases_masks.py"))


def pytest_run(*arguments, **variables):
    """Another pytest, to its end."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_case_passes_or_is_refused_with_a_reason():
    done = pytest_run(*CASES, BLASST_CASES="emulated")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    skipped = re.findall(r"^SKIPPED \[\d+\] (.*)$", done.stdout, re.MULTILINE)
    strange = [reason for reason in skipped if not re.search(REFUSALS["hopper"], reason)]
    assert not strange, strange
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= (110 if ALL else 45)


def test_device_tests_run_emulated_but_never_into_the_record_of_the_device():
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "emulator")])
    test = "tests/gpu/test_hopper_decode.py::test_nan_in_one_row_stays_there"
    done = pytest_run("--noconftest", "-p", "emulated_cuda", test, PYTHONPATH=path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-8000:] + done.stderr[-2000:]
    refused = pytest_run("-p", "emulated_cuda", test, PYTHONPATH=path)
    assert refused.returncode != 0 and "emulated_cuda wants --noconftest" in refused.stderr
