"""What the tests of the vLLM plugin share."""

from __future__ import annotations

import os
import sys

#: The command `vllm` asks for a package named vllm, which the CPU build is not.
SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")


def environment(**changes: str) -> dict[str, str]:
    """Of a process with an engine: no options of ours but those given, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLASST_")}
    fixed = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    return {**kept, **fixed, **changes}
