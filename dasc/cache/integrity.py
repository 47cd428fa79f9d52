"""Does the cache still add up? Walks everything; for tests and for debugging, not for each request."""

from __future__ import annotations

import collections

import numpy as np

from dasc.cache.entries import StateEntry, Tier
from dasc.cache.lease import Lease
from dasc.cache.lru import LruHeap
from dasc.cache.pools import PagePool, SlotPool
from dasc.cache.prefix_cache import PrefixCache
from dasc.cache.radix import TOKEN_BYTES, Node, RadixTree
from dasc.cache.tiers import TwoTierStore

_ITEM = PagePool.ITEM_BYTES


class IntegrityError(AssertionError):
    """The cache contradicts itself: a bug in it, or use against its documentation."""


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise IntegrityError(what)


def check(cache: PrefixCache) -> None:
    """Compare every part of ``cache`` with every other. Changes nothing.

    Raises:
        IntegrityError: naming the first contradiction.
    """
    ledger = cache.ledger
    leases = list(cache.leases.values())
    nodes = list(ledger.tree.walk())
    entries = [node.state for node in nodes if node.state is not None]
    _check_pool(ledger.native)
    _check_pool(ledger.compressed)
    _check_tree(ledger.tree, nodes)
    _check_holds(ledger.tree, nodes, leases)
    _check_states(nodes, leases)
    _check_store(ledger.store, entries)
    _check_slots(cache, entries)
    _check_pages(cache, nodes)


def _check_pool(pool: SlotPool) -> None:
    free = pool.free_list()
    held = [slot for slot in range(1, pool.slots + 1) if pool.owner_of(slot) is not None]
    _require(
        sorted([*free, *held]) == list(range(1, pool.slots + 1)),
        f"{pool.name}: free {sorted(free)} and held {held} are not all slots once",
    )


