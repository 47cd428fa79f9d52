import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.placement import PLACEMENT_MODES
from dasc.sglang.config import Config, PoolSize, read_config

ON = {"DASC_PLAN": "auto"}


@pytest.mark.parametrize("environ", [{}, {"DASC_PLAN": ""}, {"DASC_W_MAX": "nonsense"}, {"DASC_NONSENSE": "1"}])
def test_without_a_plan_or_a_file_the_plugin_is_off_whatever_else_is_set(environ: dict[str, str]):
    assert read_config(environ) is None


def test_what_is_not_set_has_its_default():
    assert read_config({"DASC_PLAN": "/some/plan.dasc", "PATH": "/bin"}) == Config(plan="/some/plan.dasc")


SETTINGS = [
    ("DASC_W_MAX", "64", "w_max", 64),
    ("DASC_LOAD_POLICY", "nr", "load_policy", "nr"),
    ("DASC_PLACEMENT", "off", "placement", "off"),
    ("DASC_LAYOUT", "padded", "layout", "padded"),
    ("DASC_INT8", "1", "int8", True),
    ("DASC_INT8", "Off", "int8", False),
    ("DASC_INT4", "on", "int4", True),
    ("DASC_MODE", "compressed-only", "mode", "compressed-only"),
    ("DASC_POOL", "auto", "pool", PoolSize()),
    ("DASC_POOL", "256", "pool", PoolSize(slots=256)),
    ("DASC_POOL", "1.5GiB", "pool", PoolSize(pool_bytes=3 << 29)),
    ("DASC_POOL", "64 B", "pool", PoolSize(pool_bytes=64)),
    ("DASC_LOG_INTERVAL", "0.5", "log_interval", 0.5),
]


@pytest.mark.parametrize(("variable", "text", "name", "value"), SETTINGS)
def test_each_variable_sets_its_field(variable: str, text: str, name: str, value: Any):
    config = read_config({**ON, variable: text})
    assert config is not None
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


def test_a_refresh_can_be_kept_to_two_passes():
    config = read_config({**ON, "DASC_LOAD_POLICY": "wr", "DASC_REFRESH": "two-pass"})
    assert config == Config(plan="auto", load_policy="wr", refresh="two-pass")


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("DASC_W_MAX", "3", "a whole number of at least 4"),
        ("DASC_W_MAX", "sixteen", "a whole number of at least 4"),
        ("DASC_W_MAX", "", "a whole number of at least 4"),
        ("DASC_W_MAX", "16.0", "a whole number of at least 4"),
        ("DASC_W_MAX", str(1 << 41), "a whole number of at least 4"),
        ("DASC_LOAD_POLICY", "wrr", "one of nr, wr"),
        ("DASC_PLACEMENT", "tp", "one of off, storage, hybrid"),
        ("DASC_LAYOUT", "Ragged", "one of ragged, padded"),
        ("DASC_INT8", "int8", "on or off"),
        ("DASC_INT4", "4", "on or off"),
        ("DASC_MODE", "two tier", "one of two-tier, compressed-only"),
        ("DASC_POOL", "0", "slots \\(256\\), bytes with a unit \\(2GiB\\) or auto"),
        ("DASC_POOL", "-1", "slots"),
        ("DASC_POOL", "12 parsecs", "slots"),
        ("DASC_SPILL", "2", "on or off"),
        ("DASC_WATERMARK", "-1", "a whole number of at least 0"),
        ("DASC_REFRESH", "one-pass", "one of auto, two-pass"),
        ("DASC_LOG_INTERVAL", "nan", "seconds, 0.1 or more"),
        ("DASC_LOG_INTERVAL", "-1", "seconds, 0.1 or more"),
        ("DASC_LOG_INTERVAL", "1e-9", "seconds, 0.1 or more"),
        ("DASC_LOG_INTERVAL", "inf", "seconds, 0.1 or more"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_says_what_was_expected_and_what_came(
    variable: str, text: str, expected: str
):
    with pytest.raises(ValueError, match=f"^{variable} must be .*{expected}.*, got {text!r}$"):
        read_config({**ON, variable: text})


@given(st.text(max_size=30))
def test_any_text_is_a_pool_size_or_an_error_in_one_line(text: str):
    refusal = None
    try:
        config = read_config({**ON, "DASC_POOL": text})
    except ValueError as error:
        refusal = str(error)
    if refusal is None:
        assert config is not None
        assert config.pool.slots is None or config.pool.slots >= 1
    else:
        assert refusal.startswith("DASC_POOL must be")
        assert len(refusal.splitlines()) == 1


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [("DASC_WMAX", "DASC_W_MAX"), ("DASC_LOADPOLICY", "DASC_LOAD_POLICY"), ("DASC_CONFIGURATION", "DASC_CONFIG")],
)
def test_an_unknown_variable_is_an_error_with_the_nearest_name(variable: str, nearest: str):
    with pytest.raises(ValueError, match=f"unknown variable {variable} .*; did you mean {nearest}\\?"):
        read_config({**ON, variable: "1"})


