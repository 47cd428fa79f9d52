"""Runs the tests of ``interpreted/``, each file in a process of its own with ``TRITON_INTERPRET=1``.

Kernels are interpreted or compiled for as long as a process lives, so both kinds of test cannot share one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[3]


def run(*arguments: str, interpret: bool = True) -> subprocess.CompletedProcess[str]:
    # nothing of this pytest, its workers and options is for the other one
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_INTERPRET"))}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_interpreted(name):
    result = run(str(FOLDER / name))
    assert result.returncode == 0, result.stdout + result.stderr


def test_they_are_not_collected_in_the_wrong_mode():
    result = run("--collect-only", str(FOLDER), interpret=False)
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, result.stdout + result.stderr
