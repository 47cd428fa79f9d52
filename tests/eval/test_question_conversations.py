"""Conversations of questions: what each turn asks, from what, and what is right."""

import dataclasses
import itertools

import pytest

from dasc.eval.conversations import Limits
from dasc.eval.question_conversations import question_conversations
from dasc.eval.replay import Protocol, _run, replay
from dasc.eval.replay_arms import prepare_arm
from dasc.models.tasks import VOCABULARY
from dasc.models.tasks.vocabulary import ASK, ASK_NEXT, ASK_NOW
from tests.eval.replay_runs import tiny_served, tiny_serving


def test_each_turn_asks_one_question_more_and_is_the_start_of_the_next():
    for turns in question_conversations(8, Limits(turns=4)):
        assert len(turns) == 4
        for turn in turns:
            assert turn.prompt[-2] in (ASK, ASK_NEXT, ASK_NOW)
            assert turn.answer_tokens == len(turn.right) <= 3
        for turn, after in itertools.pairwise(turns):
            told = turn.prompt + turn.right[:-1]
            assert after.prompt[: len(told)] == told
            assert len(after.prompt) == len(told) + 2
        assert len(turns[-1].prompt) <= 256


def test_what_is_right_was_told():
    """The value last told of the key, where it is a value that was told and no alias."""
    [recall] = question_conversations(1, Limits(turns=4), length=128)
    for turn in recall:
        key = turn.prompt[-1]
        assert turn.prompt[turn.prompt.index(key) + 1] == turn.right[0]


def test_the_seed_draws_everything():
    limits = Limits(turns=2)
    assert question_conversations(4, limits, seed=1) == question_conversations(4, limits, seed=1)
    assert question_conversations(4, limits, seed=1) != question_conversations(4, limits, seed=2)


@pytest.mark.parametrize(
    ("count", "limits", "message"),
    [
        (0, Limits(), "count must be >= 1, got 0"),
        (1, Limits(turns=9), "turns must be 1 to 8"),
        (1, Limits(context_tokens=255), "up to 256 tokens and answers 3, the limits are 255 and 1024"),
        (1, Limits(answer_tokens=2), "the limits are 16384 and 2"),
    ],
)
def test_limits_are_not_cut_to(count: int, limits: Limits, message: str):
    with pytest.raises(ValueError, match=message):
        question_conversations(count, limits)


def test_a_length_too_short_for_the_questions_is_refused():
    with pytest.raises(ValueError, match="length must be enough for 8 questions of task 'recall_multi', got 32"):
        question_conversations(2, Limits(turns=8), length=32)


def test_a_replay_counts_the_right_answers():
    """What the model says is taken for right in some turns, something else in others, and nothing is known of one."""
    served = tiny_served(vocab_size=VOCABULARY)
    serving = tiny_serving(served, dense_slots=40, kv_tokens=4000)
    protocol = Protocol(("off",), (16,), concurrency=4, seeds=1)
    chats = question_conversations(2, Limits(turns=2), length=96)
    prepared = prepare_arm("off", 16, served, serving)
    said = _run(prepared, chats, protocol, served, serving, 0).outputs
    rights = [[said["0.0"], (-1,)], [None, said["1.1"]]]
    known = [
        [dataclasses.replace(turn, right=right) for turn, right in zip(turns, of_chat)]
        for turns, of_chat in zip(chats, rights)
    ]
    [report] = replay(known, protocol, served, serving)
    assert report.mean["right"] == pytest.approx(2 / 3)
    unknown = [[dataclasses.replace(turn, right=None) for turn in turns] for turns in chats]
    [report] = replay(unknown, protocol, served, serving)
    assert report.mean["right"] is None
