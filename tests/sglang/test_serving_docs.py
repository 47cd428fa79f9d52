"""The commands of docs/serving.md are ones that SGLang understands, and its table is what the plugin would log."""

import argparse
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from dasc.models import read_checkpoint
from dasc.models.synthetic import published_kimi_linear, write_checkpoint
from dasc.planner import build_plan
from dasc.sglang.budget import NativeDemand, divide
from dasc.sglang.config import PoolSize
from dasc.sglang.placements import buffer_bytes
from tests.sglang.engines import ROOT, environment

TEXT = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").replace("\\\n", " ")


def commands(module: str) -> list[list[str]]:
    """Arguments of every command that runs ``module``."""
    found = re.findall(rf"python -m {re.escape(module)} (.*)", TEXT)
    return [shlex.split(line) for line in found]


def test_there_are_commands():
    assert len(commands("sglang.launch_server")) == 5
    assert len(commands("sglang.benchmark.serving")) == 1


@pytest.mark.parametrize("command", commands("sglang.launch_server"), ids=lambda words: words[1])
def test_a_server_takes_the_arguments(command: list[str]):
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(command)
    assert parsed.tp_size == 8
    if parsed.max_mamba_cache_size is not None:  # three slots a running request, or the dense arm runs fewer
        assert parsed.max_mamba_cache_size >= 3 * parsed.max_running_requests


def test_the_benchmark_takes_the_arguments():
    asked = [sys.executable, "-m", "sglang.benchmark.serving", "--help"]
    done = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=200, check=True)
    [command] = commands("sglang.benchmark.serving")
    flags = [word for word in command if word.startswith("--")]
    assert [flag for flag in flags if not re.search(rf"{flag}\b", done.stdout)] == []
    assert re.search(r"\bopenai\b", done.stdout)
    assert "agentic-trace" in done.stdout


def test_every_flag_of_sglang_that_the_page_names_exists():
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    ours = {
        "--tp",
        "--w-max",
        "--placement",
        "--state-dtype",
        "--conv-dtype",
        "--check",
        "--out",
        "--family",
    }  # of dasc plan and benchmarks
    bench = {word for command in commands("sglang.benchmark.serving") for word in command if word.startswith("--")}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", TEXT)) - ours - bench
    assert named - known == set()


def test_the_table_of_the_start_is_what_the_plugin_computes(tmp_path: Path):
    geometry, gate = published_kimi_linear()
    write_checkpoint(tmp_path, geometry.family, gate, geometry)
    plan = build_plan(read_checkpoint(tmp_path), 16, ranks=(8,), mode="storage")
    budget = divide(
        PoolSize(),
        NativeDemand(requests=32, slots_per_request=1),
        dense_slots=192,
        dense_slot_bytes=geometry.shard(8).dense_bytes(),
        compressed_slot_bytes=max(layout.slot_bytes for layout in plan.layouts(8)),
        tmp_bytes=buffer_bytes(plan, 8),
    )
    assert textwrap.indent(budget.table(), "    ") in TEXT
    kept = f"{int(plan.mask.sum()):,} of {geometry.num_units:,} units kept, {plan.placements[8].moved_units} of them"
    assert kept in TEXT
