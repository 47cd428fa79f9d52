"""The selection plan: what is decided offline, once, and read by all that serves (sections 4.1 to 4.3, appendix B).

A plan is one safetensors file. Its metadata has one key, ``dasc_plan``. The value is canonical JSON (sorted keys, no
spaces, ASCII) of the fields that are not tensors, with ``format_version`` and ``checksum``: a SHA-256 over the other
fields and the names, dtypes, shapes and bytes of the tensors. These are ``mask`` (bool), ``windows`` (int64) and, for
each placement, ``tp<P>.head_order`` and ``tp<P>.moves`` (int64). Equal plans give equal bytes.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from dasc.geometry import DtypePolicy, StateGeometry, dtype_name
from dasc.layout import Layout, LayoutKind, rank_layouts
from dasc.placement import Placement

MIN_WINDOW_TOKENS = 4  # least refresh window (eq. 7)

_METADATA_KEY = "dasc_plan"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


class PlanError(ValueError):
    """A plan file that cannot be used, or a plan that was made for another model."""


@dataclass(frozen=True, eq=False)
class SelectionPlan:
    """The mask, windows and placements of one model, one set of weights and one cutoff. Tensors are on the CPU.

    Attributes:
        family: registry name of the model family, that of ``geometry``.
        geometry: recurrent state of the whole model.
        epsilon: decay that ends a horizon, in (0, 1).
        gate_input: ``a_s``, the representative gate input.
        w_max: ``W_max`` in tokens, at least 4 (eq. 7).
        mask: bool ``[L, U]``; true units are global and stored.
        windows: ``W_u`` of eq. 7 in tokens, int64 ``[L, U]``: 4 to ``w_max`` for local units, 0 for global ones.
        fingerprint: of the decay parameters, ``"sha256:<64 hex digits>"``.
        placements: tensor-parallel degree to placement.
        dtypes: how checkpoints are stored.
        layout: ``"ragged"`` or ``"padded"``.
        format_version: of the file, the same for every plan.
    """

    family: str
    geometry: StateGeometry
    epsilon: float
    gate_input: float
    w_max: int
    mask: Tensor
    windows: Tensor
    fingerprint: str
    placements: Mapping[int, Placement] = field(default_factory=dict)
    dtypes: DtypePolicy = DtypePolicy()  # noqa: RUF009 - frozen
    layout: LayoutKind = "ragged"
    format_version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.family != self.geometry.family:
            raise ValueError(f"family must be {self.geometry.family!r} as in the geometry, got {self.family!r}")
        float_max = sys.float_info.max  # NaN is not below it either
        for name in ("epsilon", "gate_input"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= float_max:
                raise ValueError(f"{name} must be a finite number, got {value!r}")
            object.__setattr__(self, name, float(value))
        if not 0 < self.epsilon < 1:
            raise ValueError(f"epsilon must be between 0 and 1, got {self.epsilon}")
        if not isinstance(self.w_max, int) or isinstance(self.w_max, bool) or self.w_max < MIN_WINDOW_TOKENS:
            raise ValueError(f"w_max must be an integer of at least {MIN_WINDOW_TOKENS} tokens, got {self.w_max!r}")
        if not isinstance(self.fingerprint, str) or not re.fullmatch("sha256:[0-9a-f]{64}", self.fingerprint):
            raise ValueError(f"fingerprint must be 'sha256:' and 64 hex digits, got {self.fingerprint!r}")
        if self.layout not in ("ragged", "padded"):
            raise ValueError(f"layout must be 'ragged' or 'padded', got {self.layout!r}")
        self.geometry.stored_unit_shape(self.dtypes)  # raises for what cannot be stored so
        units = (self.geometry.num_layers, self.geometry.units_per_layer)
        _check_tensor("mask", self.mask, torch.bool, units)
        _check_tensor("windows", self.windows, torch.int64, units)
        _check_windows(self.mask, self.windows, self.w_max)
        placements = {}
        for ranks, placement in self.placements.items():
            if self.layout == "padded" and placement.mode != "off":
                raise ValueError(f"placements[{ranks}] balances storage, which needs the ragged layout, got 'padded'")
            placements[ranks] = _checked_placement(self.geometry, self.mask, ranks, placement)
        # Copies of its own, so that nothing the caller does later can change a plan.
        object.__setattr__(self, "mask", self.mask.clone())
        object.__setattr__(self, "windows", self.windows.clone())
        object.__setattr__(self, "placements", dict(sorted(placements.items())))

    def check_weights(self, fingerprint: str) -> None:
        """Raise unless the plan was made from the decay parameters with this fingerprint.

        Raises:
            PlanError: with both fingerprints.
        """
        if fingerprint != self.fingerprint:
            raise PlanError(f"the plan was made for the weights {self.fingerprint}, the model has {fingerprint}")

    def check_geometry(self, geometry: StateGeometry) -> None:
        """Raise unless the plan was made for a model of this geometry.

        Raises:
            PlanError: naming each field that differs.
        """
        names = [f.name for f in dataclasses.fields(StateGeometry)]
        pairs = [(name, getattr(self.geometry, name), getattr(geometry, name)) for name in names]
        wrong = [f"{name} {ours!r} against {theirs!r}" for name, ours, theirs in pairs if ours != theirs]
        if wrong:
            raise PlanError(f"the plan was made for another model: {', '.join(wrong)} of this one")

    def layouts(self, ranks: int = 1) -> list[Layout]:
        """The layout of each rank of ``ranks``. One rank needs no placement.

        Raises:
            ValueError: when the plan has no placement for that many ranks.
        """
        if ranks != 1 and ranks not in self.placements:
            held = ", ".join(map(str, self.placements)) or "none"
            raise ValueError(f"the plan has no placement for {ranks!r} ranks; it has: {held}")
        return rank_layouts(
            self.geometry,
            self.mask,
            ranks,
            kind=self.layout,
            placement=self.placements.get(ranks),
            dtypes=self.dtypes,
        )

    def same_as(self, other: SelectionPlan) -> bool:
        """Exact equality of every field (dataclass equality is undefined on tensors)."""
        fields, tensors = _contents(self)
        other_fields, other_tensors = _contents(other)
        return fields == other_fields and all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path``, at once or not at all: a failure leaves what was there, and nothing else.

        A symbolic link is followed. Whatever is there must be a regular file: a device would be replaced, not written.

        Raises:
            OSError: naming ``path``, when the file cannot be written.
        """
        target = Path(os.path.realpath(path))
        try:
            if target.exists() and not target.is_file():
                raise FileExistsError(errno.EEXIST, "not a regular file")
            _write(target, *_contents(self))
        except OSError as error:
            raise OSError(error.errno, f"cannot write the plan: {error.strerror}", os.fspath(path)) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SelectionPlan:
        """Read a plan and check all of it: format, version, checksum, fields and tensors.

        Raises:
            PlanError: in one line that names the file, whatever is wrong with it: missing, unreadable, no plan, of a
                newer version, damaged or inconsistent.
        """
        try:
            return _plan_of(*_read(path))
        except OSError as error:
            raise PlanError(f"{path}: cannot be read ({error})") from error
        except ValueError as error:
            raise PlanError(f"{path}: {error}") from error


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
        got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(type(tensor))
        raise ValueError(f"{name} must be {dtype} {shape}, got {got}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")


