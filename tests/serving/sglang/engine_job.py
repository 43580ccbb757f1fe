"""One SGLang engine in a process of its own: a job as JSON on the command line, a result as JSON in a file.

Job: model, engine (arguments of Engine), rounds (lists of prompts, token ids), max_tokens, ignore_eos.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def totals_of_metrics() -> dict[str, list[int]] | None:
    """Skipped and visited tiles by phase, read as the engine's metrics page reads them; None = not there."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    found = {
        (sample.name, sample.labels["phase"]): int(sample.value)
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("blasst_tiles")
    }
    if not found:
        return None
    names = ("blasst_tiles_skipped_total", "blasst_tiles_visited_total")
    return {phase: [found[name, phase] for name in names] for phase in ("prefill", "decode")}


def main() -> None:
    import sglang
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = sglang.Engine(
        model_path=job["model"],
        device="cpu",
        dtype="float32",
        context_length=8192,
        max_total_tokens=40_000,
        max_running_requests=8,
        enable_metrics=True,
        log_level="info",
        **job["engine"],
    )
    print("plugin loaded:", "blasst" in ATTENTION_BACKENDS)
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": job["max_tokens"]}
    sampling["ignore_eos"] = job["ignore_eos"]
    rounds = []
    before: dict[str, list[int]] | None = {"prefill": [0, 0], "decode": [0, 0]}
    for prompts in job["rounds"]:
        begin = time.monotonic()
        answers = llm.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.monotonic() - begin
        time.sleep(2.5)  # the scheduler shows its counts once a second
        after = totals_of_metrics()
        rounds.append(
            {
                "tokens": [answer["output_ids"] for answer in answers],
                "text": [answer["text"] for answer in answers],
                "cached": [answer["meta_info"]["cached_tokens"] for answer in answers],
                "seconds": seconds,
                "tiles": after
                and before
                and {p: [a - b for a, b in zip(after[p], before[p])] for p in after},
            }
        )
        before = after
    Path(sys.argv[2]).write_text(json.dumps({"rounds": rounds, "totals": before}))
    llm.shutdown()


if __name__ == "__main__":
    main()
