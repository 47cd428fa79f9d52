"""Appendix C.2: blocks, warm and measured requests, what is counted and scored, and the controls of figure 4(d)."""

import dataclasses
import re

import pytest

from dasc.eval.items import Item
from dasc.eval.quality.evaluate import score_answer
from dasc.eval.quality.protocol import (
    Block,
    BlockResult,
    Controls,
    Protocol,
    arm_failures,
    make_blocks,
    paper_controls,
    run_block,
)
from tests.eval.quality.fakes import FakeBackend, text_item

PROTOCOL = Protocol(block_items=10, slots=100, concurrency=4, replays=3)
CONTROLS = Controls(min_available_slots=50)


def run(items: list[Item], backend: FakeBackend, protocol: Protocol = PROTOCOL) -> BlockResult:
    [block] = make_blocks(items, protocol.block_items)
    return run_block("nr 16", block, backend, protocol, score_answer)


def test_a_block_is_a_flush_one_warm_request_an_item_and_then_the_rounds():
    backend = FakeBackend()
    run([text_item("a", ("?", "!")), text_item("b")], backend)
    assert backend.flushes == 1
    assert backend.batches == [2, 3, 3, 3]
    warm, measured = backend.asked[:2], backend.asked[2:]
    assert [(q.prompt, q.warm, q.max_new_tokens) for q in warm] == [("a.......", True, 1), ("b.......", True, 1)]
    assert not any(q.warm for q in measured)
    for first in (0, 3, 6):
        assert {q.prompt for q in measured[first : first + 3]} == {"a.......?", "a.......!", "b.......?"}
    assert len({q.name for q in backend.asked}) == len(backend.asked)
    assert len({q.seed for q in measured}) == len(measured)


def test_the_order_is_shuffled_and_equal_for_equal_seeds():
    items = [text_item(f"{i}") for i in range(10)]
    orders = []
    for seed in (0, 0, 1):
        backend = FakeBackend()
        run(items, backend, dataclasses.replace(PROTOCOL, seed=seed))
        orders.append([(q.prompt, q.seed) for q in backend.asked])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    rounds = [[prompt for prompt, _ in orders[0][10 * r : 10 * r + 10]] for r in (1, 2, 3)]
    assert rounds[0] != rounds[1] != rounds[2]
    assert rounds[0] != sorted(rounds[0])


def test_tokens_are_counted_of_measured_requests_alone():
    """By hand: two asks of 8 + 1 and 8 + 3 tokens, 8 of each cached, three rounds; the warm 8 new ones do not count."""
    result = run([text_item("a", ("?", "???"))], FakeBackend())
    assert [(m.ask, m.replay, m.cached_tokens, m.new_tokens) for m in result.measured] == [
        *[(0, r, 8, 1) for r in range(3)],
        *[(1, r, 8, 3) for r in range(3)],
    ]
    assert result.hit == 48 / 60
    assert result.loaded == 1.0


def test_every_output_is_scored_hit_or_not_and_no_warm_one():
    """The first of two items is evicted by the second: its requests miss, and count all the same."""
    backend = FakeBackend(lambda prompt, number: "yes" if prompt[0] == "a" else "no", slots=1)
    result = run([text_item("a"), text_item("b")], backend)
    assert [(m.item_id, m.cached_tokens, m.score, m.answer) for m in result.measured] == [
        *[("a", 0, 1.0, "yes")] * 3,
        *[("b", 8, 0.0, "no")] * 3,
    ]
    assert (result.loaded, result.hit) == (0.5, 24 / 54)


def test_scores_follow_the_rounds():
    result = run([text_item("a")], FakeBackend(lambda prompt, number: "yes" if number == 1 else "no"))
    assert [m.score for m in result.measured] == [0.0, 1.0, 0.0]


def test_items_have_replays_of_their_own_unless_the_protocol_says_otherwise():
    items = [text_item("a", replays=1), text_item("b", ("?", "!"), replays=3)]
    own = dataclasses.replace(PROTOCOL, replays=None)
    backend = FakeBackend()
    result = run(items, backend, own)
    assert backend.batches == [2, 3, 2, 2]
    assert [sum(m.item_id == name for m in result.measured) for name in "ab"] == [1, 6]
    assert own.requests(items) == len(backend.asked) == 9
    assert PROTOCOL.requests(items) == 11


def test_items_with_the_same_prefix_warm_it_once():
    """As questions about one conversation do."""
    items = [dataclasses.replace(text_item("a", (ask,)), item_id=ask) for ask in ("?", "", "!")]
    backend = FakeBackend()
    result = run([*items, text_item("b")], backend)
    assert [(q.prompt, q.repeated) for q in backend.asked if q.warm] == [("a.......", True), ("b.......", False)]
    assert PROTOCOL.requests([*items, text_item("b")]) == len(backend.asked) == 2 + 3 * 4
    assert len(result.measured) == 12


