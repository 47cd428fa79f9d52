"""Every task: exact lengths, ids in range, answers that follow from the context by another way of working them out."""

from collections import Counter

import numpy as np
import pytest

from dasc.models.tasks import EXERCISES, SHORTEST, TASKS, VOCABULARY, Example, Question
from dasc.models.tasks import vocabulary as ids
from dasc.models.tasks.text import passages

LENGTHS = (192, 256, 512)
DRAWS = TASKS | EXERCISES


def drawn(name: str, count: int = 30, length: int = 256) -> list[Example]:
    rng = np.random.default_rng(7)
    return [DRAWS[name](rng, length) for _ in range(count)]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_sequence_has_exactly_the_length_and_known_ids(name: str, length: int):
    for example in drawn(name, 20, length):
        tokens, scored, said = example.sequence()
        assert len(tokens) == length
        assert 0 <= min(tokens + said) <= max(tokens + said) < VOCABULARY
        assert scored == sorted(set(scored))
        assert 0 <= scored[0] <= scored[-1] < length
        assert len(said) == len(scored)


@pytest.mark.parametrize("name", DRAWS)
def test_an_example_follows_the_seed(name: str):
    one, same, other = (DRAWS[name](np.random.default_rng(seed), 256) for seed in (1, 1, 2))
    assert one == same
    assert one.context != other.context


@pytest.mark.parametrize("name", DRAWS)
def test_the_shortest_length_always_suffices_and_a_token_does_not(name: str):
    for seed in range(200):
        assert len(DRAWS[name](np.random.default_rng(seed), SHORTEST[name]).sequence()[0]) == SHORTEST[name]
    with pytest.raises(ValueError, match="length must be at least"):
        DRAWS[name](np.random.default_rng(0), 1)


def test_answers_of_several_tokens_are_fed_but_for_the_last():
    example = Example((1, 2), (Question((3,), (4, 5)), Question((6, 7), (8,))), probes=((1, 9),))
    assert example.sequence() == ([1, 2, 3, 4, 6, 7], [1, 2, 3, 5], [9, 4, 5, 8])


@pytest.mark.parametrize("name", ["recall_single", "recall_multi", "multi_value"])
def test_recalled_values_follow_their_key(name: str):
    for example in drawn(name):
        for question in example.questions:
            key = question.prompt[-1]
            after = [value for here, value in zip(example.context, example.context[1:]) if here == key]
            assert tuple(after) == question.answer


def test_variables_have_the_value_that_a_run_of_the_statements_gives():
    for name in ("latest_value", "variable_tracking"):
        aliases = 0
        for example in drawn(name):
            value: dict[int, int] = {}
            for i, token in enumerate(example.context):
                if token == ids.SET:
                    value[example.context[i + 1]] = example.context[i + 2]
                elif token == ids.ALIAS:
                    aliases += 1
                    value[example.context[i + 1]] = value[example.context[i + 2]]
                elif token == ids.ASK_NOW:
                    assert (i + 1, value[example.context[i + 1]]) in example.probes
            assert all((value[q.prompt[-1]],) == q.answer for q in example.questions)
        assert (aliases > 0) == (name == "variable_tracking")


def test_parity_counts_flips_up_to_each_question():
    for example in drawn("parity"):
        asked = [*example.probes, (len(example.context), example.questions[0].answer[0])]
        for position, answer in asked:
            flips = example.context[:position].count(ids.FLIP)
            assert answer == (ids.ODD if flips % 2 else ids.EVEN)


@pytest.mark.parametrize(("name", "kinds"), [("permutation", 5), ("swapping", 3)])
def test_cups_move_as_matrices_multiply(name: str, kinds: int):
    images = {ids.SWAPS[0]: (0, 2, 1), ids.SWAPS[1]: (1, 0, 2), ids.SWAPS[2]: (1, 2, 0)}
    images |= {ids.SWAPS[3]: (2, 0, 1), ids.SWAPS[4]: (2, 1, 0)}
    assert len({token for example in drawn(name) for token in example.context if token in images}) == kinds
    for example in drawn(name):
        for position, answer in [*example.probes, (len(example.context), example.questions[0].answer[0])]:
            where = np.array([1, 0, 0])
            for token in example.context[:position]:
                if token in images:
                    where = where @ np.eye(3, dtype=int)[list(images[token])]
            assert answer == ids.CUPS[int(where.argmax())]


def test_common_and_frequent_words_lead_the_count():
    for example in drawn("common_words"):
        most = [word for word, _ in Counter(example.context).most_common(3)]
        assert tuple(sorted(most)) == example.questions[0].answer
    for example in drawn("frequent_words"):
        most = [word for word, _ in Counter(example.context).most_common(3)]
        assert tuple(most) == example.questions[0].answer


def test_what_is_copied_stands_after_the_mark():
    for example in drawn("copying"):
        start = example.context.index(ids.BEGIN) + 1
        answer = example.questions[0].answer
        assert example.context[start : start + len(answer)] == answer


def test_changed_words_of_a_text_stand_after_their_cue():
    for example in drawn("text"):
        context = bytes(example.context)
        for question in example.questions:
            cue, answer = bytes(question.prompt[1:]), bytes(question.answer)
            assert cue + answer in context
            assert answer.endswith(b" ")


def test_a_recitation_says_the_rest_of_the_passage_again_changes_included():
    for example in drawn("recitation"):
        (question,) = example.questions
        cue, answer = bytes(question.prompt[1:]), bytes(question.answer)
        assert bytes(example.context).endswith(cue + answer)
        assert len(answer) > len(example.context) // 4
        assert answer not in f"{passages()} {passages()}".encode()


def test_passages_are_plain_text_long_enough_for_the_longest_example():
    assert passages().isascii()
    assert len(passages()) > 6000
