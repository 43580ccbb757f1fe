"""Compare a model under sparse attention with itself under dense attention, on given token sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blasst.core.errors import BlasstError, UnsupportedError
from blasst.evals.comparison import Comparison, LayerError, mass_summaries


class QualityError(BlasstError):
    """Sparse attention agrees less with dense attention than the stated limits allow.

    Attributes:
        ignore: names of the layers above the limit per layer, as the setting ignore takes them.
    """

    def __init__(self, message: str, ignore: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ignore = tuple(ignore)


def compare(
    model: Any,
    sequences: Sequence[Tensor | Sequence[int]],
    settings: Mapping[str, Any],
    *,
    last_tokens: int | None = None,
    decode_tokens: int = 0,
    chunk_size: int = 256,
    measure_skipped_mass: bool = True,
) -> Comparison:
    """Teacher-forced comparison of sparse with dense attention.

    Args:
        model: a transformers causal language model, on its device, in eval mode.
        sequences: token ids, each a 1-D int64 tensor or a list, of any lengths from 2 up.
        settings: keyword arguments of sparse_attention (profile, target_sparsity, threshold, ...).
        last_tokens: only the last so many predictions of each sequence enter the means, default all.
        decode_tokens: this many tokens at the end of each sequence are fed one at a time against the cache
            (the decode rule); the rest in one forward pass (the prefill rule). Default 0.
        chunk_size: positions whose logits exist at once; memory is a few chunk_size x vocabulary float32.
        measure_skipped_mass: also measure the skipped softmax weight (a second dense attention per layer).

    Returns:
        Means over all predictions of all sequences.

    Raises:
        ValueError: no sequence, a too short one, or one longer than the model takes.
        UnsupportedError: the model turns hidden states into logits in a way this function does not know.
    """
    return compare_conditions(
        model,
        sequences,
        {"": settings},
        last_tokens=last_tokens,
        decode_tokens=decode_tokens,
        chunk_size=chunk_size,
        measure_skipped_mass=measure_skipped_mass,
    )[""]


def compare_conditions(
    model: Any,
    sequences: Sequence[Tensor | Sequence[int]],
    conditions: Mapping[str, Mapping[str, Any]],
    *,
    last_tokens: int | None = None,
    decode_tokens: int = 0,
    chunk_size: int = 256,
    measure_skipped_mass: bool = True,
) -> dict[str, Comparison]:
    """`compare` for several settings, with one dense pass for all of them.

    Args:
        model: as in compare.
        sequences: as in compare.
        conditions: name to settings.
        last_tokens: as in compare.
        decode_tokens: as in compare.
        chunk_size: as in compare.
        measure_skipped_mass: as in compare.

    Returns:
        One comparison per condition, under its name.

    Raises:
        ValueError: as in compare, or blasst is enabled on the model already.
        UnsupportedError: as in compare.
    """
    from blasst.integrations.transformers import (
        attention_stats,
        mass_bound_summary,
        skipped_mass_by_layer,
        skipped_mass_summary,
        sparse_attention,
    )

    ids = _checked(model, sequences, last_tokens, decode_tokens, chunk_size)
    kept = [min(last_tokens or len(row) - 1, len(row) - 1) for row in ids]
    with torch.inference_mode():
        _check_projection(model, ids[0][:8])
        dense = [_hidden_states(model, row, decode_tokens, k) for row, k in zip(ids, kept)]
        comparisons = {}
        for name, settings in conditions.items():
            options = {"collect_counts": True, "measure_skipped_mass": measure_skipped_mass}
            sums = torch.zeros(4, dtype=torch.float64)
            with sparse_attention(model, **{**settings, **options}):
                for row, k, states in zip(ids, kept, dense):
                    sparse = _hidden_states(model, row, decode_tokens, k)
                    sums += _agreement(model, states, sparse, row[len(row) - k :], chunk_size)
                stats = attention_stats(model)
                masses = skipped_mass_summary(model) if measure_skipped_mass else {}
                bounds = mass_bound_summary(model) if measure_skipped_mass else {}
                layer_masses = skipped_mass_by_layer(model) if measure_skipped_mass else []
            nll_dense, nll_sparse, kl, equal = (sums / sum(kept)).tolist()
            comparisons[name] = Comparison(
                num_tokens=sum(kept),
                nll_dense=nll_dense,
                nll_sparse=nll_sparse,
                kl=kl,
                top1_agreement=equal,
                skipped_mass=mass_summaries(masses),
                sparsity=_sparsity(stats),
                layers=_layer_errors(stats, layer_masses),
                mass_bound=mass_summaries(bounds),
            )
    return comparisons


def compare_dense(
    model: Any,
    sequences: Sequence[Tensor | Sequence[int]],
    settings: Mapping[str, Any],
    *,
    min_top1_agreement: float | None = None,
    max_nll_difference: float | None = None,
    max_kl: float | None = None,
    max_mean_skipped_mass: float | None = None,
    max_layer_skipped_mass: float | None = None,
    **options: Any,
) -> Comparison:
    """Compare with dense attention and fail when agreement is below a stated limit.

    One layer can lose most of its attention while means over all layers look harmless, for example one whose
    attention is near uniform. max_layer_skipped_mass refuses settings under which that happens; the error
    names the layers and holds them as `ignore`, to be left dense.

    Args:
        model: as in compare.
        sequences: as in compare.
        settings: as in compare.
        min_top1_agreement: smallest share of equal most likely tokens, 0..1.
        max_nll_difference: largest nll_sparse - nll_dense, nats per token.
        max_kl: largest mean KL, nats.
        max_mean_skipped_mass: largest mean skipped mass of any phase, 0..1.
        max_layer_skipped_mass: largest mean skipped mass of any one layer in any phase, 0..1.
        **options: last_tokens, decode_tokens, chunk_size, measure_skipped_mass of compare.

    Returns:
        The comparison, when every stated limit holds.

    Raises:
        ValueError: no limit was stated, or one on a mass that is not measured.
        QualityError: a limit does not hold; names every broken limit with its value.
    """
    mass_limits = {
        "max_mean_skipped_mass": max_mean_skipped_mass,
        "max_layer_skipped_mass": max_layer_skipped_mass,
    }
    if all(x is None for x in (min_top1_agreement, max_nll_difference, max_kl, *mass_limits.values())):
        raise ValueError("limits: none stated, so nothing could fail; give min_top1_agreement, max_kl, ...")
    for name, limit in mass_limits.items():
        if limit is not None and not options.get("measure_skipped_mass", True):
            raise ValueError(f"{name}: needs measure_skipped_mass=True")
    comparison = compare(model, sequences, settings, **options)
    limits = [
        ("KL", comparison.kl, max_kl),
        ("NLL difference", comparison.nll_difference, max_nll_difference),
        *(
            (f"mean skipped mass in {phase}", mass.mean, max_mean_skipped_mass)
            for phase, mass in comparison.skipped_mass.items()
        ),
    ]
    # "not <=" so that NaN fails as well.
    broken = [
        f"{name} {value:.4g} is above {limit:g}"
        for name, value, limit in limits
        if limit is not None and not value <= limit
    ]
    if min_top1_agreement is not None and not comparison.top1_agreement >= min_top1_agreement:
        broken.append(f"top-1 agreement {comparison.top1_agreement:.4g} is below {min_top1_agreement:g}")
    ignore: tuple[str, ...] = ()
    if max_layer_skipped_mass is not None:
        over = _layers_above(max_layer_skipped_mass, comparison)
        broken += [
            f"mean skipped mass in {layer.phase} of {layer.layer} {layer.mean_skipped_mass:.4g} is above "
            f"{max_layer_skipped_mass:g}"
            for layer in over
        ]
        ignore = tuple(dict.fromkeys(layer.layer for layer in over))
    if broken:
        hint = f"; to leave these layers dense: ignore={list(ignore)}" if ignore else ""
        raise QualityError(
            f"sparse attention differs from dense: {'; '.join(broken)}{hint} ({comparison})", ignore
        )
    return comparison


def _checked(
    model: Any,
    sequences: Sequence[Tensor | Sequence[int]],
    last_tokens: int | None,
    decode_tokens: int,
    chunk_size: int,
) -> list[Tensor]:
    """The sequences as int64 tensors (seqlen,) on the model's device."""
    from blasst.integrations.transformers_attention import session_of

    if session_of(model) is not None:
        raise ValueError("model: blasst is enabled on it, so there is no dense pass; disable it first")
    if not sequences:
        raise ValueError("sequences: none given")
    if decode_tokens < 0 or chunk_size < 1 or (last_tokens is not None and last_tokens < 1):
        raise ValueError(
            f"last_tokens {last_tokens}, decode_tokens {decode_tokens}, chunk_size {chunk_size}: want at"
            " least 1, 0 and 1"
        )
    ids = [torch.as_tensor(row, dtype=torch.int64, device=model.device) for row in sequences]
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for number, row in enumerate(ids):
        if row.dim() != 1 or len(row) < decode_tokens + 2:
            raise ValueError(
                f"sequences[{number}]: shape {tuple(row.shape)}, want one dimension and at least "
                f"{decode_tokens + 2} tokens"
            )
        if longest is not None and len(row) > longest:
            raise ValueError(f"sequences[{number}]: {len(row)} tokens, the model takes {longest}")
    return ids


