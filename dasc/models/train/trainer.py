"""The training loop: an update a step, a log, and a state on disk from which it goes on after an interruption."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dasc.models.hybrid.files import save_hybrid
from dasc.models.tasks import SHORTEST
from dasc.models.train.batches import TrainingBatch, draw_batch
from dasc.models.train.forward import hidden_states
from dasc.models.train.initial import initial_weights
from dasc.models.train.recipes import Recipe

STATE_FILE = "state.pt"
LOG_FILE = "log.jsonl"

_LOG_SECONDS = 30.0
_SAVE_SECONDS = 120.0
# Share of a task's new accuracy in its running mean, and the weight of a task that is perfectly learned.
_NEW = 0.05
_LEAST_WEIGHT = 0.15


@dataclass(eq=False)
class Training:
    """A training under way.

    What a step does follows from the recipe, the seed and the state alone, so that an interruption changes nothing.

    Attributes:
        recipe: what is trained.
        seed: of weights and batches.
        weights: by name, FP32.
        optimizer: of ``weights``.
        step: updates made.
        accuracy: of each task and exercise, running mean over the tokens of its answers; batches favour what is low.
        seconds: spent in updates, over all sessions.
    """

    recipe: Recipe
    seed: int
    weights: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    step: int
    accuracy: dict[str, float]
    seconds: float

    @classmethod
    def begin(cls, recipe: Recipe, seed: int) -> Training:
        """Before the first step."""
        weights = {name: w.requires_grad_() for name, w in initial_weights(recipe.config, seed).items()}
        decayed = [w for name, w in weights.items() if _is_matrix(name, w)]
        others = [w for name, w in weights.items() if not _is_matrix(name, w)]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), foreach=True)
        return cls(recipe, seed, weights, optimizer, 0, dict.fromkeys((*recipe.tasks, *recipe.exercises), 0.0), 0.0)

    @classmethod
    def resume(cls, recipe: Recipe, seed: int, folder: Path) -> Training:
        """Go on from the state in ``folder``, or begin if there is none.

        Raises:
            ValueError: for the state of another seed.
        """
        training = cls.begin(recipe, seed)
        path = folder / STATE_FILE
        if not path.exists():
            return training
        state = torch.load(path, weights_only=True)
        if state["seed"] != seed:
            raise ValueError(f"seed must be that of {path}, {state['seed']}, got {seed}")
        with torch.no_grad():
            for name, weight in training.weights.items():
                weight.copy_(state["weights"][name])
        training.optimizer.load_state_dict(state["optimizer"])
        training.step, training.accuracy, training.seconds = state["step"], state["accuracy"], state["seconds"]
        return training

    def save(self, folder: Path) -> None:
        """Write the state and, for whoever wants to run it, the model. What was there stays whole until the end."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.detach() for name, w in self.weights.items()}
        state = {
            "seed": self.seed,
            "weights": weights,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "accuracy": self.accuracy,
            "seconds": self.seconds,
        }
        unfinished = folder / f"{STATE_FILE}.unfinished"
        torch.save(state, unfinished)
        os.replace(unfinished, folder / STATE_FILE)
        save_hybrid(folder / "model", self.recipe.config, weights)

    def update(self) -> float:
        """Make one step and return its loss, in nats."""
        recipe, began = self.recipe, time.perf_counter()
        batch = self.batch()
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(self.step)
        hidden, head = hidden_states(recipe.config, self.weights, batch.tokens, batch.others)
        logits = hidden[batch.rows, batch.positions] @ head.T
        loss = (cross_entropy(logits, batch.targets, reduction="none") * batch.weights).sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.weights.values(), recipe.clip)
        self.optimizer.step()
        self._note(batch, logits.detach().argmax(dim=-1) == batch.targets)
        self.step += 1
        self.seconds += time.perf_counter() - began
        return loss.item()

    def batch(self) -> TrainingBatch:
        """What the next update learns from."""
        rng = np.random.default_rng((self.seed, self.step))
        stage = self.recipe.stage(self.step)
        length = int(rng.choice(stage.lengths))
        names = [name for name in self.accuracy if length >= SHORTEST[name]]
        weights = np.array([_LEAST_WEIGHT + 1 - self.accuracy[name] for name in names])
        sequences = max(self.recipe.batch_tokens // length, 1)
        chosen = rng.choice(len(names), size=sequences, p=weights / weights.sum())
        return draw_batch([names[i] for i in chosen], length, rng, stage.without_states)

    def _note(self, batch: TrainingBatch, right: Tensor) -> None:
        for name in dict.fromkeys(batch.names):
            of_task = torch.tensor([other == name for other in batch.names])[batch.rows] & batch.answers
            self.accuracy[name] += _NEW * (right[of_task].float().mean().item() - self.accuracy[name])


def _forget_later(log: Path, step: int) -> None:
    """Drop what an interrupted run logged after it last saved: these steps are made again."""
    if log.exists():
        lines = [line for line in log.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= step]
        log.write_text("".join(lines))


def _is_matrix(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and "embed_tokens" not in name


def train(training: Training, folder: Path, minutes: float | None, say: Callable[[dict[str, Any]], None]) -> bool:
    """Update until all steps are made or the time is over, logging to ``folder`` and saving there.

    Returns:
        Whether all steps are made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _forget_later(folder / LOG_FILE, training.step)
    started = logged = saved = time.monotonic()
    losses: list[float] = []
    while training.step < training.recipe.steps:
        losses.append(training.update())
        now = time.monotonic()
        if now - logged >= _LOG_SECONDS or training.step == training.recipe.steps:
            entry = {
                "step": training.step,
                "minutes": round(training.seconds / 60, 1),
                "loss": round(float(np.mean(losses)), 4),
                "accuracy": {name: round(a, 3) for name, a in training.accuracy.items()},
            }
            say(entry)
            with open(folder / LOG_FILE, "a") as log:
                log.write(json.dumps(entry) + "\n")
            losses, logged = [], now
        if now - saved >= _SAVE_SECONDS:
            training.save(folder)
            saved = now
        if minutes is not None and now - started >= 60 * minutes:
            break
    training.save(folder)
    return training.step >= training.recipe.steps
