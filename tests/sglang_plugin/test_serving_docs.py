"""docs/serving.md names everything that the plugin has, and nothing that it has not."""

import re
from pathlib import Path

import pytest

from dasc.cache.counters import LABELS
from dasc.sglang import arguments
from dasc.sglang.config import _PARSERS, FILE_VARIABLE, Config, read_config

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
VARIABLES = {f"DASC_{name.upper()}" for name in _PARSERS} | {FILE_VARIABLE}
# of dasc's own engine alone, as the page says
UNUSED = {"requests", "prompt_tokens", "hit_tokens", "unserved_kv_tokens", "failed_loads", "evicted_kv_pages"} | {
    "unserved_junctions",
    "clock_errors",
}


def launches() -> list[dict[str, str]]:
    """The plugin's settings of every command that starts a server with a balanced or unbalanced plan."""
    lines = re.findall(r"^    (DASC_PLAN=.*?) \\$", TEXT, re.MULTILINE)
    return [dict(setting.split("=") for setting in line.split()) for line in lines]


def test_every_variable_is_in_the_table_and_no_other_is_named():
    assert set(re.findall(r"^\| `(DASC_\w+)`", TEXT, re.MULTILINE)) >= VARIABLES
    assert set(re.findall(r"DASC_[A-Z_0-9]+[A-Z0-9]", TEXT)) == VARIABLES


def test_every_argument_that_is_refused_is_named():
    exclusions = (
        *arguments.EXCLUSIONS,
        *arguments.REFRESH_EXCLUSIONS,
        *arguments.HYBRID_EXCLUSIONS,
    )
    assert [x.argument for x in exclusions if f"`--{x.argument.replace('_', '-')}`" not in TEXT] == []


def test_every_metric_is_explained():
    from dasc.cache.counters import Counters

    names = [name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name for name in Counters().as_dict()]
    for name in set(names) - UNUSED:
        assert f"`dasc_cache_{name}_total`" in TEXT
    assert set(re.findall(r"`dasc_cache_(\w+)_total`", TEXT)) == set(names) - UNUSED
    rows = re.findall(r"^\| `dasc_cache_(\w+)_total` \| `(\w+)` \|", TEXT, re.MULTILINE)
    assert dict(rows) == {name: label for name, label in LABELS.items() if name not in UNUSED}


def test_the_commands_are_the_authors_operating_points():
    points = [(x["DASC_W_MAX"], x["DASC_PLACEMENT"], x["DASC_MODE"]) for x in launches()]
    assert points == [("16", "off", "two-tier"), ("64", "storage", "two-tier"), ("64", "off", "two-tier")]


@pytest.mark.parametrize("settings", launches(), ids=str)
def test_the_settings_of_the_commands_are_valid(settings: dict[str, str]):
    assert isinstance(read_config(settings), Config)
