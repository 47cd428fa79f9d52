"""Processes that stand for ranks: started once for each number of ranks, then given one job after another."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Processes fork from a server that has torch and the jobs loaded.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.jobs"])
JOB_S = 60


class Outcome(NamedTuple):
    """What a job returned on one rank, or what it raised, or that its process died."""

    value: Any = None
    error: str | None = None
    error_type: str | None = None
    trace: str = ""


def _serve(rank: int, world: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=JOB_S / 2)
    )
    while (task := pipe.recv()) is not None:
        job, arguments = task
        try:
            outcome = Outcome(job(rank, world, *arguments))
        except Exception as error:
            outcome = Outcome(None, str(error), type(error).__name__, traceback.format_exc())
        pipe.send(outcome)
    dist.destroy_process_group()


class Ranks:
    """``world`` processes in one gloo group."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory(prefix="dasc-ranks-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(rank, world, f"{self._folder.name}/rendezvous", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcomes(self, job: Callable[..., Any], *arguments: Any) -> list[Outcome]:
        """Run ``job(rank, world, *arguments)`` on every rank and say what became of it there."""
        for pipe in self._pipes:
            pipe.send((job, arguments))
        return [self._receive(pipe) for pipe in self._pipes]

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """As :meth:`outcomes`, for a job that must succeed everywhere: its results."""
        outcomes = self.outcomes(job, *arguments)
        for rank, outcome in enumerate(outcomes):
            assert outcome.error is None, f"rank {rank} of {self.world}: {outcome.error}\n{outcome.trace}"
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:
                continue  # that rank is dead already
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    @staticmethod
    def _receive(pipe: Connection) -> Outcome:
        try:
            if not pipe.poll(JOB_S):
                return Outcome(None, "no answer", "Hang")
            outcome: Outcome = pipe.recv()
            return outcome
        except EOFError:
            return Outcome(None, "the process died", "Died")