def test_an_unknown_variable_like_no_other_is_an_error_with_all_names():
    with pytest.raises(ValueError, match=r"known are .*DASC_INT8.*DASC_WATERMARK"):
        read_config({**ON, "DASC_ZZZZZZZZZZ": "1"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"DASC_LAYOUT": "padded", "DASC_PLACEMENT": "storage"}, "DASC_PLACEMENT=storage needs DASC_LAYOUT=ragged"),
        ({"DASC_MODE": "compressed-only", "DASC_SPILL": "on"}, "DASC_SPILL needs DASC_MODE=two-tier"),
        ({"DASC_MODE": "compressed-only", "DASC_WATERMARK": "0"}, "DASC_WATERMARK needs DASC_MODE=two-tier"),
        ({"DASC_INT8": "on", "DASC_INT4": "on"}, "DASC_INT8 and DASC_INT4 exclude each other, got on for both"),
        ({"DASC_REFRESH": "two-pass"}, "DASC_REFRESH needs DASC_LOAD_POLICY=wr, got nr"),
    ],
)
def test_settings_that_exclude_each_other_are_an_error(settings: dict[str, str], message: str):
    with pytest.raises(ValueError, match=message):
        read_config({**ON, **settings})


def test_one_form_of_codes_may_be_on_and_the_other_off():
    config = read_config({**ON, "DASC_INT8": "off", "DASC_INT4": "on"})
    assert config == Config(plan="auto", int8=False, int4=True)


def written(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


TOML = 'plan = "auto"\nw_max = 64\nint8 = true\npool = "2GiB"\nlog_interval = 5\n'
JSON = json.dumps({"plan": "auto", "w_max": 64, "int8": True, "pool": "2GiB", "log_interval": 5})


@pytest.mark.parametrize(("name", "text"), [("dasc.toml", TOML), ("dasc.json", JSON)])
def test_a_file_says_the_same_as_variables(tmp_path: Path, name: str, text: str):
    by_file = read_config({"DASC_CONFIG": written(tmp_path, name, text)})
    variables = {"DASC_W_MAX": "64", "DASC_INT8": "on", "DASC_POOL": "2GiB", "DASC_LOG_INTERVAL": "5"}
    assert by_file == read_config({**ON, **variables})


def test_a_variable_wins_over_the_file(tmp_path: Path):
    config = read_config({"DASC_CONFIG": written(tmp_path, "dasc.toml", TOML), "DASC_W_MAX": "16"})
    assert config is not None
    assert (config.w_max, config.int8) == (16, True)


def test_an_empty_plan_leaves_it_to_the_file(tmp_path: Path):
    config = read_config({"DASC_CONFIG": written(tmp_path, "dasc.toml", TOML), "DASC_PLAN": ""})
    assert config is not None
    assert config.plan == "auto"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", 'plam = "auto"', "a.toml has the unknown setting 'plam'; did you mean plan\\?"),
        ("a.toml", "w_max = 64", "neither .*a.toml nor DASC_PLAN names a plan"),
        ("a.toml", 'plan = "auto"\nw_max = 2', "^w_max in .*a.toml must be a whole number of at least 4, got '2'$"),
        ("a.toml", 'plan = "auto"\nw_max = true', "w_max in .*a.toml must be a whole number"),
        ("a.toml", "plan = [1]", "plan in .*a.toml must be a string, a number or a boolean, got \\[1\\]"),
        ("a.toml", "plan = ", "a.toml cannot be read as TOML or JSON"),
        ("a.json", "[]", "a.json must hold settings by name"),
        ("a.json", '{"plan"', "a.json cannot be read as TOML or JSON"),
    ],
)
def test_a_file_that_is_wrong_is_an_error_that_names_it(tmp_path: Path, name: str, text: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_config({"DASC_CONFIG": written(tmp_path, name, text)})


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match=r"DASC_CONFIG: .*nowhere.toml cannot be read"):
        read_config({"DASC_CONFIG": str(tmp_path / "nowhere.toml")})


def test_every_placement_mode_is_a_value():
    for mode in PLACEMENT_MODES:
        with pytest.raises(ValueError, match=r"^(?!DASC_PLACEMENT must be)"):
            read_config({**ON, "DASC_PLACEMENT": mode, "DASC_W_MAX": "0"})


def test_ranks_compare_every_setting_but_the_plans_and_the_logs():
    """A rank with a pool of another size, say, would evict other checkpoints."""
    plan = {"plan", "w_max", "placement", "layout", "int8", "int4"}
    left = {f"DASC_{field.name.upper()}" for field in dataclasses.fields(Config) if field.name not in plan}
    assert set(Config("auto").decisive()) == left - {"DASC_LOG_INTERVAL"}
    assert Config("auto", pool=PoolSize(slots=3)).decisive()["DASC_POOL"] == "3 slots"
    assert Config("auto").decisive() == Config("other.plan", w_max=8, log_interval=1.0).decisive()
