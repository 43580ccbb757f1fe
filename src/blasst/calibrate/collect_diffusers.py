"""Counts and profile of a diffusers model: dense runs in which every self-attention call also counts.

The calls are those that `blasst.integrations.diffusers.enable` would serve: not causal, without a mask; the
phase is "prefill". The length is the number of tokens, so runs at several sizes or durations are needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from blasst.calibrate.assemble import build_profile
from blasst.calibrate.collect import CountRecord, CountTable, Progress, check_thresholds, evaluating
from blasst.calibrate.counts import Floats
from blasst.calibrate.histograms import Histograms
from blasst.core.errors import CalibrationError
from blasst.core.phase_fit import SERVING_RULES
from blasst.core.profile import DataInfo, ModelInfo, Profile
from blasst.integrations.diffusers import fingerprint_of
from blasst.integrations.diffusers_session import DiffusersCall, session_for
from blasst.kernels.eager import prefill_margins

#: A kind of content, and what runs the model on it: one denoising step, or a whole pipeline.
Run = tuple[str, Callable[[], Any]]

_RULE = replace(SERVING_RULES["prefill"], dense_tail=0)  # no row of an image is the last one


def _margins(call: DiffusersCall, index: int) -> Tensor:
    scale = call.q.shape[-1] ** -0.5 if call.softmax_scale is None else call.softmax_scale
    parts = prefill_margins(call.q[index], call.k[index], softmax_scale=scale, causal=False, tile=_RULE.tile)
    return torch.cat([margin for _, _, margin in parts], dim=1)


def collect_diffusers(
    model: nn.Module,
    runs: Sequence[Run],
    *,
    thresholds: Sequence[float] | Floats | None = None,
    disabled_until_timestep: float | None = None,
    num_train_timesteps: float = 1000.0,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> CountTable:
    """Run a model densely and count, per layer, head and threshold, the tiles that would be skipped.

    Args:
        model: a diffusers transformer.
        runs: (kind, function) each; a function calls the model, or a pipeline that holds it, at one length.
        thresholds: rising candidates in (0, 1]; default as for `blasst.calibrate.collect.collect`.
        disabled_until_timestep: steps that will stay dense are not counted; see `enable`.
        num_train_timesteps: see `enable`.
        ignore: fnmatch patterns of modules that are not counted (and will not be served).
        progress: called before each run and at the end.

    Raises:
        CalibrationError: no runs, or one that mixes lengths or counts nothing.
        ValueError: bad arguments, or no layer of the model can be served.
        UnsupportedError: a call that cannot be served.
    """
    values = check_thresholds(thresholds)
    if not runs:
        raise CalibrationError("runs: got none, need at least one")
    histograms = Histograms(np.log(values))

    def count(call: DiffusersCall) -> Tensor:
        for index in range(call.q.shape[0]):
            histograms.add("prefill", index, call.layer, call.k.shape[1], _margins(call, index))
        return call.native()

    records: list[CountRecord] = []
    with evaluating(model), session_for(model, count, ignore) as session:
        session.disabled_until_timestep = disabled_until_timestep
        session.num_train_timesteps = num_train_timesteps
        for number, (kind, run) in enumerate(runs):
            if progress is not None:
                progress(number, len(runs), kind)
            histograms.clear()
            run()
            seen = {n for layers in histograms.lengths.values() for calls in layers.values() for n in calls}
            if len(seen) != 1:
                raise CalibrationError(
                    f"run {number} ({kind}): counted calls of {sorted(seen) or 'no'} tokens, wants one length"
                )
            for index in range(len(histograms.lengths)):
                counts = histograms.take("prefill", index, len(session.layers))
                if counts is not None:
                    records.append(CountRecord(number, kind, "prefill", *counts))
        names = tuple(layer.name for layer in session.layers)
    if progress is not None:
        progress(len(runs), len(runs), "done")
    digest = hashlib.sha256(repr([(r.kind, r.kv_len) for r in records]).encode()).hexdigest()[:32]
    return CountTable(values, names, tuple(records), digest, len(runs), {"prefill": _RULE})


def calibrate_diffusers(
    model: nn.Module,
    runs: Sequence[Run],
    *,
    target_sparsity: float | None = None,
    thresholds: Sequence[float] | Floats | None = None,
    disabled_until_timestep: float | None = None,
    num_train_timesteps: float = 1000.0,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> Profile:
    """Count, then fit: a profile for `blasst.integrations.diffusers.enable`.

    Args:
        model: see `collect_diffusers`.
        runs: see `collect_diffusers`; two or more lengths let the fit know about length.
        target_sparsity: default target to keep in the profile, checked to be reachable; None = no default.
        thresholds: see `collect_diffusers`.
        disabled_until_timestep: see `collect_diffusers`.
        num_train_timesteps: see `collect_diffusers`.
        ignore: see `collect_diffusers`.
        progress: see `collect_diffusers`.

    Raises:
        CalibrationError: the runs cannot support a calibration, or the target is out of reach.
        ValueError: see `collect_diffusers`.
        UnsupportedError: see `collect_diffusers`.
    """
    table = collect_diffusers(
        model,
        runs,
        thresholds=thresholds,
        disabled_until_timestep=disabled_until_timestep,
        num_train_timesteps=num_train_timesteps,
        ignore=ignore,
        progress=progress,
    )
    return build_profile(
        table,
        model_info=ModelInfo(type(model).__name__, fingerprint_of(model) or "unknown"),
        data_info=DataInfo(table.data_hash, len(runs), tuple(sorted({kind for kind, _ in runs}))),
        target_sparsity=target_sparsity,
    )
