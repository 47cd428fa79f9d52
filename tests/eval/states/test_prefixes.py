"""Prefixes hold what an isolated run leaves, however many are computed together, and nothing changes them."""

import dataclasses

import pytest
import torch

from dasc.eval.states import Prefixes, advance, prefixes
from tests.eval.states.runs import LENGTHS, contexts, model_of, prefixes_of, tokens
from tests.models.hybrid_runs import MODELS, assert_close, isolated


def same(left: Prefixes, right: Prefixes) -> bool:
    return left.tokens == right.tokens and all(
        torch.equal(getattr(left, name), getattr(right, name)) for name in ("temporal", "conv", "kv")
    )


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_each_prefix_holds_the_state_and_kv_of_an_isolated_run(kind: str, gate: str):
    """Fault 15: every sequence of a batch of different lengths has the state at its own end."""
    model, held = model_of(kind, gate), prefixes_of(kind, gate)
    for number, context in enumerate(contexts()):
        _, states, kv = isolated(model, torch.tensor(context))
        assert_close(held.temporal[:, number], states.temporal[:, 0])
        assert_close(held.conv[:, number], states.conv[:, 0])
        assert_close(held.kv[:, held.bounds[number] : held.bounds[number + 1]], kv.rows)
    assert held.bounds == [0, 7, 37, 38, 54]


@pytest.mark.parametrize("limit", ["_BATCH_TOKENS", "_BATCH_ROWS"])
@pytest.mark.parametrize("value", [1, 24])
def test_how_many_run_together_does_not_matter(limit: str, value: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefixes, limit, value)
    held, whole = Prefixes.of(model_of("kda"), contexts()), prefixes_of("kda")
    for name in ("temporal", "conv", "kv"):
        assert_close(getattr(held, name), getattr(whole, name))


def test_a_forward_takes_as_much_as_its_limits_allow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefixes, "_BATCH_TOKENS", 10)
    monkeypatch.setattr(prefixes, "_BATCH_ROWS", 100)
    sizes = [(5, 5), (5, 5), (1, 1), (99, 99), (1, 60), (1, 40), (1, 1)]
    assert list(prefixes.batches(sizes)) == [(0, 2), (2, 3), (3, 4), (4, 6), (6, 7)]
    assert list(prefixes.batches([])) == []


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_going_on_token_by_token_or_at_once_is_the_longer_prefix(kind: str):
    model, held = model_of(kind), prefixes_of(kind)
    new = [tokens(3, 60 + number) for number in range(len(LENGTHS))]
    together, after = advance(held, new)
    whole = Prefixes.of(model, [(*c, *n) for c, n in zip(contexts(), new)])
    stepped, rows = held, []
    for step in range(3):
        logits, stepped = advance(stepped, [n[step : step + 1] for n in new])
        rows.append(logits)
    assert after.tokens == stepped.tokens == whole.tokens
    for name in ("temporal", "conv", "kv"):
        assert_close(getattr(after, name), getattr(whole, name))
        assert_close(getattr(stepped, name), getattr(whole, name))
    for number, found in enumerate(together):
        expected = isolated(model, torch.tensor(whole.tokens[number]))[0][-3:]
        assert_close(found, expected)
        assert_close(torch.cat([logits[number] for logits in rows]), expected)


def test_nothing_writes_to_what_prefixes_hold():
    held = Prefixes.of(model_of("gdn"), contexts())
    before = dataclasses.replace(held, temporal=held.temporal.clone(), conv=held.conv.clone(), kv=held.kv.clone())
    advance(held, [(1, 2)] * len(held))
    assert same(held, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temporal": torch.zeros(2, 4, 2, 8, 8)}, "temporal must be torch.float64"),
        ({"kv": torch.zeros(2, 1, 20, dtype=torch.float64)}, "kv must be torch.float64"),
        ({"tokens": ((1,),)}, "temporal must be"),
    ],
)
def test_prefixes_that_do_not_fit_together_are_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(prefixes_of("kda"), **change)


def test_wrong_contexts_and_continuations_are_refused():
    model, held = model_of("kda"), prefixes_of("kda")
    for wrong, message in (([], "contexts must hold"), ([()], "at least one new token"), ([(10_000,)], "tokens must")):
        with pytest.raises(ValueError, match=message):
            Prefixes.of(model, wrong)
    with pytest.raises(ValueError, match="tokens must be of each of the 4 prefixes, got 1"):
        advance(held, [(1,)])
    for owners in ((1, 0), (-1, 0), (0, 4)):
        with pytest.raises(ValueError, match="in the order of the 4 prefixes"):
            list(prefixes.continued(held, [(owner, (1,)) for owner in owners]))
