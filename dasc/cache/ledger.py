"""The tree, the two tiers and the KV pages tied together: which state sits at which node, and what each lease has."""

from __future__ import annotations

import time
from collections.abc import Callable

from dasc.cache.config import CacheConfig
from dasc.cache.counters import Counters
from dasc.cache.entries import StateEntry
from dasc.cache.explain import GoneLog
from dasc.cache.lease import Lease
from dasc.cache.pools import PagePool, SlotPool
from dasc.cache.radix import Node, RadixTree
from dasc.cache.tiers import TwoTierStore
from dasc.cache.transfers import Mover

_ITEM = PagePool.ITEM_BYTES
_PAGE_EVENT = 100  # the store's events are below


class Ledger:
    """Keeps three things in step: every entry is the state of one node, every lease refers to one node and its state.

    Args:
        config: sizes and habits.
        mover: moves state data.
        agree: see :class:`~dasc.cache.tiers.TwoTierStore`.
        clock: seconds, for counting stalls.
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
        self.page_size = config.page_size
        self.counters = Counters()
        self.native = SlotPool("native", config.native_slots)
        self.compressed = SlotPool("compressed", config.compressed_limit)
        self.kv = PagePool(config.kv_pages, config.page_size)
        self.tree = RadixTree(config.page_size, self._free_tree_pages)
        self.gone = GoneLog(config.explain_records)
        self.store = TwoTierStore(
            self.native,
            self.compressed,
            mover,
            dense_limit=config.dense_limit,
            watermark=config.watermark,
            on_evict=self._on_evict,
            counters=self.counters,
            agree=agree,
            clock=clock,
        )

    # -- what goes ------------------------------------------------------------------------------------------------

    def _on_evict(self, entry: StateEntry, cause: str) -> None:
        node = entry.owner
        assert isinstance(node, Node)
        self.gone.add(node.prefix(), cause)
        node.state = None
        entry.owner = None
        self.tree.prune(node)

    def _free_tree_pages(self, pages: bytes) -> None:
        self.counters.evicted_kv_pages += len(pages) // _ITEM
        self.kv.free(pages)

    def allocate_pages(self, pages: int) -> bytes | None:
        """Take KV pages, evicting the unheld leaves used longest ago, states and all.

        Returns:
            int32 bytes, or ``None``, and no change, when eviction could not make room for all.
        """
        if pages > self.kv.free_pages + self.tree.evictable_pages:
            return None
        while (run := self.kv.alloc(pages)) is None:
            leaf = self.tree.oldest_leaf()
            assert leaf is not None, "evictable pages hang on an evictable leaf"
            assert leaf.state is not None, "an unheld leaf has a state"
            self.store.evict(leaf.state, "kv")
        self.store.history.record(_PAGE_EVENT, pages, int.from_bytes(run[:_ITEM], "little"))
        return run

    # -- what a lease has -----------------------------------------------------------------------------------------

    def admit(self, lease: Lease, node: Node | None, pages: int) -> str | None:
        """Give a lease that has nothing (but perhaps a slot) its hit at ``node``, a slot and ``pages`` KV pages.

        Returns:
            ``None``, or what was missing (``"native"``, ``"kv"``); the lease then has nothing.
        """
        self.tree.hold(lease.node)
        try:
            if node is not None:
                self.refer(lease, node)
            short_of = self._take_room(lease, pages)
        except BaseException:
            self.let_go(lease)
            raise
        if short_of is not None:
            self.let_go(lease)
        return short_of

    def _take_room(self, lease: Lease, pages: int) -> str | None:
        shared = lease.node.prefix_pages()
        own = pages - len(shared) // _ITEM
        if own > self.kv.free_pages + self.tree.evictable_pages:
            return "kv"  # known before anything is evicted in vain
        if not lease.slot:
            slot = self.store.allocate(lease)
            if slot is None:
                return "native"
            lease.slot = slot
        run = self.allocate_pages(own)
        assert run is not None, "reclaiming a slot takes no pages"
        lease.pages = bytearray(shared + run)
        return None

    def refer(self, lease: Lease, node: Node) -> None:
        """Move the lease's hold and lock to ``node`` and its state."""
        assert node.state is not None
        self.tree.hold(node)
        self.store.lock(node.state)
        self.tree.release(lease.node)
        self.release_state(lease)
        lease.node, lease.entry, lease.shared_tokens = node, node.state, node.end

    def release_state(self, lease: Lease) -> None:
        """Unlock the state the lease refers to, if it still does."""
        if lease.entry is not None:
            self.store.unlock(lease.entry)
            lease.entry = None

    def let_go(self, lease: Lease) -> None:
        """Take back everything the lease has: lock, own pages, slot, hold."""
        self.release_state(lease)
        self.kv.free(lease.pages[lease.shared_tokens // self.page_size * _ITEM :])
        lease.pages = bytearray()
        if lease.slot:
            self.store.release(lease.slot, lease)
            lease.slot = 0
        self.tree.release(lease.node)
        lease.node, lease.shared_tokens = self.tree.root, 0

    # -- where a state sits ---------------------------------------------------------------------------------------

    def share_existing(self, lease: Lease) -> StateEntry | None:
        """When there is a state of the lease's computed tokens already, use it: the lease refers to it from now on."""
        node = self.tree.find(lease.prefix(lease.state_position))
        if node is None or node.state is None:
            return None
        self.store.touch(node.state)
        self.tree.touch(node)
        self._share(lease, node, node.end)
        return node.state

    def place(self, lease: Lease, entry: StateEntry) -> None:
        """Tie a new entry to the tree, at the end of the tokens it has seen; the lease refers to it from now on."""
        pages = bytes(lease.pages[: entry.position // self.page_size * _ITEM])
        node, existing = self.tree.insert(lease.prefix(entry.position), pages)
        node.state = entry
        entry.owner = node
        self._share(lease, node, existing)

    def _share(self, lease: Lease, node: Node, existing: int) -> None:
        """Use the tree's pages up to ``node``; the lease's own copies of what was there before go."""
        first = lease.shared_tokens // self.page_size * _ITEM
        last = existing // self.page_size * _ITEM
        if last > first:
            self.kv.free(lease.pages[first:last])
            lease.pages[first:last] = node.prefix_pages()[first:last]
        self.refer(lease, node)

    def note_missing(self, lease: Lease, cause: str) -> None:
        """Remember why the lease's computed tokens left no state."""
        if lease.state_position > 0:
            self.gone.add(lease.prefix(lease.state_position), cause)

    def occupancy(self) -> dict[str, int]:
        """What is where now: slots by use, bytes of the tiers, KV pages and tree nodes."""
        config, store = self.config, self.store
        dense = store.dense_count + len(store.packs)
        return {
            "native_slots": self.native.slots,
            "native_free": self.native.free_slots,
            "running": self.native.held_slots - dense,
            "dense": store.dense_count,
            "demoting": len(store.packs),
            "compressed_slots": self.compressed.slots,
            "compressed_free": self.compressed.free_slots,
            "compressed": store.compressed_count,
            "dense_bytes": dense * config.native_slot_bytes,
            "compressed_bytes": store.compressed_count * config.compressed_slot_bytes,
            "kv_pages": self.kv.pages,
            "kv_pages_free": self.kv.free_pages,
            "kv_pages_tree": self.tree.pages,
            "kv_pages_protected": self.tree.protected_pages,
            "tree_nodes": self.tree.nodes,
        }
