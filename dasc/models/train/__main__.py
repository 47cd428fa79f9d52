"""Trains a model of the zoo: ``python -m dasc.models.train kda -o FOLDER``; run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dasc.models.train.evaluate import score_all
from dasc.models.train.recipes import RECIPES
from dasc.models.train.trainer import Training, train

RESULT_FILE = "training.json"

_EXAMPLES = 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, then score every task and write the scores beside the model."""
    parser = argparse.ArgumentParser(prog="python -m dasc.models.train", description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the state, the log and the model")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    parser.add_argument("--minutes", type=float, help="stop after so many; the same command goes on later")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    torch.set_flush_denormal(True)  # arithmetic on what has decayed to nothing is slow otherwise
    recipe = RECIPES[given.recipe]
    training = Training.resume(recipe, given.seed, given.output)
    if not train(training, given.output, given.minutes, _say):
        return
    weights = {name: w.detach() for name, w in training.weights.items()}
    scores = score_all(recipe.config, weights, recipe.tasks, _EXAMPLES)
    result = {
        "command": f"python -m dasc.models.train {given.recipe} -o FOLDER --seed {given.seed}",
        "torch": torch.__version__,
        "parameters": sum(w.numel() for w in weights.values()),
        "steps": training.step,
        "minutes": round(training.seconds / 60, 1),
        "scores": {
            name: {length: dataclasses.asdict(score) for length, score in of_task.items()}
            for name, of_task in scores.items()
        },
    }
    text = json.dumps(result, indent=2)
    (given.output / RESULT_FILE).write_text(text + "\n")
    print(text)


def _say(entry: dict[str, Any]) -> None:
    accuracy = " ".join(f"{name} {value:.2f}" for name, value in entry["accuracy"].items())
    print(f"step {entry['step']} {entry['minutes']} min loss {entry['loss']:.3f} | {accuracy}", flush=True)


if __name__ == "__main__":
    main()
