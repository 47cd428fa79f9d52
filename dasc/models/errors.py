"""The one error of the checkpoint readers."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A model's files are missing, damaged, unreachable, or not what their config.json says.

    The message is one line: which file, which tensor or key, what was expected and what was found.
    """
