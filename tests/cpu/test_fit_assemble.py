"""From records of counts per layer and head to a profile, and to achieved sparsity on other prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from blasst.calibrate.assemble import achieved_on, build_profile, point_of_record
from blasst.calibrate.counts import CountPoint
from blasst.calibrate.tiles import TILES
from blasst.core.errors import CalibrationError, ProfileError
from blasst.core.profile import DataInfo, ModelInfo, Profile, load_profile
from blasst.core.types import Phase

GRID = np.exp(np.linspace(-12.0, 0.0, 25))
MODEL = ModelInfo("tiny", "f00d")
DATA = DataInfo("cafe", 6, ("code", "prose"))


@dataclass(frozen=True)
class Record:
    phase: Phase
    kind: str
    kv_len: int
    thresholds: NDArray[np.float64]
    skipped: NDArray[np.int64]
    visited: NDArray[np.int64]


def _records(phases: tuple[Phase, ...] = ("prefill", "decode"), shift: float = 0.0) -> list[Record]:
    """Three layers of two heads that skip differently; decode needs a smaller threshold."""
    records = []
    for phase in phases:
        for n in (1024, 2048, 4096):
            for kind in ("prose", "code"):
                head = np.arange(6.0).reshape(3, 2) / 3.0
                x = np.log(GRID)[:, None, None] + (3.0 if phase == "prefill" else 7.0) + head + shift
                share = 1.0 / (1.0 + np.exp(-(x + 1.3 * np.log(n / 2048)) / 2.0))
                visited = np.full((3, 2), n * 10, dtype=np.int64)
                records.append(
                    Record(phase, kind, n, GRID, np.floor(share * visited).astype(np.int64), visited)
                )
    return records


def _profile(**arguments: object) -> Profile:
    return build_profile(_records(), model_info=MODEL, data_info=DATA, **arguments)  # type: ignore[arg-type]


def test_both_phases_are_fitted_and_the_profile_goes_through_a_file(tmp_path: Path) -> None:
    profile = _profile(target_sparsity=0.5)
    assert profile.target_sparsity == {"prefill": 0.5, "decode": 0.5}
    assert profile.threshold("decode", 0.5, 2048) < 0.1 * profile.threshold("prefill", 0.5, 2048)
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json", fingerprint="f00d") == profile


def test_counts_of_layers_and_heads_are_summed() -> None:
    record = _records()[0]
    point = point_of_record(record)
    assert point.visited == 6 * 10240
    assert point.skipped.dtype == np.int64
    assert point.skipped[7] == sum(record.skipped[7, layer, head] for layer in range(3) for head in range(2))


def test_thresholds_achieve_their_targets_on_the_counted_prompts_and_not_on_shifted_ones() -> None:
    profile = _profile()
    rows = achieved_on(profile, _records(), targets=(0.3, 0.5, 0.7))
    assert len(rows) == 2 * 3 * 3
    assert {row["seqlen"] for row in rows} == {1024, 2048, 4096}
    for row in rows:
        assert row["achieved"] == pytest.approx(row["target"], abs=0.01)
    shifted = achieved_on(profile, _records(shift=1.0), targets=(0.5,))
    assert all(0.58 < row["achieved"] < 0.7 for row in shifted)


def test_a_phase_that_was_not_counted_is_missing_and_cannot_have_a_target() -> None:
    records = _records(("prefill",))
    profile = build_profile(
        records, model_info=MODEL, data_info=DATA, target_sparsity={"prefill": 0.7, "decode": None}
    )
    assert list(profile.phases) == ["prefill"]
    assert profile.target_sparsity == {"prefill": 0.7}
    with pytest.raises(ProfileError, match="decode"):
        build_profile(records, model_info=MODEL, data_info=DATA, target_sparsity={"decode": 0.5})
    with pytest.raises(ProfileError, match="decode"):
        achieved_on(profile, _records())


def test_counts_in_the_tiles_of_another_engine_are_kept_as_such() -> None:
    profile = _profile(rules=TILES["modelopt"])
    assert profile.phases["prefill"].rule == TILES["modelopt"]["prefill"]
    with pytest.raises(ProfileError, match="tile"):
        profile.require_match()
    assert _profile(rules=TILES["blasst"]).phases["prefill"].dense_tail == 64


def test_no_records_and_a_target_out_of_reach_are_errors() -> None:
    with pytest.raises(CalibrationError, match="got 0"):
        build_profile([], model_info=MODEL, data_info=DATA)
    with pytest.raises(CalibrationError, match="out of reach"):
        _profile(target_sparsity=0.99)


def test_a_record_with_other_shapes_is_refused() -> None:
    record = _records()[0]
    with pytest.raises(CalibrationError, match="layers, heads"):
        point_of_record(Record("prefill", "a", 9, GRID, record.skipped[..., 0], record.visited))
    with pytest.raises(CalibrationError, match="layers, heads"):
        point_of_record(Record("prefill", "a", 9, GRID, record.skipped, record.visited[:2]))


def test_a_table_that_sums_its_own_records_gives_the_same_profile() -> None:
    class Table:
        def points(self, phase: Phase) -> list[CountPoint]:
            return [point_of_record(record) for record in _records() if record.phase == phase]

    profile = build_profile(Table(), model_info=MODEL, data_info=DATA)
    assert profile == _profile()
    assert achieved_on(profile, Table()) == achieved_on(profile, _records())
