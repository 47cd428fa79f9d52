"""The host logic knows no tensor and no model: it needs neither torch nor any other room of dasc."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dasc.cache

ROOT = Path(dasc.cache.__file__).parent
HOST = [
    "__init__",
    "checkpoints",
    "config",
    "counters",
    "entries",
    "explain",
    "integrity",
    "lease",
    "ledger",
    "lru",
    "metrics",
    "packing",
    "pools",
    "prefix_cache",
    "radix",
    "tiers",
    "transfers",
]


def imported(module: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


@pytest.mark.parametrize("module", HOST)
def test_only_the_standard_library_numpy_and_host_logic_are_imported(module):
    for name in imported(module):
        if name.startswith("dasc"):
            assert name.removeprefix("dasc.cache.") in HOST
        else:
            assert name.split(".")[0] not in ("torch", "transformers", "sglang", "triton")


def test_importing_the_cache_loads_no_torch():
    code = "import sys, dasc.cache, dasc.cache.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("module", ["pools", "lru", "packing", "tiers", "transfers", "entries", "counters"])
def test_the_tier_policy_knows_no_tree(module):
    """A server with a radix tree of its own uses the policy alone."""
    assert not {"dasc.cache.radix", "dasc.cache.ledger", "dasc.cache.prefix_cache"} & imported(module)
