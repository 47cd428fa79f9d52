"""Serving at real size in simulated time: the real cache, requests that are traces or made up, and a cost model."""

from dasc.cache.simulation.calibration import Calibration, Fit, calibrate, read_records
from dasc.cache.simulation.cost_model import CostModel, parse_costs, read_costs
from dasc.cache.simulation.estimates import MODEL_SIZES, ModelSize, estimate_cost
from dasc.cache.simulation.generated import shared_prefix_load, wildchat_load
from dasc.cache.simulation.load import Load, Request
from dasc.cache.simulation.mooncake import read_trace
from dasc.cache.simulation.simulator import Serving, Simulation, simulate

__all__ = [
    "MODEL_SIZES",
    "Calibration",
    "CostModel",
    "Fit",
    "Load",
    "ModelSize",
    "Request",
    "Serving",
    "Simulation",
    "calibrate",
    "estimate_cost",
    "parse_costs",
    "read_costs",
    "read_records",
    "read_trace",
    "shared_prefix_load",
    "simulate",
    "wildchat_load",
]
