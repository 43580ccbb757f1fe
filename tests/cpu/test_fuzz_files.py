"""Files and settings from elsewhere, broken at random: read, or refused with the documented error.

Each test starts from something valid and puts arbitrary JSON at arbitrary places, so that most inputs get
past the first check.
"""

import copy
import json
import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blasst.calibrate.checkpoint import checkpoint_config
from blasst.calibrate.engines import ENGINES
from blasst.calibrate.export import export_profile
from blasst.calibrate.formula import parse_formula
from blasst.calibrate.interchange import read_sparse_attention_config
from blasst.core.errors import ProfileError
from blasst.core.phase_fit import KindSpread, LengthResidual, ObservedRange, PhaseFit, SparsityCurve
from blasst.core.prefill_costs import prefill_costs
from blasst.core.profile import DataInfo, ModelInfo, Profile, ProfileWarning, load_profile
from blasst.core.sparsity_model import ExponentialModel, LengthExponentModel
from blasst.core.types import DECODE_TILE, PHASES, PREFILL_TILE
from blasst.integrations.serving_options import VARIABLES, ServingOptions

#: Beyond every float, and still short enough for Python to read and print.
HUGE = 10**400

numbers = st.one_of(
    st.floats(),
    st.integers(-3, 200),
    st.sampled_from([0, 1, -1, 0.5, HUGE, -HUGE, 1e308, 5e-324, 2**63, math.nan, math.inf, -0.0]),
)
texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", "prefill", "decode", "length_exponent", "exponential", "ascending", "int8", "skip_softmax", "1"]
    ),
    st.sampled_from(
        ["a * exp(b * target_sparsity)", "a ** b ** target_sparsity", "a / target_sparsity", "log(a) - b"]
    ),
)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(texts, st.sampled_from(PHASES)), inner, max_size=3),
    ),
    max_leaves=5,
)


def places(value, path=()):
    """Every place in a JSON value, as a tuple of keys and indices."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def similar(value):
    """Values of the type that stands there."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.one_of(st.integers(), st.sampled_from([0, 1, -1, 128, 2**63, HUGE]))
    if isinstance(value, float):
        return numbers
    if isinstance(value, list):
        return st.lists(st.sampled_from(value), max_size=4) if value else st.just([])
    return texts if isinstance(value, str) else values


@st.composite
def broken(draw, valid):
    """A valid JSON value with one or two places replaced (mostly by the same type), removed or added to."""
    content = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from(list(places(content))))
        action = draw(st.sampled_from(["similar", "similar", "similar", "any", "remove", "add"]))
        if not path:
            continue
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        if action == "remove":
            del parent[path[-1]]
        elif action == "add" and isinstance(parent, dict):
            parent[draw(texts)] = draw(values)
        elif action == "similar":
            parent[path[-1]] = draw(similar(parent[path[-1]]))
        else:
            parent[path[-1]] = draw(values)
    return content


def valid_profile(ours=None, screened=False):
    def fit(phase, order=None):
        return PhaseFit(
            phase=phase,
            tile=PREFILL_TILE if phase == "prefill" else DECODE_TILE,
            order=order or ("sink_first" if phase == "prefill" else "anchors"),
            exponential=ExponentialModel(7.93, 8.61, 0.98),
            length_exponent=ours,
            selected="length_exponent" if ours else "exponential",
            selected_by="held_out_lengths",
            observed=ObservedRange((0.1, 0.9), (1024, 8192), (1e-5, 0.5)),
            points=(
                SparsityCurve(1024, 4, 1000, (0.001, 0.1, 1.0), (0, 200, 600)),
                SparsityCurve(8192, 4, 64000, (0.001, 0.1, 1.0), (10, 40000, 60800)),
            ),
            residuals=(LengthResidual("exponential", 1024, True, (0.1, 0.5), (0.02, -0.02)),),
            kind_spread=(KindSpread("prose", 1024, 0.5, 0.47),),
        )

    return Profile(
        "0.1.0",
        ModelInfo("SmolLM2", "abc"),
        DataInfo("d1", 8, ("code", "prose")),
        {phase: fit(phase) for phase in PHASES},
        {"prefill": 0.5, "decode": 0.3},
        fit("prefill", "int8") if screened else None,
    )


OURS = LengthExponentModel(-2.6, 2.1, 0.01, -1.9, 0.2, 2896.3, (-2.1, 2.1), 0.99)
PROFILES = [valid_profile().to_json(), valid_profile(OURS).to_json(), valid_profile(OURS, True).to_json()]


def use_profile(profile):
    """Everything that serving asks of a profile."""
    if profile.screened is not None:
        use_thresholds(profile.for_screen("int8"))
        if "prefill" in profile.phases:
            costs = prefill_costs(profile, 0.5, 4096)
            assert 1.0 <= costs.fused <= 2.0 and 0.5 <= costs.screened <= 2.5
    use_thresholds(profile)
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    for engine in ENGINES:
        try:
            export_profile(profile, engine)
        except ProfileError:
            pass
        except ValueError as error:
            assert "target_sparsity is missing" in str(error)


def use_thresholds(profile):
    """Every threshold is one."""
    for phase in profile.phases:
        for target in (0.0, 0.5, 1.0):
            for length in (1, 4096, 10**7):
                assert 0.0 <= profile.threshold(phase, target, length) <= 1.0
                profile.check_request(phase, target, length)
                assert 0.0 <= profile.phase_fit(phase).reachable_sparsity(length) <= 1.0


@settings(max_examples=200)
@given(broken(PROFILES))
def test_a_broken_profile_is_refused_or_serves(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "broken.json"
    path.write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProfileWarning)
        try:
            profile = load_profile(path, serving=False)
        except ProfileError as error:
            assert "wanted" in str(error), error
            assert len(str(error)) < 1000
            return
        use_profile(profile)


