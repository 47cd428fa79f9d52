"""The page of results, written from the files that the commands leave. It has no figure of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dasc.models.zoo import MODELS, SPECIALISTS, model_folder

_ALL_ITEMS = "all items"
FIGURES = "results"
"""Folder of the figures, beside the page."""

_SLACK = 1e-6  # edges are powers of ten up to rounding

_INTRODUCTION = """# Results

Measured on the small hybrids in `dasc/models/zoo`, which were trained here: figures say how a method behaves, not what
it would cost a large model. Every table is made by the command above it; `make results` runs them all and writes
this page from their files. Every command takes the folder of another small model as well, and `dasc eval quality --url`
a server with a model of any size. Greedy answers, FP32, seeds as in the files. Brackets are 95 % intervals.

In training, the recurrent states are replaced before the questions of the recall tasks, by zeros or by those of
another sequence, so that attention has to answer them, as it does in large hybrids. Without this, models this small
learn to recall from their states, which contexts of a few hundred tokens fit into.

Parity is right by chance in 50 % and the permutation in 33 %. The three models of all tasks learn neither well: with a
decay and a `beta` between 0 and 1 no token can turn around what a state holds. The specialist `gdn-tracking` can. It is
of OLMo-Hybrid's form, whose `beta` reaches 2, so that one token can reflect a state; of the permutations, those that
take one reflection were an exercise besides. A specialist of KDA, with a `beta` of at most 1, had been no better at
these two than the models of all tasks. Text is learned by the specialist `kda-text` alone, which was also trained to
recite: to say what follows two words of a passage until the passage ends. Without that, its answers were no better than
those of the others after 700 steps.

