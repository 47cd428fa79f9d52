"""Which cutoff and format to store checkpoints in: measured loss against bytes, and a choice that explains itself."""

from dasc.eval.tune.choice import Choice, choose, pareto
from dasc.eval.tune.measure import TuneReport, TuneSettings, measure_points
from dasc.eval.tune.points import Loss, Point, upper_limit

__all__ = [
    "Choice",
    "Loss",
    "Point",
    "TuneReport",
    "TuneSettings",
    "choose",
    "measure_points",
    "pareto",
    "upper_limit",
]