def _check_tree(tree: RadixTree, nodes: list[Node]) -> None:
    page_bytes = tree.page_size * TOKEN_BYTES
    _require(tree.root.key == b"" and tree.root.parent is None and tree.root.state is None, "the root is not bare")
    for node in [tree.root, *nodes]:
        _require(node.children is None or bool(node.children), f"node {node.serial} has an empty table of children")
        for first, child in (node.children or {}).items():
            _require(child.parent is node, f"node {child.serial} does not know its parent")
            _require(child.key[:page_bytes] == first, f"node {child.serial} is not under its own key")
            _require(child.end == node.end + len(child.key) // TOKEN_BYTES, f"node {child.serial} has a wrong end")
    for node in nodes:
        _require(len(node.key) > 0, f"node {node.serial} has an empty key")
        _require(len(node.key) % page_bytes == 0, f"node {node.serial} has a part of a page")
        _require(len(node.pages) // _ITEM * page_bytes == len(node.key), f"node {node.serial} has wrong pages")
        parent = node.parent
        assert parent is not None
        _require(node.stamp <= parent.stamp, f"node {node.serial} is younger than its parent")
        leaf = node.children is None
        _require(not leaf or node.protected or node.state is not None, f"leaf {node.serial} can never be hit")
        if leaf and not node.protected:
            _check_queued(node, tree.leaves, node.stamp)
    _require(tree.nodes == len(nodes), f"the tree counts {tree.nodes} nodes and has {len(nodes)}")
    pages = sum(len(node.pages) for node in nodes) // _ITEM
    _require(tree.pages == pages, f"the tree counts {tree.pages} pages and has {pages}")
    protected = sum(len(node.pages) for node in nodes if node.protected) // _ITEM
    _require(tree.protected_pages == protected, f"the tree counts {tree.protected_pages} protected, has {protected}")


def _check_holds(tree: RadixTree, nodes: list[Node], leases: list[Lease]) -> None:
    holds = collections.Counter(lease.node.serial for lease in leases)
    for node in [tree.root, *nodes]:
        _require(node.holds == holds.pop(node.serial, 0), f"node {node.serial}: holds differ from its leases")
        held = sum(child.protected for child in (node.children or {}).values())
        _require(
            node.held_children == held, f"node {node.serial} counts {node.held_children} held children, has {held}"
        )
    _require(not holds, f"leases hold nodes that are gone: {sorted(holds)}")


def _check_states(nodes: list[Node], leases: list[Lease]) -> None:
    locks = collections.Counter(lease.entry.serial for lease in leases if lease.entry is not None)
    for node in nodes:
        entry = node.state
        if entry is None:
            continue
        _require(entry.owner is node, f"entry {entry.serial} does not know its node")
        _require(entry.position == node.end, f"entry {entry.serial} of {entry.position} tokens sits at {node.end}")
        _require(entry.locks == locks.pop(entry.serial, 0), f"entry {entry.serial}: locks differ from its leases")
    _require(not locks, f"leases lock entries that are gone: {sorted(locks)}")
    for lease in leases:
        _require(lease.shared_tokens == lease.node.end, f"request {lease.request_id!r} shares other than it holds")
        _require(
            bytes(lease.tokens[: len(lease.node.prefix())]) == lease.node.prefix(),
            f"request {lease.request_id!r} holds another prefix than its own",
        )


def _check_queued(item: Node | StateEntry, heap: LruHeap[Node] | LruHeap[StateEntry], stamp: int) -> None:
    stamps = [s for s, i in heap.records() if i is item]
    _require(item.queue is heap and min(stamps, default=stamp + 1) <= stamp, f"{item.serial} is missing from its order")


def _check_store(store: TwoTierStore, entries: list[StateEntry]) -> None:
    tiers = collections.Counter(entry.tier for entry in entries)
    _require(tiers[Tier.ABSENT] == 0, "an absent entry is in the tree")
    _require(store.dense_count == tiers[Tier.DENSE], f"{store.dense_count} dense counted, {tiers[Tier.DENSE]} there")
    _require(
        store.compressed_count == tiers[Tier.COMPRESSED], f"{store.compressed_count} compressed counted, not there"
    )
    packing = {packing.entry.serial: packing for packing in store.packs.under_way()}
    demoting = {entry.serial for entry in entries if entry.tier is Tier.DEMOTING}
    _require(set(packing) == demoting, f"packs of {sorted(packing)} but {sorted(demoting)} demoting")
    _require(list(packing) == [p.entry.serial for p in store.packs.under_way()], "an entry is packed twice")
    releasing = sum(p.entry.locks == 0 for p in store.packs.under_way())
    _require(
        store.packs.releasing == releasing, f"{store.packs.releasing} slots to come, but {releasing} unlocked packs"
    )
    if store.dense_limit is not None:
        over = tiers[Tier.DENSE] - store.dense_limit
        _require(over <= 0, f"{over} dense checkpoints too many")
    stamps = [entry.stamp for entry in entries]
    _require(len(set(stamps)) == len(stamps), "two entries have one stamp")
    for entry in entries:
        if entry.tier in store.queues and not entry.locks:
            _check_queued(entry, store.queues[entry.tier], entry.stamp)


def _check_slots(cache: PrefixCache, entries: list[StateEntry]) -> None:
    store = cache.ledger.store
    native: list[tuple[int, object]] = [(lease.slot, lease) for lease in cache.leases.values()]
    native += [(entry.slot, entry) for entry in entries if entry.tier is not Tier.COMPRESSED]
    compressed: list[tuple[int, object]] = [(entry.slot, entry) for entry in entries if entry.tier is Tier.COMPRESSED]
    compressed += [(packing.target, packing.entry) for packing in [*store.packs.under_way(), *store.packs.abandoned]]
    for pool, uses in ((cache.ledger.native, native), (cache.ledger.compressed, compressed)):
        users = dict(uses)
        _require(len(users) == len(uses), f"{pool.name}: a slot has two users, in {sorted(slot for slot, _ in uses)}")
        for slot in range(1, pool.slots + 1):
            owner, user = pool.owner_of(slot), users.pop(slot, None)
            _require(owner is user, f"{pool.name}: slot {slot} belongs to {owner!r}, {user!r} uses it")
        _require(not users, f"{pool.name}: slots {sorted(users)} are used and do not exist")


def _check_pages(cache: PrefixCache, nodes: list[Node]) -> None:
    kv, tree = cache.ledger.kv, cache.ledger.tree
    runs = [node.pages for node in nodes]
    for lease in cache.leases.values():
        shared = lease.shared_tokens // tree.page_size * _ITEM
        _require(
            bytes(lease.pages[:shared]) == lease.node.prefix_pages(), f"{lease.request_id!r} has a wrong page table"
        )
        _require(len(lease.pages) // _ITEM >= kv.pages_for(lease.num_tokens), f"{lease.request_id!r} lacks pages")
        runs.append(bytes(lease.pages[shared:]))
    used = np.bincount(np.frombuffer(b"".join(runs), np.int32), minlength=kv.pages)
    _require(bool((used <= 1).all()), "a KV page has two users")
    _require(bool((used == kv.held_mask()).all()), "KV pages held differ from those used")
    _require(int(used.sum()) + kv.free_pages == kv.pages, "KV pages free and used are not all pages")
