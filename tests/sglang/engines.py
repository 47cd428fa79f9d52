"""Runs of SGLang's real engine, each in a process session of its own, one at a time on a machine."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from dasc.sglang.refusing import EXIT_STATUS
from tests.sglang.observing import mark_of

ROOT = Path(__file__).parents[2]
STANDINS = Path(__file__).parent / "standins"
TIMEOUT_S = 300

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles for 20 seconds
    "OMP_NUM_THREADS": "1",
    # a leak or a broken tree ends the server instead of being logged
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
ARGUMENTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,
    "page_size": 1,
    "mamba_radix_cache_strategy": "no_buffer",
    "mem_fraction_static": 0.2,
    "max_total_tokens": 8192,
    "max_running_requests": 4,
    "max_mamba_cache_size": 32,
    "random_seed": 0,
}


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: its prompt is all that came before, answers included, and ``tokens``.

    Attributes:
        tokens: new token ids.
        new_tokens: to generate.
        top_logprobs: log-probabilities to return for each generated token, the likeliest first.
        abort_after: abort the request once so many tokens are there.
        prompt_logprobs_from: return log-probabilities of the prompt too, from this one of ``tokens`` on.
    """

    tokens: Sequence[int]
    new_tokens: int = 8
    top_logprobs: int = 0
    abort_after: int | None = None
    prompt_logprobs_from: int | None = None


@dataclass(frozen=True)
class Conversations:
    """Conversations, played by ``concurrency`` clients."""

    conversations: Sequence[Sequence[Turn]]
    concurrency: int = 1


@dataclass(frozen=True)
class Flush:
    """Empty the cache, and fail unless that was done."""

    flush: bool = True


@dataclass(frozen=True)
class Observe:
    """Have every rank say what its pools and its tree hold."""

    observe: bool = True


Step = Conversations | Flush | Observe


@dataclass(frozen=True)
class Answer:
    """What a request was answered.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: of them, served from the cache.
        tokens: generated.
        finish: why it ended, ``"length"`` or ``"abort"``.
        top_logprobs: ``(token, log-probability)`` for each generated token, the likeliest first.
        prompt_logprobs: log-probability of each prompt token that was asked for.
        first_token_s: seconds from the request to its first token.
    """

    prompt_tokens: int
    cached_tokens: int
    tokens: list[int]
    finish: str
    top_logprobs: list[list[tuple[int, float]]] = field(repr=False)
    prompt_logprobs: list[float] = field(repr=False)
    first_token_s: float = field(compare=False)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        answers: for each step with conversations, the answers by conversation and turn.
        log: standard output and standard error of all processes.
        status: exit status of the main process; negative for a signal.
    """

    answers: list[list[list[Answer]]]
    log: str = field(repr=False)
    status: int

    @property
    def observations(self) -> list[dict[str, Any]]:
        """What the ranks said when asked to :class:`Observe`, in the order said."""
        return self.said("ENGINE")

    def said(self, observer: str) -> list[dict[str, Any]]:
        """What an observer of the tests saw on any rank, in the order said."""
        mark = mark_of(observer)
        return [json.loads(line.split(mark, 1)[1]) for line in self.log.splitlines() if mark in line]

    def refused(self) -> str:
        """The reason for which dasc stopped the server: one line, alike from all ranks that told it, and no failure.

        It is not always the last line: processes that SGLang is still starting go on to log until they are ended.
        """
        assert (self.status, self.answers) == (EXIT_STATUS, []), self.log
        [reason] = {line for line in self.log.splitlines() if line.startswith("dasc: ")}
        assert "Traceback" not in self.log.split(reason)[-1]
        return reason


class EngineError(Exception):
    """A run that did not end well, with the end of its log."""


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine: this process's own with stand-ins, and of dasc's settings ``more`` alone."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DASC_")}
    path = os.pathsep.join([str(STANDINS), str(ROOT)])
    return inherited | ENVIRONMENT | {"PYTHONPATH": path} | dict(more or {})


def run(
    model: Path,
    steps: Sequence[Step],
    *,
    env: Mapping[str, str] | None = None,
    may_fail: bool = False,
    timeout_s: float = TIMEOUT_S,
    **arguments: Any,
) -> Run:
    """Serve ``model`` and play ``steps``.

    Args:
        model: folder of the model.
        steps: played one after the other.
        env: environment variables besides.
        may_fail: return a run with another exit status than 0 instead of raising.
        timeout_s: seconds for all of it.
        arguments: of ``sglang.Engine``, over those of :data:`ARGUMENTS`.

    Raises:
        EngineError: when the engine does not start, fails, or takes longer than ``timeout_s``.
    """
    script = {
        "arguments": {**ARGUMENTS, "model_path": str(model), **arguments},
        "steps": [dataclasses.asdict(step) for step in steps],
    }
    with tempfile.TemporaryDirectory() as folder, one_at_a_time():
        source, target, log = (Path(folder) / name for name in ("script.json", "answers.json", "log.txt"))
        source.write_text(json.dumps(script))
        process = _forks().Process(target=_serve, args=(source, target, log, environment(env)))
        with mock.patch.dict(os.environ, environment(), clear=True):
            process.start()
        try:
            process.join(timeout_s)
        finally:
            status = _end(process)
        text = log.read_text(errors="replace")
        if status != 0 and not may_fail:
            raise EngineError(f"the engine ended with status {status}; the end of its log:\n{text[-6000:]}")
        results = json.loads(target.read_text()) if target.exists() else []
    answers = [[[Answer(**turn) for turn in turns] for turns in step] for step in results if step is not None]
    return Run(answers, text, status)


@functools.cache
def _forks() -> multiprocessing.context.ForkServerContext:
    """Engines fork from a process that has SGLang imported already, which takes ten seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.sglang.engine_process"])
    return context


def _serve(source: Path, target: Path, log: Path, env: Mapping[str, str]) -> None:
    """Become the engine's main process, as one that was started with this environment would be."""
    os.setsid()  # a failing engine kills its whole process group
    with open(log, "wb") as stream, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    sys.path[:0] = [folder for folder in env["PYTHONPATH"].split(os.pathsep) if folder not in sys.path]
    status = 1
    try:
        from tests.sglang import engine_process

        engine_process.main(source, target)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # a forked process would wait for SGLang's other ones instead of ending them


def _end(process: multiprocessing.context.ForkServerProcess) -> int:
    """End what is left of the session, were it without its leader, and return the leader's exit status."""
    if process.is_alive():
        process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return process.exitcode


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """An engine takes a core or two even when several tests run side by side."""
    lock = os.open(Path(tempfile.gettempdir()) / "sglang.lock", os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
