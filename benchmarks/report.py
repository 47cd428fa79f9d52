"""A table of what the suites measured: every ratio beside what it is a ratio to.

    python benchmarks/report.py build/bench.json build/bench.md

Reads pytest-benchmark's JSON, prints the table and writes it as Markdown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

# key of extra_info, how it reads
FIGURES = (
    ("times_faster", "{:.2f} times as fast as {peer}"),
    ("times_the_floor", "{:.1f} times the arithmetic floor"),
    ("share_of_copy_bandwidth", "{:.0%} of copy bandwidth"),
    ("share_by_lines", "{:.0%} by cache lines"),
    ("one_pass_over_two", "one pass takes {:.2f} of two"),
    ("ratio_to_plain", "{:.2f} times without exchange"),
    ("us_each", "{:.1f} us each"),
    ("requests_per_second", "{:,.0f} requests/s"),
)
HEADER = ("suite", "case", "median ms", "figures")


def rows(benchmarks: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """One row of :data:`HEADER` for each benchmark, in their order."""
    return [
        (
            Path(benchmark["fullname"].partition("::")[0]).stem.removeprefix("bench_"),
            benchmark["name"].removeprefix("test_"),
            f"{1e3 * benchmark['stats']['median']:.2f}",
            "; ".join(form.format(info[key], **info) for key, form in FIGURES if key in info),
        )
        for benchmark in benchmarks
        for info in (benchmark["extra_info"],)
    ]


def markdown(table: list[tuple[str, str, str, str]]) -> str:
    lines = [HEADER, ("---", "---", "---:", "---"), *table]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    report = json.loads(source.read_text())
    table = rows(report["benchmarks"])
    target.write_text(f"{report['machine_info']['cpu'].get('brand_raw', 'unknown CPU')}\n\n{markdown(table)}")
    shown = Table(*HEADER, box=box.SIMPLE)
    shown.columns[2].justify = "right"
    for line in table:
        shown.add_row(*map(escape, line))
    Console(width=None if sys.stdout.isatty() else 160).print(shown)
    print(f"\nWritten to {source} and {target}.")


if __name__ == "__main__":
    main()
