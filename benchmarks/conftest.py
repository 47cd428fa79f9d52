"""How much the suites run: ``--size smoke`` (everything once, small), ``usual`` (``make bench``) or ``long``."""

from collections.abc import Iterator

import pytest
import torch

THREADS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--size", choices=("smoke", "usual", "long"), default="usual", help="how much to run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "usual: left out of a smoke run")
    config.addinivalue_line("markers", "long: takes minutes or much memory, run with --size long alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {"smoke": {"usual", "long"}, "usual": {"long"}, "long": set()}[config.getoption("size")]
    kept = [item for item in items if not left_out & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture(scope="session")
def smoke(pytestconfig: pytest.Config) -> bool:
    """Sizes are to be small: the run only shows that the suites work."""
    return pytestconfig.getoption("size") == "smoke"


@pytest.fixture
def threads(smoke: bool) -> Iterator[None]:
    """Torch threads of suites about whole operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if smoke else THREADS)
    yield
    torch.set_num_threads(before)
