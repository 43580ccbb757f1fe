"""Counting for a calibration: equal to what kernels count, padding, modes, errors; and the prompts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers import LlamaConfig, LlamaForCausalLM

from blasst.calibrate.assemble import build_profile
from blasst.calibrate.collect import DEFAULT_THRESHOLDS, collect
from blasst.calibrate.fit import fit_phase
from blasst.calibrate.generate import greedy_pass
from blasst.calibrate.histograms import Histograms
from blasst.calibrate.measure import measure_sparsity, pooled_sparsity
from blasst.calibrate.prompts import PROMPT_KINDS, Prompt, calibration_prompts, prompts_hash
from blasst.calibrate.tiles import counting_rules
from blasst.core.errors import CalibrationError, ProfileError
from blasst.core.phase_fit import SCREENED_RULE, SERVING_RULES, CountingRule
from blasst.core.profile import DataInfo, ModelInfo, Profile
from blasst.core.types import TileShape
from blasst.integrations.transformers import attention_stats, enable, reset_stats, sparse_attention
from blasst.kernels.eager import decode_margins

LADDER = np.logspace(-6, 0, 30)


class ByteTokenizer:
    """One token per byte, with a token in front as many models have."""

    def __call__(self, text, add_special_tokens=True):
        ids = [byte + 3 for byte in text.encode()]
        return SimpleNamespace(input_ids=[1, *ids] if add_special_tokens else ids)


def make_llama(**changes):
    """Constant biases on queries and keys: attention fades with distance, so there are tiles to skip."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "attention_bias": True,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()
    for layer in model.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            torch.nn.init.constant_(projection.bias, 2.5)
            torch.nn.init.normal_(projection.weight, std=0.1)
    return model


def prompt(length, seed=0, kind="random"):
    generator = torch.Generator().manual_seed(seed)
    return Prompt(kind, token_ids=tuple(torch.randint(3, 97, (length,), generator=generator).tolist()))


@pytest.fixture
def model():
    return make_llama()


def counts_of(table):
    return [(r.prompt, r.phase, r.kv_len, r.skipped.tolist(), r.visited.tolist()) for r in table.records]


def test_a_margin_exactly_at_a_threshold_is_not_skipped_there():
    histograms = Histograms(np.log([0.1, 0.5, 1.0]))
    edge = histograms.edges(torch.device("cpu"))[1]
    below = torch.nextafter(edge, torch.tensor(-np.inf))
    margins = torch.stack([edge, below, torch.tensor(np.nan), torch.tensor(np.inf)])
    histograms.add("prefill", 0, 0, 640, margins[None])
    kv_len, skipped, visited = histograms.take("prefill", 0, 1)
    assert (kv_len, visited.tolist()) == (640, [[4]])
    assert skipped[:, 0, 0].tolist() == [0, 1, 2]  # below at 0.5, the edge itself from 1.0 on, NaN never


@pytest.mark.parametrize("screen", [None, "int8"])
def test_prefill_counts_are_those_of_the_sparse_kernel(model, screen):
    ids = prompt(1400)
    rules = {"prefill": SCREENED_RULE} if screen else SERVING_RULES
    table = collect(model, None, [ids], phases=["prefill"], thresholds=LADDER, rules=rules)
    (record,) = table.records
    assert record.kv_len == 1400 and record.skipped.shape == (30, 2, 4) and table.num_prompts == 1
    assert table.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    for j in (20, 25, 29):
        settings = {
            "threshold": float(LADDER[j]),
            "collect_counts": True,
            "dense_tail": rules["prefill"].dense_tail,
            "screen": screen,
        }
        with torch.no_grad(), sparse_attention(model, **settings):
            model(torch.tensor([ids.token_ids]))
            first = attention_stats(model)[0]  # later layers see other inputs once tiles are skipped
        assert first.skipped.tolist() == record.skipped[j, 0].tolist() and int(first.skipped.sum()) > 0
        assert first.visited.tolist() == record.visited[0].tolist()