CONFIGS = [
    {
        "model_type": "llama",
        "sparse_attention_config": {
            "config_groups": {
                "group_0": {
                    "algorithm": "skip_softmax",
                    "targets": ["LlamaAttention"],
                    "ignore": ["model.layers.0.*"],
                    "threshold_scale_factor": {
                        "formula": "a * exp(b * target_sparsity)",
                        "prefill": {"a": 7.93, "b": 8.61},
                        "decode": {"a": 0.12, "b": 9.85},
                    },
                    "target_sparsity": {"prefill": 0.5, "decode": 0.5},
                }
            },
            "producer": {"name": "modelopt", "version": "0.47"},
            "version": 1,
        },
    },
    {
        "sparse_algo": "softmax_skip",
        "threshold_scale_factor": {
            "formula": "exp(log_a + b * target_sparsity)",
            "coefficients": {"log_a": 2.0, "b": 8.0},
        },
        "target_sparsity": 0.5,
        "disabled_until_timestep": 0.7,
        "initial_disabled_steps": 3,
    },
    {"algorithm": "skip_softmax", "threshold_scale_factor": {"prefill": 500.0, "decode": 2.0}},
]


@settings(max_examples=300)
@given(broken(CONFIGS))
def test_a_broken_checkpoint_config_is_refused_or_serves(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_text(json.dumps(content))
    try:
        config = read_sparse_attention_config(path)
    except ProfileError as error:
        assert "wanted" in str(error) or "formula" in str(error) or "cannot be read" in str(error), error
        return
    assert read_sparse_attention_config(json.loads(json.dumps(config.to_json()))).phases == config.phases
    checkpoint_config(config, path)
    config.is_ignored("model.layers.0.self_attn")
    for phase in PHASES:
        for target in (None, 0.0, 0.5, 1.0):
            try:
                assert 0.0 <= config.threshold(phase, 4096, target) <= 1.0
            except ProfileError:
                continue


@settings(max_examples=60)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode), texts.map(str.encode)))
@pytest.mark.parametrize("read", [load_profile, read_sparse_attention_config])
def test_bytes_that_are_no_such_file_are_refused(tmp_path_factory, read, content):
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError):
        read(path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 5000, ""])
@pytest.mark.parametrize("read", [load_profile, read_sparse_attention_config])
def test_names_that_no_file_can_have_are_refused(read, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProfileError, match="cannot be read"):
        read(name)


tokens = st.sampled_from(
    [
        *"()[]{}.,:;=!'\"\\\n\t+-*/%@<>|&~^#_",
        *("**", "//", "1", "0", "1e308", "0x", "1j", "1_0", "é", "ﬁ", "\0", "''", "f'{a}'", "9" * 100, " "),
        *("a", "b", "target_sparsity", "exp", "log", "sqrt", "a * ", "exp(", "b)"),
        *("lambda", "if", "for", "in", "await", "__import__"),
    ]
)


@settings(max_examples=400)
@given(st.lists(tokens, max_size=8).map("".join))
def test_any_text_as_a_formula_is_a_number_or_refused(text):
    try:
        formula = parse_formula(text)
        value = formula.evaluate(dict.fromkeys(formula.names, 0.5))
    except ProfileError:
        return
    assert isinstance(value, float)
    assert math.isfinite(value)
    assert formula.names <= {word for word in formula.names if word.isidentifier()}


OPTIONS = [
    {"profile": "profile.json", "target_sparsity": {"prefill": 0.5, "decode": None}},
    {"threshold_scale_factor": "prefill=60,decode=2", "impl": "eager", "log_interval": 5},
    {"threshold": '{"prefill": 0.1}', "log_interval": "0"},
    {"threshold": 0.1},
]
option_texts = st.one_of(
    texts,
    st.lists(
        st.sampled_from(
            ["prefill", "decode", "=", ",", "{", "}", '"', ":", "1", "0.5", "nan", "inf", "1e999", " "]
        ),
        max_size=8,
    ).map("".join),
    st.just('{"a": ' * 100_000),
    st.just('{"prefill": ' + "1" * 5000 + "}"),
    st.just("9" * 5000),
)


def read_and_resolve(config, environment):
    """What an engine does with its options; only documented errors, which name what is wrong."""
    try:
        options = ServingOptions.read(config, environment)
        if options is not None:
            assert ServingOptions.read(options.as_config(), {}) is not None
            rules = options.rules(max_length=8192)
            for phase in PHASES:
                value = rules.of(phase).for_length(4096)
                assert value is None or 0.0 <= value <= 1.0
            assert str(rules)
    except ValueError as error:  # ProfileError is one
        assert "blasst" in str(error).lower(), error


@settings(max_examples=300)
@given(broken(OPTIONS))
def test_broken_options_of_an_engine_are_refused_or_serve(content):
    read_and_resolve(content, {})


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from([*VARIABLES.values(), "BLASST_X"]), option_texts, max_size=3))
def test_any_environment_is_refused_or_serves(environment):
    read_and_resolve(None, environment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threshold", HUGE),
        ("log_interval", HUGE),
        ("threshold_scale_factor", HUGE),
        ("threshold", '{"a": ' * 100_000),
        ("profile", "a\0b"),
    ],
)
def test_options_that_once_ended_in_another_error_name_themselves(name, value):
    with pytest.raises(ValueError, match="blasst"):
        options = ServingOptions.read(
            {"threshold": 0.1, name: value} if name == "log_interval" else {name: value}, {}
        )
        options.rules()
