"""Only where SGLang is installed, and dasc beside it (``make test-sglang``), are the tests of this folder collected."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator

import pytest

from tests.sglang import engines

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["*"]
else:
    # for SGLang's fixtures, which run in this process; engines have processes of their own
    os.environ |= engines.ENVIRONMENT
    sys.path.insert(0, str(engines.STANDINS))
    import sitecustomize  # noqa: F401 - what Python would have read at start


def pytest_configure(config: pytest.Config) -> None:
    """SGLang warns of kernels that a CPU does not have."""
    config.addinivalue_line("filterwarnings", "ignore::UserWarning:sglang")


@pytest.fixture(scope="session", autouse=True)
def _dasc_is_installed() -> None:
    """Without its entry point SGLang would not find the plugin, and each test would see plain SGLang."""
    points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    assert "dasc" in points.names, "dasc is not installed beside SGLang: pip install --no-deps -e ."


@pytest.fixture
def unwinding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What ends a scheduler at once is a ``SystemExit`` here."""
    from sglang.srt.runtime_context import get_parallel

    monkeypatch.setattr(os, "_exit", sys.exit)
    with get_parallel().override(num_dp_ranks=1):
        yield