def _hidden_states(model: Any, ids: Tensor, decode_tokens: int, keep: int) -> Tensor:
    """The last `keep` final hidden states that predict ids[1:], on the CPU, (keep, hidden_size)."""
    decoder = model.get_decoder()
    split = len(ids) - 1 - decode_tokens
    output = decoder(input_ids=ids[None, :split], use_cache=decode_tokens > 0)
    states = [output.last_hidden_state[0, -keep:]]
    for position in range(split, len(ids) - 1):
        # transformers 5 renamed the cache on the way.
        name = next(key for key in ("cache", "past_key_values") if output.get(key) is not None)
        output = decoder(input_ids=ids[None, position : position + 1], use_cache=True, **{name: output[name]})
        states.append(output.last_hidden_state[0])
    return torch.cat(states)[-keep:].cpu()


def _logits(model: Any, states: Tensor) -> Tensor:
    """Float32 logits (positions, vocabulary) of final hidden states, as the model computes them."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(states.to(model.device))
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits.float()


def _check_projection(model: Any, ids: Tensor) -> None:
    """Compare _logits with the model's own logits on a few tokens."""
    states = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    own = model(input_ids=ids[None], use_cache=False).logits[0].float()
    # Two runs of the same operations; a few roundings of the model's dtype are allowed for other shapes.
    tolerance = 8 * torch.finfo(states.dtype).eps * own.abs().max().item()
    if not torch.allclose(_logits(model, states), own, rtol=0.0, atol=tolerance):
        raise UnsupportedError(
            f"model {type(model).__name__}: its logits are not its output embedding applied to its last"
            " hidden state, so they cannot be computed in chunks"
        )


