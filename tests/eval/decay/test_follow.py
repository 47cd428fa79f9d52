"""Errors after a hit: exact where the theory is, and those of separate runs."""

import math

import pytest
import torch

from dasc.eval.decay import follow
from dasc.eval.states import Arm, Prefixes, advance, refresh, retain
from tests.eval.states.runs import constant_mask, contexts, draw_mask, model_of, prefixes_of, tokens
from tests.models.hybrid_runs import MODELS

TICKS = (0, 1, 3, 10)


def continuations(length: int = TICKS[-1]) -> list[tuple[int, ...]]:
    return [tokens(length, 70 + seed) for seed in range(len(contexts()))]


def nr(kind: str, gate: str = "softplus") -> Arm:
    return lambda prefixes: retain(prefixes, draw_mask(model_of(kind, gate)))


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_the_first_layer_keeps_to_its_bound_and_to_given_inputs(kind: str, gate: str):
    """Deeper layers see other inputs; a mistake in what is recorded, or in its order, would show here."""
    result = follow(prefixes_of(kind, gate), {"nr": nr(kind, gate)}, continuations(), TICKS)
    arm = result["arms"]["nr"]
    error, given, estimate, bound = (
        torch.tensor(arm[name], dtype=torch.float64) for name in ("error", "given_inputs", "estimate", "bound")
    )
    torch.testing.assert_close(error[0], bound[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(error[:, 0], given[:, 0], rtol=1e-9, atol=0)
    assert (error[1:, 1:] - given[1:, 1:]).abs().min() > 1e-9 * bound.max()
    assert 0.1 < arm["error_over_bound"][0] <= 1 + 1e-9
    assert (given <= bound * (1 + 1e-9)).all()
    assert (estimate <= bound * (1 + 1e-9)).all()
    assert (error[1:, 0] < error[:-1, 0]).all()


def test_errors_are_those_of_runs_apart():
    held = prefixes_of("kda")
    arms = {"nr": nr("kda"), "wr": lambda p: refresh(nr("kda")(p), draw_mask(p.model), 8)}
    result = follow(held, arms, continuations(), TICKS)
    for tick in TICKS[1:]:
        new = [c[:tick] for c in continuations()]
        wanted, dense = advance(held, new)
        at = TICKS.index(tick)
        assert result["norm"][at] == pytest.approx(dense.temporal.square().sum(dim=(1, 2, 3, 4)).tolist())
        for name, arm in arms.items():
            said, changed = advance(arm(held), new)
            error = (changed.temporal - dense.temporal).square().sum(dim=(1, 2, 3, 4))
            assert result["arms"][name]["error"][at] == pytest.approx(error.tolist())
            first = TICKS[at - 1]
            p = torch.cat([x[first:] for x in wanted]).softmax(dim=-1)
            q = torch.cat([x[first:] for x in said]).softmax(dim=-1)
            kl = (p * (p / q).log()).sum(dim=-1).mean()
            assert result["arms"][name]["kl"][at - 1] == pytest.approx(float(kl))
            other = (p.argmax(dim=-1) != q.argmax(dim=-1)).double().mean()
            assert result["arms"][name]["changed"][at - 1] == pytest.approx(float(other))


def test_an_arm_that_changes_nothing_has_no_error():
    keep_all = constant_mask(model_of("gdn"), True)
    result = follow(prefixes_of("gdn"), {"all": lambda p: retain(p, keep_all)}, continuations(), TICKS)
    arm = result["arms"]["all"]
    for name in ("error", "given_inputs", "estimate", "bound"):
        assert torch.tensor(arm[name]).abs().max() == 0
    assert max(map(abs, arm["kl"])) < 1e-12
    assert max(arm["error_over_bound"]) == 0 == max(arm["changed"])
    assert not any(math.isnan(x) for x in arm["error_over_bound"])


def test_batches_of_forwards_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    """What is recorded comes forward by forward, each of all layers."""
    whole = follow(prefixes_of("gdn"), {"nr": nr("gdn")}, continuations(), TICKS)
    monkeypatch.setattr("dasc.eval.states.prefixes._BATCH_TOKENS", 1)
    apart = follow(prefixes_of("gdn"), {"nr": nr("gdn")}, continuations(), TICKS)
    for name in ("error", "given_inputs", "bound"):
        torch.testing.assert_close(
            torch.tensor(apart["arms"]["nr"][name]), torch.tensor(whole["arms"]["nr"][name]), rtol=1e-5, atol=0
        )


def test_wrong_arguments_are_refused():
    held: Prefixes = prefixes_of("gdn")
    for ticks in ((0,), (1, 2), (0, 2, 2)):
        with pytest.raises(ValueError, match="ticks must ascend from 0"):
            follow(held, {}, continuations(), ticks)
    with pytest.raises(ValueError, match="continuations must be 4 of at least 10 tokens"):
        follow(held, {}, continuations(9), TICKS)
