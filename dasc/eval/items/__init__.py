"""What a quality evaluation asks, and how answers are scored."""

from dasc.eval.items.families import default_replays
from dasc.eval.items.item import Ask, Item, Text
from dasc.eval.items.jsonl import item_line, read_items
from dasc.eval.items.scoring import SCORERS, Scorer
from dasc.eval.items.sources import GENERATED, load_items

__all__ = [
    "GENERATED",
    "SCORERS",
    "Ask",
    "Item",
    "Scorer",
    "Text",
    "default_replays",
    "item_line",
    "load_items",
    "read_items",
]
