"""The prefix cache: what an engine or a simulator talks to (section 4.4, appendix B.2).

A request's life: ``acquire`` (hit, slot and pages, or backpressure), ``issue_loads`` once a batch, then ``extend`` with
new token ids, ``advance`` as the state moves on, ``checkpoint`` where ``next_stop`` says, and ``finish`` or ``abort``.
The scheduler calls ``step`` at the start of each of its steps. One thread calls all of it.

A hit is the deepest state within the KV match: min(KV, state). It leaves at least one token of the prompt to compute,
as in SGLang, since what the model says after the prompt is not cached: a prompt sent twice can use a state up to all
but its last token (:class:`~dasc.cache.checkpoints.AtPromptEnd` puts one there).

A call that is interrupted out of a transfer (by an exception that is no ``Exception``) leaves everything accounted for,
and is either done but for the transfer or not begun.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dasc.cache.checkpoints import AtJunctions, PromptInfo, next_stop
from dasc.cache.config import CacheConfig
from dasc.cache.entries import NotCached, StateEntry, Tier
from dasc.cache.explain import Explanation
from dasc.cache.lease import Backpressure, Lease, Match
from dasc.cache.ledger import Ledger
from dasc.cache.pools import PagePool
from dasc.cache.radix import TOKEN_BYTES, encode_tokens
from dasc.cache.transfers import Mover

logger = logging.getLogger(__name__)

Tokens = Sequence[int] | NDArray[np.integer]


class PrefixCache:
    """See the module.

    Attributes:
        config: sizes and habits.
        ledger: the parts (``tree``, ``store``, ``native``, ``compressed``, ``kv``), for reading.
        counters: what happened so far.
        leases: running requests by ``request_id``, for reading.

    Args:
        config: sizes and habits.
        mover: moves state data.
        agree: see :class:`~dasc.cache.tiers.TwoTierStore`; also asked about copies, loads and clears.
        clock: seconds, for counting stalls only; nothing is decided by it.
    """

    def __init__(
        self,
        config: CacheConfig,
        mover: Mover,
        *,
        agree: Callable[[bool], bool] = lambda ok: ok,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.ledger = Ledger(config, mover, agree=agree, clock=clock)
        self.counters = self.ledger.counters
        self.leases: dict[Hashable, Lease] = {}
        self._to_load: dict[Hashable, Lease] = {}
        self._warned = False
        self._mover = mover
        self._agree = agree

    # -- look-up --------------------------------------------------------------------------------------------------

    def match(self, tokens: Tokens) -> Match:
        """What a prompt would hit now. Changes nothing, not even recency.

        Raises:
            ValueError: for tokens that are no ids.
        """
        return self._match(encode_tokens(tokens))

    def _match(self, key: bytes) -> Match:
        found = self.ledger.tree.match(key, max(len(key) // TOKEN_BYTES - 1, 0))
        node = found.state_node
        usable = 0 if node is None else node.end
        return Match(found.tokens, usable, node, found.tokens if found.tokens > usable else None)

    def explain(self, tokens: Tokens) -> Explanation:
        """Where a prompt's KV match ends, where its last state is, and what is known of the states missing beyond.

        Changes nothing.

        Raises:
            ValueError: for tokens that are no ids.
        """
        key = encode_tokens(tokens)
        length = len(key) // TOKEN_BYTES
        match = self._match(key)
        gone = self.ledger.gone.along(key, match.usable_tokens, length)
        end = self.ledger.tree.find(key)
        if end is not None and end.state is not None:
            gone = [*gone, (length, "whole_prompt")]
        tier = None if match.entry is None else match.entry.tier.value
        return Explanation(length, match.kv_tokens, match.usable_tokens, tier, tuple(gone))

    # -- admission ------------------------------------------------------------------------------------------------

    def acquire(
        self,
        request_id: Hashable,
        tokens: Tokens,
        *,
        lookup: bool = True,
        store: bool = True,
        reserve_tokens: int = 0,
    ) -> Lease | Backpressure:
        """Admit a request: hit, active slot and KV pages, all or nothing. Call ``issue_loads`` before it runs.

        Locks the state hit and makes it, and no other state, the youngest. Frees slots and pages as needed. When only
        the hit itself stands in the way of a slot, it is demoted or evicted like any other and what is left is used.

        Args:
            request_id: any name not in use.
            tokens: the prompt, at least one token.
            lookup: use what is cached.
            store: leave checkpoints behind.
            reserve_tokens: KV room to take now for tokens to come.

        Returns:
            The lease, valid until ``finish`` or ``abort``, or backpressure, which leaves no trace of the request.

        Raises:
            ValueError: for a name in use, an empty prompt, tokens that are no ids, or a request larger than all of KV.
        """
        if request_id in self.leases:
            raise ValueError(f"request_id {request_id!r} is already running")
        key = encode_tokens(tokens)
        length = len(key) // TOKEN_BYTES
        if not length or reserve_tokens < 0:
            raise ValueError(f"a request takes >= 1 token and reserves >= 0, got {length} and {reserve_tokens}")
        kv = self.ledger.kv
        pages = kv.pages_for(length + reserve_tokens)
        if pages > kv.pages:
            raise ValueError(
                f"{length} tokens and {reserve_tokens} reserved take {pages} KV pages, but there are {kv.pages}"
            )
        match = self._match(key) if lookup else Match(0, 0, None, None)
        prompt = PromptInfo(length, self.config.page_size, match.junction)
        lease = Lease(request_id, bytearray(key), store, self.ledger.tree.root, prompt)
        short_of = self.ledger.admit(lease, match.node, pages)
        if short_of == "native" and match.node is not None:
            slot = self.ledger.store.allocate(lease)  # the hit itself may go
            if slot is not None:
                lease.slot = slot
                match = self._match(key)
                short_of = self.ledger.admit(lease, match.node, pages)
        if short_of is not None:
            self.counters.backpressure[short_of] += 1
            return Backpressure(short_of)
        lease.prompt = prompt._replace(junction=match.junction)
        self.leases[request_id] = self._to_load[request_id] = lease
        self._count_hit(lease, match)
        self._look_ahead(lease, match)
        return lease

    def _count_hit(self, lease: Lease, match: Match) -> None:
        counters = self.counters
        tier = "miss"
        if lease.entry is not None:
            self.ledger.store.touch(lease.entry)
            self.ledger.tree.touch(lease.node)
            lease.hit_tokens = match.usable_tokens
            tier = "compressed" if lease.entry.tier is Tier.COMPRESSED else "dense"
            counters.hit_tokens[tier] += match.usable_tokens
            if tier == "compressed":
                window = self.config.refresh_window(match.usable_tokens, lease.prompt.prompt_tokens)
                counters.refresh_tokens += window
                if window:
                    counters.refreshed_hits["one_pass"] += 1
        counters.hits[tier] += 1
        counters.requests += 1
        counters.prompt_tokens += lease.prompt.prompt_tokens
        counters.unserved_kv_tokens += match.kv_tokens - match.usable_tokens

    def _look_ahead(self, lease: Lease, match: Match) -> None:
        """Say so when no policy will put a checkpoint where this request shares a prefix in vain."""
        if match.junction is None or not lease.store:
            return
        gain = match.junction - match.usable_tokens
        if any(isinstance(p, AtJunctions) and gain < p.min_gain_tokens for p in self.config.policies):
            return  # passed over on purpose
        stop = next_stop(self.config.policies, match.usable_tokens, lease.prompt)
        if stop is not None and stop <= match.junction:
            return
        self.counters.unserved_junctions += 1
        if not self._warned:
            self._warned = True
            logger.warning(
                "policies %s take no checkpoint after %d tokens up to the shared junction at %d: prompts that part "
                "there will not hit it (said once; the counter unserved_junctions goes on)",
                self.config.policies,
                match.usable_tokens,
                match.junction,
            )

    def issue_loads(self) -> list[Hashable]:
        """Fill the active slots of all requests admitted since: one batched copy, the loads, one batched clear.

        Returns:
            Requests whose state could not be moved. They are aborted; a slot not fully written is never theirs. Acquire
            them again, with ``lookup=False`` when a state that could not be read should not be tried again.
        """
        copies: list[Lease] = []
        loads: list[Lease] = []
        fresh: list[Lease] = []
        for lease in self._to_load.values():
            entry = lease.entry
            (fresh if entry is None else loads if entry.tier is Tier.COMPRESSED else copies).append(lease)
        failed = self._fill(copies, lambda: self._mover.copy([(x.source_slot, x.slot) for x in copies]))
        for lease in loads:
            failed += self._fill([lease], partial(self._mover.load, lease.source_slot, lease.slot, lease.hit_tokens))
        failed += self._fill(fresh, lambda: self._mover.clear([x.slot for x in fresh]))
        for lease in failed:
            self.counters.failed_loads += 1
            self._end(lease)
        return [lease.request_id for lease in failed]

    def _fill(self, leases: list[Lease], move: Callable[[], None]) -> list[Lease]:
        """Run one transfer into the slots of ``leases``; return those it failed for, all or none."""
        if not leases:
            return []
        try:
            move()
            ok = True
        except Exception:
            logger.warning("filling the slots of %s failed", [x.request_id for x in leases], exc_info=True)
            ok = False
        if not self._agree(ok):
            return leases
        for lease in leases:
            lease.state_position = lease.hit_tokens
            del self._to_load[lease.request_id]
        return []

    # -- a request's life -----------------------------------------------------------------------------------------

    def _lease(self, request_id: Hashable) -> Lease:
        lease = self.leases.get(request_id)
        if lease is None:
            raise ValueError(f"request_id {request_id!r} is not running")
        return lease

    def extend(self, request_id: Hashable, tokens: Tokens) -> Backpressure | None:
        """Append token ids to a running request, with KV pages for them.

        Returns:
            Backpressure, and no change, when pages are wanting; else ``None``.

        Raises:
            ValueError: for a request not running or tokens that are no ids.
        """
        lease = self._lease(request_id)
        key = encode_tokens(tokens)
        pages = self.ledger.kv.pages_for(lease.num_tokens + len(key) // TOKEN_BYTES)
        needed = pages - len(lease.pages) // PagePool.ITEM_BYTES
        if needed > 0:
            run = self.ledger.allocate_pages(needed)
            if run is None:
                self.counters.backpressure["kv"] += 1
                return Backpressure("kv")
            lease.pages += run
        lease.tokens += key
        return None

    def truncate(self, request_id: Hashable, tokens: int) -> None:
        """Forget token ids past the first ``tokens``: rejected speculation. Their pages stay for what comes.

        Raises:
            ValueError: for a request not running, or when the prompt or the state has more tokens: a state that has
                seen a token cannot unsee it.
        """
        lease = self._lease(request_id)
        least = max(lease.prompt.prompt_tokens, lease.state_position)
        if not least <= tokens <= lease.num_tokens:
            raise ValueError(f"tokens must be in [{least}, {lease.num_tokens}], got {tokens}")
        del lease.tokens[tokens * TOKEN_BYTES :]

    def advance(self, request_id: Hashable, position: int) -> None:
        """Say that the active slot's state has now seen exactly ``position`` tokens, all of them final.

        Raises:
            ValueError: for a request not running, one whose slot was not filled yet, or a position that lies before the
                last one or past the known tokens.
        """
        lease = self._lease(request_id)
        if lease.state_position < 0:
            raise ValueError(f"request_id {request_id!r} has no state yet: call issue_loads first")
        if not lease.state_position <= position <= lease.num_tokens:
            raise ValueError(f"position must be in [{lease.state_position}, {lease.num_tokens}], got {position}")
        lease.state_position = position

    def next_stop(self, request_id: Hashable) -> int | None:
        """Where the request should next be checkpointed: never compute past it in one go. ``None``: nowhere.

        Raises:
            ValueError: for a request not running.
        """
        lease = self._lease(request_id)
        if not lease.store:
            return None
        return next_stop(self.config.policies, max(lease.state_position, lease.hit_tokens), lease.prompt)

    def checkpoint(self, request_id: Hashable, position: int) -> StateEntry | NotCached:
        """Store the running request's state, complete on return. The request refers to it from now on.

        May evict to make room. The request's KV up to here becomes shared: read the page table anew.

        Returns:
            The entry, new or found, valid until evicted; or why it was not cached.

        Raises:
            ValueError: for a request not running, or a ``position`` other than what the state has seen.
        """
        lease = self._lease(request_id)
        if position != lease.state_position:
            raise ValueError(f"position must be that of the state, {lease.state_position}, got {position}")
        found = self._storable(lease)
        if found is None:
            found = self.ledger.store.checkpoint(lease.slot, position)
            if isinstance(found, StateEntry):
                self.ledger.place(lease, found)
        return self._answer(lease, found)

    def finish(self, request_id: Hashable) -> StateEntry | NotCached:
        """End a request; its state becomes a checkpoint: compressed, or else its slot is handed over without a copy.

        Returns:
            The entry, new (it may still be packing) or found; or why it was not cached.

        Raises:
            ValueError: for a request not running.
        """
        lease = self._lease(request_id)
        adopted = None
        found = self._storable(lease)
        if found is None:
            found = self.ledger.store.adopt(lease.slot, lease, lease.state_position)
            if isinstance(found, StateEntry):
                adopted = found
                lease.slot = 0
                self.ledger.place(lease, adopted)
        answer = self._answer(lease, found)
        self._end(lease)
        if adopted is not None:
            self.ledger.store.compress(adopted)  # last: if it is interrupted, only the pack is undone
        return answer

    def abort(self, request_id: Hashable) -> None:
        """End a request and keep nothing but the checkpoints it has already left.

        Raises:
            ValueError: for a request not running.
        """
        lease = self._lease(request_id)
        self.ledger.note_missing(lease, "aborted")
        self._end(lease)

    def release_state(self, request_id: Hashable) -> None:
        """Unlock the state the request refers to, keeping its KV. Without this call it stays locked to the end.

        Raises:
            ValueError: for a request not running, or one whose slot was not filled yet.
        """
        lease = self._lease(request_id)
        if lease.state_position < 0:
            raise ValueError(f"request_id {request_id!r} still needs its state: call issue_loads first")
        self.ledger.release_state(lease)

    def _storable(self, lease: Lease) -> StateEntry | NotCached | None:
        """What already answers a wish to store the lease's state; ``None`` when it is to be stored."""
        if lease.state_position <= 0:
            return NotCached.NO_STATE
        if not lease.store:
            return NotCached.OPTED_OUT
        if lease.state_position % self.config.page_size:
            return NotCached.UNALIGNED
        return self.ledger.share_existing(lease)

    def _answer(self, lease: Lease, found: StateEntry | NotCached) -> StateEntry | NotCached:
        if isinstance(found, NotCached):
            self.counters.not_cached[found.value] += 1
            self.ledger.note_missing(lease, found.value)
        return found

    def _end(self, lease: Lease) -> None:
        self.ledger.let_go(lease)
        del self.leases[lease.request_id]
        self._to_load.pop(lease.request_id, None)

    # -- housekeeping ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Begin a scheduler step: commit earlier packs in order, then reclaim native slots down to the watermark."""
        self.ledger.store.step()

    def flush(self) -> int:
        """Drop every state that no running request refers to, and its KV. Waits for packs under way.

        Returns:
            How many states are left.
        """
        left = 0
        for node in list(self.ledger.tree.walk()):
            if node.state is not None:
                if node.state.locks:
                    left += 1
                else:
                    self.ledger.store.evict(node.state, "flush")
        return left

    def history_digest(self) -> str:
        """A hash over every choice of slot, page and victim so far; ranks that agree have the same."""
        return self.ledger.store.history.digest()

    def stats(self) -> dict[str, int | float | dict[str, int]]:
        """Counters since the start and what is where now, as one dictionary."""
        return {**self.counters.as_dict(), **self.ledger.occupancy()}