def _check_windows(mask: Tensor, windows: Tensor, w_max: int) -> None:
    """Global units are never refreshed; local ones have a window in ``[4, w_max]``."""
    if windows[mask].any():
        raise ValueError("windows must be 0 for global units")
    local = windows[~mask]
    if local.numel() and not MIN_WINDOW_TOKENS <= int(local.min()) <= int(local.max()) <= w_max:
        found = f"{int(local.min())} to {int(local.max())}"
        raise ValueError(f"windows of local units must be {MIN_WINDOW_TOKENS} to w_max = {w_max} tokens, got {found}")


def _checked_placement(geometry: StateGeometry, mask: Tensor, ranks: int, placement: Placement) -> Placement:
    """The placement that head order, mask and B.1 determine; ``ValueError`` unless ``placement`` is that one."""
    try:
        if placement.ranks != ranks:
            raise ValueError(f"ranks must be {ranks}, got {placement.ranks}")
        expected = Placement.from_head_order(geometry, mask, ranks, placement.mode, placement.head_order.clone())
        for name in ("local_units", "stored_units", "slot_units"):
            if getattr(placement, name) != getattr(expected, name):
                raise ValueError(f"{name} must be {getattr(expected, name)}, got {getattr(placement, name)}")
        _check_tensor("moves", placement.moves, torch.int64, tuple(expected.moves.shape))
        if not torch.equal(placement.moves, expected.moves):
            raise ValueError("moves must take each excess unit to the free position that B.1 gives it")
    except ValueError as error:
        raise ValueError(f"placements[{ranks}]: {error}") from error
    return expected


