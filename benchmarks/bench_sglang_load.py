"""Hit rate and time to first token of a multi-turn load in SGLang's real engine, on the CPU, at equal state memory.

    python -m benchmarks.bench_sglang_load --out build/sglang-load.json

Where SGLang and its stand-ins for CPU kernels are installed (``make test-sglang``). A tiny random model is served in
each arm, and the same conversations are played with five seeds: every client holds one conversation, more of them than
run at once, so each turn comes long after the one before it and finds its state only if that was kept.

All arms have the bytes of recurrent state that the dense arm has, running states included:

- ``dense``: SGLang as it is.
- ``int8``: SGLang's ``--enable-int8-mamba-checkpoint``. SGLang allocates that pool on top of the native one and
  charges it to nothing. Here the native pool is made smaller by as much: it keeps the three slots a running request
  that SGLang insists on, and the INT8 pool has the rest.
- ``nr``, ``wr``, ``nr int8``, ``nr two-tier``: the plugin, whose division of the same bytes is its own.

Reported per arm, over the seeds: slots, hit rate (cached of prompt tokens), tokens computed, mean TTFT. Queueing counts
in TTFT. On so small a model and CPU kernels written for clarity it says which way things go, not how far; on a busy
machine TTFT is noisy, hit rates hardly.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from dasc.geometry import DtypePolicy
from dasc.layout import RaggedLayout
from dasc.models import read_checkpoint
from dasc.planner import build_plan
from tests.sglang.engines import Answer, Conversations, Flush, Observe, Step, Turn, run
from tests.sglang.tiny_models import FAMILIES, VOCAB, write_model

RUNNING = 4
DENSE_SLOTS = 24
W_MAX = 64
F32 = DtypePolicy(torch.float32, torch.float32)
SERVER = {"max_total_tokens": 16384, "max_running_requests": RUNNING}
# the tests' checks of every step would be most of what is timed
UNCHECKED = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "0",
}
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Arm:
    """One configuration of the server.

    Attributes:
        name: in the table.
        env: the plugin's settings.
        arguments: of SGLang.
        cached_slot_bytes: of a slot of the extra pool, 0 without one.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    cached_slot_bytes: int = 0


class Budget:
    """State memory of every arm, and what a slot of each kind takes of it."""

    def __init__(self, model: Path) -> None:
        checkpoint = read_checkpoint(model)
        self.geometry = checkpoint.geometry
        self.dense_slot = self.geometry.dense_bytes(F32)
        self.total = (DENSE_SLOTS + 1) * self.dense_slot
        every = torch.ones(self.geometry.num_layers, self.geometry.units_per_layer, dtype=torch.bool)
        int8 = DtypePolicy(torch.float32, torch.float32, quantized="int8")
        self.int8_slot = RaggedLayout.from_mask(self.geometry, every, int8).slot_bytes
        [self.plan_slot] = (
            layout.slot_bytes for layout in build_plan(checkpoint, W_MAX, ranks=(), dtypes=F32).layouts()
        )
        [self.plan_int8_slot] = (
            layout.slot_bytes for layout in build_plan(checkpoint, W_MAX, ranks=(), dtypes=int8).layouts()
        )

    def arms(self) -> list[Arm]:
        native = 3 * RUNNING
        int8_slots = (self.total - (native + 1) * self.dense_slot) // self.int8_slot - 1
        int8 = {
            "enable_int8_mamba_checkpoint": True,
            "int8_mamba_ckpt_size": int8_slots,
            "max_mamba_cache_size": native,
        }
        on = {"DASC_PLAN": "auto", "DASC_W_MAX": str(W_MAX)}
        return [
            Arm("dense"),
            Arm("int8", arguments=int8, cached_slot_bytes=self.int8_slot),
            Arm("nr", on, cached_slot_bytes=self.plan_slot),
            Arm("wr", on | {"DASC_LOAD_POLICY": "wr"}, cached_slot_bytes=self.plan_slot),
            Arm("nr int8", on | {"DASC_INT8": "on"}, cached_slot_bytes=self.plan_int8_slot),
            Arm("nr two-tier", on | {"DASC_MODE": "two-tier"}, cached_slot_bytes=self.plan_slot),
        ]

    def used(self, arm: Arm, observed: Mapping[str, Any]) -> tuple[int, int]:
        """Slots of the extra pool, and bytes of both pools, as the server made them."""
        native, extra = observed["native_slots"], observed["checkpoint_slots"] or 0
        if "DASC_MODE" in arm.env:
            extra -= native  # there a pool's slots are the handles of both tiers
        extra_bytes = (extra + 1) * arm.cached_slot_bytes if extra else 0
        return extra, (native + 1) * self.dense_slot + extra_bytes


