"""blasst inside the real engine: tokens at threshold 0, sparsity beside transformers, exact counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from serving_parts import (
    LENGTHS,
    NEW_TOKENS,
    PROFILE,
    Result,
    assert_sparsity_of_transformers,
    expected_tiles,
    prompts,
)

from blasst.core.types import PHASES
from blasst.evals.chat import item_tokens, token_counter
from blasst.evals.models import LoadedModel
from blasst.evals.tasks import TASKS

Run = Callable[..., Result]


def test_tokens_at_threshold_0_are_those_of_the_engine(run_engine: Run, prose: list[int]) -> None:
    chosen = prompts(prose)
    assert [len(p) for p in chosen] == LENGTHS
    # short and long ones side by side: steps that mix chunks of prompts with decode
    rounds = [chosen[::-3] + chosen[1::3], chosen[::-1]]
    engine = {"enable_prefix_caching": True, "max_num_batched_tokens": 1024}
    own = run_engine(rounds, variables={"VLLM_PLUGINS": ""}, max_tokens=NEW_TOKENS, **engine)
    ours = run_engine(rounds, {"threshold": 0.0}, max_tokens=NEW_TOKENS, **engine)
    for wanted, got in zip(own.rounds, ours.rounds):
        assert got["tokens"] == wanted["tokens"]
        print("seconds: own", wanted["seconds"], "blasst", got["seconds"])
    assert sum(ours.rounds[1]["cached"]) > 5000
    assert ours.totals is not None
    for phase in PHASES:
        skipped, visited = ours.totals[phase]
        assert skipped == 0 < visited


def test_counts_are_those_of_the_definition(run_engine: Run, prose: list[int], smollm2: LoadedModel) -> None:
    length, new = 1000, 5
    result = run_engine(
        [[prose[:length]]], {"threshold": 0.5}, new, ignore_eos=True, max_num_batched_tokens=2048
    )
    wanted = expected_tiles(smollm2.model.config, length, new)
    assert result.totals is not None
    for phase in PHASES:
        assert result.totals[phase][1] == wanted[phase]
    assert result.totals["prefill"][0] > 0 and result.totals["decode"][0] > 0


def test_drafts_without_a_model_are_verified_by_the_decode_rule(
    run_engine: Run, prose: list[int], smollm2: LoadedModel
) -> None:
    prompt, new = prose[:400] + prose[:400], 40
    ngram = {"method": "ngram", "prompt_lookup_max": 4, "num_speculative_tokens": 7}
    engine = {"speculative_config": ngram, "max_num_batched_tokens": 2048}
    own = run_engine([[prompt]], variables={"VLLM_PLUGINS": ""}, max_tokens=new, ignore_eos=True, **engine)
    ours = run_engine([[prompt]], {"threshold": 0.0}, new, ignore_eos=True, **engine)
    assert ours.rounds[0]["tokens"] == own.rounds[0]["tokens"]
    wanted = expected_tiles(smollm2.model.config, len(prompt), new)
    assert ours.totals is not None
    assert ours.totals["prefill"][1] == wanted["prefill"]
    # steps with several tokens: fewer than tokens, and no tile of theirs is one of prefill
    assert 0 < ours.totals["decode"][1] < wanted["decode"] / 2


# A chunk's threshold follows the keys at its own step, so chunks skip more than the whole prompt at once.
@pytest.mark.parametrize("chunk", [8192, 2048])
def test_sparsity_at_6k_is_that_of_the_transformers_integration(
    chunk: int, run_engine: Run, prose: list[int], smollm2: LoadedModel
) -> None:
    prompt = prose[3000:9000]
    result = run_engine(
        [[prompt]],
        {"profile": str(PROFILE), "target_sparsity": 0.5},
        NEW_TOKENS,
        ignore_eos=True,
        max_num_batched_tokens=chunk,
    )
    assert_sparsity_of_transformers("vLLM", result, smollm2, prompt, chunk)


def test_a_needle_at_4k_is_found_at_half_the_tiles(run_engine: Run, smollm2: LoadedModel) -> None:
    task = TASKS["niah_single_2"]
    item = task.generate(0, 0, 4096, token_counter(smollm2.tokenizer))
    tokens = item_tokens(smollm2.tokenizer, task, item)
    assert 3800 < len(tokens) < 4096
    result = run_engine(
        [[tokens]],
        {"profile": str(PROFILE), "target_sparsity": 0.5},
        item.max_new_tokens,
        max_num_batched_tokens=2048,
    )
    answer = result.rounds[0]["text"][0]
    print(repr(answer), item.answers)
    assert all(value in answer for value in item.answers)
    assert result.totals is not None and result.totals["prefill"][0] > 0.3 * result.totals["prefill"][1]


def test_without_options_the_plugin_is_silent_and_changes_nothing(run_engine: Run, prose: list[int]) -> None:
    rounds = [[prose[:300], prose[400:420]]]
    with_plugin = run_engine(rounds)
    without = run_engine(rounds, variables={"VLLM_PLUGINS": ""})
    assert with_plugin.rounds[0]["tokens"] == without.rounds[0]["tokens"]
    assert with_plugin.totals is None
    assert "blasst" not in with_plugin.log.lower().replace("blasst_counts_folder", "")
