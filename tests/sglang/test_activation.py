"""The plugin is on when asked for, off when not, and stops the server with one line when it cannot be on."""

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import sglang
from sglang.srt import plugins

from dasc.sglang import targets
from dasc.sglang.refusing import EXIT_STATUS
from tests.sglang import runs
from tests.sglang.engines import Conversations, Turn, environment, run

PACKAGE = Path(sglang.__file__).parent
HIT = [Conversations([[Turn(list(range(5, 40)), 2), Turn([7], 2)]])]


def load(env: Mapping[str, str], more: str = "", path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Load SGLang's plugins in a fresh process, then do more. ``path`` comes before the installed packages."""
    environ = environment(env)
    if path is not None:
        environ["PYTHONPATH"] = f"{path}:{environ['PYTHONPATH']}"
    code = f"import sys\nfrom sglang.srt.plugins import load_plugins\nload_plugins()\n{more}\nprint('served')"
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=200)


def test_without_a_plan_nothing_is_hooked_and_nothing_of_dasc_is_loaded():
    done = load(
        {"DASC_W_MAX": "nonsense"},
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "assert not [h for hooks in HookRegistry._hooks.values() for _, h, s in hooks if s.plugin_name == 'dasc']\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'dasc'))\n",
    )
    assert done.returncode == 0, done.stderr
    assert "['dasc', 'dasc.sglang', 'dasc.sglang.plugin']" in done.stdout


def test_with_a_plan_every_hook_is_in_place_and_one_that_is_not_is_noticed():
    done = load(
        {"DASC_PLAN": "auto"},
        "import pkgutil\nfrom dasc.sglang import plugin, targets\n"
        "hooks = plugin.serving.hooks\ntargets.check_hooks(hooks)\n"
        "from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator as K\n"
        "hooked, K._handle_max_mamba_cache = K._handle_max_mamba_cache, K._handle_max_mamba_cache.__wrapped__\n"
        "try:\n    targets.check_hooks(hooks)\nexcept ValueError as error:\n    print(error)\n"
        # another plugin's wrapper around ours is no harm
        "import functools\nK._handle_max_mamba_cache = functools.wraps(hooked)(lambda *a: hooked(*a))\n"
        "targets.check_hooks(hooks)\n",
    )
    assert done.returncode == 0, done.stderr
    assert f"SGLang did not apply the hooks on {targets.SIZE_POOL}: its log says why" in done.stdout


def doctored(folder: Path, module: str, old: str, new: str) -> Path:
    """SGLang as installed, by symbolic links, but for one file in which ``old`` is ``new``."""
    place, source = folder / "sglang", PACKAGE
    for part in module.split("/"):
        place.mkdir()
        for entry in source.iterdir():
            if entry.name not in (part, "__pycache__"):
                (place / entry.name).symlink_to(entry)
        place, source = place / part, source / part
    text = source.read_text()
    assert old in text
    place.write_text(text.replace(old, new))
    return folder


POOL = "srt/mem_cache/mamba_checkpoint_pool.py"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (
            "def maybe_init_int8_mamba_checkpoint_pool(",
            "def maybe_init_mamba_checkpoint_pool(",
            f"{targets.MAKE_POOL} is missing",
        ),
        (
            "def load_to_active(self, active_mamba_pool, ckpt_slots, active_slots)",
            "def load_to_active(self, active_mamba_pool, active_slots, ckpt_slots)",
            "MambaCheckpointPool.load_to_active takes (self, active_mamba_pool, active_slots, ckpt_slots), not "
            "(self, active_mamba_pool, ckpt_slots, active_slots)",
        ),
    ],
    ids=["renamed", "another signature"],
)
def test_an_sglang_with_one_target_changed_is_refused_in_one_line(tmp_path: Path, old: str, new: str, complaint: str):
    done = load({"DASC_PLAN": "auto"}, path=doctored(tmp_path, POOL, old, new))
    assert (done.returncode, done.stdout) == (EXIT_STATUS, "")
    *before, line = done.stderr.splitlines()
    assert not [other for other in before if other.startswith("dasc: ")]
    version = importlib.metadata.version("sglang")
    assert f"this is SGLang {version}, dasc supports {', '.join(targets.SUPPORTED)}" in line
    assert complaint in line


def test_the_installed_sglang_is_supported_and_has_every_target():
    assert importlib.metadata.version("sglang") in targets.SUPPORTED
    targets.check_targets()


def test_every_change_of_a_target_is_told_at_once():
    changed = {**targets.TARGETS, "sglang.srt.nowhere.f": (), targets.PREPARE: ("self",)}
    with pytest.raises(ValueError, match=rf"{re.escape(targets.PREPARE)} takes .*; sglang\.srt\.nowhere\.f is missing"):
        targets.check_targets(changed)


@pytest.mark.parametrize(
    ("env", "complaint"),
    [
        (
            {"DASC_PLAN": "auto", "DASC_WMAX": "8"},
            "unknown variable DASC_WMAX in the environment; did you mean DASC_W_MAX?",
        ),
        (
            {"DASC_PLAN": "auto", "DASC_W_MAX": "8 tokens"},
            "DASC_W_MAX must be a whole number of at least 4, got '8 tokens'",
        ),
    ],
)
def test_a_wrong_configuration_ends_what_loads_the_plugins(
    env: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """An ``Exception`` would only be logged by SGLang, and the server go on without compression."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(plugins.HookRegistry, "apply_hooks", lambda: pytest.fail("the server went on"))
    with pytest.raises(SystemExit) as ended:
        plugins.load_plugins()
    assert ended.value.code == EXIT_STATUS
    assert capsys.readouterr().err.splitlines()[-1] == f"dasc: {complaint}"


REFUSED = [
    pytest.param(
        {},
        {"enable_hierarchical_cache": True},
        "DASC_PLAN and --enable-hierarchical-cache (here True) cannot be used together: host copies are of whole",
        id="an argument, before any scheduler starts",
    ),
    pytest.param(
        {"DASC_POOL": "1000"},
        {},
        "DASC_POOL must be from 1 to ",
        id="a size, by a scheduler",
    ),
]


@pytest.mark.parametrize(("env", "arguments", "complaint"), REFUSED)
def test_what_cannot_be_served_stops_the_engine_with_one_line(
    env: dict[str, str], arguments: dict[str, object], complaint: str
):
    ended = run(runs.model("qwen3-next"), HIT, env={"DASC_PLAN": "auto", **env}, may_fail=True, **arguments)
    assert complaint in ended.refused()
