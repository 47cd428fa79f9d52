"""What the cache hands to whoever runs requests: matches, leases, backpressure."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dasc.cache.checkpoints import PromptInfo
from dasc.cache.entries import StateEntry
from dasc.cache.radix import TOKEN_BYTES, Node


class Match(NamedTuple):
    """How far a prompt would be served. Valid until the cache next changes.

    Attributes:
        kv_tokens: tokens that KV has, whole pages, at most all but the last of the prompt.
        usable_tokens: tokens that need not be computed: where the deepest state within ``kv_tokens`` is, else 0.
        node: the tree node of that state.
        junction: ``kv_tokens`` where no state serves all of them, else ``None``: where a checkpoint would help.
    """

    kv_tokens: int
    usable_tokens: int
    node: Node | None
    junction: int | None

    @property
    def entry(self) -> StateEntry | None:
        """The state that would be used."""
        return None if self.node is None else self.node.state


class Backpressure(NamedTuple):
    """The request cannot start or grow now and has changed nothing of its own; try again when others have finished.

    Attributes:
        resource: ``"native"`` (no state slot) or ``"kv"`` (no pages).
    """

    resource: str


@dataclass(eq=False, slots=True)
class Lease:
    """One running request's share of the cache, from ``acquire`` to its end. Only the cache changes it.

    Tokens ``[0, shared_tokens)`` use the tree's pages, which ``node`` holds; the rest of ``pages`` is its own.

    Attributes:
        request_id: the caller's name for the request.
        tokens: int32 bytes of the token ids known so far, prompt first.
        store: whether the request may leave checkpoints.
        node: the tree node it holds.
        prompt: what placement policies see.
        slot: its active native slot.
        hit_tokens: prompt tokens served from the cache.
        entry: the state it was served from, later its own last checkpoint; locked, until ``release_state``.
        shared_tokens: see above.
        pages: int32 bytes, its page table.
        state_position: tokens the active slot's state has seen; -1 until ``issue_loads`` has filled the slot.
    """

    request_id: Hashable
    tokens: bytearray = field(repr=False)
    store: bool
    node: Node = field(repr=False)
    prompt: PromptInfo
    slot: int = 0
    hit_tokens: int = 0
    entry: StateEntry | None = None
    shared_tokens: int = 0
    pages: bytearray = field(default_factory=bytearray, repr=False)
    state_position: int = -1

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def page_table(self) -> NDArray[np.int32]:
        """Page numbers in order, int32. A copy: read it again after each call to the cache."""
        return np.frombuffer(bytes(self.pages), np.int32)

    @property
    def source_slot(self) -> int:
        """Slot of the state referred to: native unless that state is compressed."""
        assert self.entry is not None
        return self.entry.slot

    def prefix(self, tokens: int) -> bytes:
        """Key of the first ``tokens`` tokens."""
        return bytes(self.tokens[: tokens * TOKEN_BYTES])
