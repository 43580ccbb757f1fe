"""Calibrate a model with NVIDIA ModelOpt's own calibrator and measure what it achieves on held-out prompts.

Runs in an environment of its own (pip install torch nvidia-modelopt transformers); imports nothing of blasst.
ModelOpt 0.47 votes in 128 x 128 tiles in prefill and in 1 x 128 tiles per query head in decode, from the
first tile on, against a running maximum that includes the tile itself. It fits a * exp(b * sparsity) to
threshold * length by unweighted least squares in linear space (its default), one point per prompt (or chunk
of it, or decode step) and threshold, and averages the sparsity of layers.

    python benchmarks/write_prompts.py MODEL prompts.jsonl --lengths 4096,8192 --per-kind 1
    python benchmarks/modelopt_calibration.py MODEL prompts.jsonl modelopt.json

Prompts: one JSON object a line with "token_ids" (or "text"), "kind", "seqlen" and "split" ("calibrate" or
"heldout"). Result: the coefficients, and rows {phase, seqlen, target, achieved, by_kind}.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import modelopt
import modelopt.torch.sparsity.attention_sparsity as mtsa
import torch
from modelopt.torch.sparsity.attention_sparsity.calibration.calibrator import DynamicThresholdCalibrator
from modelopt.torch.sparsity.attention_sparsity.sparse_attention import SparseAttentionModule
from transformers import AutoModelForCausalLM, AutoTokenizer

PHASES = ("prefill", "decode")


class Recorder:
    """Takes the place of ModelOpt's statistics manager: (skipped, visited) tiles per phase."""

    def __init__(self) -> None:
        self.enabled = True
        self.counts: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def collect(self, stats: dict[str, Any]) -> None:
        """Add one attention call; total_blocks is per head, and all heads weigh the same."""
        count = self.counts[stats["phase"]]
        count[0] += stats["sparsity"][0] * stats["total_blocks"]
        count[1] += stats["total_blocks"]


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor, chunk_size: int) -> Any:
    """Run a prompt in chunks, or at once for chunk_size -1, and return the last output."""
    step = chunk_size if 0 < chunk_size < ids.shape[1] else ids.shape[1]
    cache, output = None, None
    for start in range(0, ids.shape[1], step):
        output = model(ids[:, start : start + step], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
    return output


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """Run with another attention implementation."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def dense_prefill(model: Any, ids: torch.Tensor) -> Any:
    """Run a prompt at once with torch's own attention, unseen by ModelOpt."""
    with attention(model, "sdpa"):
        return prefill(model, ids, -1)


@torch.no_grad()
def decode(model: Any, output: Any, tokens: int) -> None:
    """Greedy steps with ModelOpt's attention after a dense prefill, as its own decode loop does."""
    for _ in range(tokens):
        token = output.logits[:, -1:].argmax(-1)
        output = model(token, past_key_values=output.past_key_values, use_cache=True)


def read_prompts(path: Path, model_dir: Path, split: str, device: str) -> list[tuple[str, int, torch.Tensor]]:
    """(kind, seqlen, ids) of one split; a text is cut to its length."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    tokenizer = None
    prompts = []
    for row in rows:
        if row["split"] != split:
            continue
        ids = row.get("token_ids")
        if ids is None:
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model_dir)
            ids = tokenizer(row["text"]).input_ids
        if len(ids) < row["seqlen"]:
            raise SystemExit(f"a {row['kind']} prompt has {len(ids)} tokens, wants {row['seqlen']}")
        prompts.append((row["kind"], row["seqlen"], torch.tensor([ids[: row["seqlen"]]], device=device)))
    if not prompts:
        raise SystemExit(f"{path}: no prompts of split {split!r}")
    return prompts


def sparse_modules(model: Any) -> list[Any]:
    """ModelOpt's attention modules."""
    return [module for module in model.modules() if isinstance(module, SparseAttentionModule)]


def calibrate(model: Any, prompts: Sequence[Any], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Coefficients per phase by ModelOpt's calibrator, with its default thresholds."""
    results = {}
    for phase in options.phases:

        def forward_loop(model: Any, phase: str = phase) -> None:
            for _, _, ids in prompts:
                if phase == "prefill":
                    prefill(model, ids, options.chunk_size)
                else:
                    decode(model, dense_prefill(model, ids), options.decode_tokens)

        calibrator = DynamicThresholdCalibrator(fit_logspace=options.fit_logspace)
        result = calibrator.calibrate(model, forward_loop, phase=phase)
        if "a" not in result:
            raise SystemExit(f"{phase}: ModelOpt found no fit; use longer or more prompts")
        results[phase] = result
    return results


def measure(
    model: Any, prompts: Sequence[Any], coefficients: dict[str, Any], targets: Sequence[float], tokens: int
) -> list[dict[str, Any]]:
    """Achieved sparsity with the skipping on, per phase, length and target: counts summed, then divided."""
    modules = sparse_modules(model)
    totals: dict[tuple[str, int, float], dict[str, list[float]]] = defaultdict(dict)
    for kind, seqlen, ids in prompts:
        dense = dense_prefill(model, ids) if "decode" in coefficients else None
        for target in targets:
            recorder = Recorder()
            for module in modules:
                module._stats_manager = recorder
                module._sparse_method_instance.calibration_params = coefficients
                module._sparse_method_instance.target_sparse_ratio = dict.fromkeys(coefficients, target)
            if "prefill" in coefficients:
                prefill(model, ids, -1)
            if dense is not None:
                decode(model, copy.deepcopy(dense), tokens)
            for module in modules:
                module._stats_manager = None
            for phase in coefficients:
                total = totals[phase, seqlen, target].setdefault(kind, [0.0, 0.0])
                for i in range(2):
                    total[i] += recorder.counts[phase][i]
    rows = []
    for (phase, seqlen, target), kinds in sorted(totals.items()):
        skipped, visited = (sum(value[i] for value in kinds.values()) for i in range(2))
        by_kind = {kind: value[0] / value[1] for kind, value in kinds.items()}
        row = {"phase": phase, "seqlen": seqlen, "target": target, "achieved": skipped / visited}
        rows.append({**row, "by_kind": by_kind})
    return rows


def main() -> None:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of a transformers model")
    parser.add_argument("prompts", type=Path, help="JSONL file")
    parser.add_argument("out", type=Path, help="JSON file to write")
    parser.add_argument("--targets", default="0.5,0.7")
    parser.add_argument("--phases", default="prefill,decode")
    parser.add_argument("--chunk-size", type=int, default=2048, help="of calibration; ModelOpt's default")
    parser.add_argument("--decode-tokens", type=int, default=10, help="ModelOpt's default")
    parser.add_argument("--fit-logspace", action="store_true", help="ModelOpt's option for diffusion models")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.phases = [phase for phase in PHASES if phase in options.phases.split(",")]
    targets = [float(value) for value in options.targets.split(",")]
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        options.model, attn_implementation="eager", dtype=getattr(torch, options.dtype)
    )
    model = model.to(options.device).eval()
    layer = {"method": "flash_skip_softmax", "backend": "pytorch", "enable": True}
    model = mtsa.sparsify(model, {"sparse_cfg": {"*attn*": layer, "default": {"enable": False}}})
    prompts = read_prompts(options.prompts, options.model, "calibrate", options.device)
    coefficients = calibrate(model, prompts, options)
    held_out = read_prompts(options.prompts, options.model, "heldout", options.device)
    rows = measure(model, held_out, coefficients, targets, options.decode_tokens)
    result = {
        "modelopt": modelopt.__version__,
        "torch": torch.__version__,
        "model": options.model.name,
        "fit": "log space" if options.fit_logspace else "linear space",
        "chunk_size": options.chunk_size,
        "dtype": options.dtype,
        "prompts": {"calibrate": len(prompts), "heldout": len(held_out)},
        "coefficients": coefficients,
        "rows": rows,
        "seconds": round(time.perf_counter() - start, 1),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps({"out": str(options.out), "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
