"""The benchmark suites work, at sizes too small to measure anything, and their report says what they measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import markdown, rows

ROOT = Path(__file__).parents[1]
SUITES = sorted(path.name for path in (ROOT / "benchmarks").glob("bench_*.py"))


@pytest.mark.slow
def test_every_suite_runs():
    """One process for all of them: most of its time goes into imports."""
    suites = [f"benchmarks/{name}" for name in SUITES]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *suites, "--benchmark-disable", "--size", "smoke", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_report_names_what_each_ratio_is_to(tmp_path: Path):
    measured = [
        {
            "fullname": "benchmarks/bench_recurrences.py::test_prefill[kda]",
            "name": "test_prefill[kda]",
            "stats": {"median": 0.0125},
            "extra_info": {"times_faster": 3.456, "peer": "a_peer", "times_the_floor": 7.12, "dtype": "float32"},
        },
        {
            "fullname": "benchmarks/bench_packing.py::test_pack[a|b]",
            "name": "test_pack[a|b]",
            "stats": {"median": 0.5},
            "extra_info": {"share_of_copy_bandwidth": 0.834},
        },
    ]
    table = rows(measured)
    assert table[0] == (
        "recurrences",
        "prefill[kda]",
        "12.50",
        "3.46 times as fast as a_peer; 7.1 times the arithmetic floor",
    )
    assert table[1] == ("packing", "pack[a|b]", "500.00", "83% of copy bandwidth")
    lines = markdown(table).splitlines()
    assert len(lines) == 4
    assert lines[3] == r"| packing | pack[a\|b] | 500.00 | 83% of copy bandwidth |"
    source, target = tmp_path / "bench.json", tmp_path / "bench.md"
    source.write_text(json.dumps({"machine_info": {"cpu": {"brand_raw": "A CPU"}}, "benchmarks": measured}))
    run = subprocess.run(
        [sys.executable, "benchmarks/report.py", str(source), str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "prefill[kda]" in run.stdout
    assert "3.46 times as fast as a_peer" in run.stdout
    assert target.read_text() == f"A CPU\n\n{markdown(table)}"
