"""Where the trace of real traffic lies, for tests that need it. It is never part of the repository."""

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).parents[2].parent / "shared" / "traces" / "conversation_6000.jsonl"
TRACE = Path(os.environ.get("DASC_TRACE", _BESIDE))

needs_trace = pytest.mark.skipif(
    not TRACE.is_file(), reason="no trace: set DASC_TRACE to conversation_6000.jsonl of the Mooncake traces"
)
