"""A radix tree over token ids in whole pages: which prefixes have KV, and where on them state checkpoints sit.

Keys are ``bytes`` of int32 token ids (:func:`encode_tokens`), so that comparing an edge is one ``memcmp`` and a page
finds its child by hash. Every position and length in the interface is in tokens; every key is a whole number of pages.

A state sits at the end of its node, at exactly that many tokens, and nowhere else. A node without one is a *tombstone*:
it has KV, or marks a branch, but nothing can resume there. A leaf that is neither held nor has a state can never be hit
and is pruned at once.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dasc.cache.entries import StateEntry
from dasc.cache.lru import LruHeap
from dasc.cache.pools import PagePool

TOKEN_BYTES = 4
_PAGE_ITEM = PagePool.ITEM_BYTES
_TOP_BYTE = TOKEN_BYTES - 1 if sys.byteorder == "little" else 0


def encode_tokens(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Token ids as the bytes of int32 numbers, the form of every key.

    Raises:
        ValueError: unless ``tokens`` is one row of integers in ``[0, 2**31)``.
    """
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be a row of integers, got {tokens.dtype} {list(tokens.shape)}")
        if tokens.dtype != np.int32 and tokens.size and (tokens.min() < 0 or tokens.max() >= 2**31):
            raise ValueError(f"token ids must be in [0, 2**31), got {tokens.min()} to {tokens.max()}")
        key = tokens.astype(np.int32).tobytes()
    else:
        try:
            key = array("i", tokens).tobytes()
        except OverflowError as error:
            raise ValueError(f"token ids must be in [0, 2**31), got {min(tokens)} to {max(tokens)}") from error
        except TypeError as error:
            raise ValueError(f"tokens must be a row of integers: {error}") from error
    if not key[_TOP_BYTE::TOKEN_BYTES].isascii():  # a top byte of 128 or more is a minus sign
        raise ValueError(f"token ids must be in [0, 2**31), got {min(tokens)} to {max(tokens)}")
    return key


