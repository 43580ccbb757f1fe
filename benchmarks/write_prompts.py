"""Write blasst's calibration and held-out prompts of a model as JSONL, for other calibrators.

python benchmarks/write_prompts.py MODEL prompts.jsonl --lengths 4096,8192 --per-kind 1
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from blasst.calibrate.prompts import calibration_prompts


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a transformers model")
    parser.add_argument("out", type=Path, help="JSONL file to write")
    parser.add_argument("--lengths", default="4096,8192", help="tokens")
    parser.add_argument("--per-kind", type=int, default=1, help="prompts per length, kind and split")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lengths = [int(value) for value in options.lengths.split(",")]
    with options.out.open("w") as file:
        for split, name in (("calibration", "calibrate"), ("heldout", "heldout")):
            for length in lengths:
                prompts = calibration_prompts(
                    tokenizer, [length], per_kind=options.per_kind, split=split, seed=options.seed
                )
                for prompt in prompts:
                    row = {
                        "split": name,
                        "kind": prompt.kind,
                        "seqlen": length,
                        "token_ids": prompt.token_ids,
                    }
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
