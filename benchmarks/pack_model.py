"""Pack a GGUF model into parts that load without gguf, or unpack them into a model folder.

python benchmarks/pack_model.py pack MODEL.gguf PARTS --part-mb 57 [--tie]
python benchmarks/pack_model.py unpack PARTS FOLDER

For a machine that has transformers but no gguf and no network: the parts travel one at a time, and FOLDER is
what every script here takes as MODEL. Weights are the values that transformers loads from the file, rounded
to --dtype; with --tie the output matrix also serves as embedding.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from blasst.evals.packed import pack, unpack


def main() -> None:
    """Parse, then pack or unpack."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("source", type=Path, help="the GGUF file, or the folder of the parts")
    parser.add_argument("target", type=Path, help="folder of the parts, or of the model")
    parser.add_argument("--part-mb", type=float, default=57, help="largest part, in 10^6 bytes")
    parser.add_argument("--tie", action="store_true", help="one matrix for embedding and output")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.what == "pack":
        parts = pack(options.source, options.target, part_bytes=int(options.part_mb * 1e6), tie=options.tie)
        size = sum(part.stat().st_size for part in parts)
        print(f"{len(parts)} parts, {size / 1e6:.1f} MB, {time.perf_counter() - start:.1f} s")
        return
    parts = sorted(options.source.glob("part-*.bin"))
    name = unpack(parts, options.target, dtype=getattr(torch, options.dtype))
    print(f"{name}: {len(parts)} parts, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
