"""What a quality evaluation asks, and how answers are scored."""

from dasc.eval.items.item import Ask, Item, Text
from dasc.eval.items.scoring import SCORERS, Scorer

__all__ = ["SCORERS", "Ask", "Item", "Scorer", "Text"]
