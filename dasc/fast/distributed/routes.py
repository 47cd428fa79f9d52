"""Which units of a rank stay, go and come when checkpoints are stored balanced (appendix B.1 (b)).

The packed units of one rank are numbered in its local order (:class:`~dasc.placement.Placement`): unit ``i`` is
``layout.unit_index[i]``. Its first ``kept`` units lie at the same rows of its own slots. A rank with more units than it
stores sends the rest; one with fewer receives units of others into the rows after its own. No rank does both.

Between ranks a unit is one row of :func:`row_bytes` bytes: its values in ``layout.dtypes.stored_temporal`` and, if
quantised, its scales in ``layout.dtypes.temporal``. A buffer of ``n`` checkpoints holds rows ordered by (peer,
checkpoint, unit), so that one variable-split all-to-all moves them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dasc.layout import Layout
from dasc.placement import Placement


def row_bytes(layout: Layout) -> int:
    """Bytes of one unit on its way between ranks: its values and, if quantised, its scales."""
    return layout.geometry.stored_unit_bytes(layout.dtypes) + layout.geometry.unit_scale_bytes(layout.dtypes)


@dataclass(frozen=True)
class PeerUnits:
    """Consecutive units of one checkpoint that go to other ranks or come from them, grouped by peer, peers ascending.

    Attributes:
        first: the first of them: a local unit of what is sent, a row of the slot of what is received.
        splits: ``[P]``, units of each peer.
    """

    first: int
    splits: tuple[int, ...]

    @property
    def count(self) -> int:
        """Units of one checkpoint, of all peers together."""
        return sum(self.splits)

    @property
    def span(self) -> slice:
        """The units: ``first .. first + count``."""
        return slice(self.first, self.first + self.count)

    def groups(self) -> tuple[Tensor, Tensor]:
        """Start and size of the peer's group that each unit ``j`` (counted from 0) is in, both int64 ``[count]``.

        In the buffer of ``n`` checkpoints, unit ``j`` of checkpoint ``i`` is row
        ``n * start[j] + i * size[j] + (j - start[j])``.
        """
        sizes = torch.tensor(self.splits)
        starts = sizes.cumsum(0) - sizes
        return starts.repeat_interleave(sizes), sizes.repeat_interleave(sizes)

    def parts(self, buffer: Tensor, checkpoints: int) -> Iterator[tuple[slice, Tensor]]:
        """Each peer's units, counted from 0, and its part of the buffer as a view ``[checkpoints, size, row_bytes]``.

        Args:
            buffer: uint8 ``[checkpoints * count, row_bytes]``.
            checkpoints: ``n``.
        """
        start = 0
        for size in self.splits:
            if size:
                rows = buffer[checkpoints * start : checkpoints * (start + size)]
                yield slice(start, start + size), rows.view(checkpoints, size, -1)
            start += size


@dataclass(frozen=True)
class Routes:
    """One rank's part of a :class:`~dasc.placement.Placement`.

    Attributes:
        rank: this rank.
        ranks: ``P``.
        local_units: ``n_r``, retained units that the rank computes.
        stored_units: ``t_r``, rows of its slots that hold units; those above are padding.
        kept: ``min(n_r, t_r)``: local units ``0 .. kept`` lie at rows ``0 .. kept`` of the rank's own slots.
        sent: local units ``kept .. n_r``, by the rank that stores them.
        received: rows ``kept .. t_r`` of its slots, by the rank that computes them.
    """

    rank: int
    ranks: int
    local_units: int
    stored_units: int
    kept: int
    sent: PeerUnits
    received: PeerUnits

    @classmethod
    def of(cls, placement: Placement, rank: int) -> Routes:
        """The routes of ``rank``.

        Raises:
            ValueError: for a rank outside ``[0, P)``, or moves that are not those of B.1 (b).
        """
        if not 0 <= rank < placement.ranks:
            raise ValueError(f"rank must be in [0, {placement.ranks}), got {rank}")
        local_units, stored_units = placement.local_units[rank], placement.stored_units[rank]
        kept = min(local_units, stored_units)
        source, unit, destination, position = placement.moves.unbind(dim=1)
        goes, comes = source == rank, destination == rank
        return cls(
            rank=rank,
            ranks=placement.ranks,
            local_units=local_units,
            stored_units=stored_units,
            kept=kept,
            sent=_peer_units(kept, local_units, unit[goes], destination[goes], placement.ranks),
            received=_peer_units(kept, stored_units, position[comes], source[comes], placement.ranks),
        )


def _peer_units(first: int, stop: int, units: Tensor, peers: Tensor, ranks: int) -> PeerUnits:
    """Units ``first .. stop`` by peer; ``units`` and ``peers`` are what the placement's moves say of them."""
    ascending = all(a <= b for a, b in itertools.pairwise(peers.tolist()))
    if not ascending or not torch.equal(units, torch.arange(first, stop)):
        raise ValueError(
            f"moves must take units {first} to {stop} one after another, peers ascending, as B.1 (b) pairs them, "
            f"got units {units.tolist()} of peers {peers.tolist()}"
        )
    return PeerUnits(first, tuple(torch.bincount(peers, minlength=ranks).tolist()))
