"""Bits by horizon: units of 32, 16, 8, 4 or 0 bits against keep-or-drop at equal bytes. Not in the paper."""

from dasc.eval.bits.arms import ARMS, Units, quantised
from dasc.eval.bits.measure import BitsSettings, measure_bits
from dasc.eval.bits.results import COMPARISONS, BitsReport, Difference, Point, Score

__all__ = [
    "ARMS",
    "COMPARISONS",
    "BitsReport",
    "BitsSettings",
    "Difference",
    "Point",
    "Score",
    "Units",
    "measure_bits",
    "quantised",
]