The quantities are explained in [quality.md](quality.md) (protocol and statistics) and [omission.md](omission.md).
"""


def page(folder: Path, commands: Mapping[tuple[str, str], str]) -> str:
    """Markdown of all experiments in ``folder`` that are finished; what is not is said.

    Args:
        folder: with one folder for each experiment, ``MODEL-PROTOCOL``.
        commands: by protocol and model.
    """
    sections, shown = [_INTRODUCTION, "## The models\n", _models()], figures(folder)
    for name, (title, _, render) in _SECTIONS.items():
        sections.append(f"## {title}\n")
        for (protocol, model), command in commands.items():
            if protocol != name:
                continue
            key = f"{model}-{name}"
            sections.append(f"### {model}\n\n    {command}\n")
            path = folder / key / f"{name}.json"
            sections.append(render(json.loads(path.read_text())) if path.exists() else "Not measured.\n")
            if f"{key}.png" in shown:
                sections.append(f"![{title}: {model}]({FIGURES}/{key}.png)\n")
    return "\n".join(sections)


def figures(folder: Path) -> dict[str, Path]:
    """Figures that :func:`page` shows, by name."""
    paths = {
        f"{model}-{name}.png": folder / f"{model}-{name}" / f"{figure}.png"
        for name, (_, figure, _) in _SECTIONS.items()
        for model in (*MODELS, *SPECIALISTS)
        if figure is not None
    }
    return {name: path for name, path in paths.items() if path.exists()}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in [header, rule, *rows])


def _models() -> str:
    """How much of each task a model answers dense, by length, from the file that its training left.

    A right answer is right in every token; beside it, the share of its tokens that are.
    """
    parts = []
    for model in (*MODELS, *SPECIALISTS):
        found = json.loads((model_folder(model) / "training.json").read_text())
        lengths = sorted({int(length) for of_task in found["scores"].values() for length in of_task})
        rows = [
            [task, *(_score(of_task[str(n)]) if str(n) in of_task else "" for n in lengths)]
            for task, of_task in found["scores"].items()
        ]
        table = _table(["task", *map(str, lengths)], rows)
        parts.append(
            f"**{model}**: {found['parameters']:,} parameters, {found['steps']:,} steps in {found['minutes']:.0f} "
            f"minutes of a shared core, `{found['command']}`.\n"
            f"Questions answered right (answer tokens right), by length:\n\n{table}"
        )
    return "\n".join(parts)


def _score(found: Mapping[str, float]) -> str:
    return f"{found['right']:.1%} ({found['tokens']:.1%})"


def _interventions(found: Mapping[str, Any]) -> str:
    arms = found["settings"]["arms"]
    rows = [
        [task, *(f"{of[arm]['share']:.3f} [{of[arm]['low']:.2f}, {of[arm]['high']:.2f}]" for arm in arms)]
        for task, of in found["tasks"].items()
    ]
    return _table(["task", *arms], rows)


def _horizons(found: Mapping[str, Any]) -> str:
    rows = []
    for name, label in (("fixed", "the family's"), ("calibrated", "calibrated on even prefixes, odd ones shown")):
        of = found[name]
        pairs = [of["empirical"]["pooled"], of["magnitude"]["pooled"]]
        shown = [f"{p['median']:.3f} [{p['q1']:.3f}, {p['q3']:.3f}]" for p in pairs]
        rows.append([label, f"{of['gate_input']:g}", str(len(of["prefixes"])), *shown])
    tokens = ", ".join("infinite" if value is None else f"{value:,.0f}" for value in found["quantiles_tokens"])
    table = _table(["`a_s`", "value", "prefixes", "`H_s`, `H_e`: median [quartiles]", "`H_s`, `M_S`"], rows)
    return (
        f"{table}\nStatic horizons, tokens, at 0, 5, 25, 50, 75, 95 and 100 %: {tokens}. "
        f"Units by horizon, static in all and in each block, and observed (the median over prefixes):\n\n"
        f"{_histogram(found)}"
    )


def _histogram(found: Mapping[str, Any]) -> str:
    """Shares of units in bins of half a decade."""
    histogram, blocks = found["histogram"], found["blocks"]
    bins = [math.floor(2 * math.log10(edge) + _SLACK) for edge in histogram["edges_tokens"][:-1]]
    columns = [_sum(histogram["static"]), *histogram["static"], _sum(histogram["empirical"])]
    rows = []
    for half in range(bins[0], bins[-1] + 1):
        within = [i for i, own in enumerate(bins) if own == half]
        shares = [f"{sum(counts[i] for i in within) / sum(counts):.1%}" for counts in columns]
        rows.append([f"{10 ** (half / 2):,.3g} to {10 ** ((half + 1) / 2):,.3g} tokens", *shares])
    return _table(["horizon", "static", *(f"block {block}" for block in blocks), "observed"], rows)


def _sum(layers: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*layers, strict=True)]


def _magnitudes(found: Mapping[str, Any]) -> str:
    """The spread of units, layer by layer."""
    shares = (0, 10, 50, 90, 100)
    rows = [
        [str(number), *(f"{value:.3g}" for value in np.percentile(row, shares))]
        for number, row in enumerate(found["magnitudes"])
    ]
    table = _table(["recurrent layer", *(f"{share} %" for share in shares)], rows)
    prefixes = len(found["source"]["prefixes"])
    return f"Root mean square over {prefixes} prefixes, at some percentiles of the units:\n\n{table}"


def _quality(found: Mapping[str, Any]) -> str:
    """Arms below one another, tasks side by side; the row over all items comes first."""
    tasks = found["table"]["rows"]
    tasks = [*(row for row in tasks if row["task"] == _ALL_ITEMS), *(row for row in tasks if row["task"] != _ALL_ITEMS)]
    stored = {(arm["method"], arm["w_max"]): arm["settings"] for arm in found["arms"]}
    rows = []
    for number, key in enumerate((c["method"], c["w_max"]) for c in tasks[0]["cells"]):
        settings, cells = stored[key], [row["cells"][number] for row in tasks]
        scores = [f"{c['score']:.3f}" + ("" if c["sd"] is None else f" ± {c['sd']:.3f}") for c in cells]
        kept = f"{settings['units_kept'] / settings['units']:.1%}"
        rows.append([" ".join(str(p) for p in key if p is not None), kept, f"{settings['compression']:.2f}", *scores])
    rows.append(["hit, all arms", "", "", *(f"{row['hit']:.3f}" for row in tasks)])
    compared = [
        [
            f"{c['first']} - {c['second']}",
            _difference(c["difference"]),
            f"{c['difference']['p']:.4f}",
            f"{c['p_holm']:.4f}",
        ]
        for c in found["table"]["comparisons"]
        if c["task"] == _ALL_ITEMS
    ]
    header = ["arm", "units kept", "dense bytes / bytes", *(f"{row['task']} ({row['items']})" for row in tasks)]
    return "\n".join(
        [
            "Scores by task (items); ± is the standard deviation over Random's masks. `wr` with a cutoff of the "
            "prompts' length computes all of them again.\n",
            _table(header, rows),
            "Differences over all items, in points of score:\n",
            _table(["arms", "difference", "p", "p, Holm"], compared),
            *(f"**Failed:** {failure}\n" for failure in found["table"]["failures"]),
        ]
    )


def _difference(paired: Mapping[str, float]) -> str:
    return f"{paired['mean']:+.3f} [{paired['low']:+.3f}, {paired['high']:+.3f}]"


def _bits(found: Mapping[str, Any]) -> str:
    arms = list(dict.fromkeys(point["arm"] for point in found["points"]))
    budgets = sorted({point["budget_bytes"] for point in found["points"]})
    points = {(point["arm"], point["budget_bytes"]): point["scores"]["all"] for point in found["points"]}
    dense = found["dense"]["all"]

    def cell(arm: str, budget: int) -> str:
        score = points.get((arm, budget))
        return "" if score is None else f"{score['accuracy']:.3f} ({dense['log_prob'] - score['log_prob']:.3f})"

    rows = [[f"{budget / found['dense_bytes']:.1%}", *(cell(arm, budget) for arm in arms)] for budget in budgets]
    compared = [
        [f"{c['arm']} - {c['other']}", f"{c['budget_bytes'] / found['dense_bytes']:.1%}", _difference(c["paired"])]
        for c in found["differences"]
        if c["task"] == "all" and c["measure"] == "log_prob" and c["arm"] in ("bits-horizon", "bits-range", "keep-int4")
    ]
    return (
        "Accuracy over all tasks, and nats lost an answer, at equal bytes of the temporal states; "
        f"dense {dense['accuracy']:.3f}:\n\n"
        f"{_table(['bytes', *arms], rows)}\nDifferences of log-probability, nats an answer:\n\n"
        f"{_table(['arms', 'bytes', 'difference'], compared)}"
    )


def _decay(found: Mapping[str, Any]) -> str:
    ticks = found["settings"]["ticks"]
    trace = found["traces"]["all"]
    rows = []
    for arm, of in trace["arms"].items():
        errors = [sum(error) / sum(norm) for error, norm in zip(of["error"], trace["norm"], strict=True)]
        rows.append([f"{arm}: squared error of the states", *(f"{error:.2g}" for error in errors)])
        rows.append([f"{arm}: KL of the predictions, nats", *(f"{kl:.2g}" for kl in of["kl"]), ""])
    rows.append(["left of the omission by static horizons", *(f"{share:.2g}" for share in found["remaining"])])
    suffixes = [str(n) for n in found["settings"]["suffixes"]]
    policies = [
        [
            policy["name"],
            f"{policy['replayed_tokens']:.0f}",
            "{:+.3f} [{:+.3f}, {:+.3f}]".format(*policy["accuracy_loss"]),
            "{:+.3f} [{:+.3f}, {:+.3f}]".format(*policy["log_prob_loss"]),
            *(f"{log_prob:+.3f}" for _, log_prob, _ in policy["by_suffix"]),
        ]
        for policy in found["policies"]
    ]
    widths = [end - first for first, end in pairwise(ticks)]
    by_task = {
        task: [sum(kl * n for kl, n in zip(of["arms"][arm]["kl"], widths)) / sum(widths) for arm in trace["arms"]]
        for task, of in found["traces"].items()
    }
    header = ["refreshed", "tokens a hit", "accuracy lost", "nats lost", *(f"{n} new" for n in suffixes)]
    kept = f"`W_max` {found['settings']['w_max']}, {found['units_kept']:.1%} of the units kept.\n"
    return "\n".join(
        [
            kept,
            _table(["tokens since the hit", *map(str, ticks)], rows),
            f"KL of the predictions, nats, mean of the {ticks[-1]} tokens after the hit, by task:\n",
            _table(["task", *trace["arms"]], [[task, *(f"{kl:.2g}" for kl in kls)] for task, kls in by_task.items()]),
            "Hits refreshed never, when fewer prompt tokens than a threshold are new, or always; nats by new tokens:\n",
            _table(header, policies),
        ]
    )


def _tune(found: Mapping[str, Any]) -> str:
    rows = [
        [
            p["label"] + (" *" if p["label"] in found["front"] else ""),
            f"{p['checkpoint_bytes']:,}",
            str(p["replay_tokens"]),
            *(f"{p[m]['mean']:+.4f} (at most {p[m]['upper']:+.4f})" for m in ("accuracy", "log_prob")),
        ]
        for p in found["points"]
    ]
    table = _table(["way", "bytes", "replayed tokens", "accuracy lost", "nats lost"], rows)
    return f"{' '.join(found['explanation'])}\n\n{table}\n\\* on the front of bytes against the measured loss.\n"


_SECTIONS: dict[str, tuple[str, str | None, Callable[[Mapping[str, Any]], str]]] = {
    "interventions": ("Which part of a cached prefix carries what: table 1(a)", None, _interventions),
    "horizons": ("Static horizons against observed signals: table 1(b)", "horizons", _horizons),
    "magnitudes": ("Observed magnitudes: what `observed` goes by below", None, _magnitudes),
    "quality": ("Quality by warm-up and replay: table 2", "accuracy", _quality),
    "tune": ("Choosing `W_max`", "tune", _tune),
    "bits": ("Bits by horizon", "bits", _bits),
    "decay": ("How long an omission hurts", "decay", _decay),
}
"""Title, figure if there is one, and what makes the text of each protocol's file."""
