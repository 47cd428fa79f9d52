"""RULER's subtasks: solvable by reading, fitted to the length, the same everywhere."""

import hashlib
import re
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dasc.eval.items import SCORERS, Item
from dasc.eval.items.ruler import SINGLE_NEEDLE, SUBTASKS, ruler_items
from dasc.eval.items.ruler.aggregation import COMMON, COMMON_TIMES, UNCOMMON_TIMES
from dasc.eval.items.ruler.draft import Draft, fitted
from dasc.eval.items.ruler.invented import invented_names, linked_passages
from dasc.eval.items.ruler.subtasks import NEEDLES
from dasc.eval.items.ruler.texts import NOISE, essay, sentences, words
from tests.eval.items.ruler_solvers import asked_keys, coded_words, documents, listed_words, needles, solve

LENGTH = 8192
ALL_WORDS = [word for kind in ("adjectives", "nouns", "verbs") for word in words(kind)]


def count_bytes(text: str) -> int:
    return len(text.encode())


def score(item: Item, answer: str) -> float:
    (ask,) = item.asks
    return SCORERS[item.scorer](item, ask, answer)


@pytest.fixture(scope="module")
def items() -> dict[str, list[Item]]:
    return {name: ruler_items(LENGTH, 12, count_tokens=count_bytes, subtasks=[name]) for name in SUBTASKS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with the usual splitting, trained on the bundled text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*sentences(), "VAR is: .\n\n", *ALL_WORDS], trainer)
    return tokenizer


def test_the_subtasks_are_rulers_13():
    niah = [f"niah_{kind}" for kind in ["single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3"]]
    assert list(SUBTASKS) == [*niah, "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"]
    assert {name: subtask.max_new_tokens for name, subtask in SUBTASKS.items() if name not in NEEDLES} == {
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
        "qa_1": 32,
        "qa_2": 32,
    }
    assert {SUBTASKS[name].max_new_tokens for name in NEEDLES} == {128}
    assert {name for name, s in SUBTASKS.items() if s.scorer == "string_match_part"} == {"qa_1", "qa_2"}


@pytest.mark.parametrize("name", SUBTASKS)
def test_a_reader_of_the_prompt_answers_everything(name: str, items):
    for item in items[name]:
        answer = solve(name, item.asks[0].prompt)
        assert len(answer) == (1 if name in ("qa_1", "qa_2") else len(item.asks[0].references))
        assert score(item, ", ".join(answer)) == 1


@pytest.mark.parametrize("name", SUBTASKS)
def test_what_else_the_prompt_holds_is_no_answer(name: str, items):
    for item in items[name]:
        prompt, references = item.asks[0].prompt, item.asks[0].references
        if name in NEEDLES:
            others = [value for _, value in needles(prompt) if value not in references]
        elif name == "vt":
            others = [v for v in re.findall(r"VAR (\w+) =", prompt) if v not in references]
            assert len(others) == 5
        elif name == "cwe":
            others = [word for word in listed_words(prompt) if word not in references]
        elif name == "fwe":
            others = [word for word in coded_words(prompt) if word not in references]
        else:
            others = [d for d in documents(prompt) if references[0] not in d]
            assert len(others) >= len(documents(prompt)) - 2
        assert score(item, " ".join(others) or "none") == 0
        assert score(item, "") == 0


@pytest.mark.parametrize("name", SUBTASKS)
def test_the_question_follows_what_is_warmed_and_does_not_tell_the_answer(name: str, items):
    for item in items[name]:
        (ask,) = item.asks
        question = ask.prompt[len(item.warm) :]
        assert ask.prompt == item.warm + question
        assert question[0].isalpha()  # so that no tokenizer joins it to the line break before it
        assert item.warm.endswith("\n")
        assert re.search(r"(?:Answer:| is| are)( .*)?$", question)
        for reference in ask.references:
            assert reference in item.warm
            assert reference.lower() not in question.lower()


def test_no_word_of_the_lists_is_in_the_question_about_them_nor_part_of_another(items):
    question = items["cwe"][0].asks[0].prompt[len(items["cwe"][0].warm) :].lower()
    assert [word for word in ALL_WORDS if word in question] == []
    assert len(set(ALL_WORDS)) == len(ALL_WORDS)
    joined = " ".join(ALL_WORDS)
    assert [word for word in ALL_WORDS if joined.count(word) > 1] == []


