"""What a model's checkpoint says: its geometry and its decay parameters."""

from dasc.models.checkpoint import Checkpoint, ReadReport, read_checkpoint
from dasc.models.errors import CheckpointError
from dasc.models.families import FAMILIES, Family
from dasc.models.gate_parameters import GateKind, GateParameters

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "CheckpointError",
    "Family",
    "GateKind",
    "GateParameters",
    "ReadReport",
    "read_checkpoint",
]
