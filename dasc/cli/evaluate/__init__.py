"""``dasc eval``: the paper's protocols, one subcommand each."""

from __future__ import annotations

import click

from dasc.cli.evaluate.bits import bits
from dasc.cli.evaluate.compare import compare
from dasc.cli.evaluate.decay import decay
from dasc.cli.evaluate.horizons import horizons
from dasc.cli.evaluate.interventions import interventions
from dasc.cli.evaluate.items import items
from dasc.cli.evaluate.quality import quality


@click.group(name="eval")
def evaluate() -> None:
    """Measure what compressed checkpoints cost in quality."""


evaluate.add_command(items)
evaluate.add_command(interventions)
evaluate.add_command(decay)
evaluate.add_command(quality)
evaluate.add_command(compare)
evaluate.add_command(bits)
evaluate.add_command(horizons)
