"""Do the horizons that weights tell agree with what a model does? Section 3.4, table 1(b), appendix A.2."""

from dasc.eval.horizons.measure import HorizonReport, HorizonSettings, measure_horizons
from dasc.eval.horizons.prefixes import SCALED_TARGETS, Prefix, task_prefixes
from dasc.eval.horizons.sharegpt import TARGETS, read_sharegpt, select_prefixes

__all__ = [
    "SCALED_TARGETS",
    "TARGETS",
    "HorizonReport",
    "HorizonSettings",
    "Prefix",
    "measure_horizons",
    "read_sharegpt",
    "select_prefixes",
    "task_prefixes",
]
