"""The page of results and the commands that make it."""

from pathlib import Path

from benchmarks.results import experiments
from benchmarks.results_page import page
from dasc.models.zoo import MODELS, SPECIALISTS

PAGE = Path(__file__).parents[1] / "docs" / "results.md"


def test_the_page_has_every_command_and_every_result():
    text = PAGE.read_text()
    for experiment in experiments():
        assert f"    {experiment.command}\n" in text
    assert "Not measured" not in text
    for figure in (line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")):
        assert (PAGE.parent / figure).is_file(), figure


def test_what_is_not_measured_is_said(tmp_path: Path):
    commands = {(e.name, e.model): e.command for e in experiments()}
    text = page(tmp_path, commands)
    assert text.count("Not measured.") == len(commands)
    for model in (*MODELS, *SPECIALISTS):
        assert f"**{model}**" in text
