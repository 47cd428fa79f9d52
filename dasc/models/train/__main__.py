"""Trains a model of the zoo: ``python -m dasc.models.train kda -o FOLDER``; run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from dasc.models.train.evaluate import examples, score
from dasc.models.train.recipes import RECIPES
from dasc.models.train.trainer import SHORTEST, Training, train

_LENGTHS = (128, 256, 512)
_EXAMPLES = 100
RESULT_FILE = "training.json"


def main() -> None:
    """Train, then score every task and write the scores beside the model."""
    parser = argparse.ArgumentParser(prog="python -m dasc.models.train", description=__doc__)
    parser.add_argument("recipe", choices=sorted(RECIPES))
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the state, the log and the model")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default 0)")
    parser.add_argument("--minutes", type=float, help="stop after so many; the same command goes on later")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # arithmetic on what has decayed to nothing is slow otherwise
    recipe = RECIPES[arguments.recipe]
    training = Training.resume(recipe, arguments.seed, arguments.output)
    if not train(training, arguments.output, arguments.minutes, _say):
        return
    result = {
        "command": f"python -m dasc.models.train {arguments.recipe} -o FOLDER --seed {arguments.seed}",
        "torch": torch.__version__,
        "parameters": sum(w.numel() for w in training.weights.values()),
        "steps": training.step,
        "minutes": round(training.seconds / 60, 1),
        "scores": scores(training),
    }
    (arguments.output / RESULT_FILE).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def scores(training: Training) -> dict[str, dict[int, dict[str, float]]]:
    """Share of questions answered and of tokens, by task and length."""
    weights = {name: w.detach() for name, w in training.weights.items()}
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name in training.recipe.tasks:
        found[name] = {}
        for length in _LENGTHS:
            if length >= SHORTEST.get(name, 0):
                result = score(training.recipe.config, weights, examples(name, length, _EXAMPLES))
                found[name][length] = {"right": round(result.right, 4), "tokens": round(result.tokens, 4)}
    return found


def _say(entry: dict[str, Any]) -> None:
    accuracy = " ".join(f"{name} {value:.2f}" for name, value in entry["accuracy"].items())
    print(f"step {entry['step']} {entry['minutes']} min loss {entry['loss']:.3f} | {accuracy}", flush=True)


if __name__ == "__main__":
    main()
