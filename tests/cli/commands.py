"""The command, called in this process."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dasc.cli.main import app, main


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in args])


def failing(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *args: str | Path) -> str:
    """Standard error of a command that must end with status 2, one line and no traceback."""
    monkeypatch.setattr(sys, "argv", ["dasc", *(str(a) for a in args)])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    assert caught.value.code == 2, err
    assert out == ""
    assert len([line for line in err.splitlines() if line.startswith(("dasc:", "Error:"))]) == 1, err
    return err
