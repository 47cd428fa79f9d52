"""All arms over all blocks: what items weigh, what is resumed, and what may not be."""

import dataclasses
import json
from pathlib import Path

import pytest

from dasc.eval.quality.arms import ArmSpec
from dasc.eval.quality.backend import BackendError
from dasc.eval.quality.evaluate import evaluate, items_sha256, total_requests
from dasc.eval.quality.protocol import Controls, Protocol
from dasc.eval.quality.results import QualityResult, merge, read_result
from tests.eval.quality.fakes import FakeBackend, text_item

PROTOCOL = Protocol(block_items=2, slots=100, concurrency=4, replays=2)
DENSE, NR = ArmSpec("dense"), ArmSpec("nr", 16)
ITEMS = [text_item(name, task=task) for task in ("x", "y") for name in "abc"]


def measure(items=ITEMS, arms=(DENSE, NR), backend=FakeBackend, protocol=PROTOCOL, **options) -> QualityResult:
    options = {"model": "fake", "model_sha256": "0", "run": {}, **options}
    return evaluate(items, arms, lambda spec: backend(), protocol, **options)


def test_asks_and_replays_are_averaged_within_the_item_and_items_count_once():
    """By hand: item a has one ask, right in both rounds; b has three asks, one of them right in one of two rounds.

    The mean of items is (1 + 1/6) / 2; pooled over requests it would be 3 / 8.
    """

    def answer(prompt: str, number: int) -> str:
        return "yes" if prompt[0] == "a" or (prompt.endswith("!") and number == 1) else "no"

    items = [text_item("a"), text_item("b", ("?", "!", "."))]
    task = measure(items, backend=lambda: FakeBackend(answer)).arms[0].tasks["task"]
    assert task.scores == (1.0, pytest.approx(1 / 6))
    assert task.score == pytest.approx((1 + 1 / 6) / 2)
    assert task.requests == 8


def test_hits_are_pooled_over_requests_not_averaged():
    """By hand: 2 x (8 + 1) tokens of a, 2 x (8 + 4) of b, 8 of each cached: 32 of 42."""
    items = [text_item("a"), text_item("b", ("????",))]
    task = measure(items).arms[0].tasks["task"]
    assert (task.cached_tokens, task.new_tokens, task.loaded) == (32, 10, 4)
    assert task.hit == 32 / 42


def test_arms_are_asked_the_same_in_the_same_order():
    backends = {}
    made = {"model": "m", "model_sha256": None, "run": {}}
    evaluate(ITEMS, (DENSE, NR), lambda spec: backends.setdefault(spec, FakeBackend()), PROTOCOL, **made)
    assert backends[DENSE].asked == backends[NR].asked
    assert backends[DENSE].flushes == 4  # two tasks of three items in blocks of two


def test_progress_counts_every_request_once():
    seen = []
    measure(progress=lambda label, requests: seen.append((label, requests)))
    for label in ("dense", "nr 16"):
        assert sum(requests for name, requests in seen if name == label) == 18
    assert total_requests(ITEMS, (DENSE, NR), PROTOCOL) == 36


@pytest.mark.parametrize("fail_after", [0, 5, 11, 17])
def test_an_interrupted_run_goes_on_and_ends_in_the_same(tmp_path: Path, fail_after: int):
    """Each block is asked once over both runs, but for the one that was interrupted."""
    whole = measure(units_path=tmp_path / "whole.jsonl")
    path = tmp_path / "units.jsonl"
    first = FakeBackend(fail_after=fail_after)
    with pytest.raises(BackendError, match="out of order"):
        measure(backend=lambda: first, units_path=path)
    done = path.read_bytes().count(b'"measured"')
    path.write_bytes(path.read_bytes() + b'["dense: x/1", {"arm": "den')  # a line cut short
    seen = []
    again = measure(units_path=path, progress=lambda label, requests: seen.append(requests))
    assert again.as_dict() == whole.as_dict()
    assert json.dumps(again.as_dict()) == json.dumps(whole.as_dict())
    assert sum(seen) == total_requests(ITEMS, (DENSE, NR), PROTOCOL)
    assert path.read_bytes().count(b'"measured"') == 8 > done
    third = measure(backend=None, units_path=path)  # everything is there: no backend is started
    assert third.as_dict() == whole.as_dict()


CHANGES = {
    "replays": {"protocol": dataclasses.replace(PROTOCOL, replays=3)},
    "seed": {"protocol": dataclasses.replace(PROTOCOL, seed=1)},
    "controls": {"protocol": dataclasses.replace(PROTOCOL, controls=Controls(1))},
    "items_sha256": {"items": [*ITEMS[:-1], text_item("c", ("!",), task="y")]},
    "arms": {"arms": (DENSE,)},
    "model": {"model": "other"},
    "model_sha256": {"model_sha256": "1"},
    "threads": {"run": {"threads": 2}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_refuses_to_go_on(tmp_path: Path, name: str):
    path = tmp_path / "units.jsonl"
    measure(units_path=path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"units.jsonl cannot be resumed: {name} was .*take another output folder"):
        measure(units_path=path, **CHANGES[name])
    assert path.read_bytes() == before


def test_a_changed_backend_refuses_to_go_on(tmp_path: Path):
    path = tmp_path / "units.jsonl"
    with pytest.raises(BackendError):
        measure(backend=lambda: FakeBackend(fail_after=11), units_path=path)
    with pytest.raises(ValueError, match="arm 'dense' cannot be resumed: name was 'fake' and is now 'another'"):
        measure(backend=lambda: FakeBackend(name="another"), units_path=path)


def test_a_result_survives_its_file(tmp_path: Path):
    protocol = dataclasses.replace(PROTOCOL, controls=Controls(1000))
    result = measure(protocol=protocol, arms=(DENSE, ArmSpec("random", 16, 1234)))
    assert all(arm.failures for arm in result.arms)
    path = tmp_path / "quality.json"
    path.write_text(json.dumps(result.as_dict()))
    assert read_result(path).as_dict() == result.as_dict()
    path.write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"quality.json: not a result of dasc eval quality"):
        read_result(path)


def test_results_of_single_arms_come_together():
    both = measure()
    [merged] = merge([measure(arms=(DENSE,)), measure(arms=(NR,))])
    assert merged.as_dict() == both.as_dict()
    assert [r.model for r in merge([both, measure(model="other")])] == ["fake", "other"]


def test_results_that_are_not_comparable_are_refused():
    other = dataclasses.replace(PROTOCOL, replays=3)
    with pytest.raises(ValueError, match="cannot be compared: replays is 2 in one and 3 in another"):
        merge([measure(arms=(DENSE,)), measure(arms=(NR,), protocol=other)])
    with pytest.raises(ValueError, match="cannot be compared: model_sha256 is '0' in one and '1' in another"):
        merge([measure(arms=(DENSE,)), measure(arms=(NR,), model_sha256="1")])
    with pytest.raises(ValueError, match="hold the arm 'nr 16' twice"):
        merge([measure(), measure(arms=(NR,))])


@pytest.mark.parametrize("arms", [(), (NR, NR)])
def test_no_arm_and_the_same_arm_twice_are_refused(arms: tuple[ArmSpec, ...]):
    with pytest.raises(ValueError, match="at least one and none twice"):
        measure(arms=arms)


def test_the_items_fingerprint_changes_with_them():
    assert items_sha256(ITEMS) == items_sha256(list(ITEMS)) != items_sha256(ITEMS[1:])
