"""ScreenedCache: decode steps of transformers models are screened, with the bits of the plain steps."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from test_key_codes import assert_equal_codes  # noqa: E402
from test_transformers import left_padded, make_llama, tokens  # noqa: E402
from transformers import DynamicCache, LlamaConfig  # noqa: E402

from blasst import KeyCodes, ScreenedCache, UnsupportedError  # noqa: E402
from blasst.evals.models import load_smollm2  # noqa: E402
from blasst.integrations.transformers import attention_stats, sparse_attention  # noqa: E402
from blasst.integrations.transformers_cache import codes_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

DECODE = {"prefill": None, "decode": 0.05}
STORAGES = [("side", torch.float32), ("side", torch.bfloat16), ("progressive", torch.bfloat16)]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Unscreened(ScreenedCache):
    """The same cache, whose keys come without their codes."""

    def update(self, *args, **kwargs):
        keys, values = super().update(*args, **kwargs)
        return keys.view_as(keys), values


def steps(model, cache, ids, count, prefix):
    """Logits of a prompt and of decode steps; what was counted in decode."""
    with sparse_attention(model, threshold=DECODE, collect_counts=True):
        logits = [model(ids[:, :prefix], past_key_values=cache).logits[:, -1]]
        for i in range(prefix, prefix + count):
            logits.append(model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1])
        stats = [s for s in attention_stats(model) if s.phase == "decode"]
    sums = [sum(int(getattr(s, name).sum()) for s in stats) for name in ("visited", "skipped", "screened")]
    return torch.stack(logits), sums


@pytest.mark.parametrize(("storage", "dtype"), STORAGES)
@pytest.mark.parametrize("bits", [4, 6])
def test_screened_steps_have_the_bits_of_the_plain_ones(storage, dtype, bits):
    model, ids = make_llama(peaky=True).to(dtype), tokens(2, 900)
    options = {"storage": storage, "bits": bits}
    cache = ScreenedCache(model.config, **options)
    got, (visited, skipped, screened) = steps(model, cache, ids, 70, 800)
    plain, counted = steps(model, Unscreened(model.config, **options), ids, 70, 800)
    assert torch.equal(got, plain) and counted == [visited, skipped, 0]
    assert 0 < screened <= skipped < visited and screened > 0.5 * skipped
    dense, counted = steps(model, DynamicCache(config=model.config), ids, 70, 800)
    if storage == "side":
        assert torch.equal(got, dense) and counted == [visited, skipped, 0]
    else:  # of keys as stored
        assert torch.equal(got[0], dense[0]) and (got - dense).abs().max() < 0.02 * dense.abs().max()
        assert cache.layers[0].keys.shape == (2, 2, 870, 16)
    ordinary = sum(x.keys.nbytes + x.values.nbytes for x in DynamicCacheOf(cache))
    extra = 1 / 64 if storage == "progressive" else (bits / 32 + 1 / 64) * 2 / dtype.itemsize
    assert cache.nbytes <= ordinary * (1 + extra) + 2 * 2 * 2 * 64 * 16 * 2  # and a tile begun, in each layer


class DynamicCacheOf:
    """Layers of an ordinary cache with the same keys and values."""

    def __init__(self, cache):
        self.layers = cache.layers

    def __iter__(self):
        return iter(self.layers)


def state(cache):
    """What the layers would hand out, and their codes."""
    found = []
    for layer in cache.layers:
        codes = layer.codes if hasattr(layer, "codes") else layer.store
        whole = layer.get_seq_length() // 64
        names = ("codes", "low", "step") if isinstance(codes, KeyCodes) else ("planes", "low", "step")
        found += [layer.keys.clone(), layer.values.clone()]
        found += [getattr(codes, name)[:, :whole].clone() for name in names]
    return found


def assert_same_state(a, b):
    for x, y in zip(state(a), state(b), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def filled(model, storage, ids):
    cache = ScreenedCache(model.config, storage=storage)
    model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize(("storage", "dtype"), STORAGES[1:])
def test_beams_repeats_and_choices_move_the_codes(storage, dtype):
    model, ids = make_llama().to(dtype), tokens(3, 150)
    order = torch.tensor([2, 0, 0])
    cache = filled(model, storage, ids)
    cache.reorder_cache(order)
    assert_same_state(cache, filled(model, storage, ids[order]))
    cache.batch_select_indices(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    want = ids[order][[1, 1, 0, 0]]
    assert_same_state(cache, filled(model, storage, want))
    other = copy.deepcopy(cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0 and other.get_seq_length() == 150
    model(want, past_key_values=cache)
    assert_same_state(cache, other)


@pytest.mark.parametrize(("storage", "dtype"), STORAGES[1:])
def test_tokens_that_were_taken_back_leave_no_trace(storage, dtype):
    model, ids, others = make_llama(peaky=True).to(dtype), tokens(1, 400), tokens(1, 400, seed=1)
    cache, fresh = (filled(model, storage, ids[:, :320]) for _ in range(2))
    model(others[:, :100], past_key_values=cache)
    cache.crop(-100)
    assert cache.get_seq_length() == 320
    assert_same_state(cache, fresh)
    for other in (cache, fresh):  # as many at once, so that no length tells that there were others
        model(ids[:, 300:], past_key_values=other)
    assert_same_state(cache, fresh)
    cache.crop(-100)
    with pytest.raises(ValueError, match=r"^tokens_to_remove: got 5, want minus the number of tokens"):
        cache.crop(5)
    cache.crop(-30)  # into an encoded tile, whose other keys stay as they were stored
    before = state(cache)[:2]
    cache.crop(0)
    model(ids[:, :1], past_key_values=cache)
    assert torch.equal(cache.layers[0].keys[:, :, :290], before[0])
    cache.crop(-1)
    got, (_, _, screened) = steps(model, cache, ids, 40, 8)
    assert screened > 0
    again = filled(model, storage, ids[:, :320])
    again.__class__ = Unscreened
    again.crop(-30)
    assert torch.equal(got, steps(model, again, ids, 40, 8)[0])


@pytest.mark.parametrize(("storage", "dtype"), STORAGES[1:])
def test_generate_with_beams_and_with_assistance(storage, dtype):
    model, ids = make_llama(peaky=True).to(dtype), tokens(1, 500)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    for more in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}):
        texts = []
        for kind in (ScreenedCache, Unscreened):
            with sparse_attention(model, threshold=DECODE, collect_counts=True):
                cache = kind(model.config, storage=storage)
                texts.append(model.generate(ids, past_key_values=cache, **options, **more))
                screened = sum(int(s.screened.sum()) for s in attention_stats(model))
            assert (screened > 0) == (kind is ScreenedCache)
        assert torch.equal(*texts)


@pytest.mark.parametrize(("storage", "dtype"), STORAGES[1:])
def test_padded_batches_and_budgets_are_served_without_screening(storage, dtype):
    model, ids = make_llama(peaky=True).to(dtype), tokens(2, 500)
    mask = left_padded(2, 500, [0, 70])
    for options, attention_mask in (({}, mask), ({"max_skipped_mass": 0.5}, None)):
        texts = []
        for kind in (ScreenedCache, Unscreened):
            with sparse_attention(model, threshold=DECODE, collect_counts=True, **options):
                cache = kind(model.config, storage=storage)
                settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": attention_mask}
                texts.append(model.generate(ids, past_key_values=cache, **settings))
                stats = [s for s in attention_stats(model) if s.phase == "decode"]
            assert sum(int(s.skipped.sum()) for s in stats) > 0
            assert sum(int(s.screened.sum()) for s in stats) == 0
        assert torch.equal(*texts)


def test_a_prefill_sees_its_own_keys_and_decode_those_stored():
    model, ids = make_llama().bfloat16(), tokens(1, 300)
    cache, plain = ScreenedCache(model.config, storage="progressive"), DynamicCache(config=model.config)
    assert torch.equal(
        model(ids[:, :200], past_key_values=cache).logits, model(ids[:, :200], past_key_values=plain).logits
    )
    layer, seen = cache.layers[0], []
    update = layer.update

    def record(*args, **kwargs):
        seen.append((args[0], update(*args, **kwargs)[0]))
        return seen[-1][1], layer.values

    layer.update = record
    model(ids[:, 200:264], past_key_values=cache)
    model(ids[:, 264:265], past_key_values=cache)
    (chunk, chunk_keys), (_, step_keys) = seen
    assert torch.equal(chunk_keys[:, :, 200:], chunk) and codes_of(chunk_keys) is None
    stored = layer.keys
    assert torch.equal(chunk_keys[:, :, :192], stored[:, :, :192])
    assert torch.equal(step_keys, stored) and codes_of(step_keys) is not None
    assert not torch.equal(stored[:, :, 200:264], chunk)  # a few small keys moved


def test_codes_beside_the_keys_are_those_of_the_keys():
    model, ids = make_llama(), tokens(2, 300)
    cache = filled(model, "side", ids[:, :130])
    for i in range(130, 260, 13):
        model(ids[:, i : i + 13], past_key_values=cache)
    for layer in cache.layers:
        assert_equal_codes(layer.codes, KeyCodes.from_keys(layer.keys.transpose(1, 2), 6))


def test_layers_with_a_window_keep_their_own_cache():
    from transformers import MistralConfig

    mixed = LlamaConfig(num_hidden_layers=3)
    mixed.layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    mixed.sliding_window = 64
    names = [type(layer).__name__ for layer in ScreenedCache(mixed).layers]
    assert names == ["DynamicSlidingWindowLayer", "CodedLayer", "DynamicSlidingWindowLayer"]
    with pytest.raises(ValueError, match=r"^config: got a model without layers of full attention"):
        ScreenedCache(MistralConfig(num_hidden_layers=2, sliding_window=64))


def test_what_does_not_fit_is_refused():
    model = make_llama()
    with pytest.raises(ValueError, match=r"^storage: got 'both', want one of side, progressive"):
        ScreenedCache(model.config, storage="both")
    with pytest.raises(ValueError, match=r"^bits: got 7, want one of 4, 5, 6"):
        ScreenedCache(model.config, bits=7)
    with pytest.raises(UnsupportedError, match=r"^dtype: got torch\.float32, progressive keys have 16 bits"):
        filled(model, "progressive", tokens(1, 10))
    cache = filled(model.bfloat16(), "progressive", tokens(1, 70))
    with pytest.raises(UnsupportedError, match=r"^keys: progressive keys are not replaced or moved"):
        cache.layers[0].offload()
    with (
        sparse_attention(model, threshold=DECODE, impl="triton"),
        pytest.raises(UnsupportedError, match="triton: it takes no screen"),
    ):
        model(tokens(1, 1), past_key_values=cache)


# --- a real model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    """The model, a prompt, and the cache of all of it but the last token."""
    model, tokenizer, _ = load_smollm2(dtype=torch.float32)
    text = "A list of the cities of Europe and of what they are known for. " * 40
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :320]
    with torch.no_grad():
        return model, ids, filled(model, "side", ids[:, :-1])


@pytest.mark.parametrize(("storage", "dtype"), [STORAGES[0], STORAGES[2]])
def test_smollm2_decodes_with_screening_and_the_same_bits(smollm2, storage, dtype):
    model, ids, known = smollm2
    model, prompt = model.to(dtype), ScreenedCache(model.config, storage=storage)
    for i, layer in enumerate(known.layers):  # a prompt in bfloat16 takes half a minute on a CPU
        prompt.update(layer.keys.to(dtype), layer.values.to(dtype), i)

    def generate(kind, threshold):
        cache = copy.deepcopy(prompt)
        cache.__class__ = kind
        settings = {"max_new_tokens": 2, "do_sample": False, "past_key_values": cache}
        if threshold is None:
            return model.generate(ids, **settings), None
        with sparse_attention(model, threshold={"decode": threshold}, collect_counts=True):
            found = model.generate(ids, **settings)
            stats = attention_stats(model)
        names = ("visited", "skipped", "screened")
        return found, [sum(int(getattr(s, name).sum()) for s in stats) for name in names]

    dense, _ = generate(ScreenedCache, None)
    got, counts = generate(ScreenedCache, 0.0)
    assert torch.equal(got, dense) and counts[1:] == [0, 0]
    got, (visited, skipped, screened) = generate(ScreenedCache, 0.02)
    plain, counted = generate(Unscreened, 0.02)
    assert torch.equal(got, plain) and counted == [visited, skipped, 0]
    assert 0.1 * visited < skipped and 0.5 * skipped < screened <= skipped
