"""enable() with a calibration profile: thresholds in force, phases without calibration, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from blasst import blasst_attn_func
from blasst.calibrate.counts import CountPoint
from blasst.calibrate.fit import fit_phase
from blasst.core.errors import ProfileError
from blasst.core.profile import DataInfo, ModelInfo, Profile, ProfileWarning, model_fingerprint
from blasst.integrations.transformers import attention_stats, disable, enable, sparse_attention


def make_llama(**changes):
    torch.manual_seed(0)
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def counted(kind, seqlen):
    """Counts whose sparsity is logistic in ln(threshold) and ln(length)."""
    threshold = np.logspace(-6, 0, 40)
    logit = 4.0 + 1.1 * np.log(threshold) + 0.9 * np.log(seqlen / 512)
    visited = 100_000
    return CountPoint(
        kind, seqlen, threshold, np.round(visited / (1 + np.exp(-logit))).astype(np.int64), visited
    )


def make_profile(model, phases=("prefill", "decode")):
    points = [counted(kind, n) for kind in ("prose", "code") for n in (128, 256, 512, 1024)]
    return Profile(
        library_version="test",
        model=ModelInfo("tiny", model_fingerprint(model.config.to_dict())),
        data=DataInfo("0" * 32, 8, ("code", "prose")),
        phases={phase: fit_phase(points, phase=phase) for phase in phases},
    )


@pytest.fixture
def model():
    return make_llama()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_thresholds_in_force_are_the_profiles_for_each_sequence(model):
    profile = make_profile(model)
    seen = []
    with sparse_attention(model, profile=profile, target_sparsity=0.5) as enabled:
        handler = enabled._session.handler
        original = handler._threshold
        handler._threshold = lambda call, rule: seen.append(original(call, rule)) or seen[-1]
        mask = torch.ones(2, 300, dtype=torch.long)
        mask[0, :140] = 0
        ids = torch.randint(3, 97, (2, 300))
        model(ids, attention_mask=mask)
        model(ids)
    for lengths, threshold in zip(([160, 300], [300, 300]), (seen[0], seen[2])):
        wanted = [profile.threshold("prefill", 0.5, n) for n in lengths]
        assert threshold.tolist() == pytest.approx(wanted, rel=1e-5)
    assert seen[0] is seen[1], "computed once per forward, not once per layer"
    assert "target sparsity 0.5, profile of tiny" in str(enabled)


def fading_llama():
    """Attention fades with distance."""
    model = make_llama(attention_bias=True)
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.bias.fill_(2.0)
    return model


def test_the_dense_tail_is_the_profiles_unless_another_is_asked_for():
    model = fading_llama()
    profile = make_profile(model)
    tail = replace(profile.phases["prefill"], dense_tail=192)
    profile = replace(profile, phases={**profile.phases, "prefill": tail})
    ids = torch.randint(3, 97, (1, 700))

    def skipped(**options):
        with sparse_attention(
            model, profile=profile, target_sparsity=0.85, collect_counts=True, **options
        ) as enabled:
            model(ids)
            return enabled.dense_tail, sum(int(r.skipped.sum()) for r in attention_stats(model))

    assert skipped() == skipped(dense_tail=192)
    assert skipped(dense_tail=0)[1] > skipped()[1] > skipped(dense_tail=700)[1] == 0
    assert "last 192 rows" in str(enable(model, profile=profile, target_sparsity=0.5))
    assert "last" not in str(enable(model, profile=profile, target_sparsity={"decode": 0.5}))
    disable(model)


@pytest.mark.parametrize("impl", ["eager", "reference"])
def test_a_screened_prefill_follows_its_own_curve_and_decode_its_usual_one(impl):
    model = fading_llama()
    profile = make_profile(model)
    higher = [replace(counted("prose", n), threshold=np.logspace(-3, 0, 40)) for n in (128, 256, 512, 1024)]
    screened = replace(fit_phase(higher, phase="prefill", order="int8"), dense_tail=70)
    both = replace(profile, screened=screened)
    own = both.for_screen("int8")
    ids, mask = torch.randint(3, 97, (2, 700)), torch.ones(2, 700, dtype=torch.long)
    mask[0, :140] = 0
    usual = {"target_sparsity": 0.8, "collect_counts": True, "impl": impl}

    def run(**options):
        with sparse_attention(model, **options) as enabled:
            output = model(ids, attention_mask=mask)
            name = "cache" if "cache" in output else "past_key_values"
            longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
            model(ids[:, :1], attention_mask=longer, **{name: output[name]})
            first = {r.phase: r for r in attention_stats(model) if r.layer.startswith("model.layers.0")}
            return enabled, first["prefill"].skipped.tolist(), first["decode"].skipped.tolist()

    enabled, skipped, decode = run(profile=both, screen="int8", **usual)
    assert enabled.screen == "int8" and enabled.dense_tail == 70 and "int8 copies" in str(enabled)
    for length in (560, 700):
        assert enabled.thresholds["prefill"].for_length(length) == own.threshold("prefill", 0.8, length)
        assert enabled.thresholds["decode"].for_length(length) == profile.threshold("decode", 0.8, length)
    wanted = {screen: torch.zeros(4, dtype=torch.int64) for screen in ("int8", None)}
    with sparse_attention(model, threshold=0.5) as probe:  # q, k, v of the first layer
        seen = []
        handler = probe._session.handler
        original = handler._threshold
        handler._threshold = lambda call, rule: seen.append(call) or original(call, rule)
        model(ids, attention_mask=mask)
    for index, rows, keys in seen[0].sequences():
        part = [x[None] for x in (seen[0].q[index, rows], seen[0].k[index, keys], seen[0].v[index, keys])]
        threshold = own.threshold("prefill", 0.8, torch.tensor([part[1].shape[1]]))
        options = {"causal": True, "dense_tail": 70, "impl": impl, "return_counts": True}
        for screen, total in wanted.items():
            total += blasst_attn_func(*part, threshold=threshold, screen=screen, **options).counts.skipped[0]
    assert skipped == wanted["int8"].tolist() != wanted[None].tolist() and sum(skipped) > 0
    _, unscreened, same_decode = run(profile=both, **usual)
    assert decode == same_decode and sum(decode) > 0 and skipped != unscreened


def test_a_screen_without_its_curve_is_refused_before_anything_changes(model):
    profile = make_profile(model)
    with pytest.raises(ProfileError, match="prefill_screened: found nothing"):
        enable(model, profile=profile, target_sparsity=0.5, screen="int8")
    screened = replace(profile, screened=replace(profile.phases["prefill"], order="int8"))
    with pytest.raises(ValueError, match="no target sparsity for this phase"):
        enable(model, profile=screened, target_sparsity={"decode": 0.5}, screen="int8")
    assert model.config._attn_implementation == "sdpa"


def test_a_profile_is_read_from_its_file(model, tmp_path):
    path = tmp_path / "profile.json"
    make_profile(model).save(path)
    enabled = enable(model, profile=path, target_sparsity={"prefill": 0.3})
    assert enabled.thresholds["prefill"].kind == "profile" and enabled.thresholds["decode"].kind == "dense"
    assert str(path) in str(enabled)
    disable(model)


def test_a_phase_without_calibration_stays_dense_and_says_so(model):
    profile = make_profile(model, phases=("prefill",))
    with pytest.warns(ProfileWarning, match="decode was not calibrated"):
        enabled = enable(model, profile=profile, target_sparsity=0.5, collect_counts=True)
    assert enabled.thresholds["decode"].kind == "dense"
    assert "decode: dense (profile of tiny has no calibration of this phase)" in str(enabled)
    ids = torch.randint(3, 97, (1, 200))
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0
    )
    assert {record.phase for record in attention_stats(model)} == {"prefill"}
    disable(model)
    with pytest.raises(ProfileError, match="decode"):
        enable(model, profile=profile, target_sparsity={"decode": 0.5})
    assert model.config._attn_implementation == "sdpa"


def test_the_profile_of_another_model_is_refused(model, tmp_path):
    profile = make_profile(make_llama(num_hidden_layers=3))
    profile.save(tmp_path / "other.json")
    for given in (profile, tmp_path / "other.json"):
        with pytest.raises(ProfileError, match="fingerprint"):
            enable(model, profile=given, target_sparsity=0.5)
    with pytest.raises(ProfileError, match="cannot be read"):
        enable(model, profile=tmp_path / "missing.json", target_sparsity=0.5)
    assert model.config._attn_implementation == "sdpa"


def test_a_profile_without_a_target_is_refused(model):
    with pytest.raises(ValueError, match="target_sparsity"):
        enable(model, profile=make_profile(model))


def test_a_length_far_beyond_the_calibration_warns_once(model):
    ids = torch.randint(3, 97, (1, 2000))
    with sparse_attention(model, profile=make_profile(model), target_sparsity=0.5):
        with pytest.warns(ProfileWarning, match="outside the calibrated lengths"):
            model(ids, logits_to_keep=1)
        model(ids, logits_to_keep=1)
