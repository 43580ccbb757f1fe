"""blasst inside the real engine: tokens at threshold 0, sparsity beside transformers, exact counts."""

from __future__ import annotations

import re
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
from sglang_parts import NO_PLUGIN

from blasst.core.types import PHASES
from blasst.evals.chat import item_tokens, token_counter
from blasst.evals.models import LoadedModel
from blasst.evals.tasks import TASKS

Run = Callable[..., Result]

HALF = {"BLASST_PROFILE": str(PROFILE), "BLASST_TARGET_SPARSITY": "0.5"}


def test_tokens_at_threshold_0_are_those_of_the_engine(run_engine: Run, prose: list[int]) -> None:
    chosen = prompts(prose)
    assert [len(p) for p in chosen] == LENGTHS
    # short and long ones side by side, then some of them again, from the prefix cache
    rounds = [[p for pair in zip(chosen[:10], chosen[:9:-1]) for p in pair], chosen[1::3]]
    assert len(rounds[0]) == 20
    # Ours also mixes chunks of prompts with decode in a step. SGLang's own backend would take many times as
    # long for that, since it computes all rows of a sequence for one new token in such a step.
    own = run_engine(
        rounds, NO_PLUGIN, NEW_TOKENS, attention_backend="torch_native", chunked_prefill_size=2048
    )
    ours = run_engine(
        rounds, {"BLASST_THRESHOLD": "0"}, NEW_TOKENS, chunked_prefill_size=2048, enable_mixed_chunk=True
    )
    for wanted, got in zip(own.rounds, ours.rounds):
        assert got["tokens"] == wanted["tokens"]
        assert all(len(tokens) > 1 for tokens in got["tokens"])
        print("seconds: own", wanted["seconds"], "blasst", got["seconds"])
    print("cached", [sum(answers["cached"]) for answers in ours.rounds])
    assert sum(ours.rounds[1]["cached"]) > 5000
    assert "blasst is on" in ours.log and "blasst is on" not in own.log
    assert own.totals is None and ours.totals is not None
    for phase in PHASES:
        skipped, visited = ours.totals[phase]
        assert skipped == 0 < visited


def test_counts_are_those_of_the_definition(run_engine: Run, prose: list[int], smollm2: LoadedModel) -> None:
    length, new = 1000, 5
    variables = {"BLASST_THRESHOLD": "0.5", "BLASST_LOG_INTERVAL": "0.5"}
    result = run_engine([[prose[:length]]], variables, new, True, chunked_prefill_size=2048)
    wanted = expected_tiles(smollm2.model.config, length, new)
    assert result.totals is not None
    for phase in PHASES:
        assert result.totals[phase][1] == wanted[phase]
        assert result.totals[phase][0] > 0
        # the lines of the log add up to the metrics
        logged = re.findall(rf"{phase} \d+\.\d% of (\d+) tiles skipped", result.log)
        assert sum(map(int, logged)) == wanted[phase]


# A chunk's threshold follows the keys at its own step, so chunks skip more than the whole prompt at once.
@pytest.mark.parametrize("chunk", [8192, 2048])
def test_sparsity_at_6k_is_that_of_the_transformers_integration(
    chunk: int, run_engine: Run, prose: list[int], smollm2: LoadedModel
) -> None:
    prompt = prose[3000:9000]
    result = run_engine([[prompt]], HALF, NEW_TOKENS, True, chunked_prefill_size=chunk)
    assert_sparsity_of_transformers("SGLang", result, smollm2, prompt, chunk)


def test_a_needle_at_4k_is_found_at_half_the_tiles(run_engine: Run, smollm2: LoadedModel) -> None:
    task = TASKS["niah_single_2"]
    item = task.generate(0, 0, 4096, token_counter(smollm2.tokenizer))
    tokens = item_tokens(smollm2.tokenizer, task, item)
    assert 3800 < len(tokens) < 4096
    result = run_engine([[tokens]], HALF, item.max_new_tokens, chunked_prefill_size=2048)
    answer = result.rounds[0]["text"][0]
    print(repr(answer), item.answers)
    assert all(value in answer for value in item.answers)
    assert result.totals is not None and result.totals["prefill"][0] > 0.3 * result.totals["prefill"][1]


def test_without_options_the_plugin_is_silent_and_changes_nothing(run_engine: Run, prose: list[int]) -> None:
    rounds = [[prose[:300], prose[400:420]]]
    with_plugin = run_engine(rounds, {}, attention_backend="torch_native")
    without = run_engine(rounds, NO_PLUGIN, attention_backend="torch_native")
    assert with_plugin.rounds[0]["tokens"] == without.rounds[0]["tokens"]
    assert with_plugin.totals is None
    assert "plugin loaded: True" in with_plugin.log and "plugin loaded: False" in without.log
    assert "blasst is on" not in with_plugin.log and "blasst: " not in with_plugin.log
