import re
from collections import Counter
from dataclasses import replace

import pytest

from blasst.evals import haystack
from blasst.evals.chat import item_tokens, render, token_counter
from blasst.evals.models import find_smollm2
from blasst.evals.tasks import TASKS
from blasst.evals.tasks.item import largest_item

RULER_NAMES = [
    *("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2"),
    *("niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
]


def count_pieces(text):
    """A tokenizer stand-in: runs of up to four letters, digits and signs one by one."""
    return len(re.findall(r"[A-Za-z]{1,4}|[^\sA-Za-z]", text))


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    from transformers import AutoTokenizer

    path = find_smollm2()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def test_registry_holds_the_13_kinds_under_their_ruler_names():
    assert list(TASKS) == RULER_NAMES
    assert all(task.name == name for name, task in TASKS.items())


@pytest.mark.parametrize("name", RULER_NAMES)
def test_items_depend_on_seed_and_index_only(name):
    generate = TASKS[name].generate
    item = generate(1, 2, 1500, count_pieces)
    assert item == generate(1, 2, 1500, count_pieces)
    others = [generate(1, 3, 1500, count_pieces), generate(2, 2, 1500, count_pieces)]
    assert all(other.context != item.context and other.answers != item.answers for other in others)


@pytest.mark.parametrize("name", RULER_NAMES)
def test_answers_score_one_and_other_items_answers_score_zero(name):
    task = TASKS[name]
    item, other = (task.generate(0, index, 1500, count_pieces) for index in (0, 1))
    text = " " + ", ".join(item.answers)
    assert task.score(item, text) == 1.0
    assert task.score(item, "") == 0.0
    assert task.score(other, text) < 0.5
    assert task.prompt(item).endswith("\n" + item.answer_prefix)
    # The answer must be found, not read off the question.
    question = task.prompt(item).removeprefix(task.prompt(item).split(item.context)[0] + item.context)
    assert not any(answer in question for answer in item.answers)


@pytest.mark.parametrize("name", RULER_NAMES)
@pytest.mark.parametrize("num_tokens", [1024, 4096])
def test_prompt_and_answer_fill_the_budget_of_a_real_tokenizer_and_never_exceed_it(
    smollm2_tokenizer, name, num_tokens
):
    item = TASKS[name].generate(0, 0, num_tokens, token_counter(smollm2_tokenizer))
    used = len(item_tokens(smollm2_tokenizer, TASKS[name], item)) + item.max_new_tokens
    # 2%, but never finer than what a text grows by: a UUID needle, a word of cwe three times, one of prose.
    unit = {"niah_multikey_3": 90, "niah_multikey_2": 40}.get(name, 24)
    assert num_tokens - max(0.02 * num_tokens, unit) <= used <= num_tokens


def test_a_text_that_cannot_grow_to_the_budget_is_an_error_and_no_endless_search():
    fixed = replace(TASKS["vt"].generate(0, 0, 300, count_pieces), num_tokens=1000)
    with pytest.raises(ValueError, match="no text for as many as 1000"):
        largest_item(lambda size: fixed, lambda item: 300, first_guess=10)


def test_a_budget_below_the_shortest_item_is_an_error():
    with pytest.raises(ValueError, match="too short for vt"):
        TASKS["vt"].generate(0, 0, 60, count_pieces)


@pytest.mark.parametrize("name", [name for name in RULER_NAMES if name.startswith("niah")])
def test_each_hidden_value_stands_once_in_the_text_beside_its_key(name):
    item = TASKS[name].generate(0, 0, 1500, count_pieces)
    for answer in item.answers:
        assert item.context.count(answer) == 1
        line = re.search(rf"One of the secret (?:number|uuid)s for (\S+) is: {answer}\.", item.context)
        assert line is not None and line[1] in item.question


def test_variable_chain_is_assigned_in_order():
    item = TASKS["vt"].generate(0, 0, 1500, count_pieces)
    assignments = re.findall(r"VAR (\w+) = (\w+)", item.context)
    assert [name for name, _ in assignments] == list(item.answers)
    assert [value for _, value in assignments[1:]] == list(item.answers[:-1])
    assert assignments[0][1] in item.question


def test_common_words_are_the_most_frequent_of_their_list():
    item = TASKS["cwe"].generate(0, 0, 6000, count_pieces)
    counts = Counter(re.findall(r"[a-z]+", item.context)).most_common()
    assert {word for word, _ in counts[:10]} == set(item.answers)
    assert counts[9][1] > 2 * counts[10][1] > 0


def test_frequent_words_are_the_most_frequent_of_the_code():
    item = TASKS["fwe"].generate(0, 0, 3000, count_pieces)
    counts = Counter(re.findall(r"[a-z]+", item.context)).most_common()
    assert [word for word, _ in counts[:3]] == list(item.answers)
    assert counts[2][1] > counts[3][1]


def test_two_hop_answer_follows_from_two_documents():
    item = TASKS["qa_2"].generate(0, 0, 3000, count_pieces)
    site = re.search(r"founder of the (.+) born", item.question)[1]
    founder = re.search(rf"The {site} was founded in \d+ by (\w+ \w+)\.", item.context)[1]
    assert re.search(rf"{founder} was born in the town of (\w+)", item.context)[1] == item.answers[0]
    documents = item.context.split("\n\n")
    assert not any(site in text and item.answers[0] in text for text in documents)


@pytest.mark.parametrize("kind", haystack.TEXT_KINDS)
def test_texts_are_deterministic_and_long_enough(kind):
    text = haystack.sample_text(kind, 3, 1, 400)
    assert text == haystack.sample_text(kind, 3, 1, 400)
    assert 350 <= len(text.split()) <= 520
    if kind != "noise":
        assert text != haystack.sample_text(kind, 3, 2, 400) != haystack.sample_text(kind, 4, 2, 400)


@pytest.mark.parametrize("num_words", [1, 7, 100])
def test_prose_has_exactly_the_words_asked_for(num_words):
    assert len(" ".join(haystack.prose(haystack.random_for("t", 0, 0), num_words)).split()) == num_words


def test_token_sequences_have_the_exact_length(smollm2_tokenizer, tmp_path):
    for kind in haystack.TEXT_KINDS:
        ids = haystack.token_sequence(smollm2_tokenizer, kind, seed=0, index=0, num_tokens=300)
        assert len(ids) == 300
    path = tmp_path / "own.txt"
    path.write_text("one two three four five six seven eight nine ten", encoding="utf-8")
    own = [
        haystack.token_sequence(smollm2_tokenizer, "prose", seed=0, index=i, num_tokens=4, files=[path])
        for i in (0, 1)
    ]
    assert own[0] + own[1] == smollm2_tokenizer(path.read_text(encoding="utf-8")).input_ids[:8]
    with pytest.raises(ValueError, match="too few tokens"):
        haystack.token_sequence(smollm2_tokenizer, "prose", seed=0, index=2, num_tokens=400, files=[path])


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00"], ids=["missing", "empty", "not text"])
def test_unreadable_user_files_are_an_error_that_names_them(tmp_path, content):
    path = tmp_path / "file.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        haystack.read_files([path])


def test_chat_template_puts_the_prefix_after_the_assistant_header(smollm2_tokenizer):
    text = render(smollm2_tokenizer, "What?", "The answer is")
    assert text.endswith("<|im_start|>assistant\nThe answer is")
    assert "user\nWhat?<|im_end|>" in text