def _agreement(model: Any, dense: Tensor, sparse: Tensor, targets: Tensor, chunk_size: int) -> Tensor:
    """Sums over positions: NLL dense, NLL sparse, KL(dense || sparse), equal top-1; float64 (4,)."""
    sums = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(targets), chunk_size):
        chunk = slice(start, start + chunk_size)
        log_p = _logits(model, dense[chunk]).log_softmax(-1)  # [chunk, vocabulary]
        log_q = _logits(model, sparse[chunk]).log_softmax(-1)
        target = targets[chunk, None]
        equal = log_p.argmax(-1) == log_q.argmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        parts = (-log_p.gather(1, target), -log_q.gather(1, target), kl, equal)
        sums += torch.stack([part.sum(dtype=torch.float64).cpu() for part in parts])
    return sums


def _sparsity(records: Sequence[Any]) -> dict[str, float]:
    """Skipped over visited tiles per phase, summed over layers."""
    tiles: dict[str, list[int]] = {}
    for record in records:
        sums = tiles.setdefault(record.phase, [0, 0])
        sums[0] += int(record.skipped.sum())
        sums[1] += int(record.visited.sum())
    return {phase: skipped / max(visited, 1) for phase, (skipped, visited) in tiles.items()}


def _layers_above(limit: float, comparison: Comparison) -> list[LayerError]:
    """Layers whose mean skipped mass is not within the limit."""
    measured = [(layer, layer.mean_skipped_mass) for layer in comparison.layers]
    return [layer for layer, mass in measured if mass is not None and not mass <= limit]


def _layer_errors(stats: Sequence[Any], masses: Sequence[Any]) -> tuple[LayerError, ...]:
    """Sparsity and skipped mass of each layer and phase, joined by name."""
    by_layer = {(mass.layer, mass.phase): (mass.mean, mass.max, mass.heads) for mass in masses}
    return tuple(
        LayerError(
            record.layer,
            record.phase,
            record.sparsity,
            *by_layer.get((record.layer, record.phase), (None, None, ())),
        )
        for record in stats
    )