def test_decode_counts_are_those_of_the_sparse_kernel(model):
    ids = prompt(900)
    table = collect(model, None, [ids], phases=["decode"], thresholds=LADDER, decode_tokens=3)
    (record,) = table.records
    assert record.kv_len == 902 and record.skipped.shape == (30, 2, 2)
    assert record.visited.tolist() == [[45, 45], [45, 45]]
    with torch.no_grad():
        fed = greedy_pass(model, [ids.token_ids], 3)
        sequence = torch.tensor([ids.token_ids])
        cache = model(sequence)
        with sparse_attention(model, threshold={"decode": float(LADDER[20])}, collect_counts=True):
            for step in range(3):
                name = "cache" if "cache" in cache else "past_key_values"
                cache = model(fed[:, step : step + 1], **{name: cache[name]})
            first = attention_stats(model)[0]
    assert first.skipped.tolist() == record.skipped[20, 0].tolist() and int(first.skipped.sum()) > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rule", [SERVING_RULES["prefill"], SCREENED_RULE])
def test_padding_changes_no_count(model, side, rule):
    prompts = [prompt(500, 1), prompt(230, 2), prompt(640, 3)]
    rules = {**SERVING_RULES, "prefill": rule}
    settings = {"thresholds": LADDER, "decode_tokens": 3, "rules": rules}
    alone = collect(model, None, prompts, **settings)
    together = collect(model, None, prompts, batch_size=3, padding_side=side, **settings)
    for one, other in zip(
        sorted(alone.records, key=lambda r: (r.prompt, r.phase)),
        sorted(together.records, key=lambda r: (r.prompt, r.phase)),
    ):
        assert (one.prompt, one.phase, one.kv_len) == (other.prompt, other.phase, other.kv_len)
        assert np.array_equal(one.visited, other.visited)
        # the same sums in another order: a margin may land on the other side of a threshold
        assert np.abs(one.skipped - other.skipped).max() <= 1
    assert sum(int(r.skipped.sum()) for r in alone.records) > 0


def test_text_prompts_need_a_tokenizer(model):
    text = Prompt("prose", text="hello " * 60)
    table = collect(model, ByteTokenizer(), [text], phases=["prefill"])
    assert table.records[0].kv_len == 361 and table.records[0].kind == "prose"
    with pytest.raises(ValueError, match="tokenizer is missing"):
        collect(model, None, [text])
    with pytest.raises(ValueError, match="one of them"):
        collect(model, None, [Prompt("prose", text="a", token_ids=(1,))])


def test_training_mode_and_attention_are_restored_also_after_an_exception(model):
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]

    def stop(done, total, what):
        assert not model.training and model.config._attn_implementation == "blasst"
        if done:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        collect(model, None, [prompt(200), prompt(210)], phases=["prefill"], progress=stop)
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"
    enable(model, threshold=0.5, collect_counts=True)
    collect(model, None, [prompt(200)], phases=["prefill"])
    reset_stats(model)
    assert model.config._attn_implementation == "blasst"


def test_ignored_layers_are_not_counted(model):
    table = collect(model, None, [prompt(300)], phases=["prefill"], ignore=["model.layers.0.*"])
    assert table.layers == ("model.layers.1.self_attn",) and table.records[0].visited.shape == (1, 4)


def test_another_engines_tile_shape_can_be_counted(model):
    table = collect(
        model,
        None,
        [prompt(512)],
        phases=["prefill"],
        rules=counting_rules(["modelopt"]),
    )
    assert table.records[0].visited.tolist() == [[10] * 4] * 2
    assert table.rules == {"prefill": CountingRule(TileShape(128, 128), "ascending")}


