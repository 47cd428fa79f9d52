"""Every table of ``docs/results.md``, from the bundled models: run the commands, then write the page.

    python -m benchmarks.results -o build/results            # all of it: a quarter of an hour a model, or less
    python -m benchmarks.results -o build/results --only kda-bits,gdn-bits
    python -m benchmarks.results -o build/results --page-only

Each command has a folder of its own and goes on there when it was interrupted. A finished one is not run again, unless
the model or the command has changed: then its folder is emptied first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results_page import FIGURES, figures, page
from dasc.eval.provenance import folder_sha256
from dasc.models.train.recipes import RECIPES
from dasc.models.zoo import MODELS, SPECIALISTS, model_folder

W_GRID = "32,64,128,256"
W_MAX = "128"


@dataclass(frozen=True)
class Experiment:
    """One command.

    Attributes:
        model: whom it is about.
        name: of the protocol.
        arguments: of ``dasc``, without the folder.
    """

    model: str
    name: str
    arguments: str

    @property
    def key(self) -> str:
        return f"{self.model}-{self.name}"

    @property
    def command(self) -> str:
        return f"dasc {self.arguments} -o {self.key}"


def experiments() -> list[Experiment]:
    """All of them, in the order of the page."""
    zeroed = "--count 60 --arms baseline,zero-full-kv,zero-temporal,zero-linear,zero-both"
    arms = "dense,nr,wr,random,padded,int8,int4,observed,int8-all,int4-all"
    quality = (
        f"eval quality tasks --model {{0}} --length 256 --count 16 --w-max {W_GRID} --arms {arms} "
        "--magnitudes {0}-magnitudes/magnitudes.json"
    )
    protocols = {
        "interventions": f"eval interventions {{}} --length 128 {zeroed}",
        "horizons": "eval horizons {}",
        "magnitudes": "observe {} --targets 256 --per-target 44",
        "quality": quality,
        "tune": "tune {0} --quality-budget 0.02 --measure log-prob --memory 2MiB --count 30 "
        "--magnitudes {0}-magnitudes/magnitudes.json",
        "bits": "eval bits {} --length 128 --count 20",
        "decay": f"eval decay {{}} --w-max {W_MAX}",
    }
    of_models = [Experiment(model, name, text.format(model)) for name, text in protocols.items() for model in MODELS]
    tasks = {model: f"--tasks {','.join(RECIPES[model].tasks)}" for model in SPECIALISTS}
    of_specialists = [
        Experiment(model, "interventions", f"eval interventions {model} --length 256 {zeroed} {tasks[model]}")
        for model in SPECIALISTS
    ]
    # the other one answers from its attention alone, and no state can be missed
    tracking = "gdn-tracking"
    of_specialists += [
        Experiment(tracking, name, f"{protocols[name].format(tracking)} {tasks[tracking]}")
        for name in ("magnitudes", "quality")
    ]
    return of_models + of_specialists


def main() -> None:
    """Run what is not finished, then write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results", description=__doc__.split("\n\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of all results")
    parser.add_argument("--only", help="keys of experiments, with commas between them")
    parser.add_argument("--page", type=Path, default=Path("docs/results.md"), help="(default docs/results.md)")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    given = parser.parse_args()
    planned = experiments()
    known = [experiment.key for experiment in planned]
    wanted = known if given.only is None else given.only.split(",")
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        parser.error(f"--only must name experiments out of {', '.join(known)}, got {unknown[0]}")
    for experiment in planned:
        if experiment.key in wanted and not given.page_only:
            measure(experiment, given.output)
    given.page.write_text(page(given.output, {(e.name, e.model): e.command for e in planned}))
    (given.page.parent / FIGURES).mkdir(exist_ok=True)
    for name, path in figures(given.output).items():
        shutil.copyfile(path, given.page.parent / FIGURES / name)
    print(f"written: {given.page}")


def measure(experiment: Experiment, output: Path) -> None:
    """Run a command in its folder of ``output``, unless that is done.

    Raises:
        SystemExit: when it fails.
    """
    folder = output / experiment.key
    finished = folder / "finished.json"
    made = {"command": experiment.command, "model_sha256": folder_sha256(model_folder(experiment.model))}
    if finished.exists():
        if made.items() <= json.loads(finished.read_text()).items():
            print(f"{experiment.key}: finished before")
            return
        shutil.rmtree(folder)
    print(f"{experiment.key}: {experiment.command}", flush=True)
    began = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    arguments = [*shlex.split(experiment.arguments), "-o", experiment.key]
    # where the folders are, for commands that read what others left
    run = subprocess.run([sys.executable, "-m", "dasc", *arguments], stdout=subprocess.DEVNULL, cwd=output)
    status = run.returncode
    # dasc tune ends with 1 when nothing is within the budget, which is a result
    if status not in ((0, 1) if experiment.name == "tune" else (0,)):
        raise SystemExit(f"{experiment.key} ended with status {status}")
    seconds = round(time.monotonic() - began)
    finished.write_text(json.dumps({**made, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
