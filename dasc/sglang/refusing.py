"""Stopping the server with one line. SGLang logs any ``Exception`` of a plugin and goes on without it."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

EXIT_STATUS = os.EX_CONFIG
"""By which SGLang's main process knows that a scheduler stopped for a reason already told."""


def refuse(reason: object) -> NoReturn:
    """Write one line to standard error and leave this process with :data:`EXIT_STATUS`.

    Raises:
        SystemExit: always.
    """
    # one write: ranks share the stream
    sys.stderr.write(f"dasc: {' '.join(str(reason).split())}\n")
    sys.stderr.flush()
    raise SystemExit(EXIT_STATUS)