@pytest.mark.parametrize("name", NEEDLES)
def test_needles_are_told_once_and_differ(name: str, items):
    task = NEEDLES[name]
    for item in items[name]:
        told = needles(item.warm)
        keys, values = [key for key, _ in told], [value for _, value in told]
        asked = asked_keys(item.asks[0].prompt)
        assert len(asked) == len(set(asked)) == task.queries
        assert len(set(values)) == len(values)
        assert all(keys.count(key) == task.values_per_key for key in asked)
        assert item.asks[0].references == tuple(v for key in asked for k, v in told if k == key) or (
            set(item.asks[0].references) == {v for k, v in told if k in asked}
        )
        if task.haystack == "needles":
            assert len(set(keys)) == len(keys) > 50
        else:
            assert len(told) == task.queries * task.values_per_key + task.others
        pattern = {"number": r"[1-9]\d{6}", "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}[task.values]
        assert all(re.fullmatch(pattern, value) for value in values)


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2", "vt", "qa_1"])
def test_the_place_of_what_is_asked_varies_over_the_context(name: str, items):
    places = [
        min(item.warm.rfind(reference) for reference in item.asks[0].references) / len(item.warm)
        for item in items[name]
    ]
    assert min(places) < 0.4
    assert max(places) > 0.6


@pytest.mark.parametrize("name", SINGLE_NEEDLE)
def test_a_needle_lies_at_the_depth_asked_for(name: str):
    prompts = {}
    for depth in (0, 0.25, 0.5, 0.75, 1):
        item = ruler_items(LENGTH, 1, count_tokens=count_bytes, subtasks=[name], depth=depth)[0]
        assert item.task == f"ruler/{LENGTH}/{name}/depth-{100 * depth:g}"
        text = item.warm.split("\n\n")[1]
        before = text.index("The secret")
        after = len(text) - text.index(item.asks[0].references[0])
        assert abs(before / (before + after) - depth) < 0.03
        assert (before == 0) == (depth == 0)
        prompts[depth] = item.asks[0].references
    assert len(set(prompts.values())) == 1  # alike but for the place


def test_a_depth_is_for_single_needles_only():
    for name in set(SUBTASKS) - set(SINGLE_NEEDLE):
        with pytest.raises(ValueError, match="depth"):
            ruler_items(LENGTH, 1, count_tokens=count_bytes, subtasks=[name], depth=0.5)
    with pytest.raises(ValueError, match=r"depth must be from 0 to 1, got 1\.5"):
        ruler_items(LENGTH, 1, count_tokens=count_bytes, subtasks=["niah_single_1"], depth=1.5)


def test_common_words_come_30_times_and_others_3_times(items):
    for item in items["cwe"]:
        counts = listed_words(item.warm)
        assert sorted(set(counts.values())) == [UNCOMMON_TIMES, COMMON_TIMES]
        assert {word for word, times in counts.items() if times == COMMON_TIMES} == set(item.asks[0].references)
        assert len(item.asks[0].references) == COMMON


def test_a_list_longer_than_the_bundled_words_goes_on_with_pairs_that_hold_no_common_word():
    (item,) = ruler_items(80_000, 1, count_tokens=count_bytes, subtasks=["cwe"])
    counts = listed_words(item.warm)
    pairs = [word for word in counts if "-" in word]
    assert len(pairs) > 300
    assert sorted(set(counts.values())) == [UNCOMMON_TIMES, COMMON_TIMES]
    assert score(item, " ".join(word for word in counts if word not in item.asks[0].references)) == 0


def test_coded_words_follow_the_power_law_without_ties_around_the_three(items):
    for item in items["fwe"]:
        counts = [times for _, times in coded_words(item.warm).most_common()]
        assert counts[0] > counts[1] > counts[2] > counts[3]
        dots = item.warm.count("...")
        assert counts[0] == pytest.approx(dots / 4, abs=1)
        assert counts[1] == pytest.approx(dots / 9, abs=1)


def test_a_chain_of_variables_has_4_hops_in_order(items):
    for item in items["vt"]:
        text = item.warm.split("Now the text that counts.")[1]
        assigned = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
        names = [name for name, _ in assigned]
        assert tuple(names) == item.asks[0].references
        assert [source for _, source in assigned][1:] == names[:-1]


def test_questions_are_about_names_that_come_nowhere_else(items):
    for name in ("qa_1", "qa_2"):
        assert len({item.asks[0].prompt for item in items[name]}) == len(items[name])
        for item in items[name]:
            told = [d for d in documents(item.warm) if item.asks[0].references[-1] in d]
            assert 1 <= len(told) <= 2


def test_invented_names_are_never_part_of_each_other():
    pairs = linked_passages(Random(1))
    names = [passage.name for _ in range(200) for passage in next(pairs)]
    assert len(set(names)) == len(names)
    joined = "|".join(names)
    assert all(joined.count(name) == 1 for name in names)
    parts = list(islice(invented_names(Random(1)), 10_000))
    assert len(set(parts)) == len(parts)
    assert {len(name) for name in parts} == {7}


def test_every_question_form_can_be_solved(items):
    forms = set()
    for seed in range(4):
        for name in ("qa_1", "qa_2"):
            for item in ruler_items(3000, 30, count_tokens=count_bytes, subtasks=[name], seed=seed):
                assert score(item, solve(name, item.asks[0].prompt)[0]) == 1
                (question,) = re.findall("Question: (.*)", item.asks[0].prompt)
                forms.add((name, re.sub(r"\b[A-Z][a-z]{2} [A-Z]\w{6}\b|\b(?!Observ)[A-Z]\w{6}\b", "*", question)))
    assert len([form for form in forms if form[0] == "qa_1"]) == 24
    assert len([form for form in forms if form[0] == "qa_2"]) > 30


@given(st.sampled_from(sorted(SUBTASKS)), st.integers(6000, 12_000), st.integers(0, 1000))
def test_a_prompt_and_its_answer_never_exceed_the_length_and_come_close(name: str, length: int, seed: int):
    for item in ruler_items(length, 1, count_tokens=count_bytes, subtasks=[name], seed=seed):
        total = count_bytes(item.asks[0].prompt) + item.max_new_tokens
        assert 0.975 * length <= total <= length


@pytest.mark.parametrize("length", [2048, 4096])
def test_lengths_are_those_of_a_real_tokenizer_and_the_warm_prompt_stays_a_prefix_in_its_ids(length, tokenizer):
    def ids(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    names = [name for name in SUBTASKS if name != "cwe" or length > 2048]
    for item in ruler_items(length, 1, count_tokens=lambda text: len(ids(text)), subtasks=names):
        prompt = ids(item.asks[0].prompt)
        assert 0.96 * length <= len(prompt) + item.max_new_tokens <= length
        warm = ids(item.warm)
        assert prompt[: len(warm)] == warm


@given(st.integers(0, 5), st.integers(1, 9), st.integers(0, 40), st.integers(10, 700))
def test_fitting_finds_the_largest_size_with_few_counts(least: int, unit: int, fixed: int, budget: int):
    calls = []

    def count(text: str) -> int:
        calls.append(text)
        return len(text)

    draft = Draft(lambda size: "x" * (fixed + size * unit + size % 2), "?", ("x",), least)
    if count_bytes(draft.prompt(least)) > budget:
        with pytest.raises(ValueError, match="at least"):
            fitted(draft, count, budget)
        return
    best = max(size for size in range(least, 800) if len(draft.prompt(size)) <= budget)
    assert abs(len(fitted(draft, count, budget)) - len(draft.context(best))) <= unit
    assert len(calls) <= 12


def test_a_count_that_does_not_grow_is_refused():
    with pytest.raises(ValueError, match="count_tokens must give more than 7 for a longer text, got 7"):
        ruler_items(4096, 1, count_tokens=lambda text: 7, subtasks=["vt"])


def test_a_length_too_short_for_a_subtask_is_refused_with_the_tokens_that_it_needs():
    with pytest.raises(ValueError, match=r"length 4096 is too short for cwe .* at least \d+ tokens"):
        ruler_items(4096, 1, count_tokens=count_bytes, subtasks=["cwe"])
    with pytest.raises(ValueError, match=r"subtasks must be of niah_single_1.*'nonsense'"):
        ruler_items(4096, 1, count_tokens=count_bytes, subtasks=["nonsense"])
    with pytest.raises(ValueError, match="count must be >= 1, got 0"):
        ruler_items(4096, 0, count_tokens=count_bytes)


def test_items_are_the_same_on_every_machine_and_differ_by_seed_length_and_number():
    items = ruler_items(LENGTH, 2, count_tokens=count_bytes)
    assert items == ruler_items(LENGTH, 2, count_tokens=count_bytes)
    text = "\0".join(item.asks[0].prompt for item in items)
    # changes with any wording and any draw; figures made with other items cannot be compared with older ones
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "c5e6c163f6596a1c"
    other_seed = ruler_items(LENGTH, 2, count_tokens=count_bytes, seed=1)
    longer = ruler_items(LENGTH + 1000, 2, count_tokens=count_bytes)
    answers = [item.asks[0].references for item in (*items, *other_seed, *longer)]
    assert len(set(answers)) == len(answers)
    assert {item.replays for item in items} == {3}
    assert len({item.item_id for item in (*items, *other_seed, *longer)}) == len(answers)


def test_an_essay_has_the_words_asked_for_and_every_sentence_before_one_comes_again():
    assert essay("s", 0) == []
    assert sum(len(sentence.split(" ")) for sentence in essay("s", 777)) == 777
    taken = essay("s", 20_000)
    assert sorted(taken[: len(sentences())]) == sorted(sentences())
    assert taken[: len(sentences())] != taken[len(sentences()) : 2 * len(sentences())]
    assert essay("s", 300)[:5] == taken[:5] != essay("t", 300)[:5]


def test_filler_holds_nothing_that_could_be_taken_for_an_answer():
    filler = " ".join((*sentences(), *NOISE))
    assert not re.search(r"\d", filler)
    assert "secret number" not in filler
    assert "VAR" not in filler
