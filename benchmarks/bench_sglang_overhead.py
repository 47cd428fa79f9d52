"""What the plugin adds to an insertion and to a hit, against SGLang's dense states and its INT8 pool, on the CPU.

    python -m benchmarks.bench_sglang_overhead --out build/sglang-overhead.json

Where SGLang and its stand-ins for CPU kernels are installed (``make test-sglang``). Two tables:

1. Host work. SGLang's own cache, as its fixtures build it, serves requests that extend a cached prefix: the *hit* is
   everything from matching to the loaded state, the *insertion* is finishing the request, with an eviction once the
   pool is full. States are tiny, so what is timed is Python and launches. The forward is left out.
2. Moving a state. One checkpoint of a tensor-parallel rank of eight, Kimi-Linear's and Qwen3-Next's true size, stored
   and loaded: SGLang's copy of a dense state, its INT8 pool, the plugin's pool. A dense insertion of a finished request
   hands its slot over and moves nothing; the copy is what an unfinished one and every hit cost.

The arms take turns within each round; figures are medians over rounds, and ratios are medians of the rounds' ratios.
A refreshed hit (WR) costs a short forward besides: see ``bench_sglang_load``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tests.sglang import engines

WARM_REQUESTS = 40  # enough to fill the fixture's pools
REQUESTS = 40


def host_work(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round's median hit and insertion, by operation and arm."""
    from tests.sglang.cache_driver import Driver
    from tests.sglang.cache_settings import all_settings

    class Untested(Driver):
        """Without the driver's own states and checks."""

        def _write(self, slot: int, tokens: object) -> None:
            pass

        def check_restored(self, running: object) -> None:
            pass

    settings = all_settings()[:3]
    assert [setting.arm for setting in settings] == ["dense", "int8", "compressed-only"]
    seconds: dict[str, dict[str, list[float]]] = {what: {} for what in ("hit", "insertion")}
    for _ in range(rounds):
        for setting in settings:
            driver = Untested(setting)
            try:
                hits, insertions = play(driver)
            finally:
                driver.close()
            arm = "dasc" if setting.arm == "compressed-only" else setting.arm
            seconds["hit"].setdefault(arm, []).append(statistics.median(hits))
            seconds["insertion"].setdefault(arm, []).append(statistics.median(insertions))
    return seconds


def play(driver: Any) -> tuple[list[float], list[float]]:
    """Requests that each extend the same cached prefix."""
    prefix = driver.new_tokens(8)
    driver.finish(driver.start(prefix))
    hits, insertions = [], []
    for number in range(WARM_REQUESTS + REQUESTS):
        started = time.perf_counter()
        running = driver.start(prefix + driver.new_tokens(1))
        loaded = time.perf_counter()
        driver.finish(running)
        if number >= WARM_REQUESTS:
            hits.append(loaded - started)
            insertions.append(time.perf_counter() - loaded)
        assert running.hit_tokens == len(prefix)
    return hits, insertions


def moves(model: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of one store and one load of a checkpoint, by operation and arm."""
    import torch

    from benchmarks.gpu import sglang_pools as pools

    geometry = pools.MODELS[model].shard(8)
    states = pools.running_states(geometry, 2, seed=0)
    source, target, slot = (torch.tensor([number]) for number in (1, 2, 1))
    int8 = pools.sglang_int8_pool(geometry, 1)
    ours = pools.compressed_pool(geometry, 1, kept=pools.KEPT, quantized=None)
    calls: dict[str, dict[str, Callable[[], object]]] = {
        "store": {
            "dense": lambda: states.copy_from(source, target),
            "int8": lambda: int8.store_from_active(states, source, slot),
            "dasc": lambda: ours.store_from_active(states, source, slot),
        },
        "load": {
            "dense": lambda: states.copy_from(source, target),
            "int8": lambda: int8.load_to_active(states, slot, target),
            "dasc": lambda: ours.load_to_active(states, slot, target),
        },
    }
    seconds: dict[str, dict[str, list[float]]] = {what: {arm: [] for arm in arms} for what, arms in calls.items()}
    for number in range(rounds + 1):
        for what, arms in calls.items():
            for arm, call in arms.items():
                started = time.perf_counter()
                call()
                if number:  # the first round touches memory for the first time
                    seconds[what][arm].append(time.perf_counter() - started)
    return seconds


def table(title: str, seconds: Mapping[str, Mapping[str, list[float]]]) -> Table:
    arms = ("dense", "int8", "dasc")
    shown = Table("", *(f"{arm} us" for arm in arms), "dasc/dense", "dasc/int8", title=title, box=box.SIMPLE)
    for what, by_arm in seconds.items():
        times = [f"{1e6 * statistics.median(by_arm[arm]):,.0f}" for arm in arms]
        ratios = [statistics.median(a / b for a, b in zip(by_arm["dasc"], by_arm[arm])) for arm in arms[:2]]
        shown.add_row(what, *times, *(f"{ratio:.2f}" for ratio in ratios))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write every round's times to this JSON file, in seconds")
    arguments = parser.parse_args()
    os.environ |= engines.ENVIRONMENT
    warnings.filterwarnings("ignore", module="sglang")
    sys.path.insert(0, str(engines.STANDINS))
    import sitecustomize  # noqa: F401 - what Python would have read at start

    measured = {"host work": host_work(arguments.rounds)}
    for model in ("kimi_linear", "qwen3_next"):
        measured[f"one checkpoint of {model}, a rank of 8"] = moves(model, arguments.rounds)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for title, seconds in measured.items():
        console.print(table(title, seconds))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
