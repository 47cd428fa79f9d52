"""Who may import whom, read from the import statements, and what importing dasc may load, tried in a fresh process."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dasc

ROOT = Path(dasc.__file__).parent

# A room may import the rooms of its own rank only where it is itself, and anything of a lower rank.
RANK = {
    "units": 0,
    "geometry": 0,
    "placement": 1,
    "layout": 2,
    "accounting": 3,
    "contract": 3,
    "plan": 4,
    "models": 5,
    "reference": 6,
    "fast": 6,
    "cache": 6,
    "magnitudes": 6,
    "planner": 7,
    "sglang": 8,
    "eval": 8,
    "cli": 9,
    "__main__": 10,
}
# third-party packages that only one room may import
ONLY_IN = {"sglang": "sglang", "triton": "fast/triton", "click": "cli", "transformers": None, "tests": None}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports_of(source: str) -> set[str]:
    """Absolute dotted names that a module imports, type-checking blocks included."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(relative: str, source: str) -> list[str]:
    room = relative.split("/")[0].removesuffix(".py")
    if room == "__init__":
        return []
    found = []
    for name in imports_of(source):
        top, _, rest = name.partition(".")
        if top == "dasc":
            other = rest.split(".")[0]
            if other.startswith("__") or other == room:
                continue
            if RANK[other] >= RANK[room]:
                found.append(f"{relative} imports dasc.{other}")
        elif top in ONLY_IN and not (ONLY_IN[top] and relative.startswith(ONLY_IN[top])):
            found.append(f"{relative} imports {top}")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_each_module_imports_only_rooms_below_it(path: Path):
    assert violations(path.relative_to(ROOT).as_posix(), path.read_text()) == []


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("reference/gates.py", "from dasc.fast import chunk_gdn"),
        ("fast/cpu.py", "import dasc.reference.chunk"),
        ("cache/radix.py", "from dasc.reference import pack"),
        ("models/hybrid.py", "def f():\n    from dasc.reference import chunk_gdn"),
        ("plan.py", "from dasc.models import Checkpoint"),
        ("cache/engine.py", "import sglang.srt"),
        ("fast/cpu.py", "import triton"),
        ("models/hub.py", "from transformers import AutoConfig"),
        ("reference/chunk.py", "from tests.inputs import REGIMES"),
    ],
)
def test_a_forbidden_import_is_seen(relative: str, source: str):
    assert violations(relative, source) != []


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_importing_dasc_and_every_public_name_needs_neither_triton_nor_sglang_nor_transformers():
    blocked = "\n".join(f"import sys; sys.modules[{name!r}] = None" for name in ("triton", "sglang", "transformers"))
    loaded_after(f"{blocked}\nfrom dasc import *")


def test_the_command_line_shows_help_without_loading_torch():
    code = (
        "import sys, contextlib\nfrom dasc.cli.main import main\nsys.argv = ['dasc', '--help']\n"
        "with contextlib.suppress(SystemExit): main()"
    )
    assert "torch" not in loaded_after(code)
    assert "torch" in loaded_after("from dasc.geometry import StateGeometry")  # the check itself can fail


def test_public_names_are_all_there():
    assert dasc.__all__ == sorted(dasc.__all__)
    for name in dasc.__all__:
        assert getattr(dasc, name) is not None
    assert set(dasc.__all__) <= set(dir(dasc))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dasc.nonsense  # noqa: B018
