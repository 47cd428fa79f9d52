"""The ``dasc`` command.

Each subcommand parses, calls the library and prints; what needs torch is imported when it runs.
"""

from __future__ import annotations

import os
import sys

import click

from dasc import __version__
from dasc.cli.calibrate import calibrate
from dasc.cli.evaluate import evaluate
from dasc.cli.example import example
from dasc.cli.observe import observe
from dasc.cli.plan import plan
from dasc.cli.profile import profile
from dasc.cli.replay import replay
from dasc.cli.show import show
from dasc.cli.simulate import simulate
from dasc.cli.tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dasc")
def app() -> None:
    """Decay-aware compression of recurrent-state checkpoints.

    Reads how fast each head or key channel of a hybrid linear-attention model forgets, and says which part of a state
    checkpoint is worth keeping.
    """


for command in (plan, profile, observe, show, example, simulate, replay, calibrate, evaluate, tune):
    app.add_command(command)


def main() -> None:
    """Run the command; wrong input ends in one line on standard error and exit status 2."""
    try:
        code = app.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = 130
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except BrokenPipeError:
        # the reader of our output has gone; nothing is left to say to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except (ValueError, OverflowError, OSError, ImportError) as error:
        click.echo(f"dasc: {_one_line(error)}", err=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