def _contents(plan: SelectionPlan) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the file of a plan holds: JSON fields, without the checksum, and tensors."""
    tensors = {"mask": plan.mask, "windows": plan.windows}
    placements = []
    for ranks, placement in plan.placements.items():
        tensors[f"tp{ranks}.head_order"] = placement.head_order
        tensors[f"tp{ranks}.moves"] = placement.moves
        names = ("mode", "ranks", "local_units", "stored_units", "slot_units")
        placements.append({name: getattr(placement, name) for name in names})
    temporal, conv = dtype_name(plan.dtypes.temporal), dtype_name(plan.dtypes.conv)
    fields = {
        "format_version": plan.format_version,
        "family": plan.family,
        "geometry": dataclasses.asdict(plan.geometry),
        "epsilon": plan.epsilon,
        "gate_input": plan.gate_input,
        "w_max": plan.w_max,
        "fingerprint": plan.fingerprint,
        "placements": placements,
        "dtypes": {"temporal": temporal, "conv": conv, "quantized": plan.dtypes.quantized},
        "layout": plan.layout,
    }
    return fields, tensors


def _plan_of(fields: dict[str, Any], tensors: dict[str, Tensor]) -> SelectionPlan:
    """The plan whose :func:`_contents` these are; ``ValueError`` when there is none."""
    try:
        dtypes = {name: getattr(torch, fields["dtypes"][name]) for name in ("temporal", "conv")}
        placements = {
            entry["ranks"]: Placement(
                mode=entry["mode"],
                ranks=entry["ranks"],
                head_order=tensors[f"tp{entry['ranks']}.head_order"],
                local_units=tuple(entry["local_units"]),
                stored_units=tuple(entry["stored_units"]),
                moves=tensors[f"tp{entry['ranks']}.moves"],
                slot_units=entry["slot_units"],
            )
            for entry in fields["placements"]
        }
        plan = SelectionPlan(
            family=fields["family"],
            geometry=StateGeometry(**fields["geometry"]),
            epsilon=fields["epsilon"],
            gate_input=fields["gate_input"],
            w_max=fields["w_max"],
            mask=tensors["mask"],
            windows=tensors["windows"],
            fingerprint=fields["fingerprint"],
            placements=placements,
            dtypes=DtypePolicy(**dtypes, quantized=fields["dtypes"]["quantized"]),
            layout=fields["layout"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field or tensor is missing or of the wrong type ({error!r})") from error
    written, named = _contents(plan)
    if _canonical(written) != _canonical(fields) or named.keys() != tensors.keys():
        raise ValueError("the file holds fields or tensors that its plan does not have")
    return plan


def _write(path: Path, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write the file under another name, then give it its own."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = safetensors.torch.save(tensors, {_METADATA_KEY: _seal(fields, tensors)})
    temporary = path.with_name(f".dasc-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields and tensors that :func:`_write` was given, with their seal checked.

    The file is opened once, so that a plan saved meanwhile cannot be mixed with the one being read.

    Raises:
        OSError: when the file cannot be read.
        ValueError: for a file that is no plan, is damaged, or has another format version.
    """
    with open(path, "rb") as file:
        start = file.read(8)
        header = file.read(min(int.from_bytes(start, "little"), _MAX_HEADER_BYTES))
        metadata = _json_object(header, "not a safetensors file, or a damaged one").get("__metadata__")
        text = metadata.get(_METADATA_KEY) if isinstance(metadata, dict) and len(metadata) == 1 else None
        if not isinstance(text, str):
            raise ValueError(f"not a dasc plan: its metadata is not {_METADATA_KEY!r} alone")
        data = start + header + file.read()
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise ValueError(f"not a safetensors file, or a damaged one ({error})") from error
    fields = _json_object(text, "damaged: the metadata is not a JSON object")
    _check_version(fields.get("format_version"))
    fields.pop("checksum", None)
    if text != _seal(fields, tensors):
        raise ValueError("damaged: the checksum does not match")
    return fields, tensors


def _json_object(text: str | bytes, complaint: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{complaint} ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(complaint)
    return value


def _check_version(version: object) -> None:
    if isinstance(version, int) and version > SelectionPlan.format_version:
        newest = SelectionPlan.format_version
        raise ValueError(f"format version {version} is newer than {newest}, the newest this dasc reads: upgrade dasc")
    if version != SelectionPlan.format_version:
        raise ValueError(f"damaged: format version must be {SelectionPlan.format_version}, got {version!r}")


def _seal(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Canonical JSON of the fields and their checksum."""
    digest = hashlib.sha256(_canonical(fields).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(_canonical([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode())
        # the bytes as they lie: a copy could turn every non-zero byte of a bool tensor into 1
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return _canonical({**fields, "checksum": f"sha256:{digest.hexdigest()}"})


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
