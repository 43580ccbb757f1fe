"""What the tests of the vLLM plugin share."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
#: Counted in bfloat16 with the GPU kernels; the test compares with the transformers integration, not with it.
PROFILE = ROOT / "benchmarks" / "results" / "h200_smollm2" / "profile.json"


#: The command `vllm` asks for a package named vllm, which the CPU build is not.
SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")


def environment(**changes: str) -> dict[str, str]:
    """Of a process with an engine: no options of ours but those given, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLASST_")}
    fixed = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    return {**kept, **fixed, **changes}


class Result(NamedTuple):
    """What an engine answered, its tile counts (or None) and everything it logged."""

    rounds: list[dict[str, Any]]
    totals: dict[str, list[int]] | None
    log: str
