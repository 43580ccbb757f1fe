"""Record of the last green run on a device: `tests/gpu/verified.json`, by a whole run of this folder.

tests/cpu/test_verified.py fails when a kernel source has changed since. Commit the record after the run.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
SOURCES = FOLDER.parents[1] / "src/blasst/kernels"
RECORD = FOLDER / "verified.json"


def kernel_hashes() -> dict[str, str]:
    """sha256 of every file that holds device code or launches it."""
    files = sorted(p for p in SOURCES.glob("triton/*.py") if p.name != "__init__.py")
    return {str(p.relative_to(SOURCES)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the record when every test of this folder was run and none failed."""
    config = session.config
    partial = config.option.keyword or config.option.markexpr or hasattr(config, "workerinput")
    files = {path.name for path in FOLDER.glob("test_*.py")}
    asked = {Path(arg.split("::")[0]).resolve() for arg in config.args}
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus != 0 or partial or FOLDER.resolve() not in asked or reporter is None:
        return
    import torch

    stats = {name: len(reporter.stats.get(name, ())) for name in ("passed", "skipped")}
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        **stats,
        "files": sorted(files),
        "sources": kernel_hashes(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
