"""One prompt pass and greedy decode steps of a transformers model, with or without padding."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn


def cache_of(output: Any) -> tuple[str, Any]:
    """The name of the argument that takes a model's key-value cache, and the cache in its output.

    Args:
        output: of a forward with use_cache.

    Raises:
        ValueError: there is none.
    """
    for name in ("cache", "past_key_values"):  # transformers 5 renamed it on the way
        if name in output.keys() and output[name] is not None:  # noqa: SIM118 - a ModelOutput, not a dict
            return name, output[name]
    raise ValueError("model: returned no key-value cache, so decode steps cannot be run")


def _padded(
    prompts: Sequence[Sequence[int]], side: Literal["left", "right"], device: torch.device
) -> tuple[Tensor, Tensor | None]:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, place] = torch.tensor(prompt)
        mask[row, place] = 1
    return ids.to(device), None if bool(mask.all()) else mask.to(device)


def greedy_pass(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    steps: int,
    padding_side: Literal["left", "right"] = "left",
) -> Tensor:
    """Run prompts in one batch, then greedy decode steps of one token each.

    Args:
        model: causal language model in eval mode.
        prompts: token ids of each.
        steps: decode steps; each is one forward with one new token per sequence.
        padding_side: where shorter prompts are padded.

    Returns:
        int64 (batch, steps) the tokens that were fed to the decode steps.
    """
    device = next(model.parameters()).device
    ids, mask = _padded(prompts, padding_side, device)
    parameters = inspect.signature(model.forward).parameters
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    first: dict[str, Any] = {"use_cache": steps > 0}
    if mask is not None:
        first |= {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    last_column = padding_side == "left" or mask is None
    if last_column and "logits_to_keep" in parameters:
        first["logits_to_keep"] = 1  # the logits of a long prompt can be larger than the model
    output = model(ids, **first)
    column = -1 if last_column else lengths - 1
    token = output.logits[torch.arange(len(prompts), device=device), column].argmax(-1, keepdim=True)
    fed = []
    for step in range(steps):
        fed.append(token)
        name, cache = cache_of(output)
        further: dict[str, Any] = {name: cache, "use_cache": True}
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
            further |= {"attention_mask": mask, "position_ids": (lengths + step)[:, None]}
        output = model(token, **further)
        token = output.logits[:, -1].argmax(-1, keepdim=True)
    return torch.cat(fed, dim=1) if fed else ids.new_zeros(len(prompts), 0)
