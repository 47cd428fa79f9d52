"""Decay-aware compression of recurrent-state checkpoints for serving hybrid linear-attention models.

The public names below are imported when first used, so that ``dasc --help`` does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dasc.accounting import (
        MemorySplit,
        bottleneck_compression,
        checkpoint_compression,
        split_budget,
        temporal_compression,
        usable_slots,
    )
    from dasc.contract import DeltaRuleOutput
    from dasc.geometry import DtypePolicy, StateGeometry
    from dasc.layout import PaddedLayout, RaggedLayout, rank_layouts
    from dasc.models import Checkpoint, CheckpointError, GateParameters, read_checkpoint
    from dasc.placement import Placement
    from dasc.plan import PlanError, SelectionPlan
    from dasc.planner import build_plan, summarise

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "models",
    "CheckpointError": "models",
    "DeltaRuleOutput": "contract",
    "DtypePolicy": "geometry",
    "GateParameters": "models",
    "MemorySplit": "accounting",
    "PaddedLayout": "layout",
    "Placement": "placement",
    "PlanError": "plan",
    "RaggedLayout": "layout",
    "SelectionPlan": "plan",
    "StateGeometry": "geometry",
    "bottleneck_compression": "accounting",
    "build_plan": "planner",
    "checkpoint_compression": "accounting",
    "rank_layouts": "layout",
    "read_checkpoint": "models",
    "split_budget": "accounting",
    "summarise": "planner",
    "temporal_compression": "accounting",
    "usable_slots": "accounting",
}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DeltaRuleOutput",
    "DtypePolicy",
    "GateParameters",
    "MemorySplit",
    "PaddedLayout",
    "Placement",
    "PlanError",
    "RaggedLayout",
    "SelectionPlan",
    "StateGeometry",
    "bottleneck_compression",
    "build_plan",
    "checkpoint_compression",
    "rank_layouts",
    "read_checkpoint",
    "split_budget",
    "summarise",
    "temporal_compression",
    "usable_slots",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'dasc' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dasc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
