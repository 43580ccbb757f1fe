"""Profiles: thresholds of any valid coefficients, the file, and what a broken or foreign file says."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blasst.core.errors import ProfileError
from blasst.core.phase_fit import KindSpread, LengthResidual, ObservedRange, PhaseFit, SparsityCurve
from blasst.core.profile import (
    DataInfo,
    ModelInfo,
    Profile,
    ProfileWarning,
    load_profile,
    model_fingerprint,
)
from blasst.core.sparsity_model import MAX_MODEL_LENGTH, ExponentialModel, LengthExponentModel, logit
from blasst.core.types import DECODE_TILE, PREFILL_TILE, Phase, TileShape
from blasst.integrations.threshold_rules import resolve_rules

TARGETS = (0.0, 1e-9, 0.05, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)
LENGTHS = (1, 2, 127, 2048, 131072, 10**6, MAX_MODEL_LENGTH)


def _fit(
    phase: Phase = "prefill",
    exponential: ExponentialModel | None = None,
    length_exponent: LengthExponentModel | None = None,
) -> PhaseFit:
    return PhaseFit(
        phase=phase,
        tile=PREFILL_TILE if phase == "prefill" else DECODE_TILE,
        order="sink_first" if phase == "prefill" else "anchors",
        exponential=exponential or ExponentialModel(a=7.93, b=8.61, r2=0.98),
        length_exponent=length_exponent,
        selected="length_exponent" if length_exponent else "exponential",
        selected_by="held_out_lengths",
        observed=ObservedRange(sparsity=(0.1, 0.9), seqlen=(1024, 8192), threshold=(1e-5, 0.5)),
        points=(
            SparsityCurve(1024, 4, 1000, (0.001, 0.1, 1.0), (0, 200, 600)),
            SparsityCurve(8192, 4, 64000, (0.001, 0.1, 1.0), (10, 40000, 60800)),
        ),
        residuals=(LengthResidual("exponential", 1024, True, (0.1, 0.5), (0.02, -0.02)),),
        kind_spread=(KindSpread("prose", 1024, 0.5, 0.47),),
    )


OURS = LengthExponentModel(-2.6, 2.1, 0.01, -1.9, 0.2, 2896.3, (-2.1, 2.1), 0.99)


def _profile(*fits: PhaseFit, target: dict[Phase, float] | None = None) -> Profile:
    return Profile(
        library_version="0.1.0",
        model=ModelInfo("SmolLM2", "abc"),
        data=DataInfo("d1", 8, ("code", "prose")),
        phases={fit.phase: fit for fit in fits or (_fit(), _fit("decode", length_exponent=OURS))},
        target_sparsity=target or {},
    )


exponentials = st.builds(
    ExponentialModel,
    a=st.floats(1e-12, 1e12),
    b=st.floats(1e-6, 2000.0),
    r2=st.just(0.9),
)


@st.composite
def _length_exponents(draw: st.DrawFn) -> LengthExponentModel:
    low = draw(st.floats(-6.0, 5.0))
    try:
        return LengthExponentModel(
            c0=draw(st.floats(-50.0, 50.0)),
            c1=draw(st.floats(0.01, 50.0)),
            c2=draw(st.floats(-1.0, 1.0)),
            c3=draw(st.floats(-10.0, 0.0)),
            c4=draw(st.floats(-0.5, 0.5)),
            reference_length=draw(st.floats(1.0, 2.0**27)),
            logit_range=(low, draw(st.floats(low, 6.0))),
            r2=0.9,
        )
    except ProfileError:
        assume(False)
        raise


@settings(max_examples=100, deadline=None)
@given(model=exponentials | _length_exponents())
def test_thresholds_of_any_valid_model_are_in_range_rise_with_target_and_never_with_length(
    model: Any,
) -> None:
    fit = _fit(exponential=model) if isinstance(model, ExponentialModel) else _fit(length_exponent=model)
    profile = _profile(fit)
    table = [[profile.threshold("prefill", target, length) for length in LENGTHS] for target in TARGETS]
    assert all(0.0 <= value <= 1.0 for row in table for value in row)
    assert table[0] == [0.0] * len(LENGTHS)
    for row in table:
        assert all(right <= left * (1 + 1e-12) for left, right in itertools.pairwise(row))
    for lower, upper in itertools.pairwise(table):
        assert all(high >= low * (1 - 1e-12) for low, high in zip(lower, upper))
    lengths = torch.tensor(LENGTHS)
    for target, row in zip(TARGETS, table):
        on_device = profile.threshold("prefill", target, lengths)
        assert on_device.dtype == torch.float32
        # float32 carries ln(threshold), at most a few hundred in size, with an error of 1e-7 of that size.
        wanted = torch.tensor(row, dtype=torch.float64).log().clamp(min=-80.0)
        got = on_device.double().log().clamp(min=-80.0)
        assert (got - wanted).abs().max() < 2e-3
        assert bool((on_device.diff() <= 0).all())


def test_curve_that_leaves_the_unit_interval_is_clamped() -> None:
    profile = _profile(_fit(exponential=ExponentialModel(a=1000.0, b=5.0, r2=1.0)))
    for target in (0.5, 0.9, 0.99):
        assert profile.threshold("prefill", target, 127) == 1.0
        assert profile.threshold("prefill", target, 10**6) == pytest.approx(1e-3 * math.exp(5 * target))


def test_a_scale_of_e_to_the_800_does_not_overflow() -> None:
    profile = _profile(_fit(exponential=ExponentialModel(a=1.0, b=1600.0, r2=1.0)))
    assert profile.threshold("prefill", 0.5, 10**6) == 1.0
    assert profile.threshold("prefill", 0.5, torch.tensor([10**6])).item() == 1.0
    wanted = math.exp(800.0 - 400.0 * math.log(10.0))
    assert profile.threshold("prefill", 0.5, 10**400) == pytest.approx(wanted, rel=1e-9)


def test_coefficients_give_the_threshold_as_two_scalars() -> None:
    profile = _profile()
    for phase in ("prefill", "decode"):
        for target in (0.2, 0.5, 0.95):
            log_scale, exponent = profile.coefficients(phase, target)
            wanted = min(1.0, math.exp(log_scale) * 3000.0**exponent)
            assert profile.threshold(phase, target, 3000) == pytest.approx(wanted, rel=1e-12)
    assert profile.coefficients("prefill", 0.0) == (-math.inf, 0.0)


def test_length_model_follows_its_formula_inside_and_its_tangent_outside() -> None:
    x, length = logit(0.6), 6000.0
    wanted = -2.6 + 2.1 * x + 0.01 * x * x + (-1.9 + 0.2 * x) * math.log(length / 2896.3)
    profile = _profile(_fit(length_exponent=OURS))
    assert math.log(profile.threshold("prefill", 0.6, length)) == pytest.approx(wanted, rel=1e-12)
    edge = 2.1
    outside = logit(0.98)
    tangent = -2.6 + 2.1 * edge + 0.01 * edge**2 + (2.1 + 0.02 * edge) * (outside - edge)
    wanted = tangent + (-1.9 + 0.2 * edge) * math.log(200000.0 / 2896.3)
    assert math.log(profile.threshold("prefill", 0.98, 200000.0)) == pytest.approx(wanted, rel=1e-12)


def test_tensor_lengths_keep_shape_and_accept_every_integer_dtype() -> None:
    profile = _profile()
    for dtype in (torch.int32, torch.int64, torch.float32):
        lengths = torch.tensor([[256, 4096], [65536, 0]], dtype=dtype)
        got = profile.threshold("decode", 0.5, lengths)
        assert got.shape == (2, 2)
        assert got[0, 1].item() == pytest.approx(profile.threshold("decode", 0.5, 4096), rel=1e-5)
    assert torch.equal(profile.threshold("decode", 0.0, lengths), torch.zeros(2, 2))


def test_tensor_thresholds_read_nothing_back_and_compile_in_one_graph() -> None:
    profile = _profile()
    meta = profile.threshold("decode", 0.5, torch.empty(3, dtype=torch.int32, device="meta"))
    assert meta.device.type == "meta"
    assert meta.shape == (3,)
    compiled = torch.compile(lambda n: profile.threshold("decode", 0.5, n), fullgraph=True, backend="eager")
    lengths = torch.tensor([100, 5000])
    assert torch.equal(compiled(lengths), profile.threshold("decode", 0.5, lengths))


@pytest.mark.parametrize(
    ("target", "error"),
    [(1.5, ValueError), (-0.1, ValueError), (math.nan, ValueError), (True, TypeError), ("0.5", TypeError)],
)
def test_a_target_that_is_no_fraction_is_refused(target: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="target_sparsity"):
        _profile().threshold("prefill", target, 4096)
    with pytest.raises(error, match="target_sparsity"):
        _profile().resolve_targets(target)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: ExponentialModel(0.0, 1.0, 1.0), "exponential.a"),
        (lambda: ExponentialModel(1.0, 0.0, 1.0), "exponential.b"),
        (lambda: ExponentialModel(1.0, -2.0, 1.0), "exponential.b"),
        (lambda: ExponentialModel(math.nan, 1.0, 1.0), "exponential.a"),
        (lambda: ExponentialModel(math.inf, 1.0, 1.0), "exponential.a"),
        (lambda: ExponentialModel(1.0, 1.0, 1.5), "exponential.r2"),
        (lambda: LengthExponentModel(0.0, 1.0, 0.0, 0.1, 0.0, 4096.0, (-2.0, 2.0), 1.0), "exponent"),
        (lambda: LengthExponentModel(0.0, 1.0, 0.0, -0.3, 0.2, 4096.0, (-2.0, 2.0), 1.0), "exponent"),
        (lambda: LengthExponentModel(0.0, -1.0, 0.0, -1.0, 0.0, 4096.0, (-2.0, 2.0), 1.0), "slope"),
        (lambda: LengthExponentModel(0.0, 1.0, 0.3, -1.0, 0.0, 4096.0, (-2.0, 2.0), 1.0), "slope"),
        (lambda: LengthExponentModel(0.0, 1.0, 0.0, -1.0, 0.4, 4096.0, (-2.0, 2.0), 1.0), "slope"),
        (lambda: LengthExponentModel(0.0, 1.0, 0.0, -1.0, 0.0, 0.5, (-2.0, 2.0), 1.0), "reference_length"),
        (lambda: LengthExponentModel(0.0, 1.0, 0.0, -1.0, 0.0, 4096.0, (2.0, -2.0), 1.0), "logit_range"),
        (lambda: LengthExponentModel(1e9, 1.0, 0.0, -1.0, 0.0, 4096.0, (-2.0, 2.0), 1.0), "c0"),
    ],
)
def test_a_model_whose_thresholds_would_not_be_monotone_cannot_be_made(
    build: Callable[[], object], named: str
) -> None:
    with pytest.raises(ProfileError, match=named):
        build()


def test_round_trip_through_the_file_is_exact_and_valid_by_the_schema(tmp_path: Path) -> None:
    profile = _profile(target={"prefill": 0.5, "decode": 0.7})
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json", fingerprint="abc") == profile
    jsonschema.validate(json.loads((tmp_path / "p.json").read_text()), _schema())


def _schema() -> Any:
    return json.loads(resources.files("blasst.core").joinpath("profile.schema.json").read_text())


def test_every_field_of_the_schema_is_described_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "calibration.md").read_text()
    schema = _schema()
    names = set(schema["properties"]) | set(schema["$defs"]["phase"]["properties"])
    for group in ("points", "residuals", "kind_spread"):
        names |= set(schema["$defs"]["phase"]["properties"][group]["items"]["properties"])
    assert len(names) > 20
    # Fields of length_exponent are written as c0..c4 there.
    assert not [name for name in sorted(names) if f"`{name}" not in text and f".{name}" not in text]


def test_prefill_only_profile_comes_back_exactly_and_decode_says_it_is_dense(tmp_path: Path) -> None:
    profile = _profile(_fit(), target={"prefill": 0.7})
    profile.save(tmp_path / "p.json")
    read = load_profile(tmp_path / "p.json")
    assert read == profile
    assert read.target_sparsity == {"prefill": 0.7}
    assert read.resolve_targets() == {"prefill": 0.7, "decode": None}
    with pytest.raises(ProfileError, match="decode runs dense"):
        read.threshold("decode", 0.5, 4096)
    with pytest.raises(ProfileError, match="decode"):
        read.resolve_targets({"prefill": 0.7, "decode": 0.5})
    with pytest.warns(ProfileWarning, match="decode was not calibrated and runs dense"):
        assert read.resolve_targets(0.6) == {"prefill": 0.6, "decode": None}
    assert read.resolve_targets({"prefill": None}) == {"prefill": None, "decode": None}


def test_targets_that_name_no_phase_or_are_missing_are_refused() -> None:
    with pytest.raises(ValueError, match="no default target"):
        _profile().resolve_targets()
    with pytest.raises(ValueError, match="verify"):
        _profile().resolve_targets({"verify": 0.5})  # type: ignore[dict-item]
    with pytest.raises(ProfileError, match="decode"):
        _profile(_fit(), target={"decode": 0.5})


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            content = content[int(name)] if isinstance(content, list) else content[name]
        if value is _GONE:
            del content[last]
        else:
            content[last] = value

    return change


_GONE = object()
BROKEN = [
    ("format", "other"),
    ("version", 2),
    ("version", "1"),
    ("model.fingerprint", 7),
    ("model", _GONE),
    ("data.kinds", [1]),
    ("target_sparsity.prefill", 1.5),
    ("phases", {}),
    ("phases.prefill", []),
    ("phases.prefill.order", "random"),
    ("phases.prefill.selected", "best"),
    ("phases.prefill.tile.key", 0),
    ("phases.prefill.exponential.a", None),
    ("phases.prefill.exponential.b", "8"),
    ("phases.prefill.exponential.b", True),
    ("phases.decode.length_exponent.c1", _GONE),
    ("phases.decode.length_exponent.logit_range", [1.0]),
    ("phases.prefill.observed.sparsity", [0.1, 1.2]),
    ("phases.prefill.points.0.visited", 0),
    ("phases.prefill.points.0.visited", 2**63),
    ("phases.prefill.points.0.skipped", [0, 0.5, 1]),
    ("phases.prefill.residuals.0.held_out", 1),
    ("phases.prefill.kind_spread.0.achieved", -0.1),
    ("surprise", 1),
    ("phases.prefill.surprise", 1),
]


@pytest.mark.parametrize(("path", "value"), BROKEN)
def test_a_broken_file_names_the_field_and_fails_the_schema_too(
    tmp_path: Path, path: str, value: Any
) -> None:
    content = copy.deepcopy(_profile().to_json())
    _set(path, value)(content)
    (tmp_path / "p.json").write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=path.split(".")[-1] + ".*found .*wanted "):
        load_profile(tmp_path / "p.json")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, _schema())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("phases.prefill.points.0.skipped", [0, 200]),
        ("phases.prefill.points.0.skipped", [0, 600, 200]),
        ("phases.prefill.points.0.skipped", [0, 200, 1001]),
        ("phases.prefill.points.0.threshold", [0.1, 0.1, 1.0]),
        ("phases.prefill.points.0.seqlen", 8192),
        ("phases.prefill.points.0.seqlen", 9000),
    ],
)
def test_counts_that_contradict_each_other_are_refused(path: str, value: Any) -> None:
    content = _profile().to_json()
    _set(path, value)(content)
    name = "points" if path.endswith("seqlen") else path.split(".")[-1]
    with pytest.raises(
        ProfileError, match=rf"phases\.prefill\.points.*{name}: found .*wanted |points: found"
    ):
        Profile.from_json(content)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": NaN}', "[" * 5000])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ProfileError, match=r"p\.json"):
        load_profile(tmp_path / "p.json")


def test_nan_and_infinite_numbers_in_a_file_are_refused(tmp_path: Path) -> None:
    for value in (math.nan, math.inf):
        content = _profile().to_json()
        _set("phases.prefill.exponential.r2", value)(content)
        (tmp_path / "p.json").write_text(json.dumps(content))
        with pytest.raises(ProfileError, match=r"r2.*finite"):
            load_profile(tmp_path / "p.json")


def test_numbers_beyond_a_float_in_a_file_are_refused(tmp_path: Path) -> None:
    for path in ("phases.prefill.exponential.a", "phases.prefill.exponential.r2"):
        content = _profile().to_json()
        _set(path, 10**400)(content)
        (tmp_path / "p.json").write_text(json.dumps(content))
        with pytest.raises(ProfileError, match=path.rsplit(".", maxsplit=1)[-1] + ".*wanted"):
            load_profile(tmp_path / "p.json")


def test_a_missing_file_is_a_profile_error(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path / "absent.json")


def test_tile_shape_order_and_fingerprint_must_match(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile = _profile()
    profile.save(path)
    with pytest.raises(ProfileError, match=r"model.fingerprint: found 'abc'.*wanted 'xyz'"):
        load_profile(path, fingerprint="xyz")
    content = profile.to_json()
    content["phases"]["prefill"]["tile"] = {"query": 128, "key": 128}
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=r"phases.prefill.tile: found .*128.*wanted .*64"):
        load_profile(path)
    assert load_profile(path, serving=False).phases["prefill"].tile == TileShape(128, 128)
    with pytest.raises(ProfileError, match="fingerprint"):
        load_profile(path, serving=False, fingerprint="xyz")
    content["phases"]["prefill"]["tile"] = {"query": 64, "key": 64}
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=r"phases.prefill.tile: found .*key=64.*wanted .*key=128"):
        load_profile(path)
    content["phases"]["prefill"]["tile"] = {"query": 64, "key": 128}
    content["phases"]["prefill"]["order"] = "ascending"
    path.write_text(json.dumps(content))
    with pytest.raises(ProfileError, match=r"phases.prefill.order: found 'ascending', wanted 'sink_first'"):
        load_profile(path)


def test_a_selected_model_must_exist() -> None:
    with pytest.raises(ProfileError, match="selected"):
        PhaseFit(**{**vars(_fit()), "selected": "length_exponent"})


def test_requests_outside_the_calibration_warn_once_each() -> None:
    profile = _profile()
    profile.check_request("prefill", 0.5, 4096)
    with pytest.warns(ProfileWarning, match="length 65536 lies outside the calibrated lengths 1024 to 8192"):
        profile.check_request("prefill", 0.5, 65536)
    profile.check_request("prefill", 0.5, 131072)  # said already
    with pytest.warns(ProfileWarning, match=r"target sparsity 0.95 lies outside the calibrated range"):
        profile.check_request("prefill", 0.95, 8192)
    with pytest.warns(ProfileWarning, match=r"0.8 is out of reach at length 1024.*0.600"):
        profile.check_request("prefill", 0.8, torch.tensor([1024, 1024]))
    with pytest.warns(ProfileWarning, match="decode: length"):
        profile.check_request("decode", 0.5, torch.tensor([100, 99999]))
    profile.check_request("decode", 0.5, torch.empty(2, device="meta"))  # a device is not read back
    profile.check_request("decode", 0.0, 10**7)


def test_reachable_sparsity_is_interpolated_between_counted_lengths() -> None:
    fit = _fit()
    assert fit.reachable_sparsity(500) == 0.6
    assert fit.reachable_sparsity(8192) == 0.95
    assert fit.reachable_sparsity(10**6) == 0.95
    assert fit.reachable_sparsity(math.sqrt(1024 * 8192)) == pytest.approx((0.6 + 0.95) / 2)


def test_fingerprint_tells_shapes_apart_and_ignores_the_rest() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576}
    same = {
        **config,
        "num_key_value_heads": 9,
        "head_dim": 64,
        "_name_or_path": "elsewhere",
        "dtype": "float16",
    }
    assert model_fingerprint(config) == model_fingerprint(same) == model_fingerprint({"text_config": config})
    assert model_fingerprint(config) != model_fingerprint({**config, "num_key_value_heads": 3})
    assert model_fingerprint(config) != model_fingerprint({**config, "num_hidden_layers": 32})
    with pytest.raises(ValueError, match="num_attention_heads"):
        model_fingerprint({"hidden_size": 64})


def test_the_dense_tail_is_kept_served_and_only_of_prefill():
    counted = replace(_fit(), dense_tail=128)
    read = Profile.from_json(json.loads(json.dumps(_profile(counted).to_json())))
    assert read.phases["prefill"] == counted and read.phases["prefill"].rule.dense_tail == 128
    assert "dense_tail" not in _profile(_fit()).to_json()["phases"]["prefill"]
    assert resolve_rules(read, {"prefill": 0.5}, None, None)["prefill"].dense_tail == 128
    assert resolve_rules(None, None, 0.1, None)["prefill"].dense_tail == 0
    with pytest.raises(ProfileError, match=r"phases\.decode\.dense_tail: found 128, wanted 0"):
        replace(_fit("decode"), dense_tail=128)
    for wrong in (-5, 1.5, True, "64"):
        with pytest.raises(ProfileError, match=r"phases\.prefill\.dense_tail: found .*, wanted an integer"):
            replace(_fit(), dense_tail=wrong)
