"""Stopping the server with one line. SGLang logs any ``Exception`` of a plugin and goes on without it."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

EXIT_STATUS = os.EX_CONFIG
"""By which SGLang's main process knows that a scheduler stopped for a reason already told."""


def refuse(reason: object) -> NoReturn:
    """Write one line to standard error and leave this process with :data:`EXIT_STATUS`. Not for a scheduler that runs.

    Raises:
        SystemExit: always.
    """
    _say(reason)
    raise SystemExit(EXIT_STATUS)


def stop(reason: object) -> NoReturn:
    """Write one line to standard error and end this scheduler at once, with :data:`EXIT_STATUS`.

    Nothing is unwound: SGLang's and torch's own endings may wait for ranks that are gone, and the main process for this
    one. A controller of data-parallel replicas waits for a scheduler's message without looking whether it lives, so it
    gets the signal that SGLang's schedulers send when they fail.
    """
    from sglang.srt.runtime_context import get_parallel

    _say(reason)
    sys.stdout.flush()
    if get_parallel().num_dp_ranks > 1:
        os.kill(os.getppid(), signal.SIGQUIT)
    os._exit(EXIT_STATUS)


def _say(reason: object) -> None:
    # one write: ranks share the stream
    sys.stderr.write(f"dasc: {' '.join(str(reason).split())}\n")
    sys.stderr.flush()
