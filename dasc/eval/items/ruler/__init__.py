"""RULER's subtasks by generators of our own: nothing is downloaded."""

from dasc.eval.items.ruler.draft import CountTokens
from dasc.eval.items.ruler.subtasks import SINGLE_NEEDLE, SUBTASKS, ruler_items

__all__ = ["SINGLE_NEEDLE", "SUBTASKS", "CountTokens", "ruler_items"]
