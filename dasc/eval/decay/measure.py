"""Decay of omissions over tasks: from settings to a report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dasc.eval.decay.follow import follow
from dasc.eval.decay.suffixes import ask_after, losses_by_example
from dasc.eval.provenance import described
from dasc.eval.states import Arm, Prefixes, refresh, retain
from dasc.eval.statistics import paired
from dasc.eval.task_runs import TaskSettings, load_task_model
from dasc.eval.unit_file import UnitFile
from dasc.models import read_checkpoint
from dasc.models.hybrid import HybridModel
from dasc.models.tasks import Example
from dasc.planner import build_plan
from dasc.reference import remaining_share, replay_window, settle_tokens, static_horizons

FOLLOWED = ("nr", "wr", "int8")


@dataclass(frozen=True, kw_only=True)
class DecaySettings(TaskSettings):
    """What is measured.

    Attributes:
        w_max: cutoff in tokens.
        gate_input: representative gate input ``a_s``; the family's own when ``None``.
        ticks: tokens since the hit at which states are compared, from 0, ascending.
        suffixes: new tokens before a question, each once.
        tolerances: shares of an omission that may be left for a hit to have settled, within ``(0, 1]``.
    """

    length: int = 512
    count: int = 16
    w_max: int
    gate_input: float | None = None
    ticks: tuple[int, ...] = (0, 1, 2, 4, 8, 16, 32, 64, 128)
    suffixes: tuple[int, ...] = (0, 4, 8, 16, 32, 64, 128)
    tolerances: tuple[float, ...] = (0.5, 0.2, 0.1, 0.03, 0.01)


@dataclass(frozen=True)
class Policy:
    """When to refresh, and what that came to, over all suffixes, tasks and questions.

    Attributes:
        name: ``nr`` (never), ``below N``, ``wr`` (always) or ``rest``.
        refresh_below: hits with fewer new prompt tokens are refreshed; ``None`` for ``rest``.
        replayed_tokens: mean of a hit.
        accuracy_loss: mean, with its 95 % interval over examples.
        log_prob_loss: of right answers in nats, likewise.
        by_suffix: accuracy loss, log-probability loss and replayed tokens, means, for each suffix in order.
    """

    name: str
    refresh_below: int | None
    replayed_tokens: float
    accuracy_loss: tuple[float, float, float]
    log_prob_loss: tuple[float, float, float]
    by_suffix: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class Settling:
    """When at most a share of an omission is left.

    Attributes:
        tolerance: the share.
        by_weights: tokens, by :func:`dasc.reference.settle_tokens`.
        measured: the first tick at which NR's error of the states is at most this share of what it was at the hit;
            ``None`` if there is none.
    """

    tolerance: float
    by_weights: int
    measured: int | None


@dataclass(frozen=True)
class DecayReport:
    """What was measured.

    Attributes:
        settings: and everything else that the figures depend on.
        window_tokens: that WR replays.
        units_kept: share.
        traces: by ``"all"`` or a task: see :meth:`relative`; arms of :data:`FOLLOWED`.
        remaining: expected share of omitted units missing at each tick, from the weights.
        settling: for each tolerance.
        dense_accuracy: at all suffixes, which are the same to a dense hit.
        policies: never, below each suffix but the first, always, and the rest of the window.
    """

    settings: dict[str, Any]
    window_tokens: int
    units_kept: float
    traces: dict[str, dict[str, Any]]
    remaining: tuple[float, ...]
    settling: tuple[Settling, ...]
    dense_accuracy: float
    policies: tuple[Policy, ...]

    def relative(self, arm: str, name: str, *, layer: int | None = None, task: str = "all") -> list[float]:
        """A quantity of :func:`follow`, relative to the dense state, at each tick; of one layer or of all together."""
        return relative_to_dense(self.traces[task], arm, name, layer)

    def first_layer(self, arm: str) -> int:
        """The first recurrent layer whose state is off at the hit: up to it, all inputs are the dense ones.

        It is the first of all when none is off, as when the window reaches back to the first token.
        """
        at_hit = self.traces["all"]["arms"][arm]["error"][0]
        return next((layer for layer, square in enumerate(at_hit) if square > 0), 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)


def measure_decay(
    folder: Path,
    settings: DecaySettings,
    *,
    units_path: Path | None = None,
    progress: Callable[[str], None] = lambda unit: None,
) -> DecayReport:
    """Measure a model on tasks. The same arguments give the same report.

    Args:
        folder: of a model that reads the tasks' tokens.
        settings: what to measure.
        units_path: file of finished tasks, to go on from when interrupted.
        progress: called after each unit, of two a task.

    Raises:
        ValueError: for a model, settings or a file of units that do not fit, or a cutoff that omits no unit.
    """
    model = load_task_model(folder, torch.float64)  # or rounding would hide what is left of an error in the end
    checkpoint = read_checkpoint(folder)
    plan = build_plan(checkpoint, settings.w_max, gate_input=settings.gate_input)
    if plan.mask.all():
        raise ValueError(f"w_max must be above a horizon of the model, or nothing is omitted; got {settings.w_max}")
    horizons = static_horizons(checkpoint.gate, plan.gate_input, plan.epsilon)
    window = replay_window(plan.windows, settings.w_max)
    in_force = {"gate_input": plan.gate_input, "epsilon": plan.epsilon}
    everything = described(folder, dataclasses.asdict(settings) | in_force)
    drawn = {task: settings.examples(task) for task in settings.tasks}
    shortest = min(len(example.context) for group in drawn.values() for example in group)
    for name in ("ticks", "suffixes"):
        if max(getattr(settings, name)) >= shortest:
            raise ValueError(
                f"{name} must be below {shortest}, the tokens of the shortest context, got {getattr(settings, name)}"
            )
    units = UnitFile(units_path, everything)
    followed, asked = {}, {}
    for task in settings.tasks:
        follow_task = partial(_follow, model, plan.mask, window, drawn[task], settings.ticks)
        followed[task] = units.get(f"follow {task}", follow_task)
        progress(f"{task}: states")
        ask_task = partial(ask_after, model, plan.mask, window, drawn[task], settings.suffixes, settings.questions)
        asked[task] = units.get(f"ask {task}", ask_task)
        progress(f"{task}: answers")
    always = max(settings.suffixes) + max(max(unit["prompt"]) for unit in asked.values()) + 1
    below = {f"below {n}": n for n in sorted(settings.suffixes)[1:]}
    policies = {"nr": 0, **below, "wr": always, "rest": None}
    traces = {"all": _pooled(list(followed.values())), **followed}
    right = [np.mean(unit["dense"]["right"]) for unit in asked.values()]
    return DecayReport(
        settings=everything,
        window_tokens=window,
        units_kept=float(plan.mask.double().mean()),
        traces=traces,
        remaining=tuple(remaining_share(horizons, plan.mask, t, plan.epsilon) for t in settings.ticks),
        settling=tuple(
            Settling(
                tolerance,
                settle_tokens(horizons, plan.mask, tolerance, plan.epsilon),
                _first_settled(relative_to_dense(traces["all"], "nr", "error"), settings.ticks, tolerance),
            )
            for tolerance in settings.tolerances
        ),
        dense_accuracy=float(np.mean(right)),
        policies=tuple(_policy(name, n, list(asked.values()), settings.suffixes) for name, n in policies.items()),
    )


def relative_to_dense(trace: dict[str, Any], arm: str, name: str, layer: int | None = None) -> list[float]:
    """Root of a sum of squares of :func:`follow` over that of the dense state, at each tick."""
    part = slice(None) if layer is None else slice(layer, layer + 1)
    return [math.sqrt(sum(a[part]) / sum(b[part])) for a, b in zip(trace["arms"][arm][name], trace["norm"])]


def _first_settled(errors: list[float], ticks: tuple[int, ...], tolerance: float) -> int | None:
    return next((tick for tick, error in zip(ticks, errors) if error <= tolerance * errors[0]), None)


def _follow(
    model: HybridModel, mask: Tensor, window: int, drawn: list[Example], ticks: tuple[int, ...]
) -> dict[str, Any]:
    """The end of each context is what comes after the hit."""
    contexts = [example.context for example in drawn]
    arms: dict[str, Arm] = {
        "nr": lambda prefixes: retain(prefixes, mask),
        "wr": lambda prefixes: refresh(retain(prefixes, mask), mask, window),
        "int8": lambda prefixes: retain(prefixes, torch.ones_like(mask), quantized="int8"),
    }
    assert tuple(arms) == FOLLOWED
    hits = [len(context) - max(ticks) for context in contexts]
    dense = Prefixes.of(model, [context[:hit] for context, hit in zip(contexts, hits)])
    return follow(dense, arms, [context[hit:] for context, hit in zip(contexts, hits)], ticks)


def _pooled(units: list[dict[str, Any]]) -> dict[str, Any]:
    """Tasks together: squares are summed, means averaged, the largest ratio kept."""

    def combine(values: list[Any], how: Callable[..., Any]) -> list[Any]:
        return [float(x) for x in how(np.array(values), axis=0)]

    def pool(name: str, values: list[Any]) -> Any:
        if name == "error_over_bound":
            return combine(values, np.max)
        if name in ("kl", "changed"):
            return combine(values, np.mean)
        return np.sum(np.array(values), axis=0).tolist()

    arms = {
        arm: {name: pool(name, [unit["arms"][arm][name] for unit in units]) for name in of_arm}
        for arm, of_arm in units[0]["arms"].items()
    }
    return {"norm": pool("norm", [unit["norm"] for unit in units]), "arms": arms}


def _policy(name: str, below: int | None, units: list[dict[str, Any]], suffixes: tuple[int, ...]) -> Policy:
    # [suffix, quantity, example of any task]
    losses = np.array([np.concatenate([losses_by_example(u, n, below) for u in units], axis=1) for n in suffixes])
    accuracy, log_prob = paired(losses[:, 0].mean(axis=0)), paired(losses[:, 1].mean(axis=0))
    by_suffix = losses.mean(axis=2)
    return Policy(
        name=name,
        refresh_below=below,
        replayed_tokens=float(by_suffix[:, 2].mean()),
        accuracy_loss=(accuracy.mean, accuracy.low, accuracy.high),
        log_prob_loss=(log_prob.mean, log_prob.low, log_prob.high),
        by_suffix=tuple((float(a), float(b), float(c)) for a, b, c in by_suffix),
    )
