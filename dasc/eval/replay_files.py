"""The records of a replay, as ``dasc calibrate`` reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dasc.eval.files import json_bytes
from dasc.eval.replay import ArmReport


def records_json(reports: Sequence[ArmReport]) -> bytes:
    """Forwards and transfers of all arms in the form that ``dasc calibrate`` reads."""
    steps = [dataclasses.asdict(step) for report in reports for step in report.steps]
    transfers = [dataclasses.asdict(transfer) for report in reports for transfer in report.transfers]
    return json_bytes({"steps": steps, "transfers": transfers}, indent=None)
