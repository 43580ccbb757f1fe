"""enable/disable on a tiny Llama: equality with the model's own attention, padding, caches, generate()."""

import copy
import gc
import inspect
import threading

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache  # noqa: E402

from blasst.core.errors import BlasstError, UnsupportedError  # noqa: E402
from blasst.integrations.transformers import (  # noqa: E402
    attention_stats,
    disable,
    enable,
    reset_stats,
    skipped_mass_samples,
    skipped_mass_summary,
    sparse_attention,
)
from blasst.integrations.transformers_attention import blasst_attention  # noqa: E402
from blasst.integrations.transformers_mask import _recent  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

#: fp32, three layers, logits of order 1: rounding of two different summation orders.
TOLERANCE = 1e-5

CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def make_llama(peaky: bool = False, **changes):
    """Random weights; `peaky` adds a constant to queries and keys, which the rotary embedding turns into
    attention that fades with distance, so that thresholds find tiles to skip."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, "attention_bias": peaky, **changes})).eval()
    if peaky:
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                torch.nn.init.constant_(projection.bias, 2.0)
    return model


def tokens(batch, length, seed=0):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch, length, pads):
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask


def positions(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.fixture
def model():
    return make_llama()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def test_logits_at_threshold_zero_equal_sdpa_for_one_sequence(model):
    ids = tokens(1, 300)
    expected = model(ids).logits
    with sparse_attention(model, threshold=0.0):
        assert model.config._attn_implementation == "blasst"
        torch.testing.assert_close(model(ids).logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_padded_batches_equal_sdpa_at_real_tokens(model, side):
    ids, mask = tokens(2, 200), left_padded(2, 200, [70, 0])
    if side == "right":
        mask = mask.flip(1)
    expected = model(ids, attention_mask=mask).logits
    with sparse_attention(model, threshold=0.0):
        got = model(ids, attention_mask=mask).logits
    assert got.isfinite().all()
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=TOLERANCE, rtol=0)


def test_mask_of_ones_and_no_mask_give_the_same_bits(model):
    ids = tokens(2, 140)
    with sparse_attention(model, threshold=0.01):
        assert torch.equal(model(ids).logits, model(ids, attention_mask=torch.ones_like(ids)).logits)


def test_rows_of_a_batch_do_not_influence_each_other():
    model = make_llama(peaky=True)
    ids = tokens(3, 400)
    with sparse_attention(model, threshold=0.3, collect_counts=True):
        together = model(ids).logits
        skipped = sum(int(r.skipped.sum()) for r in attention_stats(model))
        reset_stats(model)
        alone = torch.cat([model(ids[b : b + 1]).logits for b in range(3)])
        assert sum(int(r.skipped.sum()) for r in attention_stats(model)) == skipped > 0
    torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_neither_tile_counts_nor_logits(side):
    model = make_llama(peaky=True)
    lengths = [100, 400]
    ids, mask = tokens(2, 400), left_padded(2, 400, [300, 0])
    if side == "right":
        mask = mask.flip(1)
    with sparse_attention(model, threshold_scale_factor=100.0, collect_counts=True):
        padded = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
        counts = [(r.skipped, r.visited) for r in attention_stats(model)]
        reset_stats(model)
        alone = [model(ids[b][mask[b].bool()][None]).logits[0] for b in range(2)]
        expected = [(r.skipped, r.visited) for r in attention_stats(model)]
    for (skipped, visited), (want_skipped, want_visited) in zip(counts, expected):
        assert torch.equal(skipped, want_skipped) and torch.equal(visited, want_visited)
    assert sum(int(s.sum()) for s, _ in counts) > 0
    for b, length in enumerate(lengths):
        assert alone[b].shape[0] == length
        torch.testing.assert_close(padded[b][mask[b].bool()], alone[b], atol=TOLERANCE, rtol=0)


def test_threshold_follows_each_sequence_and_not_the_batch_maximum():
    model = make_llama(peaky=True)
    mask = left_padded(2, 512, [256, 0])
    with sparse_attention(model, threshold_scale_factor={"prefill": 64.0}) as enabled:
        model(tokens(2, 512), attention_mask=mask)
        record = enabled._session.handler
    rule = enabled.thresholds["prefill"]
    assert rule.for_lengths(torch.tensor([256, 512])).tolist() == [0.25, 0.125]
    assert record.rules["decode"].kind == "dense"
    seen = []
    with sparse_attention(model, threshold_scale_factor=64.0) as enabled:
        attend = enabled._session.handler._threshold
        enabled._session.handler._threshold = lambda *call: seen.append(attend(*call)) or seen[-1]
        out = model(tokens(2, 512), attention_mask=mask, use_cache=True)
        step = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        model(tokens(2, 1), attention_mask=step, past_key_values=out.past_key_values)
    layers = model.config.num_hidden_layers
    torch.testing.assert_close(
        torch.stack(seen), torch.tensor([[64 / 256, 64 / 512]] * layers + [[64 / 257, 64 / 513]] * layers)
    )


@pytest.mark.parametrize("chunk", [64, 100, 6])
def test_chunked_prefill_equals_one_shot(model, chunk):
    ids = tokens(1, 230)
    expected = model(ids).logits
    with sparse_attention(model, threshold=0.0, collect_counts=True):
        cache, parts = DynamicCache(config=model.config), []
        for first in range(0, 230, chunk):
            parts.append(model(ids[:, first : first + chunk], **{CACHE: cache}).logits)
        phases = {r.phase for r in attention_stats(model)}
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=TOLERANCE, rtol=0)
    assert ("decode" in phases) == (230 % chunk <= 8), "1 to 8 new tokens against a cache are decode"


@pytest.mark.parametrize("new", [1, 5, 8, 9])
def test_border_between_decode_and_prefill_is_eight_new_tokens(model, new):
    cache = DynamicCache(config=model.config)
    model(tokens(1, 200), **{CACHE: cache})
    with sparse_attention(model, threshold={"decode": 0.5}, collect_counts=True):
        model(tokens(1, new), **{CACHE: cache})
        assert bool(attention_stats(model)) == (new <= 8)


def roll(model, cache, ids, mask, steps=4, forward=None):
    """Prompt, then fixed next tokens; logits at the last real token of each step."""
    forward = model if forward is None else forward
    logits = model(ids, attention_mask=mask, position_ids=positions(mask), **{CACHE: cache}).logits
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    out = [logits[torch.arange(len(ids)), last]]
    for step in range(steps):
        mask = torch.cat([mask, torch.ones(len(ids), 1, dtype=mask.dtype)], 1)
        token = tokens(len(ids), 1, seed=step)
        where = mask.sum(1, keepdim=True) - 1
        out.append(forward(token, attention_mask=mask, position_ids=where, **{CACHE: cache}).logits[:, -1])
    return torch.stack(out)


@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_decode_logits_equal_sdpa_with_padding_and_caches(model, side, kind):
    def cache():
        static = kind == "static"
        return (
            StaticCache(config=model.config, max_cache_len=256)
            if static
            else DynamicCache(config=model.config)
        )

    ids, mask = tokens(2, 80), left_padded(2, 80, [0, 0] if side == "none" else [33, 0])
    if side == "right":
        mask = mask.flip(1)
    expected = roll(model, cache(), ids, mask)
    with sparse_attention(model, threshold=0.0):
        torch.testing.assert_close(roll(model, cache(), ids, mask), expected, atol=TOLERANCE, rtol=0)


def test_static_cache_slots_beyond_the_position_are_ignored(model):
    cache = StaticCache(config=model.config, max_cache_len=256)
    ids, mask = tokens(2, 17), left_padded(2, 17, [5, 0])
    expected = roll(model, StaticCache(config=model.config, max_cache_len=256), ids, mask)
    with sparse_attention(model, threshold=0.0):
        model(ids, attention_mask=mask, position_ids=positions(mask), **{CACHE: cache})
        for layer in cache.layers:
            layer.keys[:, :, 17:] = float("nan")
            layer.values[:, :, 17:] = float("nan")
        step = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        got = model(
            tokens(2, 1, seed=0),
            attention_mask=step,
            position_ids=step.sum(1, keepdim=True) - 1,
            **{CACHE: cache},
        ).logits[:, -1]
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected[1], atol=TOLERANCE, rtol=0)


def test_a_mask_as_long_as_a_static_cache_adds_no_keys(model):
    ids, cache = tokens(2, 17), StaticCache(config=model.config, max_cache_len=64)
    mask = torch.ones(2, 64, dtype=torch.long)
    expected = model(ids).logits
    with sparse_attention(model, threshold=0.0):
        got = model(ids, attention_mask=mask, position_ids=torch.arange(17)[None], **{CACHE: cache}).logits
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_compiled_decode_with_a_static_cache_equals_sdpa():
    model = make_llama(num_hidden_layers=1)
    ids, mask = tokens(2, 17), left_padded(2, 17, [5, 0])
    expected = roll(model, StaticCache(config=model.config, max_cache_len=64), ids, mask, steps=2)
    with sparse_attention(model, threshold=0.0):
        compiled = torch.compile(model, backend="eager")
        cache = StaticCache(config=model.config, max_cache_len=64)
        got = roll(model, cache, ids, mask, steps=2, forward=compiled)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)
    torch._dynamo.reset()


@pytest.mark.parametrize("extra", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
def test_generate_gives_the_same_tokens(model, extra):
    ids, mask = tokens(2, 60), left_padded(2, 60, [25, 0])
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **extra}
    expected = model.generate(ids, attention_mask=mask, **settings)
    with sparse_attention(model, threshold=0.0, collect_counts=True):
        got = model.generate(ids, attention_mask=mask, **settings)
        assert {r.phase for r in attention_stats(model)} == {"prefill", "decode"}
    assert torch.equal(got, expected)


def test_layers_may_hold_caches_of_different_lengths(model):
    cache = DynamicCache(config=model.config)
    ids = tokens(1, 90)
    model(ids, **{CACHE: cache})
    cache.layers[1].keys = cache.layers[1].keys[:, :, 2:]
    cache.layers[1].values = cache.layers[1].values[:, :, 2:]
    attention = model.model.layers[1].self_attn
    seen = {}

    def remember(module, args, kwargs, output):
        seen["k"] = kwargs[CACHE].layers[1].keys.shape[2]

    handle = attention.register_forward_hook(remember, with_kwargs=True)
    with sparse_attention(model, threshold=0.0):
        out = model(tokens(1, 1), **{CACHE: cache}).logits
    handle.remove()
    assert out.isfinite().all() and seen["k"] == 89


def test_sparse_run_skips_and_stays_within_the_measured_mass():
    model = make_llama(peaky=True)
    ids = tokens(1, 700)
    dense = model(ids).logits
    with sparse_attention(model, threshold=0.3, collect_counts=True, measure_skipped_mass=True):
        sparse = model(ids).logits
        stats, masses, summary = (
            attention_stats(model),
            skipped_mass_samples(model),
            skipped_mass_summary(model),
        )
    assert sum(int(r.skipped.sum()) for r in stats) > 0 and not torch.equal(dense, sparse)
    assert [r.layer for r in stats] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert all(r.skipped.shape == (4,) and r.phase == "prefill" and 0 < r.sparsity < 1 for r in stats)
    sample = masses["prefill"]
    assert sample.min() >= 0 and 0 < sample.max() <= summary["prefill"]["max"] <= 1
    assert summary["prefill"]["rows"] == 2 * 4 * 700
    assert 0 < summary["prefill"]["mean"] < summary["prefill"]["max"]


def test_counting_and_measuring_change_no_bit():
    model = make_llama(peaky=True)
    ids, mask = tokens(2, 400), left_padded(2, 400, [80, 0])
    with sparse_attention(model, threshold=0.2):
        plain = model(ids, attention_mask=mask).logits
    with sparse_attention(model, threshold=0.2, collect_counts=True, measure_skipped_mass=True):
        assert torch.equal(model(ids, attention_mask=mask).logits, plain)
        assert sum(int(r.skipped.sum()) for r in attention_stats(model)) > 0


@pytest.mark.parametrize("side", ["left", "right", None])
def test_the_last_rows_of_every_prompt_stay_dense(side):
    model = make_llama(peaky=True)
    ids = tokens(2, 700)
    mask = torch.ones_like(ids)
    if side is not None:
        mask[1, slice(0, 230) if side == "left" else slice(470, 700)] = 0

    def skipped(rows):
        with sparse_attention(model, threshold=1.0, collect_counts=True, dense_tail=rows) as enabled:
            model(ids, attention_mask=mask)
            assert enabled.dense_tail == rows and (f"last {rows} rows" in str(enabled)) == (rows > 0)
            return sum(int(r.skipped.sum()) for r in attention_stats(model))

    everything, most, some, nothing = (skipped(rows) for rows in (0, 64, 200, 700))
    assert everything > most > some > 0 == nothing


def test_decode_skips_with_counts_per_kv_head():
    model = make_llama(peaky=True)
    cache = DynamicCache(config=model.config)
    model(tokens(1, 900), **{CACHE: cache})
    with sparse_attention(model, threshold={"decode": 1.0}, collect_counts=True, measure_skipped_mass=True):
        for step in range(4):
            model(tokens(1, 1, seed=step), **{CACHE: cache})
        stats, summary = attention_stats(model), skipped_mass_summary(model)
    assert {r.phase for r in stats} == {"decode"} and all(r.visited.tolist() == [60, 60] for r in stats)
    assert sum(int(r.skipped.sum()) for r in stats) > 0
    assert summary["decode"]["rows"] == 4 * 2 * 4 and summary["decode"]["max"] > 0


def test_disable_restores_the_model_exactly(model):
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    enable(model, threshold=0.1)
    enable(model, threshold=0.2)
    disable(model)
    disable(model)
    assert model.config._attn_implementation == "sdpa"
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == {
        n: set(d) for n, d in before.items()
    }
    assert model.config.to_dict() == make_llama().config.to_dict()


def test_context_manager_restores_after_an_exception_and_an_outer_enable(model):
    with pytest.raises(RuntimeError, match="inside"), sparse_attention(model, threshold=0.1):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == "sdpa"
    outer = enable(model, threshold=0.5, collect_counts=True)
    with sparse_attention(model, threshold=0.0):
        pass
    assert model.config._attn_implementation == "blasst"
    model(tokens(1, 20))
    assert len(attention_stats(model)) == len(outer.served) == 2
    disable(model)
    assert model.config._attn_implementation == "sdpa"


def test_enabled_tells_served_layers_and_the_thresholds_in_force(model):
    enabled = enable(model, threshold_scale_factor={"prefill": 40.0}, ignore=["model.layers.0.*"])
    assert enabled.served == ("model.layers.1.self_attn",)
    assert enabled.unserved == (("model.layers.0.self_attn", "ignored by pattern 'model.layers.0.*'"),)
    assert enabled.thresholds["prefill"].for_length(4000) == pytest.approx(0.01)
    assert enabled.thresholds["prefill"].for_length(10) == 1.0
    text = str(enabled)
    for part in (
        "serves 1 attention",
        "threshold_scale_factor 40",
        "decode: dense",
        "model.layers.0.self_attn",
    ):
        assert part in text
    disable(model)


def test_an_ignored_layer_runs_on_its_own_attention(model):
    ids, mask = tokens(2, 120), left_padded(2, 120, [50, 0])
    expected = model(ids, attention_mask=mask).logits
    with sparse_attention(model, threshold=0.0, ignore=["model.layers.0.*"], collect_counts=True):
        got = model(ids, attention_mask=mask).logits
        assert [r.layer for r in attention_stats(model)] == ["model.layers.1.self_attn"]
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to enable"),
        ({"threshold": 0.1, "threshold_scale_factor": 3.0}, "give one of them"),
        ({"target_sparsity": 0.5}, "needs profile"),
        ({"target_sparsity": 0.5, "threshold": 0.1}, "give one of them"),
        ({"threshold": [0.1, 0.2]}, "wants a number"),
        ({"threshold": "0.1"}, "wants a number"),
        ({"threshold": True}, "wants a number"),
        ({"threshold": 1.5}, r"wants \[0, 1\]"),
        ({"threshold": float("nan")}, r"wants \[0, 1\]"),
        ({"threshold": -0.7}, "log units"),
        ({"threshold": {"prefill": None}}, "no phase has a value"),
        ({"threshold": {"prefil": 0.1}}, "unknown phase"),
        ({"threshold_scale_factor": float("inf")}, "finite"),
        ({"threshold": 0.1, "max_skipped_mass": 1.0}, r"in \(0, 1\)"),
        ({"threshold": 0.1, "dense_tail": -1}, "dense_tail: got -1"),
        ({"threshold": 0.1, "screen": "int4"}, 'screen: got .int4., want "int8"'),
        (
            {"threshold": 0.1, "screen": "int8", "max_skipped_mass": 0.1},
            "beside max_skipped_mass",
        ),
        ({"threshold": {"decode": 0.1}, "screen": "int8"}, "for a prefill that is dense"),
        ({"threshold": 0.1, "impl": "cuda9000"}, "impl: got 'cuda9000'"),
        ({"threshold": 0.1, "impl": None}, "impl: got None"),
        ({"threshold": 0.1, "ignore": "model.layers.0.*"}, "sequence of patterns"),
        ({"threshold": 0.1, "ignore": ["no.such.layer"]}, "matches no module"),
        ({"threshold": 0.1, "ignore": ["*"]}, "no attention layer can be served"),
    ],
)
def test_bad_arguments_are_refused_and_leave_the_model_alone(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        enable(model, **arguments)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "argument",
    [
        {"max_skipped_mass": "x"},
        {"max_skipped_mass": True},
        {"dense_tail": 1.5},
        {"screen": 8},
        {"ignore": [5]},
        {"collect_counts": "no"},
        {"measure_skipped_mass": 1},
        {"profile": 5, "threshold": None},
    ],
)
def test_arguments_of_a_wrong_type_are_named_and_leave_the_model_alone(model, argument):
    with pytest.raises(TypeError, match="^" + next(iter(argument))):
        enable(model, **{"threshold": 0.1, **argument})
    assert model.config._attn_implementation == "sdpa"


def test_statistics_need_an_enabled_model_that_counts(model):
    with pytest.raises(ValueError, match="not enabled"):
        attention_stats(model)
    with sparse_attention(model, threshold=0.1):
        with pytest.raises(ValueError, match="collect_counts"):
            attention_stats(model)
        with pytest.raises(ValueError, match="measure_skipped_mass"):
            skipped_mass_samples(model)


def test_attention_weights_and_dropout_are_refused(model):
    with sparse_attention(model, threshold=0.1), pytest.raises(UnsupportedError, match="output_attentions"):
        model(tokens(1, 20), output_attentions=True)
    dropping = make_llama(attention_dropout=0.1).train()
    with sparse_attention(dropping, threshold=0.1), pytest.raises(UnsupportedError, match=r"model\.eval"):
        dropping(tokens(1, 20))
    assert dropping.training


def test_gradients_are_refused_and_not_silently_dropped(model):
    with torch.enable_grad(), sparse_attention(model, threshold=0.1), pytest.raises(NotImplementedError):
        model(tokens(1, 20))


def test_a_custom_4d_mask_runs_on_the_own_attention_and_is_listed_once(model):
    ids = tokens(1, 40)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    mask[:10, :10] = True  # a bidirectional block
    expected = model(ids, attention_mask=mask[None, None]).logits
    assert (expected - model(ids).logits).abs().max() > 1e-4, "the block must matter"
    with sparse_attention(model, threshold=0.0) as enabled:
        with pytest.warns(UserWarning, match="4-D attention mask"):
            got = model(ids, attention_mask=mask[None, None]).logits
        model(ids, attention_mask=mask[None, None])  # no second warning: warnings are errors here
        assert len(enabled.unserved) == 2 and "4-D" in str(enabled)
    assert torch.equal(got, expected)


def test_packed_sequences_keep_their_own_mask(model):
    ids, where = tokens(1, 60), torch.cat([torch.arange(25), torch.arange(35)])[None]
    expected = model(ids, position_ids=where, use_cache=False).logits
    with sparse_attention(model, threshold=0.0), pytest.warns(UserWarning, match="packed"):
        got = model(ids, position_ids=where, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_packed_arguments_without_a_mask_are_refused(model):
    ends = torch.tensor([0, 25, 60], dtype=torch.int32)
    with sparse_attention(model, threshold=0.1), pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
        model(tokens(1, 60), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_a_mask_that_lost_its_record_is_matched_to_the_last_forward(model):
    ids, mask = tokens(2, 90), left_padded(2, 90, [40, 0])
    expected = model(ids, attention_mask=mask).logits

    def lose(module, args, kwargs):
        # what moving a mask to another device does between the layers of a split model
        kwargs["attention_mask"] = kwargs["attention_mask"].clone()
        return args, kwargs

    with sparse_attention(model, threshold=0.0):
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lose, with_kwargs=True)
        got = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], atol=TOLERANCE, rtol=0)


def test_blasst_named_at_load_time_needs_enable(model):
    with sparse_attention(model, threshold=0.1):
        pass  # registers the name
    model.set_attn_implementation("blasst")
    with pytest.raises(BlasstError, match=r"blasst\.enable"):
        model(tokens(1, 20))
    with sparse_attention(model, threshold=0.1):
        assert model(tokens(1, 20)).logits.isfinite().all()


def test_mixed_dtypes_are_cast_to_that_of_the_values_with_one_warning(model):
    attention = model.model.layers[0].self_attn
    q, k, v = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
    with sparse_attention(model, threshold=0.0):
        expected, _ = blasst_attention(attention, q.bfloat16(), k.bfloat16(), v.bfloat16(), None)
        with pytest.warns(UserWarning, match=r"from torch\.float32 to torch\.bfloat16"):
            got, _ = blasst_attention(attention, q.bfloat16().float(), k.bfloat16(), v.bfloat16(), None)
        blasst_attention(attention, q, k.bfloat16(), v.bfloat16(), None)
    assert got.dtype == torch.float32 and torch.equal(got, expected.float())


def test_a_copy_of_an_enabled_model_is_enabled_on_its_own(model):
    enable(model, threshold=0.1, collect_counts=True)
    other = copy.deepcopy(model)
    other(tokens(1, 30))
    assert len(attention_stats(other)) == 2 and attention_stats(model) == []
    disable(other)
    assert (model.config._attn_implementation, other.config._attn_implementation) == ("blasst", "sdpa")


def test_masks_are_freed_with_the_forward(model):
    gc.disable()  # no cycle may need it
    try:
        with sparse_attention(model, threshold=0.0):
            model(tokens(2, 30), attention_mask=left_padded(2, 30, [4, 0]))
        assert [reference() for reference in _recent.records][-1:] == [None]
    finally:
        gc.enable()


def test_two_threads_with_two_models_do_not_mix(model):
    other = make_llama(num_hidden_layers=1)
    ids, mask = tokens(2, 64), left_padded(2, 64, [20, 0])
    expected = [m(ids, attention_mask=mask).logits[mask.bool()] for m in (model, other)]
    enable(model, threshold=0.0)
    enable(other, threshold=0.0)
    got = {}

    def work(index, m):
        with torch.no_grad():
            got[index] = m(ids, attention_mask=mask).logits[mask.bool()]

    threads = [threading.Thread(target=work, args=(i, m)) for i, m in enumerate((model, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        torch.testing.assert_close(got[index], expected[index], atol=TOLERANCE, rtol=0)
