"""Do the tests notice a wrong rule? Copy the sources, break one line, run the tests that ought to see it.

`python tests/mutants` takes every mutant of mutants.toml beside this file, or those whose name holds one of
the given texts. A mutant that breaks a test is killed; one that lives on is a hole in the tests, and the exit
status is 1. All tests in question first run on the sources as they are: one that fails there kills nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "blasst"
LIST = Path(__file__).with_name("mutants.toml")

#: Seconds for the tests of one mutant, and for all tests on the sources as they are. Too slow is no verdict.
TIME_LIMIT = 300
TIME_LIMIT_OF_ALL = 1800


@dataclass(frozen=True)
class Mutant:
    """One wrong version of one file.

    Attributes:
        name: what it gets wrong.
        file: path below src/blasst.
        old: text that stands once in the file.
        new: what stands there in the mutant.
        tests: files of tests/cpu, or single tests of them, one of which must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: "killed", "survived" or "broken" (the tests did not even run)."""

    mutant: Mutant
    state: str
    by: str
    seconds: float


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """The list, in its order."""
    with path.open("rb") as file:
        entries = tomllib.load(file)["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def apply(mutant: Mutant, source: Path) -> None:
    """Break one file of a copy of src/blasst.

    Raises:
        ValueError: the text to replace does not stand exactly once in the file.
    """
    path = source / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: found {text.count(mutant.old)} places in {mutant.file}, wanted 1")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def run_tests(
    tests: tuple[str, ...], package_root: Path, time_limit: int = TIME_LIMIT
) -> subprocess.CompletedProcess[str]:
    """Run tests of tests/cpu on the package below a folder, up to the first failure."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(package_root),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=line",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-p", "no:xdist", "--hypothesis-profile=mutants", *(f"tests/cpu/{test}" for test in tests)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=time_limit, check=False
    )


def judge(mutant: Mutant) -> Verdict:
    """Run one mutant in a folder of its own."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="blasst-mutant-") as folder:
        copy = Path(folder) / "blasst"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        apply(mutant, copy)
        try:
            done = run_tests(mutant.tests, Path(folder))
        except subprocess.TimeoutExpired:
            return Verdict(mutant, "broken", f"no end within {TIME_LIMIT} s", time.monotonic() - start)
    state = {0: "survived", 1: "killed"}.get(done.returncode, "broken")
    failed = re.search(r"^FAILED tests/cpu/(\S+)", done.stdout, re.MULTILINE)
    by = failed[1] if failed else "" if state == "survived" else done.stdout[-300:] + done.stderr[-300:]
    return Verdict(mutant, state, by, time.monotonic() - start)


def check_unbroken(mutants: list[Mutant]) -> str | None:
    """Why the tests cannot judge, or None: they must be green on the sources as they are."""
    tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    done = run_tests(tests, ROOT / "src", TIME_LIMIT_OF_ALL)
    return None if done.returncode == 0 else done.stdout[-2000:] + done.stderr[-2000:]


def main() -> int:
    """Print a table; 0 when every mutant was killed."""
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=__doc__)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="only mutants whose name or file holds it")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in read_mutants()
        if not options.texts or any(text in f"{mutant.name} {mutant.file}" for text in options.texts)
    ]
    if not mutants:
        parser.error("no mutant has such a name")
    if (reason := check_unbroken(mutants)) is not None:
        print(f"the tests fail without any mutant:\n{reason}")
        return 2
    verdicts = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(judge, mutants):
            verdicts.append(verdict)
            mutant = verdict.mutant
            print(f"{verdict.state:8}  {mutant.file:38}  {mutant.name}", flush=True)
            print(f"{verdict.seconds:7.1f}s  {verdict.by}", flush=True)
    killed = sum(verdict.state == "killed" for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} mutants killed, {len(verdicts) - killed} not")
    return int(killed < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
