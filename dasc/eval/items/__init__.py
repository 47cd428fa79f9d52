"""What a quality evaluation asks, and how answers are scored."""

from dasc.eval.items.item import Ask, Item, Text

__all__ = ["Ask", "Item", "Text"]
