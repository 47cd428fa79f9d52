"""What the plugin is told: ``DASC_`` variables of the environment and one optional file."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dasc.units import parse_bytes

LEAST_LOG_INTERVAL = 0.1
"""Seconds."""
_PREFIX = "DASC_"
FILE_VARIABLE = "DASC_CONFIG"
AUTO = "auto"


@dataclass(frozen=True)
class PoolSize:
    """Size of a rank's compressed pool: one of the two, or neither for what the running requests leave.

    Attributes:
        slots: usable slots.
        pool_bytes: bytes, the reserved slot included.
    """

    slots: int | None = None
    pool_bytes: int | None = None

    def __str__(self) -> str:
        if self.slots is not None:
            return f"{self.slots} slots"
        return AUTO if self.pool_bytes is None else f"{self.pool_bytes} bytes"


@dataclass(frozen=True)
class Config:
    """The settings of one server, checked against each other.

    What is ``None`` was not set: a plan from a file keeps its own, a plan made at start has W_max 16, the ragged
    layout, units that are not quantised and placement ``off``.

    Attributes:
        plan: path of a plan, or ``"auto"`` for one made from the served model's weights.
        w_max: cutoff in tokens.
        load_policy: what a hit does with omitted units: zero them (``nr``) or refresh them (``wr``).
        placement: of units over tensor-parallel ranks.
        layout: of a slot.
        int8: store units as INT8.
        int4: store units as INT4.
        mode: ``compressed-only`` caches compressed checkpoints alone, ``two-tier`` dense ones too.
        pool: of compressed checkpoints, on each rank.
        spill: two-tier: keep dense checkpoints when the compressed pool is full.
        watermark: two-tier: native slots to keep free.
        refresh: ``two-pass`` keeps a refresh apart from the forwards of requests, ``auto`` only where it must be.
        log_interval: seconds between summary lines in the log, 0 for none.
    """

    plan: str
    w_max: int | None = None
    load_policy: Literal["nr", "wr"] = "nr"
    placement: Literal["off", "storage", "hybrid"] | None = None
    layout: Literal["ragged", "padded"] | None = None
    int8: bool | None = None
    int4: bool | None = None
    mode: Literal["two-tier", "compressed-only"] = "compressed-only"
    pool: PoolSize = PoolSize()
    spill: bool = True
    watermark: int = 0
    refresh: Literal["auto", "two-pass"] = "auto"
    log_interval: float = 60.0

    def decisive(self) -> dict[str, str]:
        """Settings by which ranks decide what to store and evict, beside the plan: all must have the same."""
        names = ("load_policy", "refresh", "mode", "pool", "spill", "watermark")
        return {_PREFIX + name.upper(): str(getattr(self, name)) for name in names}


_TWO_TIER_ONLY = ("spill", "watermark")


def read_config(environ: Mapping[str, str]) -> Config | None:
    """The settings that ``environ`` and the file it names give, or ``None`` when neither ``DASC_PLAN`` nor
    ``DASC_CONFIG`` is set: the plugin is off then, whatever else is set. A variable wins over the file.

    Raises:
        ValueError: in one line: an unknown name (with the nearest one), a value out of range, settings that exclude
            each other, or a file that cannot be read.
    """
    if not environ.get("DASC_PLAN") and not environ.get(FILE_VARIABLE):
        return None
    settings = {}
    for source, name, value in _given(environ):
        try:
            settings[name] = _PARSERS[name](value)
        except ValueError as error:
            raise ValueError(f"{source} must be {error}, got {value!r}") from error
    if "plan" not in settings:
        raise ValueError(f"{FILE_VARIABLE} is set, but neither {environ[FILE_VARIABLE]} nor DASC_PLAN names a plan")
    config = Config(**settings)
    _check(config, settings)
    return config


def _given(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """``(where, setting, text)`` of all that is set, the file first."""
    file = environ.get(FILE_VARIABLE)
    if file:
        for name, value in _read_file(file).items():
            if name not in _PARSERS:
                raise ValueError(f"{file} has the unknown setting {name!r}{_nearest(name, list(_PARSERS))}")
            yield f"{name} in {file}", name, value
    variables = {_PREFIX + name.upper(): name for name in _PARSERS}
    for variable in sorted(environ):
        if variable in variables:
            if variable != "DASC_PLAN" or environ[variable]:
                yield variable, variables[variable], environ[variable]
        elif variable.startswith(_PREFIX) and variable != FILE_VARIABLE:
            nearest = _nearest(variable, [*variables, FILE_VARIABLE])
            raise ValueError(f"unknown variable {variable} in the environment{nearest}")


def _nearest(name: str, known: list[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else f"; known are {', '.join(sorted(known))}"


def _read_file(file: str) -> dict[str, str]:
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"{FILE_VARIABLE}: {file} cannot be read as TOML or JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{FILE_VARIABLE}: {file} must hold settings by name")
    return {name: _as_text(f"{name} in {file}", value) for name, value in values.items()}


def _as_text(source: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"{source} must be a string, a number or a boolean, got {value!r}")


def _check(config: Config, settings: Mapping[str, Any]) -> None:
    if config.layout == "padded" and config.placement in ("storage", "hybrid"):
        raise ValueError(f"DASC_PLACEMENT={config.placement} needs DASC_LAYOUT=ragged, got padded")
    if config.int8 and config.int4:
        raise ValueError("DASC_INT8 and DASC_INT4 exclude each other, got on for both")
    for name in _TWO_TIER_ONLY:
        if name in settings and config.mode != "two-tier":
            raise ValueError(f"{_PREFIX}{name.upper()} needs DASC_MODE=two-tier, got {config.mode}")
    if "refresh" in settings and config.load_policy != "wr":
        raise ValueError(f"DASC_REFRESH needs DASC_LOAD_POLICY=wr, got {config.load_policy}")


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}")
        return text

    return parse


def _whole(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or not minimum <= int(text) <= 1 << 40:
            raise ValueError(f"a whole number of at least {minimum}")
        return int(text)

    return parse


def _flag(text: str) -> bool:
    values = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
    if text.lower() not in values:
        raise ValueError("on or off")
    return values[text.lower()]


def _path(text: str) -> str:
    if not text:
        raise ValueError(f"the path of a plan, or {AUTO}")
    return text


def _pool(text: str) -> PoolSize:
    if text == AUTO:
        return PoolSize()
    try:
        return PoolSize(slots=_whole(1)(text)) if text.isdecimal() else PoolSize(pool_bytes=parse_bytes(text))
    except ValueError as error:
        raise ValueError(f"slots (256), bytes with a unit (2GiB) or {AUTO}") from error


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if value != 0 and not LEAST_LOG_INTERVAL <= value < math.inf:
        raise ValueError(f"seconds, {LEAST_LOG_INTERVAL} or more, or 0 for none")
    return value


_PARSERS: dict[str, Callable[[str], Any]] = {
    "plan": _path,
    "w_max": _whole(4),
    "load_policy": _one_of("nr", "wr"),
    "placement": _one_of("off", "storage", "hybrid"),
    "layout": _one_of("ragged", "padded"),
    "int8": _flag,
    "int4": _flag,
    "mode": _one_of("two-tier", "compressed-only"),
    "pool": _pool,
    "spill": _flag,
    "watermark": _whole(0),
    "refresh": _one_of("auto", "two-pass"),
    "log_interval": _seconds,
}
