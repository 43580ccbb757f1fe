"""Kernel sources must not change after the device run that is on record."""

import importlib.util
import json
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "gpu"


def test_kernels_are_those_of_the_recorded_device_run():
    spec = importlib.util.spec_from_file_location("gpu_conftest", FOLDER / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    record = json.loads((FOLDER / "verified.json").read_text(encoding="utf-8"))
    now = module.kernel_hashes()
    assert now, "no kernel sources found"
    changed = sorted(
        name for name in now.keys() | record["sources"].keys() if now.get(name) != record["sources"].get(name)
    )
    assert not changed, (
        f"changed since the device run of {record['date']}: {changed}; run `make test-gpu` and commit"
    )
    assert record["passed"] > 0 and "H200" in record["gpu"]
