"""What came of an evaluation: scores by item, hits by arm, and files that hold every figure and setting."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from dasc.eval.quality.arms import ArmSpec
from dasc.eval.quality.protocol import BlockResult, Controls, arm_failures

FORMAT = "dasc-quality-1"


@dataclass(frozen=True)
class TaskResult:
    """One arm on one task.

    Attributes:
        item_ids: items in order.
        scores: one an item: its asks and replays averaged.
        cached_tokens: of all measured requests.
        new_tokens: likewise.
        requests: measured.
        loaded: requests that were served from the cache at all.
        ttft_mean_s: over the measured requests that have one; ``None`` if none has.
        outputs_sha256: of all measured answers in order: equal for equal outputs.
    """

    item_ids: tuple[str, ...]
    scores: tuple[float, ...]
    cached_tokens: int
    new_tokens: int
    requests: int
    loaded: int
    ttft_mean_s: float | None
    outputs_sha256: str

    @property
    def score(self) -> float:
        """Mean over the items."""
        return fmean(self.scores)

    @property
    def hit(self) -> float:
        """``sum C / sum (C + N)``."""
        return self.cached_tokens / (self.cached_tokens + self.new_tokens)


@dataclass(frozen=True)
class ArmResult:
    """One arm on all tasks.

    Attributes:
        spec: the arm.
        settings: its own, of the backend.
        tasks: by name, in order.
        blocks: what was resident, and which controls failed, block by block.
        failures: of the arm and its blocks, in words; nothing without controls.
    """

    spec: ArmSpec
    settings: dict[str, Any]
    tasks: dict[str, TaskResult]
    blocks: tuple[dict[str, Any], ...]
    failures: tuple[str, ...]


@dataclass(frozen=True)
class QualityResult:
    """Arms of one model over the same items by the same protocol.

    Attributes:
        model: name for tables.
        shared: settings that every arm has in common; results are compared only where they are equal.
        run: settings that may differ between results that are compared, such as versions.
        arms: in the order measured.
    """

    model: str
    shared: dict[str, Any]
    run: dict[str, Any]
    arms: tuple[ArmResult, ...]

    def arm(self, label: str) -> ArmResult | None:
        """By its label."""
        return next((arm for arm in self.arms if arm.spec.label == label), None)

    @property
    def tasks(self) -> list[str]:
        return list(self.arms[0].tasks)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` takes them back."""
        arms = [
            {
                "label": arm.spec.label,
                **asdict(arm.spec),
                "settings": arm.settings,
                "failures": list(arm.failures),
                "tasks": {
                    name: {"score": task.score, "hit": task.hit, **asdict(task)} for name, task in arm.tasks.items()
                },
                "blocks": list(arm.blocks),
            }
            for arm in self.arms
        ]
        return {"format": FORMAT, "model": self.model, "shared": self.shared, "run": self.run, "arms": arms}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QualityResult:
        """What :meth:`as_dict` gave, perhaps by way of JSON."""
        arms = tuple(
            ArmResult(
                spec=ArmSpec(arm["method"], arm["w_max"], arm["mask_seed"]),
                settings=arm["settings"],
                tasks={name: _task_from_dict(task) for name, task in arm["tasks"].items()},
                blocks=tuple(arm["blocks"]),
                failures=tuple(arm["failures"]),
            )
            for arm in values["arms"]
        )
        return cls(values["model"], values["shared"], values["run"], arms)


def _task_from_dict(values: Mapping[str, Any]) -> TaskResult:
    kept = {name: value for name, value in values.items() if name not in ("score", "hit")}
    return TaskResult(**{**kept, "item_ids": tuple(kept["item_ids"]), "scores": tuple(kept["scores"])})


def summarise_arm(
    spec: ArmSpec, settings: dict[str, Any], blocks: Sequence[BlockResult], controls: Controls | None
) -> ArmResult:
    """An arm from its blocks, all of them in order."""
    tasks = {task: _summarise_task(list(group)) for task, group in groupby(blocks, lambda block: block.task)}
    lines = tuple(
        {
            "task": block.task,
            "block": block.number,
            "hit": block.hit,
            "loaded": block.loaded,
            "available_slots": block.available_slots,
            "evictions": block.evictions,
            "failures": list(block.failures),
        }
        for block in blocks
    )
    return ArmResult(spec, settings, tasks, lines, arm_failures(controls, blocks))


def _summarise_task(blocks: Sequence[BlockResult]) -> TaskResult:
    measured = [m for block in blocks for m in block.measured]
    items = [(item_id, fmean(m.score for m in group)) for item_id, group in groupby(measured, lambda m: m.item_id)]
    times = [m.ttft_s for m in measured if m.ttft_s is not None]
    answers = json.dumps([[m.item_id, m.ask, m.replay, m.answer] for m in measured])
    return TaskResult(
        item_ids=tuple(item_id for item_id, _ in items),
        scores=tuple(score for _, score in items),
        cached_tokens=sum(m.cached_tokens for m in measured),
        new_tokens=sum(m.new_tokens for m in measured),
        requests=len(measured),
        loaded=sum(m.cached_tokens > 0 for m in measured),
        ttft_mean_s=fmean(times) if times else None,
        outputs_sha256=hashlib.sha256(answers.encode()).hexdigest(),
    )


def read_result(path: Path) -> QualityResult:
    """A file that an evaluation has written.

    Raises:
        ValueError: for anything else.
        OSError: when it cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}")
        return QualityResult.from_dict(values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a result of dasc eval quality in format {FORMAT} ({error})") from error


def merge(results: Sequence[QualityResult]) -> list[QualityResult]:
    """Results of one model become one, with all their arms; models stay in the order of their first file.

    Raises:
        ValueError: for results of a model that did not share items and protocol, or hold the same arm twice.
    """
    merged: dict[str, QualityResult] = {}
    for result in results:
        known = merged.get(result.model)
        if known is None:
            merged[result.model] = result
            continue
        for name in sorted({*known.shared, *result.shared}):
            ours, theirs = known.shared.get(name), result.shared.get(name)
            if ours != theirs:
                raise ValueError(
                    f"results of {result.model} cannot be compared: {name} is {ours!r} in one and {theirs!r} in another"
                )
        for arm in result.arms:
            if known.arm(arm.spec.label) is not None:
                raise ValueError(f"results of {result.model} hold the arm {arm.spec.label!r} twice")
        merged[result.model] = QualityResult(known.model, known.shared, known.run, (*known.arms, *result.arms))
    return list(merged.values())