def test_a_prompt_that_is_exactly_the_warmed_one_is_announced():
    backend = FakeBackend()
    run([text_item("a", ("?", "")), text_item("b")], backend)
    assert [q.repeated for q in backend.asked[:2]] == [True, False]


def test_a_score_outside_0_to_1_is_refused():
    [block] = make_blocks([text_item("a")], 1)
    with pytest.raises(ValueError, match=r"in \[0, 1\], scorer 'exact' gave 2.0"):
        run_block("nr 16", block, FakeBackend(), PROTOCOL, lambda item, ask, answer: 2.0)


def test_items_of_a_task_are_cut_into_blocks():
    items = [text_item(f"{i}", task=task) for task in ("x", "y") for i in range(5)]
    blocks = make_blocks(items, 2)
    assert [(b.task, b.number, len(b.items)) for b in blocks] == [
        (task, number, size) for task in ("x", "y") for number, size in enumerate((2, 2, 1))
    ]
    assert [item for block in blocks for item in block.items] == items


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "at least one"),
        ([text_item("a"), text_item("a")], "different ids"),
        ([text_item("a"), text_item("b", task="other"), text_item("c")], "must follow each other"),
    ],
)
def test_items_that_cannot_be_cut_are_refused(items: list[Item], message: str):
    with pytest.raises(ValueError, match=message):
        make_blocks(items, 2)


@pytest.mark.parametrize("field", ["block_items", "slots", "concurrency", "replays"])
def test_counts_below_one_are_refused(field: str):
    with pytest.raises(ValueError, match=f"{field} must be >= 1, got 0"):
        dataclasses.replace(PROTOCOL, **{field: 0})


FULFILLED = {"warm_tokens": 8, "asks": ("?",)}
UNFULFILLED = {
    "50 slots": ({}, FakeBackend(slots=52), "49 slots available after warming, fewer than 50"),
    "eviction": ({}, FakeBackend(replay_evictions=1), "3 evictions while replaying"),
    "hit": ({"asks": ("????",)}, FakeBackend(), "token hit 0.667, not above 0.7"),
    "nothing told": ({}, FakeBackend(tells=False), "does not tell how many slots .* does not tell evictions"),
}


def controlled(backend: FakeBackend, **options) -> BlockResult:
    items = [text_item(name, **{**FULFILLED, **options}) for name in "abc"]
    return run(items, backend, dataclasses.replace(PROTOCOL, controls=CONTROLS))


def test_a_block_that_fulfils_all_controls_has_no_failures():
    assert controlled(FakeBackend(slots=53)).failures == ()


@pytest.mark.parametrize("name", UNFULFILLED)
def test_each_control_marks_the_block_that_does_not_fulfil_it(name: str):
    options, backend, expected = UNFULFILLED[name]
    result = controlled(backend, **options)
    assert result.failures
    assert re.search(expected, " ".join(result.failures))
    assert arm_failures(CONTROLS, [result]) == tuple(f"task/0: {failure}" for failure in result.failures)
    assert arm_failures(None, [result]) == ()


def measured_block(number: int, requests: int, loaded: int) -> BlockResult:
    [one] = run([text_item("a")], FakeBackend(), dataclasses.replace(PROTOCOL, replays=1)).measured
    missed = dataclasses.replace(one, cached_tokens=0, new_tokens=9)
    return BlockResult("nr 16", "task", number, (one,) * loaded + (missed,) * (requests - loaded), 90, 0, ())


def test_an_arm_needs_more_loaded_requests_than_each_of_its_blocks():
    """95 % of each block and 99 % of the arm."""
    assert arm_failures(CONTROLS, [measured_block(0, 100, 97), measured_block(1, 300, 299)]) == ()
    assert arm_failures(CONTROLS, [measured_block(0, 100, 96), measured_block(1, 300, 299)]) == (
        "98.8% of all requests loaded, below 99%",
    )


def test_a_block_needs_95_percent_of_its_requests_loaded():
    """One of 20 items is evicted while warming: 95 %. Two: 90 %."""
    items = [text_item(f"{i:02}") for i in range(20)]
    protocol = dataclasses.replace(PROTOCOL, block_items=20, controls=Controls(0))
    assert run(items, FakeBackend(slots=19), protocol).failures == ()
    assert run(items, FakeBackend(slots=18), protocol).failures == ("90.0% of requests loaded, below 95%",)


def test_the_papers_block_must_have_272_slots_free():
    assert paper_controls(256).min_available_slots == 272


def test_a_finished_block_survives_json():
    result = controlled(FakeBackend(tells=False))
    assert BlockResult.from_dict(result.as_dict()) == result
    assert Block("task", 3, ()).key == "task/3"
