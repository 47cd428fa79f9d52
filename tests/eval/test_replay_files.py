"""What a replay leaves on disk: everything or nothing."""

import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest

from dasc.cache.records import StepRecord, TransferRecord
from dasc.cache.simulation import read_records
from dasc.eval.files import write_together
from dasc.eval.replay import ArmReport
from dasc.eval.replay_files import records_json


@contextmanager
def disk_of(size_bytes: int):
    """No file can grow beyond this: writing then fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_written_and_overwritten(tmp_path: Path):
    folder = tmp_path / "new" / "deep"
    for data in (b"one", b"two"):
        paths = write_together(folder, {"a": data, "b": data * 2})
        assert paths == [folder / "a", folder / "b"]
        assert contents(folder) == {"a": data, "b": data * 2}


@pytest.mark.parametrize("existing", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, existing: bool):
    folder = tmp_path / "out"
    if existing:
        write_together(folder, {"a": b"old"})
    with disk_of(1000), pytest.raises(OSError, match="File too large"):
        write_together(folder, {"a": b"new", "b": b"x" * 5000})
    assert (contents(folder) if existing else list(tmp_path.iterdir())) == ({"a": b"old"} if existing else [])


def test_a_folder_in_the_way_is_seen_before_anything_is_replaced(tmp_path: Path):
    write_together(tmp_path, {"a": b"old"})
    (tmp_path / "b").mkdir()
    with pytest.raises(FileExistsError):
        write_together(tmp_path, {"a": b"new", "b": b"new"})
    assert (tmp_path / "a").read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_links_are_followed_and_nothing_but_files_is_replaced(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_together(tmp_path, {"link": b"new"})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_bytes() == b"new"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileExistsError, match="not a regular file"):
        write_together(tmp_path, {"target": b"newer", "fifo": b""})
    assert (tmp_path / "fifo").is_fifo()
    assert (tmp_path / "target").read_bytes() == b"new"


def test_records_are_what_calibrate_reads(tmp_path: Path):
    steps, transfers = (StepRecord(1, 2, 3, 4, 5, 0.5),), (TransferRecord("load", 7, 0.1),)
    report = ArmReport("x", None, None, (), steps, transfers)
    path = tmp_path / "records.json"
    path.write_bytes(records_json([report, report]))
    assert read_records(path) == ([*steps, *steps], [*transfers, *transfers])
    assert json.loads(path.read_bytes())["steps"][0]["seconds"] == 0.5
