"""Fits a cost model to measured forward passes and transfers, and says how well it fits. Needs scipy (``eval``)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from dasc.cache.records import StepRecord, TransferKind, TransferRecord
from dasc.cache.simulation.cost_model import MAX_SECONDS, CostModel

STEP_COSTS = (
    "step_s",
    "prefill_s_per_token",
    "prefill_s_per_pair",
    "decode_step_s",
    "decode_s_per_sequence",
    "decode_s_per_context_token",
)
"""Constants fitted from forward passes, in the order of the columns of :func:`step_columns`."""

_ROUNDS = 10
_MIN_SECONDS = 1e-12  # shorter than any clock tells
_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True)
class Fit:
    """How well one kind of record is fitted. Errors are relative: fitted time over measured time, minus 1.

    Attributes:
        kind: ``"step"`` or a kind of transfer.
        rows: records.
        mean_error: mean of the absolute errors.
        worst_error: the largest absolute error.
        total_error: of the sum of all times, signed.
        undetermined: constants that the records do not tell apart or say nothing about: one value of many, often 0.
    """

    kind: str
    rows: int
    mean_error: float
    worst_error: float
    total_error: float
    undetermined: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """Fitted constants, a fit for each kind of record there was, and the constants no record speaks of (left at 0)."""

    cost: CostModel
    fits: tuple[Fit, ...]
    unmeasured: tuple[str, ...]

    @property
    def determined(self) -> dict[str, float]:
        """The constants that have one value only by the records. The others must come from elsewhere."""
        left_out = {*self.unmeasured, *(name for fit in self.fits for name in fit.undetermined)}
        return {name: value for name, value in asdict(self.cost).items() if name not in left_out}


def step_columns(steps: Sequence[StepRecord]) -> NDArray[np.float64]:
    """``[steps, 6]``: what each of :data:`STEP_COSTS` is multiplied by. Replayed tokens count as prefill tokens."""
    rows = [
        (
            1,
            s.prefill_tokens + s.refresh_tokens,
            s.prefill_pairs,
            s.decode_sequences > 0,
            s.decode_sequences,
            s.decode_pairs,
        )
        for s in steps
    ]
    return np.array(rows, dtype=np.float64)


def calibrate(steps: Sequence[StepRecord], transfers: Sequence[TransferRecord] = ()) -> Calibration:
    """Fit every constant that the records speak of by non-negative least squares.

    A record's squared error is weighted by the inverse of the time fitted before, a few times over. So short passes
    count beside long ones, and the fitted times add up to the measured total. A second pass for refresh and the
    collectives of balanced storage leave no records of their own and stay 0.

    Raises:
        ValueError: for no records, or one whose time is not positive and finite.
        ImportError: without scipy.
    """
    if not steps and not transfers:
        raise ValueError("steps and transfers must hold at least one record, got none")
    found: dict[str, float] = {}
    fits = []
    if steps:
        fits.append(_fit("step", STEP_COSTS, step_columns(steps), [s.seconds for s in steps], found))
    for kind in get_args(TransferKind):
        mine = [t for t in transfers if t.kind == kind]
        if mine:
            columns = np.array([(1, t.bytes) for t in mine], dtype=np.float64)
            costs = (f"{kind}_latency_s", f"{kind}_s_per_byte")
            fits.append(_fit(kind, costs, columns, [t.seconds for t in mine], found))
    names = [field.name for field in fields(CostModel)]
    unmeasured = tuple(name for name in names if name not in found)
    return Calibration(CostModel(**{name: found.get(name, 0.0) for name in names}), tuple(fits), unmeasured)


def _fit(
    kind: str, names: Sequence[str], columns: NDArray[np.float64], seconds: Sequence[float], found: dict[str, float]
) -> Fit:
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise ImportError("calibrating needs scipy: pip install 'dasc[eval]'") from error
    measured = np.array(seconds, dtype=np.float64)
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise ValueError(f"every {kind} record must take a positive, finite time, got {float(measured.min())} s")
    expected = measured
    for _ in range(_ROUNDS):
        weights = 1 / np.sqrt(np.maximum(expected, measured.min() / 1000))
        weighted = columns * weights[:, None]
        # columns of unit length, or the solver would lose pairs (1e9) beside passes (1)
        length = np.linalg.norm(weighted, axis=0)
        scaled = np.divide(weighted, length, out=np.zeros_like(weighted), where=length > 0)
        solution, _ = nnls(scaled, measured * weights)
        constants = np.divide(solution, length, out=np.zeros_like(solution), where=length > 0)
        expected = columns @ constants
    found.update(zip(names, constants.tolist(), strict=True))
    errors = expected / measured - 1
    return Fit(
        kind=kind,
        rows=len(measured),
        mean_error=float(np.abs(errors).mean()),
        worst_error=float(np.abs(errors).max()),
        total_error=float(expected.sum() / measured.sum() - 1),
        undetermined=tuple(name for name, known in zip(names, _determined(scaled), strict=True) if not known),
    )


def _determined(columns: NDArray[np.float64]) -> list[bool]:
    """For each column, whether it lies outside the span of the others, so that its constant has one value only."""
    rank = np.linalg.matrix_rank(columns)
    return [bool(np.linalg.matrix_rank(np.delete(columns, i, axis=1)) < rank) for i in range(columns.shape[1])]


Record = TypeVar("Record", StepRecord, TransferRecord)


def read_records(path: str | os.PathLike[str]) -> tuple[list[StepRecord], list[TransferRecord]]:
    """Read ``{"steps": [...], "transfers": [...]}``, each entry an object with the fields of its record.

    Either list may be missing; other keys are ignored. Counts are whole numbers of 64 bits; times are 0 or from 1e-12
    to 1e6 s.

    Raises:
        ValueError: naming the file and the first entry that is wrong.
        OSError: when the file cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            data = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict) or not data.keys() & {"steps", "transfers"}:
        raise ValueError(f"{path}: expected an object with 'steps' or 'transfers'")
    return _records(path, data, "steps", StepRecord), _records(path, data, "transfers", TransferRecord)


def _records(path: str | os.PathLike[str], data: dict[str, Any], key: str, record_type: type[Record]) -> list[Record]:
    entries = data.get(key, [])
    if not isinstance(entries, list):
        raise ValueError(f"{path}: {key} must be a list, got a {type(entries).__name__}")
    names = {field.name for field in fields(record_type)}
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.keys() != names:
            raise ValueError(f"{path}: {key}[{number}] must be an object of {', '.join(sorted(names))}")
        for name, value in entry.items():
            if name == "kind":
                if value not in get_args(TransferKind):
                    raise ValueError(
                        f"{path}: {key}[{number}].kind must be one of {get_args(TransferKind)}, got {value!r}"
                    )
            elif name == "seconds":
                if type(value) not in (int, float) or not (value == 0 or _MIN_SECONDS <= value <= MAX_SECONDS):
                    raise ValueError(
                        f"{path}: {key}[{number}].seconds must be 0 or from {_MIN_SECONDS:g} to {MAX_SECONDS:.0f}, "
                        f"got {value!r:.60}"
                    )
            elif type(value) is not int or not 0 <= value <= _MAX_COUNT:
                raise ValueError(
                    f"{path}: {key}[{number}].{name} must be a whole number from 0 to 2^63 - 1, got {value!r:.60}"
                )
    return [record_type(**entry) for entry in entries]
