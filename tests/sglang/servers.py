"""SGLang's real server, in a process session of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.engines import ROOT, environment, one_at_a_time

STARTUP_S = 300


@contextmanager
def served(model: Path, log: Path, env: Mapping[str, str], arguments: Mapping[str, Any]) -> Iterator[str]:
    """The address of a server of ``model`` that is up; it is ended in the end.

    Args:
        model: folder.
        log: file for what it says.
        env: the plugin's settings.
        arguments: of SGLang, by the names that its engine has for them.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--model-path", str(model), "--port", str(port), "--enable-metrics"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    with one_at_a_time(), open(log, "wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *flags],
            cwd=ROOT,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{port}"
        try:
            _wait_until_up(address, process, log)
            yield address
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_up(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTUP_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(address + "/health", timeout=30).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not come up; the end of its log:\n{log.read_text(errors='replace')[-4000:]}")
