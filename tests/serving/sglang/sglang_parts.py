"""What the tests of the SGLang plugin share."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SERVER = (sys.executable, "-m", "sglang.launch_server")

#: Stands for the one function of vLLM that SGLang wants on a machine without a GPU.
STUB = Path(__file__).with_name("stub")

#: A name that no plugin has, so that SGLang loads none.
NO_PLUGIN = {"SGLANG_PLUGINS": "none"}


def environment(**changes: str) -> dict[str, str]:
    """Of a process with an engine on a CPU: no options of ours but those given, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BLASST_")}
    paths = [str(STUB), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "0",
    }
    return {**kept, **fixed, **changes}
