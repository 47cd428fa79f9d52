"""What a forward pass is asked to do, sequence by sequence, and how that is packed for the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

WindowKV = Literal["replayed", "cached"]


@dataclass(frozen=True, eq=False)
class StatePool:
    """Recurrent states by slot, owned by the caller. A forward writes the slots it is told to and no others.

    Attributes:
        temporal: ``[L, slots, HV, V, K]``, FP32 in serving.
        conv: ``[L, slots, channels, width - 1]``, oldest row first.
    """

    temporal: Tensor
    conv: Tensor


@dataclass(frozen=True, eq=False)
class KVPool:
    """Attention K/V of single tokens by slot, owned by the caller.

    Attributes:
        rows: ``[A, slots, width]`` for the ``A`` attention layers. A row is ``k | v`` of all KV heads (grouped
            attention), or the normalised latent and the shared key part (latent attention is cached compressed).
    """

    rows: Tensor


@dataclass(frozen=True, eq=False)
class SequenceInput:
    """One request's part of a forward: a prompt, a piece of one, or one token to decode. Tensors are on the CPU.

    Attributes:
        tokens: ``[T]`` int64, new tokens at positions ``start .. start + T - 1``. At least one, unless there is a
            window: then the state at ``start`` may be refreshed alone.
        start: tokens before them, ``n_p`` on a cache hit. At 0 the state is zero whatever the slot holds.
        state_slot: slot of the state pool that the state after the last token is written to.
        kv_slots: ``[start + T]`` int64, KV slot of each position: the first ``start`` are read, the others written.
        source_slot: slot that the state at ``start`` is read from; ``state_slot`` when ``None``. Another slot makes the
            forward a copy on write: a shared checkpoint, or the state before speculative tokens, stays as it is.
        window: ``[W]`` int64 replay tokens at positions ``start - W .. start - 1`` (section 4.2), or ``None``.
    """

    tokens: Tensor
    start: int
    state_slot: int
    kv_slots: Tensor
    source_slot: int | None = None
    window: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "kv_slots", "window"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dtype != torch.int64 or tensor.ndim != 1):
                raise ValueError(f"{name} must be a 1-D int64 tensor, got {tensor.dtype} {list(tensor.shape)}")
        if not len(self.tokens) and not self.window_tokens:
            raise ValueError("tokens must hold at least one new token when there is no window, got none")
        if self.start < 0 or self.window_tokens > self.start:
            raise ValueError(f"start must be at least the window's {self.window_tokens} tokens, got {self.start}")
        if len(self.kv_slots) != self.start + len(self.tokens):
            raise ValueError(
                f"kv_slots must be {self.start + len(self.tokens)} slots, one a position, got {len(self.kv_slots)}"
            )

    @property
    def window_tokens(self) -> int:
        return 0 if self.window is None else len(self.window)

    @property
    def read_slot(self) -> int:
        """Slot of the state at ``start``."""
        return self.state_slot if self.source_slot is None else self.source_slot


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences that one forward handles together.

    Attributes:
        sequences: at least one; each writes a state slot and KV slots of its own.
        global_units: ``[L, units a layer]`` bool, units that a refresh takes from the slot; the others come from the
            window. Needed when a sequence has a window.
        window_kv: what replay tokens attend to inside their window. ``"replayed"``: K/V of their own, computed anew and
            thrown away. ``"cached"``: the exact K/V in the cache. Both read the cache before the window; the new tokens
            always read the cache alone.
    """

    sequences: tuple[SequenceInput, ...]
    global_units: Tensor | None = None
    window_kv: WindowKV = "replayed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "sequences", tuple(self.sequences))
        if not self.sequences:
            raise ValueError("sequences must hold at least one sequence, got none")
        if self.window_kv not in ("replayed", "cached"):
            raise ValueError(f"window_kv must be 'replayed' or 'cached', got {self.window_kv!r}")
        if self.global_units is None and any(s.window_tokens for s in self.sequences):
            raise ValueError("global_units must be given when a sequence has a replay window, got None")
        written = [s.state_slot for s in self.sequences]
        if len(set(written)) != len(written):
            raise ValueError(f"state_slot must differ between sequences, got {written}")
        for s in self.sequences:
            if s.read_slot != s.state_slot and s.read_slot in written:
                raise ValueError(f"source_slot {s.read_slot} is written by another sequence of the batch")
        kv_written = torch.cat([s.kv_slots[s.start :] for s in self.sequences]).tolist()
        if len(set(kv_written)) != len(kv_written):
            raise ValueError("kv_slots of new tokens must differ between all tokens of the batch")


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """Runs of query tokens of one length ``t``, attended together: ``n`` runs, each after a prefix of the cache.

    Attributes:
        rows: ``[n, t]`` packed rows of the queries.
        prefix_slots: ``[n, S]`` KV slots before the run, filled up on the right.
        own_slots: ``[n, t]`` KV slots of the run itself when it reads the cache there, ``None`` when it projects K/V.
        mask: ``[n, 1, t, S + t]`` bool, what each query may see of the prefix and then of the run.
    """

    rows: Tensor
    prefix_slots: Tensor
    own_slots: Tensor | None
    mask: Tensor


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A batch laid out for the layers: all windows, then all new tokens, each in the order of the sequences.

    Attributes:
        tokens: ``[W + T]`` int64.
        positions: ``[W + T]`` int64.
        window_rows: ``W``, rows of the windows.
        window_cu: ``[windows + 1]`` boundaries of the windows, from 0.
        new_cu: ``[N + 1]`` boundaries of the new tokens, from 0.
        refreshed: ``[windows]`` int64, the sequences that have a window.
        single_tokens: every sequence has one new token (a decode step).
        fresh: ``[N]`` bool, sequences that start at 0.
        read_slots: ``[N]`` int64.
        write_slots: ``[N]`` int64.
        kv_written: ``[T]`` int64, KV slots of the new tokens.
        kv_first_row: first row whose K/V is projected: 0, or ``W`` when windows read the cache.
        groups: the attention's work.
    """

    tokens: Tensor
    positions: Tensor
    window_rows: int
    window_cu: Tensor
    new_cu: Tensor
    refreshed: Tensor
    single_tokens: bool
    fresh: Tensor
    read_slots: Tensor
    write_slots: Tensor
    kv_written: Tensor
    kv_first_row: int
    groups: tuple[AttentionGroup, ...]

    @property
    def conv_cu(self) -> Tensor:
        """``[windows + N + 1]`` boundaries of windows and new tokens together."""
        return torch.cat([self.window_cu, self.new_cu[1:] + self.window_rows])


@dataclass(frozen=True, eq=False)
class _Run:
    """Consecutive tokens of a sequence that are queries together."""

    tokens: Tensor
    first_row: int
    first_position: int
    kv_slots: Tensor
    reads_own_slots: bool


def pack(batch: Batch, device: torch.device, *, windows: bool = True) -> PackedBatch:
    """Lay out ``batch``, without its replay windows if ``windows`` is false."""
    numbers = [n for n, s in enumerate(batch.sequences) if windows and s.window_tokens]
    refreshed = [batch.sequences[n] for n in numbers]
    cached = batch.window_kv == "cached"
    runs: list[_Run] = []
    row = 0
    for s in refreshed:
        assert s.window is not None
        runs.append(_Run(s.window, row, s.start - s.window_tokens, s.kv_slots, cached))
        row += s.window_tokens
    window_rows = row
    for s in batch.sequences:
        runs.append(_Run(s.tokens, row, s.start, s.kv_slots, False))
        row += len(s.tokens)

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    positions = [torch.arange(len(r.tokens)) + r.first_position for r in runs]
    return PackedBatch(
        tokens=torch.cat([r.tokens for r in runs]).to(device),
        positions=torch.cat(positions).to(device),
        window_rows=window_rows,
        window_cu=integers([0, *(s.window_tokens for s in refreshed)]).cumsum(0),
        new_cu=integers([0, *(len(s.tokens) for s in batch.sequences)]).cumsum(0),
        refreshed=integers(numbers),
        single_tokens=all(len(s.tokens) == 1 for s in batch.sequences),
        fresh=integers([s.start for s in batch.sequences]) == 0,
        read_slots=integers([s.read_slot for s in batch.sequences]),
        write_slots=integers([s.state_slot for s in batch.sequences]),
        kv_written=torch.cat([s.kv_slots[s.start :] for s in batch.sequences]).to(device),
        kv_first_row=window_rows if cached else 0,
        groups=tuple(_attention_group(g, device) for g in _by_length(runs)),
    )


def _by_length(runs: list[_Run]) -> list[list[_Run]]:
    """Runs that can be attended as one rectangle: as many queries, and K/V from the same place."""
    groups: dict[tuple[int, bool], list[_Run]] = {}
    for run in filter(lambda r: len(r.tokens), runs):
        groups.setdefault((len(run.tokens), run.reads_own_slots), []).append(run)
    return list(groups.values())


def _attention_group(runs: list[_Run], device: torch.device) -> AttentionGroup:
    t = len(runs[0].tokens)
    prefixes = [run.kv_slots[: run.first_position] for run in runs]
    lengths = torch.tensor([len(prefix) for prefix in prefixes])
    longest = max(prefixes, key=len)
    # fill up with a slot that is known to be written: what others hold may be NaN, which a mask does not stop
    filler = int(longest[0]) if len(longest) else 0
    seen = (torch.arange(len(longest)) < lengths[:, None])[:, None, None, :].expand(-1, 1, t, -1)
    causal = torch.ones(t, t, dtype=torch.bool).tril().expand(len(runs), 1, t, t)
    own = [run.kv_slots[run.first_position : run.first_position + t] for run in runs]
    return AttentionGroup(
        rows=(torch.tensor([run.first_row for run in runs])[:, None] + torch.arange(t)).to(device),
        prefix_slots=pad_sequence(prefixes, batch_first=True, padding_value=filler).to(device),
        own_slots=torch.stack(own).to(device) if runs[0].reads_own_slots else None,
        mask=torch.cat([seen, causal], dim=-1).to(device),
    )
