"""enable() on tiny models of other architectures: windows, softcap, sinks, MLA, encoders."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import causal_mask_function, create_causal_mask

from blasst.integrations.transformers import attention_stats, enable, sparse_attention
from blasst.integrations.transformers_mask import MaskPattern, classify

TOLERANCE = 1e-5  # fp32, two layers, logits of order 1

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention"]


def _gemma2():
    config = Gemma2Config(
        **COMMON, head_dim=16, sliding_window=32, attn_logit_softcapping=0.2, query_pre_attn_scalar=1
    )
    config._attn_implementation = "eager"  # sdpa does not know softcap
    return Gemma2ForCausalLM(config)


def _gpt_oss():
    config = GptOssConfig(
        **COMMON,
        head_dim=16,
        sliding_window=32,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=MIXED,
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def _deepseek():
    config = DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
    )
    return DeepseekV3ForCausalLM(config)


MODELS = {
    "softcap and window": _gemma2,
    "window": lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=32)),
    "window in some layers": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON, head_dim=16, sliding_window=32, layer_types=MIXED, query_pre_attn_scalar=16
        )
    ),
    "sinks and window": _gpt_oss,
    "value dimension differs": _deepseek,
    "learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=512, bos_token_id=1, eos_token_id=2
        )
    ),
}


def make(factory):
    torch.manual_seed(0)
    return factory().eval()


def tokens(batch, length, seed=0):
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_generated_tokens_equal_the_own_attention(kind):
    model = make(MODELS[kind])
    original = model.config._attn_implementation
    ids, mask = tokens(2, 90), torch.ones(2, 90, dtype=torch.long)
    mask[0, :30] = 0
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    plain, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    texts = [
        model.generate(ids, attention_mask=mask, cache_implementation=c, **settings) for c in (None, "static")
    ]
    with sparse_attention(model, threshold=0.0, collect_counts=True) as enabled:
        torch.testing.assert_close(model(ids).logits, plain, atol=TOLERANCE, rtol=0)
        got = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(got[mask.bool()], padded[mask.bool()], atol=TOLERANCE, rtol=0)
        for cache, text in zip((None, "static"), texts):
            got = model.generate(ids, attention_mask=mask, cache_implementation=cache, **settings)
            assert torch.equal(got, text)
        assert len(enabled.served) == 2 and enabled.unserved == ()
        assert {r.phase for r in attention_stats(model)} == {"prefill", "decode"}
    assert model.config._attn_implementation == original


def test_softcap_and_sinks_reach_the_kernel():
    ids = tokens(1, 60)
    model = make(_gemma2)
    with sparse_attention(model, threshold=0.0):
        capped = model(ids).logits
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        assert (model(ids).logits - capped).abs().max() > 100 * TOLERANCE
    model = make(_gpt_oss)
    with sparse_attention(model, threshold=0.0):
        sunk = model(ids).logits
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.self_attn.sinks, 8.0)
        assert (model(ids).logits - sunk).abs().max() > 100 * TOLERANCE


def test_a_window_over_a_cache_with_padding_inside_keeps_the_own_attention():
    model = make(lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=200)))
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, 40:] = 0

    def two_steps():
        first = model(ids, attention_mask=mask)
        cache = first.get("cache", first.get("past_key_values"))
        step = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        name = "cache" if "cache" in first else "past_key_values"
        return model(tokens(2, 1), attention_mask=step, **{name: cache}).logits

    expected = two_steps()
    with sparse_attention(model, threshold=0.0) as enabled:
        with pytest.warns(UserWarning, match="padding inside"):
            got = two_steps()
        assert any("padding inside" in reason for _, reason in enabled.unserved)
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("hole", [slice(40, 60), slice(10, 100)])
def test_a_window_over_padding_between_real_tokens_keeps_the_own_attention(hole):
    model = make(lambda: MistralForCausalLM(MistralConfig(**COMMON, sliding_window=70)))
    ids = torch.randint(3, 97, (2, 150), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, hole] = 0
    real = mask.bool()
    own = model(ids, attention_mask=mask).logits[real]
    with (
        pytest.warns(UserWarning, match="a sliding window over padding between real tokens"),
        sparse_attention(model, threshold=0.0) as enabled,
    ):
        ours = model(ids, attention_mask=mask).logits[real]
        reasons = {reason for _, reason in enabled.unserved}
    torch.testing.assert_close(ours, own, atol=TOLERANCE, rtol=0)
    assert reasons == {"a sliding window over padding between real tokens (in some calls)"}


def test_chunked_attention_layers_keep_their_own_attention():
    config = Llama4TextConfig(
        **COMMON,
        head_dim=16,
        attention_chunk_size=32,
        num_local_experts=2,
        intermediate_size_mlp=96,
        num_experts_per_tok=1,
        layer_types=["chunked_attention", "full_attention"],
    )
    model = make(lambda: Llama4ForCausalLM(config))
    ids = tokens(1, 90)
    expected = model(ids).logits
    with sparse_attention(model, threshold=0.0, collect_counts=True) as enabled:
        with pytest.warns(UserWarning, match="packed, chunked or custom"):
            got = model(ids).logits
        assert [r.layer for r in attention_stats(model)] == ["model.layers.1.self_attn"]
        assert [name for name, _ in enabled.unserved] == ["model.layers.0.self_attn"]
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_encoder_and_cross_attention_layers_keep_their_own_attention():
    config = BartConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
    )
    model = make(lambda: BartForConditionalGeneration(config))
    source, target, mask = tokens(2, 77), tokens(2, 15, seed=1), torch.ones(2, 77, dtype=torch.long)
    mask[0, 60:] = 0
    expected = model(source, attention_mask=mask, decoder_input_ids=target).logits
    with sparse_attention(model, threshold=0.0, collect_counts=True) as enabled:
        got = model(source, attention_mask=mask, decoder_input_ids=target).logits
        assert enabled.served == ("model.decoder.layers.0.self_attn",)
        assert dict(enabled.unserved).keys() == {
            "model.encoder.layers.0.self_attn",
            "model.decoder.layers.0.encoder_attn",
        }
        assert len(attention_stats(model)) == 1
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


def test_position_bias_keeps_the_own_attention():
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, pad_token_id=0)
    model = make(lambda: T5ForConditionalGeneration(config))
    source, target = tokens(1, 30), tokens(1, 12, seed=1)
    expected = model(source, decoder_input_ids=target).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with sparse_attention(model, threshold=0.0) as enabled:
                got = model(source, decoder_input_ids=target).logits
                assert any("position_bias" in reason for _, reason in enabled.unserved)
        except ValueError as error:  # a T5 that does not call the attention interface
            assert "no attention layer can be served" in str(error)
            return
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_model_without_causal_layers_is_refused():
    config = BertConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = make(lambda: BertModel(config))
    with pytest.raises(ValueError, match=r"no attention layer can be served .*not causal"):
        enable(model, threshold=0.1)


def test_only_fully_known_masks_are_taken_for_causal():
    from transformers import masking_utils as hf

    assert classify(hf.causal_mask_function) == MaskPattern(causal=True)
    assert classify(hf.bidirectional_mask_function) == MaskPattern(causal=False)
    assert classify(hf.sliding_window_causal_mask_function(7)) == MaskPattern(causal=True, window=7)
    custom = hf.or_masks(hf.causal_mask_function, lambda b, h, q, k: k < 3)
    unknown = [
        custom,
        hf.and_masks(hf.causal_mask_function, hf.packed_sequence_mask_function(torch.zeros(1, 4))),
        hf.and_masks(hf.sliding_window_overlay(7), custom),
        hf.and_masks(hf.sliding_window_overlay(7), hf.causal_mask_function, hf.causal_mask_function),
        hf.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)),
        lambda b, h, q, k: k <= q,
    ]
    assert [classify(function) for function in unknown] == [None] * len(unknown)


def test_a_custom_mask_function_reaches_the_own_attention():
    model = make(MODELS["learned positions"])
    with sparse_attention(model, threshold=0.0):
        mask = create_causal_mask(
            model.config,
            torch.zeros(1, 6, 64),
            None,
            None,
            or_mask_function=lambda b, h, q, k: k < 3,
        )
        record = mask.blasst_record
    assert record.pattern is None
    own = record.native("sdpa")
    q, k = torch.arange(6)[:, None], torch.arange(6)[None]
    assert torch.equal(own[0, 0], causal_mask_function(0, 0, q, k) | (k < 3))