class Node:
    """An edge and its end. Read it freely; only the tree changes it. The object survives splits as the lower part.

    Attributes:
        key: token ids of the edge, whole pages; empty only at the root.
        pages: KV page numbers of the edge, int32 bytes.
        end: tokens from the root to the end of the edge.
        parent: the node above, ``None`` at the root and after removal.
        children: by the first page of their key; ``None`` while there are none.
        state: the checkpoint of exactly ``end`` tokens, or ``None``.
        holds: ``hold`` calls without their ``release``.
        held_children: children that are held or have held ones below.
        stamp: when its KV was last used, on the tree's logical clock.
        serial: unique number, rising with creation.
        queue: the order of recency it stands in.
    """

    __slots__ = (
        "children",
        "end",
        "held_children",
        "holds",
        "key",
        "pages",
        "parent",
        "queue",
        "serial",
        "stamp",
        "state",
    )

    def __init__(self, key: bytes, pages: bytes, end: int, parent: Node | None, stamp: int, serial: int) -> None:
        self.key = key
        self.pages = pages
        self.end = end
        self.parent = parent
        self.children: dict[bytes, Node] | None = None
        self.state: StateEntry | None = None
        self.holds = 0
        self.held_children = 0
        self.stamp = stamp
        self.serial = serial
        self.queue: LruHeap[Node] | None = None

    @property
    def protected(self) -> bool:
        """In use here or below: its KV stays."""
        return self.holds > 0 or self.held_children > 0

    def path(self) -> list[Node]:
        """Nodes from below the root down to this one."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def prefix(self) -> bytes:
        """Key from the root to the end of this node."""
        return b"".join(node.key for node in self.path())

    def prefix_pages(self) -> bytes:
        """KV pages from the root to the end of this node."""
        return b"".join(node.pages for node in self.path())


class TreeMatch(NamedTuple):
    """Result of :meth:`RadixTree.match`, valid until the tree next changes.

    Attributes:
        tokens: how far the KV match reaches, whole pages.
        state_node: the deepest matched node with a state, ``None`` when there is none.
    """

    tokens: int
    state_node: Node | None


class RadixTree:
    """The tree and the KV pages it owns.

    Args:
        page_size: tokens a page.
        free_pages: called with the pages (int32 bytes) of every removed node.

    Raises:
        ValueError: for a page without tokens.
    """

    def __init__(self, page_size: int, free_pages: Callable[[bytes], None]) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be >= 1, got {page_size}")
        self.page_size = page_size
        self.root = Node(b"", b"", 0, None, 0, 0)
        self.nodes = 0
        self.pages = 0
        self.protected_pages = 0
        self._free_pages = free_pages
        self._page_bytes = page_size * TOKEN_BYTES
        self._now = 0
        self._serial = 0
        self.leaves: LruHeap[Node] = LruHeap(
            lambda node: node.children is None and not node.protected and node.parent is not None
        )

    @property
    def evictable_pages(self) -> int:
        """KV pages that eviction could give back now."""
        return self.pages - self.protected_pages

    # -- look-up --------------------------------------------------------------------------------------------------

    def match(self, key: bytes, limit: int | None = None) -> TreeMatch:
        """The longest cached prefix of ``key``, of at most ``limit`` tokens. Changes nothing, not even recency.

        A key that is no whole number of pages is matched up to its last whole page.
        """
        page_bytes = self._page_bytes
        length = len(key) if limit is None else min(len(key), limit * TOKEN_BYTES)
        length -= length % page_bytes
        node = self.root
        state_node = None
        offset = 0
        while offset < length and node.children is not None:
            child = node.children.get(key[offset : offset + page_bytes])
            if child is None:
                break
            edge = child.key
            if offset + len(edge) > length or not key.startswith(edge, offset):
                offset += self._common_bytes(edge, key, offset, length)
                break
            offset += len(edge)
            node = child
            if node.state is not None:
                state_node = node
        return TreeMatch(offset // TOKEN_BYTES, state_node)

    def find(self, key: bytes) -> Node | None:
        """The node that ends exactly at the end of ``key``. Changes nothing."""
        node = self.root
        offset = 0
        while offset < len(key):
            child = None if node.children is None else node.children.get(key[offset : offset + self._page_bytes])
            if child is None or not key.startswith(child.key, offset):
                return None
            node = child
            offset += len(node.key)
        return node

    def _common_bytes(self, edge: bytes, key: bytes, offset: int, stop: int) -> int:
        """Bytes, whole pages, that ``edge`` shares with ``key[offset:stop]``."""
        count = min(len(edge), stop - offset) // TOKEN_BYTES
        differs = np.frombuffer(edge, np.int32, count) != np.frombuffer(key, np.int32, count, offset)
        first = int(differs.argmax())
        common = first if differs[first] else count
        return common // self.page_size * self._page_bytes

    def touch(self, node: Node) -> None:
        """Record a use of the KV up to the end of ``node``: the whole path becomes the youngest."""
        self._now += 1
        here: Node | None = node
        while here is not None:
            here.stamp = self._now
            here = here.parent

    # -- change ---------------------------------------------------------------------------------------------------

    def insert(self, key: bytes, pages: bytes) -> tuple[Node, int]:
        """Make ``key`` a node. Splits an edge or adds a leaf where needed, takes over the pages of what was missing.

        The path becomes the youngest. A new leaf must get a state, or be held, before the tree next changes.

        Args:
            key: a whole number of pages, at least one.
            pages: int32 bytes, a page number for each page of ``key``.

        Returns:
            The node that ends with ``key``, and how many tokens were there before: the caller keeps its pages of those.

        Raises:
            ValueError: for a key of no or broken pages, or another number of pages.
        """
        page_bytes = self._page_bytes
        if not key or len(key) % page_bytes or len(pages) * page_bytes != len(key) * _PAGE_ITEM:
            raise ValueError(
                f"key must be whole pages of {self.page_size} tokens with a number for each page, "
                f"got {len(key) / TOKEN_BYTES:g} tokens and {len(pages) / _PAGE_ITEM:g} pages"
            )
        node = self.root
        offset = 0
        while offset < len(key):
            child = None if node.children is None else node.children.get(key[offset : offset + page_bytes])
            if child is None:
                break
            if not key.startswith(child.key, offset):
                common = self._common_bytes(child.key, key, offset, len(key))
                child = self._split(child, common)
            offset += len(child.key)
            node = child
        existing = offset // TOKEN_BYTES
        if offset < len(key):
            node = self._add_child(node, key[offset:], pages[offset // page_bytes * _PAGE_ITEM :])
        self.touch(node)
        return node, existing

    def _new_node(self, key: bytes, pages: bytes, end: int, parent: Node, stamp: int) -> Node:
        self._serial += 1
        self.nodes += 1
        return Node(key, pages, end, parent, stamp, self._serial)

    def _add_child(self, parent: Node, key: bytes, pages: bytes) -> Node:
        child = self._new_node(key, pages, parent.end + len(key) // TOKEN_BYTES, parent, self._now)
        if parent.children is None:
            parent.children = {}
        parent.children[key[: self._page_bytes]] = child
        self.pages += len(pages) // _PAGE_ITEM
        self.leaves.push(child)
        return child

    def _split(self, lower: Node, at: int) -> Node:
        """Cut ``lower``'s edge after ``at`` bytes, a whole number of pages; return the new upper part."""
        assert 0 < at < len(lower.key), "a split leaves no empty key"
        assert at % self._page_bytes == 0, "a split falls between pages"
        parent = lower.parent
        assert parent is not None
        assert parent.children is not None
        cut = at // self._page_bytes * _PAGE_ITEM
        end = lower.end - (len(lower.key) - at) // TOKEN_BYTES
        upper = self._new_node(lower.key[:at], lower.pages[:cut], end, parent, lower.stamp)
        upper.held_children = int(lower.protected)
        parent.children[upper.key[: self._page_bytes]] = upper
        lower.key = lower.key[at:]
        lower.pages = lower.pages[cut:]
        lower.parent = upper
        upper.children = {lower.key[: self._page_bytes]: lower}
        return upper

    def prune(self, node: Node) -> None:
        """Remove ``node`` and then its ancestors for as long as they are leaves that can never be hit."""
        while node.parent is not None and node.children is None and node.state is None and not node.protected:
            parent = node.parent
            assert parent.children is not None
            del parent.children[node.key[: self._page_bytes]]
            if not parent.children:
                parent.children = None
                self.leaves.push(parent)
            self.leaves.discard(node)
            node.parent = None
            self.nodes -= 1
            self.pages -= len(node.pages) // _PAGE_ITEM
            self._free_pages(node.pages)
            node = parent

    # -- holds ----------------------------------------------------------------------------------------------------

    def hold(self, node: Node) -> None:
        """Keep the KV up to the end of ``node``, through splits, until ``release``."""
        node.holds += 1
        if node.holds == 1 and not node.held_children:
            self._protect(node)

    def release(self, node: Node) -> None:
        """Undo one ``hold``; prunes what can no longer be hit.

        Raises:
            ValueError: without a ``hold``.
        """
        if node.holds == 0:
            raise ValueError(f"node {node.serial} at {node.end} tokens is not held")
        node.holds -= 1
        if node.holds == 0 and not node.held_children:
            self._unprotect(node)
            if node.children is None:
                self.leaves.push(node)
                self.prune(node)

    def _protect(self, node: Node) -> None:
        while True:
            self.protected_pages += len(node.pages) // _PAGE_ITEM
            if node.parent is None:
                return
            node = node.parent
            node.held_children += 1
            if node.held_children > 1 or node.holds:
                return

    def _unprotect(self, node: Node) -> None:
        while True:
            self.protected_pages -= len(node.pages) // _PAGE_ITEM
            if node.parent is None:
                return
            node = node.parent
            node.held_children -= 1
            if node.protected:
                return

    # -- eviction -------------------------------------------------------------------------------------------------

    def oldest_leaf(self) -> Node | None:
        """The leaf not held whose KV was used longest ago; ``None`` when all are held. It has a state."""
        return self.leaves.oldest()

    def walk(self) -> Iterator[Node]:
        """Every node below the root, parents first; the tree must not change meanwhile."""
        stack = list((self.root.children or {}).values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend((node.children or {}).values())
