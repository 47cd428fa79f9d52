"""What was finished is not computed again, unless it was measured otherwise."""

from pathlib import Path

import pytest

from dasc.eval.unit_file import UnitFile


def fail() -> None:
    raise AssertionError("computed again")


def test_units_are_computed_once_and_survive(tmp_path: Path):
    path = tmp_path / "units.jsonl"
    assert UnitFile(path, {"seed": 1, "ticks": (0, 1)}).get("a", lambda: (1.5, {"x": None})) == [1.5, {"x": None}]
    again = UnitFile(path, {"seed": 1, "ticks": [0, 1]})
    assert again.get("a", fail) == [1.5, {"x": None}]
    assert again.get("b", lambda: 2) == again.get("b", fail) == 2


def test_a_line_cut_short_is_computed_again(tmp_path: Path):
    path = tmp_path / "units.jsonl"
    file = UnitFile(path, {})
    file.get("a", lambda: 1)
    file.get("b", lambda: 2)
    path.write_bytes(path.read_bytes()[:-3])
    resumed = UnitFile(path, {})
    assert resumed.get("a", fail) == 1
    assert resumed.get("b", lambda: 3) == 3
    assert UnitFile(path, {}).get("b", fail) == 3


def test_units_are_kept_once_and_can_be_asked_for(tmp_path: Path):
    path = tmp_path / "folder" / "units.jsonl"
    units = UnitFile(path, {})
    assert "a" not in units
    assert units.keep("a", (1, 2)) == units.keep("a", "other") == units["a"] == [1, 2]
    assert "a" in UnitFile(path, {})


def test_without_a_path_units_are_kept_in_memory():
    units = UnitFile(None, {})
    assert units.get("a", lambda: 1) == units.get("a", fail)


def test_other_settings_are_refused(tmp_path: Path):
    path = tmp_path / "units.jsonl"
    UnitFile(path, {"seed": 1})
    for settings, message in (({"seed": 2}, "seed was 1 and is now 2"), ({}, "seed was 1 and is now None")):
        with pytest.raises(ValueError, match=message):
            UnitFile(path, settings)


@pytest.mark.parametrize(
    "content", [b"no JSON\n", b"[1]\n", b"{}\n3\n", b'{"settings": {}}\n{"arm": 1}\n', b'{}\n["a"]\n']
)
def test_another_file_is_refused_and_left_alone(tmp_path: Path, content: bytes):
    path = tmp_path / "units.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="no file of finished units"):
        UnitFile(path, {})
    assert path.read_bytes() == content