def conversations(seed: int, count: int, turns: int) -> list[list[Turn]]:
    """First prompts of 64 to 160 tokens, later ones of 8 to 32; 4 to 12 tokens are generated each."""
    rng = np.random.default_rng(seed)

    def turn(low: int, high: int) -> Turn:
        return Turn(rng.integers(3, VOCAB, rng.integers(low, high + 1)).tolist(), int(rng.integers(4, 13)))

    return [[turn(64, 160), *(turn(8, 32) for _ in range(turns - 1))] for _ in range(count)]


def measure(model: Path, budget: Budget, arm: Arm, seeds: int, count: int, turns: int) -> dict[str, Any]:
    """One arm's row: each seed on an empty cache of the same server."""
    warm = [Conversations(conversations(10_000, 2, 2)), Flush()]
    rounds: list[Step] = [
        step
        for seed in range(seeds)
        for step in (Conversations(conversations(seed, count, turns), concurrency=count), Observe(), Flush())
    ]
    arguments = {"max_mamba_cache_size": DENSE_SLOTS, **SERVER, **arm.arguments}
    served = run(model, [*warm, *rounds], env=UNCHECKED | dict(arm.env), timeout_s=TIMEOUT_S, **arguments)
    extra, used = budget.used(arm, served.observations[0])
    assert used <= budget.total, f"{arm.name} has {used} bytes of state, the budget is {budget.total}"
    answers = [[answer for talk in step for answer in talk] for step in served.answers[1:]]
    return {
        "arm": arm.name,
        "native_slots": served.observations[0]["native_slots"],
        "extra_slots": extra,
        "state_bytes": used,
        "hit_rate": [hit_rate(each) for each in answers],
        "computed_tokens": [sum(a.prompt_tokens - a.cached_tokens for a in each) for each in answers],
        "ttft_ms": [1e3 * statistics.mean(a.first_token_s for a in each) for each in answers],
    }


def hit_rate(answers: list[Answer]) -> float:
    return sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)


def table(family: str, rows: list[dict[str, Any]], budget: Budget) -> Table:
    title = f"{family}: {budget.total / 1024:.0f} KiB of state in every arm, {RUNNING} requests at once"
    shown = Table("arm", "native", "extra", "hit rate", "computed", "mean TTFT ms", title=title, box=box.SIMPLE)
    for row in rows:
        hits, computed, ttft = (row[name] for name in ("hit_rate", "computed_tokens", "ttft_ms"))
        shown.add_row(
            row["arm"],
            str(row["native_slots"]),
            str(row["extra_slots"]),
            spread(hits, ".3f"),
            spread(computed, ",.0f"),
            spread(ttft, ",.0f"),
        )
    return shown


def spread(values: list[float], form: str) -> str:
    """Mean and sample standard deviation over seeds."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{form}} ± {deviation:{form}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="kimi-linear")
    parser.add_argument("--arms", nargs="+", help="these arms only")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=14, help="clients, one conversation each")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines are sessions of their own: end them first
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(arguments.family, Path(folder) / "model")
        budget = Budget(model)
        arms = {arm.name: arm for arm in budget.arms()}
        rows = []
        for name in arguments.arms or arms:
            started = time.perf_counter()
            rows.append(measure(model, budget, arms[name], arguments.seeds, arguments.conversations, arguments.turns))
            hits, seconds = spread(rows[-1]["hit_rate"], ".3f"), time.perf_counter() - started
            print(f"{name}: hit rate {hits}, {seconds:.0f} s", file=sys.stderr, flush=True)
    console.print(table(arguments.family, rows, budget))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"family": arguments.family, "arms": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
