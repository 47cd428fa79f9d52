"""Questions after new tokens, and what policies lose and replay."""

import numpy as np
import pytest

from dasc.eval.decay import ask_after
from dasc.eval.decay.suffixes import losses_by_example
from dasc.eval.states import Prefixes, advance, ask, refresh, retain
from dasc.models.tasks import Example, Question
from tests.eval.states.runs import constant_mask, draw_mask, model_of, tokens

WINDOW, SUFFIXES = 6, (0, 4, 9)
EXAMPLES = [
    Example(tokens(length, seed), (Question(tokens(2, seed), tokens(1, seed)), Question(tokens(3, seed), (5, 6))))
    for seed, length in enumerate((30, 12, 20))
]


def log_probs(prefixes: Prefixes) -> list[float]:
    return ask(prefixes, [example.questions for example in EXAMPLES]).log_prob.tolist()


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_answers_are_those_of_each_way_by_hand(kind: str):
    model, mask = model_of(kind), draw_mask(model_of(kind))
    result = ask_after(model, mask, WINDOW, EXAMPLES, SUFFIXES, 2)
    assert result["owner"] == [0, 0, 1, 1, 2, 2]
    assert result["prompt"] == [2, 3] * 3
    assert result["dense"]["log_prob"] == pytest.approx(
        log_probs(Prefixes.of(model, [example.context for example in EXAMPLES]))
    )
    for suffix in SUFFIXES:
        hits = [len(example.context) - suffix for example in EXAMPLES]
        held = Prefixes.of(model, [example.context[:hit] for example, hit in zip(EXAMPLES, hits)])
        new = [example.context[hit:] for example, hit in zip(EXAMPLES, hits)]
        for way, window in (("nr", 0), ("wr", WINDOW), ("rest", max(WINDOW - suffix, 0))):
            loaded = refresh(retain(held, mask), mask, window)
            after = advance(loaded, new)[1] if suffix else loaded
            assert result[str(suffix)][way]["log_prob"] == pytest.approx(log_probs(after)), (suffix, way)
            assert result[str(suffix)][way]["replayed"] == [min(window, hit) for hit in hits]


def test_with_all_units_kept_every_way_is_dense():
    result = ask_after(model_of("kda"), constant_mask(model_of("kda"), True), 0, EXAMPLES, SUFFIXES, 1)
    for suffix in SUFFIXES:
        for way in ("nr", "wr", "rest"):
            assert result[str(suffix)][way]["log_prob"] == pytest.approx(result["dense"]["log_prob"])


def test_suffixes_that_do_not_fit_are_refused():
    for suffixes in ((), (1, 1), (-1,), (12,)):
        with pytest.raises(ValueError, match="suffixes must be different numbers from 0 to 11"):
            ask_after(model_of("kda"), draw_mask(model_of("kda")), WINDOW, EXAMPLES, suffixes, 1)


# Two questions of the first example, one of the second.
UNIT = {
    "owner": [0, 0, 1],
    "prompt": [2, 5, 2],
    "dense": {"right": [1, 1, 1], "log_prob": [-1.0, -1.0, -1.0]},
    "4": {
        "nr": {"right": [0, 0, 0], "log_prob": [-3.0, -5.0, -2.0], "replayed": [0, 0]},
        "wr": {"right": [1, 1, 0], "log_prob": [-1.5, -1.0, -2.0], "replayed": [8, 6]},
        "rest": {"right": [1, 0, 1], "log_prob": [-1.0, -2.0, -1.0], "replayed": [4, 4]},
    },
}


@pytest.mark.parametrize(
    ("below", "accuracy", "log_prob", "replayed"),
    [
        (0, [1, 1], [3.0, 1.0], [0, 0]),
        (6, [1, 1], [3.0, 1.0], [0, 0]),  # 4 + 2 new tokens are not below 6
        (7, [0.5, 1], [2.25, 1.0], [4, 6]),  # the question of 5 tokens is not refreshed
        (10, [0, 1], [0.25, 1.0], [8, 6]),
        (None, [0.5, 0], [0.5, 0.0], [4, 4]),
    ],
)
def test_a_policy_refreshes_below_its_threshold(below, accuracy, log_prob, replayed):
    for got, expected in zip(losses_by_example(UNIT, 4, below), (accuracy, log_prob, replayed)):
        np.testing.assert_allclose(got, expected)
