"""One vLLM engine in a process of its own: a job as JSON on the command line, a result as JSON in a file.

Job: model, options (or null), engine (arguments of LLM), rounds (lists of prompts, token ids), max_tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    from vllm import LLM, SamplingParams

    from blasst.integrations.serving_counts import read_totals

    job = json.loads(Path(sys.argv[1]).read_text())
    config = {} if job["options"] is None else {"blasst": job["options"]}
    llm = LLM(
        job["model"],
        max_model_len=8192,
        max_num_seqs=8,
        enforce_eager=True,
        additional_config=config,
        disable_log_stats=True,
        **job["engine"],
    )
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=job["ignore_eos"])
    rounds = []
    for prompts in job["rounds"]:
        begin = time.monotonic()
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        rounds.append(
            {
                "tokens": [list(a.outputs[0].token_ids) for a in answers],
                "text": [a.outputs[0].text for a in answers],
                "cached": [a.num_cached_tokens or 0 for a in answers],
                "seconds": time.monotonic() - begin,
            }
        )
    folder = os.environ.get("BLASST_COUNTS_FOLDER")
    time.sleep(2.5)  # the worker writes its counts once a second
    totals = None if folder is None else read_totals(Path(folder))
    Path(sys.argv[2]).write_text(json.dumps({"rounds": rounds, "totals": totals}))


if __name__ == "__main__":
    main()
