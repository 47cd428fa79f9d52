"""Checkpoints and decay parameters made up for tests, examples and documentation; no trained weights in them."""

from dasc.models.synthetic.files import write_checkpoint
from dasc.models.synthetic.gates import GEOMETRIES, example_gate, gate_with_counts
from dasc.models.synthetic.published import PUBLISHED_KIMI_LINEAR_COUNTS, published_kimi_linear

__all__ = [
    "GEOMETRIES",
    "PUBLISHED_KIMI_LINEAR_COUNTS",
    "example_gate",
    "gate_with_counts",
    "published_kimi_linear",
    "write_checkpoint",
]
