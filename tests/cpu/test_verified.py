"""Kernel sources and their device tests must not change after the device run that is on record."""

import importlib.util
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "gpu"
_spec = importlib.util.spec_from_file_location("gpu_conftest", FOLDER / "conftest.py")
gpu = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu)


@pytest.mark.parametrize("family", gpu.FAMILIES)
def test_kernels_are_those_of_the_recorded_device_run(family):
    records = json.loads(gpu.RECORD.read_text(encoding="utf-8"))
    remedy = f"run `make test-gpu` (or `python3 -m pytest tests/gpu/test_{family}*.py`) on an H200 and commit"
    assert family in records, f"no device run of the {family} kernels is on record; {remedy}"
    record = records[family]
    changed = []
    for what, now in (("sources", gpu.kernel_hashes(family)), ("tests", gpu.test_hashes(family))):
        assert now, f"no {what} of {family} found"
        then = record[what]
        changed += sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))
    assert not changed, f"changed since the device run of {record['date']}: {changed}; {remedy}"
    assert record["passed"] > 0 and "H200" in record["gpu"]


def test_every_device_source_and_test_belongs_to_a_family():
    sources = {p for pattern in ("*/*.py", "*/*.cu", "*/*.cuh") for p in gpu.SOURCES.glob(pattern)}
    names = {str(p.relative_to(gpu.SOURCES)) for p in sources if p.name != "__init__.py"}
    assert names == set().union(*(gpu.kernel_hashes(family) for family in gpu.FAMILIES))
    tests = {path.name for path in FOLDER.glob("*.py")} - {"conftest.py", "sanitize.py", "test_machine.py"}
    assert tests == set().union(*(gpu.test_hashes(family) for family in gpu.FAMILIES))


def test_only_a_whole_green_run_of_a_family_counts():
    tests = [f"tests/gpu/{name}::test_{i}" for name in gpu.test_hashes("triton") for i in range(3)]
    foreign = ["tests/gpu/test_machine.py::test_x"]
    assert gpu.outcome("triton", tests + foreign, tests[:-1] + foreign, tests[-1:]) == {
        "passed": len(tests) - 1,
        "skipped": 1,
    }
    assert gpu.outcome("triton", tests, tests[:-1], []) is None, "one failed"
    assert gpu.outcome("triton", tests[:3], tests[:3], []) is None, "one file was not asked for"
    assert gpu.outcome("triton", tests, [], tests) is None, "everything was skipped"
    assert gpu.outcome("triton", foreign, foreign, []) is None
