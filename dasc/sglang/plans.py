"""The plan a server runs by: read from a file, or made from the model's weights at start."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from dasc.geometry import DtypePolicy, Quantization
from dasc.models import Checkpoint, CheckpointError, read_checkpoint
from dasc.plan import PlanError, SelectionPlan
from dasc.planner import build_plan
from dasc.sglang.config import AUTO, Config

DEFAULT_W_MAX = 16


def load_plan(config: Config, model: str, revision: str | None, ranks: int, dtypes: DtypePolicy) -> SelectionPlan:
    """The plan that ``config`` asks for, checked against the weights of ``model``.

    Args:
        model: folder or Hub id; only its configuration and decay parameters are read.
        revision: of a Hub id. With ``HF_HUB_OFFLINE`` the copy in the Hub's local cache is read.
        ranks: tensor-parallel degree, which the plan must have a placement for.
        dtypes: of the served state; how units are quantised is the configuration's.

    Raises:
        CheckpointError: for a model that cannot be read.
        PlanError: for a plan file that cannot be used, is for other weights, or has other settings than ``config``.
        ValueError: for settings that the model does not allow, or a plan without a placement for so many ranks.
    """
    checkpoint = _read(model, revision)
    if config.plan == AUTO:
        quantized: Quantization | None = "int8" if config.int8 else "int4" if config.int4 else None
        return build_plan(
            checkpoint,
            DEFAULT_W_MAX if config.w_max is None else config.w_max,
            ranks=(ranks,),
            mode=config.placement or "off",
            layout=config.layout or "ragged",
            dtypes=DtypePolicy(dtypes.temporal, dtypes.conv, quantized),
        )
    plan = SelectionPlan.load(config.plan)
    plan.check_geometry(checkpoint.geometry)
    plan.check_weights(checkpoint.gate.fingerprint())
    plan.layouts(ranks)
    _check_settings(config, plan, ranks)
    return plan


def _read(model: str, revision: str | None) -> Checkpoint:
    if not constants.HF_HUB_OFFLINE or os.path.exists(model):
        return read_checkpoint(model, revision=None if os.path.exists(model) else revision)
    try:
        return read_checkpoint(Path(snapshot_download(model, revision=revision, local_files_only=True)))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(f"{model} is not in the local cache of the Hub, and HF_HUB_OFFLINE is set") from error


def placement_mode(plan: SelectionPlan, ranks: int) -> str:
    """Placement mode of the plan on ``ranks`` ranks."""
    return plan.placements[ranks].mode if ranks in plan.placements else "off"


def plan_summary(plan: SelectionPlan, ranks: int) -> dict[str, str]:
    """What the ranks of a server must have in common, for :func:`dasc.fast.distributed.agree_on`."""
    placement = plan.placements.get(ranks)
    return {
        "the plan's weights": plan.fingerprint,
        "W_max": str(plan.w_max),
        "the layout": plan.layout,
        "the stored dtypes": str(plan.dtypes),
        "the placement": placement_mode(plan, ranks),
        "the plan's mask": _digest(plan.mask),
        "the order of heads": "as in the model" if placement is None else _digest(placement.head_order),
    }


def _check_settings(config: Config, plan: SelectionPlan, ranks: int) -> None:
    pairs = [
        ("DASC_W_MAX", config.w_max, plan.w_max),
        ("DASC_LAYOUT", config.layout, plan.layout),
        ("DASC_INT8", config.int8, plan.dtypes.quantized == "int8"),
        ("DASC_INT4", config.int4, plan.dtypes.quantized == "int4"),
        ("DASC_PLACEMENT", config.placement, placement_mode(plan, ranks)),
    ]
    wrong = [f"{name} is {asked}, the plan has {planned}" for name, asked, planned in pairs
             if asked is not None and asked != planned]  # fmt: skip
    if wrong:
        raise PlanError(f"{config.plan}: {'; '.join(wrong)}: leave them unset, or make another plan")


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]
