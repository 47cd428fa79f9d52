"""Where the chunks of a batch lie: made on the host once, used by every layer of a forward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dasc.contract import sequence_spans

# Tokens of a chunk, at most: the side of the kernels' tiles.
CHUNK_TOKENS = 64


class ChunkTable(NamedTuple):
    """The chunks of a batch, in the order of its tokens. None straddles a sequence's end or the end of its replay.

    Attributes:
        chunks: ``[C, 2]`` int64 on the device: first row of ``[B * T]`` and tokens, 1 to ``CHUNK_TOKENS``.
        sequences: ``[N, 4]`` int64 on the device: first row, replayed tokens, all tokens, first chunk.
        tokens: ``B * T``.
        cu_seqlens: as given, on the CPU.
        chunk_size: tokens of a full chunk.
        has_replay: whether any sequence has replayed tokens.
    """

    chunks: Tensor
    sequences: Tensor
    tokens: int
    cu_seqlens: Tensor | None
    chunk_size: int
    has_replay: bool


def chunk_table(
    batch: int,
    tokens: int,
    cu_seqlens: Tensor | None,
    device: torch.device,
    *,
    replay_tokens: Tensor | None = None,
    chunk_size: int = CHUNK_TOKENS,
) -> ChunkTable:
    """The table of a batch ``[B, T]``. Reads ``cu_seqlens`` and ``replay_tokens``, which waits for a GPU they are on.

    Args:
        batch: ``B``.
        tokens: ``T``.
        cu_seqlens: ``[N + 1]`` boundaries of packed sequences (then ``B = 1``).
        device: of the inputs.
        replay_tokens: ``[N]``, of :class:`dasc.contract.RefreshMerge`.
        chunk_size: tokens of a chunk; more than ``CHUNK_TOKENS`` do not fit, and chunks are then of so many.

    Raises:
        ValueError: for a ``chunk_size`` below 1, wrong ``cu_seqlens``, or replays longer than their sequence.
    """
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size must be a positive integer, got {chunk_size!r}")
    size = min(chunk_size, CHUNK_TOKENS)
    starts, lengths = sequence_spans(batch, tokens, cu_seqlens, torch.device("cpu"))
    replays = torch.zeros_like(lengths) if replay_tokens is None else replay_tokens.cpu().long()
    if replays.shape != lengths.shape or not bool(((replays >= 0) & (replays <= lengths)).all()):
        raise ValueError(
            "replay_tokens must be from 0 to the length of its sequence, "
            f"got {replays.tolist()} for lengths {lengths.tolist()}"
        )
    # two parts a sequence, the replay and the rest, each in chunks of its own
    part_tokens = torch.stack([replays, lengths - replays], dim=1).flatten()
    part_starts = torch.stack([starts, starts + replays], dim=1).flatten()
    part_chunks = (part_tokens + size - 1) // size
    first_chunks = part_chunks.cumsum(0) - part_chunks
    within = torch.arange(int(part_chunks.sum())) - first_chunks.repeat_interleave(part_chunks)
    chunk_starts = part_starts.repeat_interleave(part_chunks) + within * size
    left = (part_tokens.repeat_interleave(part_chunks) - within * size).clamp(max=size)
    return ChunkTable(
        chunks=torch.stack([chunk_starts, left], dim=1).to(device),
        sequences=torch.stack([starts, replays, lengths, first_chunks[::2]], dim=1).to(device),
        tokens=batch * tokens,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.cpu(),
        chunk_size=size,
        has_replay=bool(replays.any()),
    )
