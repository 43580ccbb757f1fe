"""Record of the last green run on a device: `tests/gpu/verified.json`, one entry for each family of kernels.

An entry is rewritten when every test of the family was run and none failed; tests/cpu/test_verified.py
fails when a source or a test of the family has changed since. Commit the record after the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1] / "src/blasst/kernels"
RECORD = FOLDER / "verified.json"

_TRITON, _HOPPER = ["triton/*.py"], ["hopper/*.cu", "hopper/*.cuh", "hopper/*.py", "triton/launch.py"]

#: Family of tests -> files that hold the device code they test or launch it. With one GPU, all tests of
#: two_gpus are skipped, which leaves their entry as it was.
FAMILIES = {
    "triton": _TRITON,
    "hopper": _HOPPER,
    "both": [*_TRITON, *_HOPPER],
    "two_gpus": ["hopper/launch.py", "hopper/compile.py", "triton/launch.py"],
}

#: Family -> what its tests import from this folder.
PARTS = {"hopper": ["decode_oracle.py"], "both": ["peak_memory.py"]}


def test_files(family: str) -> list[Path]:
    """The files of this folder that test a family."""
    return sorted(FOLDER.glob(f"test_{family}*.py"))


def kernel_hashes(family: str) -> dict[str, str]:
    """sha256 of every source of a family."""
    files = {path for pattern in FAMILIES[family] for path in SOURCES.glob(pattern)}
    return {str(p.relative_to(SOURCES)): _sha256(p) for p in sorted(files) if p.name != "__init__.py"}


def test_hashes(family: str) -> dict[str, str]:
    """sha256 of every test file of a family: they run nowhere else, so a change is unproven until then."""
    files = [*test_files(family), *(FOLDER / name for name in PARTS.get(family, ()))]
    return {path.name: _sha256(path) for path in files}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def outcome(
    family: str, collected: Sequence[str], passed: Sequence[str], skipped: Sequence[str]
) -> dict[str, int] | None:
    """How many tests of a family passed and were skipped, or None if not all of them were run or one failed.

    Args:
        family: of kernels.
        collected: node ids of the run.
        passed: those that passed.
        skipped: those that were skipped.
    """
    names = {path.name for path in test_files(family)}

    def of_family(ids: Sequence[str]) -> set[str]:
        return {one for one in ids if one.split("::")[0].rsplit("/", 1)[-1] in names}

    everything, good, left = of_family(collected), of_family(passed), of_family(skipped)
    present = {one.split("::")[0].rsplit("/", 1)[-1] for one in everything}
    if not good or present != names or good | left != everything:
        return None
    return {"passed": len(good), "skipped": len(left)}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the entries of the families whose tests were all run and none failed."""
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus not in (0, 1) or reporter is None or hasattr(config, "workerinput"):
        return
    outcomes = ("passed", "skipped", "failed", "error")
    stats = {name: [report.nodeid for report in reporter.stats.get(name, ())] for name in outcomes}
    everything = [one for name in outcomes for one in stats[name]]  # session.items stays in xdist's workers
    broken = {*stats["failed"], *stats["error"]}
    passed = [one for one in stats["passed"] if one not in broken]  # a test may pass and its teardown fail
    single = any("::" in arg for arg in config.args) or bool(reporter.stats.get("deselected"))
    single |= bool(config.option.keyword or config.option.markexpr)  # xdist's workers keep what they deselect
    results = {family: outcome(family, everything, passed, stats["skipped"]) for family in FAMILIES}
    if single or not any(results.values()):
        return
    import torch

    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for family, result in results.items():
        if result is not None:
            record[family] = {
                "date": datetime.now(UTC).date().isoformat(),
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                **result,
                "tests": test_hashes(family),
                "sources": kernel_hashes(family),
            }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
