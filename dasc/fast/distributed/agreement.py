"""What ranks must have in common, compared before it can do harm: a plan, a slot, the outcome of a transfer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

_MESSAGE_BYTES = 4096


class ExchangeError(RuntimeError):
    """A collective did not complete, because a rank is gone, late or at odds. What it was to write is undefined."""


class RanksDisagreeError(ExchangeError):
    """Ranks were given different things; raised on all of them."""


@contextmanager
def collective(operation: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run a collective; when it fails, say which, on what rank.

    Raises:
        ExchangeError: when a rank is gone, or late by more than the group's timeout.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(f"{operation} failed on rank {rank} of {ranks}: {error}") from error


def agree_on(
    values: Mapping[str, str], group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> None:
    """Raise on every rank unless all ranks of the group call this with the same values.

    Args:
        values: what to compare, by name. Give digests of what is long: all of it goes into 4 KiB of JSON.
        group: the default group when ``None``. Its timeout limits the wait for a rank that does not call.
        device: that the group communicates from.

    Raises:
        RanksDisagreeError: naming each thing that differs and which ranks have which value.
        ExchangeError: when a rank is gone or late.
        ValueError: for values that are too long (the other ranks then wait for their timeout).
    """
    message = json.dumps(dict(values)).encode()
    if len(message) > _MESSAGE_BYTES:
        raise ValueError(f"values must fit in {_MESSAGE_BYTES} bytes of JSON, got {len(message)}")
    own = torch.frombuffer(bytearray(message.ljust(_MESSAGE_BYTES)), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    with collective(f"comparing {', '.join(values)}", group):
        dist.all_gather(everyone, own, group=group)
    told = [_decode(message) for message in everyone]
    names = sorted({name for values in told for name in values})
    differences = [_difference(name, [values.get(name, "nothing") for values in told]) for name in names]
    if any(differences):
        raise RanksDisagreeError(f"ranks disagree: {'; '.join(filter(None, differences))}")


def outcome_agreement(
    group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> Callable[[bool], bool]:
    """The ``agree`` hook of :class:`~dasc.cache.tiers.TwoTierStore`: true where every rank says true.

    Its all-reduces must come in one order on all ranks, so ``group`` must not be one over which another thread (a
    mover's, say) communicates. A group on the CPU answers without waiting for a GPU.

    Args:
        group: the default group when ``None``. Its timeout limits the wait for a rank that does not ask.
        device: that the group communicates from.

    Returns:
        A function that raises :class:`ExchangeError` when a rank is gone or late.
    """
    flag = torch.empty(1, dtype=torch.int32, device=device)

    def agree(ok: bool) -> bool:
        flag.fill_(int(ok))
        with collective("agreeing on the outcome of a transfer", group):
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        return bool(flag.item())

    return agree


def _decode(message: Tensor) -> dict[str, str]:
    values: dict[str, str] = json.loads(bytes(message.tolist()))
    return values


def _difference(name: str, by_rank: list[str]) -> str | None:
    """``"w_max is 16 on ranks 0, 2 and 64 on rank 1"``, or ``None`` when all are equal."""
    distinct = list(dict.fromkeys(by_rank))
    if len(distinct) == 1:
        return None
    held = []
    for value in distinct:
        ranks = [str(rank) for rank, other in enumerate(by_rank) if other == value]
        held.append(f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}")
    return f"{name} is {' and '.join(held)}"
