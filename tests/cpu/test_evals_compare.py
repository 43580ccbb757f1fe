import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blasst.core.errors import UnsupportedError
from blasst.evals.compare import QualityError, compare, compare_conditions, compare_dense
from blasst.integrations.transformers import sparse_attention

SKIP = {"threshold": {"decode": 1.0}}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(300, (n,), generator=generator) for n in (480, 333)]


def test_threshold_zero_agrees_with_dense_and_nll_is_the_models_own(model, sequences):
    result = compare(model, sequences, {"threshold": 0.0}, chunk_size=100)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum")
            for row in sequences
        ]
    assert result.num_tokens == 811
    assert result.nll_dense == pytest.approx(float(sum(losses)) / 811, rel=1e-5)
    assert result.nll_difference == pytest.approx(0.0, abs=1e-5)
    assert result.kl == pytest.approx(0.0, abs=1e-6)
    assert result.top1_agreement == 1.0
    assert result.sparsity["prefill"] == 0.0
    assert result.skipped_mass["prefill"].max == 0.0


def test_decode_tokens_are_fed_one_at_a_time_and_skipping_shows(model, sequences):
    result = compare(model, sequences, SKIP, decode_tokens=20, last_tokens=20)
    dense = compare(model, sequences, {"threshold": 0.0}, decode_tokens=0, last_tokens=20, chunk_size=7)
    assert result.num_tokens == 40
    assert result.nll_dense == pytest.approx(dense.nll_dense, rel=1e-5)
    assert 0.0 < result.sparsity["decode"] < 1.0
    assert "prefill" not in result.sparsity
    mass = result.skipped_mass["decode"]
    # rows: 2 sequences, 20 steps, 2 layers, 4 heads
    assert mass.n == 320
    assert 0.0 < mass.mean <= mass.p99 <= mass.max < 1.0
    assert result.kl > 0.0
    assert result.nll_sparse != result.nll_dense


def test_several_conditions_share_one_dense_pass(model, sequences, monkeypatch):
    passes = 0
    forward = model.model.forward

    def counted(*args, **kwargs):
        nonlocal passes
        passes += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", counted)
    results = compare_conditions(
        model, sequences, {"a": {"threshold": 0.0}, "b": {"threshold": 0.1}}, measure_skipped_mass=False
    )
    assert list(results) == ["a", "b"]
    assert results["a"].nll_dense == results["b"].nll_dense
    assert results["a"].skipped_mass == {}
    # two for the check of the logits, two dense, two per condition
    assert passes == 8


def test_limits_fail_loudly_and_name_what_is_broken(model, sequences):
    options = {"decode_tokens": 20, "last_tokens": 20}
    with pytest.raises(QualityError, match=r"KL .* is above 1e-12.*top-1 agreement"):
        compare_dense(model, sequences, SKIP, max_kl=1e-12, min_top1_agreement=1.01, **options)
    with pytest.raises(QualityError, match="mean skipped mass in decode"):
        compare_dense(model, sequences, SKIP, max_mean_skipped_mass=1e-9, **options)
    result = compare_dense(model, sequences, SKIP, max_kl=10.0, max_nll_difference=5.0, **options)
    assert result.sparsity["decode"] > 0.0


@pytest.fixture(scope="module")
def model_with_a_flat_layer():
    """Four layers; attention is near uniform in the first and peaked in the others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.weight.mul_(0.05 if number == 0 else 4.0)
    return model


def test_a_layer_that_collapses_is_named_and_can_be_left_dense(model_with_a_flat_layer):
    model = model_with_a_flat_layer
    ids = [torch.randint(300, (1000,), generator=torch.Generator().manual_seed(1))]
    options = {"decode_tokens": 16, "last_tokens": 16}
    result = compare(model, ids, SKIP, **options)
    names = [f"model.layers.{number}.self_attn" for number in range(4)]
    assert [(layer.layer, layer.phase) for layer in result.layers] == [(name, "decode") for name in names]
    first, *others = result.layers
    # Sparsity tells nothing about it: the flat layer skips as much as another.
    assert first.sparsity > 0.0
    assert first.sparsity <= max(layer.sparsity for layer in others)
    assert first.mean_skipped_mass > 0.3 > 0.1 > max(layer.mean_skipped_mass for layer in others)
    assert first.mean_skipped_mass <= first.max_skipped_mass <= 1.0
    rows = sum(layer.mean_skipped_mass for layer in result.layers) / 4
    assert result.skipped_mass["decode"].mean == pytest.approx(rows, rel=1e-6)

    limits = {"max_mean_skipped_mass": 0.2, "max_layer_skipped_mass": 0.1}
    with pytest.raises(
        QualityError, match=r"in decode of model\.layers\.0\.self_attn 0\..*ignore=\["
    ) as error:
        compare_dense(model, ids, SKIP, **limits, **options)
    assert error.value.ignore == (names[0],)
    assert "mean skipped mass in decode 0." not in str(error.value)  # the mean over layers looks harmless
    better = compare_dense(model, ids, {**SKIP, "ignore": error.value.ignore}, **limits, **options)
    assert [layer.layer for layer in better.layers] == names[1:]
    assert better.sparsity["decode"] > 0.0
    assert better.kl < result.kl


def test_layers_without_measured_mass_still_have_their_sparsity(model, sequences):
    result = compare(model, sequences, SKIP, decode_tokens=4, measure_skipped_mass=False)
    assert len(result.layers) == 2
    assert all(layer.sparsity > 0 and layer.mean_skipped_mass is None for layer in result.layers)


def test_nan_fails_every_limit(model, sequences, monkeypatch):
    monkeypatch.setattr("blasst.evals.compare._agreement", lambda *a: torch.full((4,), torch.nan).double())
    with pytest.raises(QualityError, match="KL nan"):
        compare_dense(model, sequences, {"threshold": 0.1}, max_kl=1.0)


def test_limits_that_cannot_be_checked_are_an_error(model, sequences):
    with pytest.raises(ValueError, match="none stated"):
        compare_dense(model, sequences, SKIP)
    with pytest.raises(ValueError, match="measure_skipped_mass"):
        compare_dense(model, sequences, SKIP, max_mean_skipped_mass=0.1, measure_skipped_mass=False)
    with pytest.raises(ValueError, match="max_layer_skipped_mass"):
        compare_dense(model, sequences, SKIP, max_layer_skipped_mass=0.1, measure_skipped_mass=False)


def test_logits_that_are_not_the_projection_of_the_last_state_are_refused(model, sequences, monkeypatch):
    forward = model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(model, "forward", scaled)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM"):
        compare(model, sequences, {"threshold": 0.1})


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "none given"),
        ([[1]], {}, "at least 2 tokens"),
        ([[1, 2, 3]], {"decode_tokens": 2}, "at least 4 tokens"),
        ([[[1, 2, 3]]], {}, "one dimension"),
        ([[1] * 1025], {}, "the model takes 1024"),
        ([[1, 2, 3]], {"last_tokens": 0}, "last_tokens"),
    ],
)
def test_bad_sequences_are_named(model, rows, options, message):
    with pytest.raises(ValueError, match=message):
        compare(model, rows, {"threshold": 0.1}, **options)


def test_an_enabled_model_is_refused_since_there_would_be_no_dense_pass(model, sequences):
    with sparse_attention(model, threshold=0.1), pytest.raises(ValueError, match="no dense pass"):
        compare(model, sequences, {"threshold": 0.1})