@pytest.mark.parametrize("splits", [1, 3, 50])
def test_xqa_counts_are_those_of_its_rule(splits):
    """Key tile t is compared with the earlier tiles of its split: t - splits, t - 2 * splits, ..."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 16), torch.randn(1300, 2, 16) * torch.linspace(2, 0.2, 1300)[:, None, None]
    first, margin = decode_margins(q, k, softmax_scale=0.25, tile=TileShape(None, 64), splits=splits)
    scores = torch.einsum("hd,khd->hk", q[0] * 0.25, k.repeat_interleave(2, 1))
    tile_max = torch.nn.functional.pad(scores, (0, 21 * 64 - 1300), value=-torch.inf).view(4, 21, 64).amax(-1)
    for head in range(2):
        for tile in range(21):
            rows = tile_max[2 * head : 2 * head + 2]
            earlier = [rows[:, t] for t in range(tile - splits, -1, -splits)]
            expected = torch.inf
            if earlier:
                expected = float((rows[:, tile] - torch.stack(earlier).amax(0)).max())
            assert float(margin[head, tile]) == pytest.approx(expected, abs=1e-5)
    assert first == 0 and margin.shape == (2, 21)


def test_more_splits_skip_less_and_the_profile_says_how_many(model):
    skipped = []
    for splits in (1, 4):
        table = collect(
            model,
            None,
            [prompt(900), prompt(1400, 1)],
            phases=["decode"],
            rules=counting_rules(["xqa"], splits=splits),
            decode_tokens=2,
        )
        skipped.append(sum(int(r.skipped.sum()) for r in table.records))
        assert table.rules["decode"].splits == splits
    assert skipped[0] > skipped[1] > 0
    profile = build_profile(table, model_info=ModelInfo("m", "f"), data_info=DataInfo("h", 2, ("random",)))
    read = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert read.phases["decode"].rule == CountingRule(TileShape(None, 64), "ascending", 4)
    with pytest.raises(ProfileError, match=r"phases\.decode\.order"):
        read.require_match()


def test_modelopt_decode_counts_single_heads(model):
    rules = counting_rules(["modelopt"])
    table = collect(model, None, [prompt(700)], phases=["decode"], rules=rules, decode_tokens=1)
    assert table.records[0].visited.tolist() == [[6] * 4] * 2


@pytest.mark.parametrize(
    ("names", "splits", "message"),
    [
        (["fmha_v2", "modelopt"], 1, "two ways to count prefill"),
        (["nothing"], 1, "nothing"),
        (["modelopt"], 4, "without xqa"),
    ],
)
def test_tiles_that_make_no_sense_are_refused(names, splits, message):
    with pytest.raises(ValueError, match=message):
        counting_rules(names, splits=splits)


def test_a_phase_without_a_rule_is_not_counted(model):
    with pytest.raises(ValueError, match="nothing for decode"):
        collect(model, None, [prompt(700)], rules=counting_rules(["fmha_v2"]))
    with pytest.raises(ValueError, match="cannot be counted"):
        collect(model, None, [prompt(700)], rules={"prefill": CountingRule(TileShape(64, 128), "anchors")})
    for phase, tile in (
        ("prefill", TileShape(128, 128)),
        ("prefill", TileShape(None, 64)),
        ("decode", TileShape(64, 128)),
    ):
        rules = {phase: replace(SCREENED_RULE, tile=tile, dense_tail=0)}
        with pytest.raises(ValueError, match=f"{phase} cannot be counted"):
            collect(model, None, [prompt(700)], phases=[phase], rules=rules)
    tail = {"prefill": replace(SERVING_RULES["prefill"], dense_tail=600)}
    with pytest.raises(CalibrationError, match="more than 728 tokens"):
        collect(model, None, [prompt(700)], phases=["prefill"], rules=tail)
    for phase, rows in (("prefill", -5), ("prefill", 1.5), ("decode", 64)):
        wrong = SERVING_RULES | {phase: replace(SERVING_RULES[phase], dense_tail=rows)}
        with pytest.raises((TypeError, ValueError), match="dense_tail"):
            collect(model, None, [prompt(700)], rules=wrong)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([], {}, "got none"),
        ([prompt(20)] * 3, {}, "no skippable tile"),
        ([prompt(128)], {"phases": ["prefill"]}, "no skippable tile"),
        ([prompt(190)], {"phases": ["decode"]}, "no skippable tile"),
        ([prompt(300), Prompt("prose", token_ids=())], {}, "no tokens"),
    ],
)
def test_samples_that_can_say_nothing_are_refused(model, prompts, settings, message):
    with pytest.raises(CalibrationError, match=message):
        collect(model, None, prompts, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thresholds": [0.5, 0.1]}, "rising"),
        ({"thresholds": [0.0, 0.1]}, "rising"),
        ({"phases": ["prefil"]}, "unknown"),
        ({"phases": []}, "nothing to count"),
        ({"decode_tokens": 0}, "decode_tokens"),
    ],
)
def test_bad_arguments_of_collect_are_refused(model, settings, message):
    with pytest.raises(ValueError, match=message):
        collect(model, None, [prompt(300)], **settings)


def test_points_are_sums_that_the_fit_takes(model):
    prompts = [prompt(n, seed) for n in (800, 1600) for seed in range(2)]
    table = collect(model, None, prompts, thresholds=DEFAULT_THRESHOLDS, decode_tokens=4)
    points = table.points("prefill")
    assert [p.seqlen for p in points] == [800, 800, 1600, 1600] and points[0].kind == "random"
    assert points[0].visited == 2 * 4 * (2 * (1 + 2 + 3 + 4 + 5 + 6) + 7)
    fit = fit_phase(points, phase="prefill")
    assert fit.observed.seqlen == (800, 1600) and fit.dense_tail == 0
    heads = table.head_sparsity("prefill", 1.0)
    assert heads.shape == (2, 4) and 0 < heads.mean() < 1


def test_measured_sparsity_is_the_kernels_own_count(model):
    prompts = [prompt(500, 5, "a"), prompt(700, 6, "b")]
    records = measure_sparsity(
        model, None, prompts, decode_tokens=2, threshold={"prefill": 0.3, "decode": 1.0}
    )
    assert [(r.phase, r.kind, r.seqlen) for r in records] == [
        ("prefill", "a", 500),
        ("decode", "a", 500),
        ("prefill", "b", 700),
        ("decode", "b", 700),
    ]
    assert all(0 < r.sparsity < 1 for r in records if r.phase == "prefill")
    pooled = pooled_sparsity(records, "prefill")
    assert pooled == (records[0].skipped + records[2].skipped) / (records[0].visited + records[2].visited)
    assert pooled_sparsity(records, "prefill", 500) == records[0].sparsity
    assert model.config._attn_implementation == "sdpa"


def test_greedy_pass_feeds_the_tokens_that_generate_gives(model):
    with torch.no_grad():
        ids = [prompt(50, 1).token_ids, prompt(80, 2).token_ids]
        together = greedy_pass(model, ids, 5)
        right = greedy_pass(model, ids, 5, padding_side="right")
        for row in range(2):
            settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            expected = model.generate(torch.tensor([ids[row]]), **settings)[0, -5:]
            assert together[row].tolist() == expected.tolist() == right[row].tolist()


def test_prompts_have_exact_lengths_and_are_deterministic():
    tokenizer = ByteTokenizer()
    prompts = calibration_prompts(tokenizer, [400, 3000], per_kind=2, seed=3)
    assert [len(p.token_ids) for p in prompts] == [400] * 8 + [3000] * 8
    assert [p.kind for p in prompts[:8:2]] == list(PROMPT_KINDS)
    assert prompts == calibration_prompts(tokenizer, [400, 3000], per_kind=2, seed=3)
    assert all(p.token_ids[0] == 1 for p in prompts)
    ids = [p.token_ids for p in prompts]
    assert len(set(ids)) == 16 and prompts_hash(ids) != prompts_hash(ids[::-1])


@pytest.mark.parametrize("kind", PROMPT_KINDS)
def test_calibration_and_heldout_prompts_share_no_text(kind):
    tokenizer, width, pieces = ByteTokenizer(), 60, []
    for split in ("calibration", "heldout"):
        found = set()
        for p in calibration_prompts(tokenizer, [6000], kinds=[kind], per_kind=3, split=split):
            text = p.token_ids[1:]
            found |= {text[i : i + width] for i in range(len(text) - width)}
        pieces.append(found)
    shared = pieces[0] & pieces[1]
    # source files repeat lines of one another (licences, idioms), help texts have standard headings
    assert len(shared) <= len(pieces[1]) * {"code": 0.01, "noise": 0.0}.get(kind, 0.001)


def test_a_retrieval_prompt_ends_with_a_question_about_one_of_its_needles():
    (p,) = calibration_prompts(ByteTokenizer(), [1500], kinds=["retrieval"])
    text = bytes(token - 3 for token in p.token_ids[1:])
    assert text.count(b"The access code of the") == 3 and text.endswith(b" is")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "test"}, "split"),
        ({"kinds": ["poetry"]}, "unknown"),
        ({"lengths": [1]}, "at least 2"),
        ({"lengths": [60], "kinds": ["retrieval"]}, "at least"),
        ({"lengths": []}, "nothing to build"),
    ],
)
def test_bad_arguments_of_prompts_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        calibration_prompts(ByteTokenizer(), **{"lengths": [100], **settings})
