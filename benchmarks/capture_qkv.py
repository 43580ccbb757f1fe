"""Save q, k and v of one layer of a model for `blasst bench prefill --capture`.

python benchmarks/capture_qkv.py MODEL qkv.pt --length 16384 --layer 12 --kind prose --device cuda

One held-out prompt of the calibration generator runs through the model's own attention; the tensors are those
after position embedding, (batch, seqlen, heads, head_dim).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from blasst.calibrate.prompts import PROMPT_KINDS, calibration_prompts
from blasst.evals.models import LoadedModel, load_model, load_smollm2
from blasst.integrations.transformers_attention import AttentionCall, Layer, Session


def capture(loaded: LoadedModel, token_ids: tuple[int, ...], index: int, name: str) -> dict[str, object]:
    """Run one prompt and keep what one layer was given.

    Args:
        loaded: the model.
        token_ids: the prompt.
        index: position of the layer among the attention layers that blasst can serve.
        name: what the input set is called in benchmark rows.

    Returns:
        q, k, v on the CPU, softmax_scale, name.

    Raises:
        ValueError: no such layer, or it has a window, a softcap or sinks, which the benchmark does not know.
    """
    kept: dict[str, object] = {}

    def keep(layer: Layer, call: AttentionCall) -> Tensor:
        if layer.index == index:
            if call.window_size != (-1, -1) or call.softcap or call.sinks is not None:
                raise ValueError(f"{layer.name}: has a window, a softcap or sinks; choose another layer")
            tensors = {"q": call.q, "k": call.k, "v": call.v}
            kept.update({key: value.detach().cpu().contiguous() for key, value in tensors.items()})
            kept.update(softmax_scale=float(call.scale), name=name)
        return call.native()

    session = Session.create(loaded.model, keep)
    if not 0 <= index < len(session.served):
        raise ValueError(f"layer {index}: the model has {len(session.served)} layers that can be served")
    session.activate()
    try:
        ids = torch.tensor([token_ids], device=next(loaded.model.parameters()).device)
        with torch.no_grad():
            loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        session.deactivate()
    return kept


def main() -> None:
    """Parse, run, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help='"smollm2" (in a wheel), a model folder or a .gguf file')
    parser.add_argument("out", type=Path, help="torch file to write")
    parser.add_argument("--length", type=int, default=8192, help="tokens")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--kind", choices=PROMPT_KINDS, default="prose")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.model == "smollm2":
        loaded = load_smollm2(device=options.device)
    else:
        loaded = load_model(options.model, device=options.device)
    (prompt,) = calibration_prompts(
        loaded.tokenizer, [options.length], kinds=[options.kind], split="heldout", seed=options.seed
    )
    name = f"{loaded.name}, layer {options.layer}, {options.kind}, {options.length} tokens"
    content = capture(loaded, prompt.ids(loaded.tokenizer), options.layer, name)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, options.out)
    print({key: tuple(x.shape) if isinstance(x, Tensor) else x for key, x in content.items()})


if __name__ == "__main__":
    main()
