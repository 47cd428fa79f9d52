import random
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.cache import PagePool, RadixTree, StateEntry, Tier, encode_tokens
from dasc.cache.integrity import _check_tree


class Planted:
    """A tree with pages, into which states can be put."""

    def __init__(self, page: int, pages: int = 4000) -> None:
        self.pool = PagePool(pages, page)
        self.tree = RadixTree(page, self.pool.free)
        self.page = page
        self.serial = 0

    def insert(self, tokens, state: bool = True):
        run = self.pool.alloc(len(tokens) // self.page)
        node, existing = self.tree.insert(encode_tokens(tokens), run)
        self.pool.free(run[: existing // self.page * 4])
        if state:
            self.serial += 1
            node.state = StateEntry(self.serial, node.end, Tier.DENSE, 1, 0)
        return node, existing

    def check(self):
        nodes = list(self.tree.walk())
        _check_tree(self.tree, nodes)
        assert self.pool.free_pages + self.tree.pages == self.pool.pages


@pytest.mark.parametrize("page", [1, 3, 64])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_lookup_around_a_page_makes_no_node_and_matches_whole_pages(page, extra):
    """Fault 2: page 64 with lookups of 63, 64 and 65 tokens."""
    plant = Planted(page)
    tokens = list(range(page * 3))
    plant.insert(tokens)
    nodes = plant.tree.nodes
    length = page + extra
    match = plant.tree.match(encode_tokens(tokens[:length]))
    assert match.tokens == length // page * page
    assert match.state_node is None
    assert plant.tree.nodes == nodes
    assert plant.tree.match(encode_tokens([*tokens[:length], 10**6])).tokens == length // page * page
    plant.check()


def test_after_a_split_every_child_sits_under_its_own_key():
    """Fault 1."""
    plant = Planted(2)
    a = [1, 1, 2, 2, 3, 3, 4, 4]
    plant.insert(a)
    for other in ([1, 1, 2, 2, 9, 9], [1, 1, 8, 8], [1, 1, 2, 2, 3, 3, 7, 7], a[:6], a[:4], a[:2]):
        plant.insert(other)
        plant.check()
    for prefix in (a, a[:2], a[:4], a[:6]):
        assert plant.tree.find(encode_tokens(prefix)).end == len(prefix)
        assert plant.tree.match(encode_tokens([*prefix, 5, 5])).state_node.end == len(prefix)


def test_a_split_keeps_node_objects_holds_and_states_below():
    plant = Planted(1)
    long, _ = plant.insert([1, 2, 3, 4])
    plant.tree.hold(long)
    short, existing = plant.insert([1, 2])
    assert existing == 2
    assert (short.end, long.end, long.parent) == (2, 4, short)
    assert (short.holds, short.held_children, long.holds) == (0, 1, 1)
    assert plant.tree.protected_pages == 4
    short.state = None
    plant.tree.prune(short)
    plant.check()
    plant.tree.release(long)
    assert plant.tree.protected_pages == 0
    plant.check()


def test_the_deepest_state_within_the_match_is_found():
    """Faults 3, 20, 23: tombstones are passed over, what lies past the match is not used."""
    plant = Planted(1)
    for end in (2, 5, 9):
        plant.insert(list(range(end)))
    plant.insert(list(range(7)), state=False)
    for length, expected in ((1, None), (2, 2), (4, 2), (5, 5), (8, 5), (9, 9), (12, 9)):
        match = plant.tree.match(encode_tokens(list(range(length))))
        assert match.tokens == min(length, 9)
        assert (match.state_node and match.state_node.end) == expected
        assert plant.tree.match(encode_tokens(list(range(12))), length).state_node is match.state_node


def test_release_without_hold_raises():
    """Fault 7."""
    plant = Planted(1)
    node, _ = plant.insert([1])
    plant.tree.hold(node)
    plant.tree.release(node)
    with pytest.raises(ValueError, match="is not held"):
        plant.tree.release(node)
    assert node.holds == 0


def test_pruning_takes_exactly_what_can_never_be_hit():
    plant = Planted(1)
    deep, _ = plant.insert([1, 2, 3, 4, 5])
    middle, _ = plant.insert([1, 2, 3])
    other, _ = plant.insert([1, 9])
    deep.state = None
    plant.tree.prune(deep)
    assert plant.tree.find(encode_tokens([1, 2, 3])) is middle
    assert plant.tree.pages == 4
    middle.state = None
    plant.tree.hold(middle)
    plant.tree.prune(middle)
    assert plant.tree.pages == 4, "held"
    plant.tree.release(middle)
    assert plant.tree.pages == 2, "a leaf without state goes with the last hold"
    other.state = None
    plant.tree.prune(other)
    assert (plant.tree.nodes, plant.tree.pages, plant.pool.free_pages) == (0, 0, plant.pool.pages)


@pytest.mark.parametrize("page", [1, 2])
@given(seed=st.integers(0, 2**31 - 1))
def test_matches_equal_a_scan_of_all_prefixes(page, seed):
    rng = random.Random(seed)
    plant = Planted(page)
    stored: set[tuple[int, ...]] = set()
    for _ in range(25):
        base = rng.choice(sorted(stored)) if stored and rng.random() < 0.6 else ()
        tokens = list(base[: rng.randint(0, len(base))]) + [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        tokens = tuple(tokens[: len(tokens) // page * page])
        if tokens and rng.random() < 0.6:
            node, existing = plant.insert(tokens)
            kv = max((_shared(tokens, s, page) for s in stored), default=0)
            assert existing == kv
            stored.add(tokens)
            assert node.prefix() == encode_tokens(tokens)
        match = plant.tree.match(encode_tokens(tokens))
        assert match.tokens == max((_shared(tokens, s, page) for s in stored), default=0)
        usable = max((len(s) for s in stored if tokens[: len(s)] == s), default=0)
        assert (match.state_node.end if match.state_node else 0) == usable
        plant.check()


def _shared(a, b, page):
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count // page * page


def test_the_path_of_a_use_becomes_the_youngest_and_leaves_go_oldest_first():
    plant = Planted(1)
    first, _ = plant.insert([1, 2, 3])
    second, _ = plant.insert([1, 2, 4])
    third, _ = plant.insert([5])
    plant.tree.touch(first)
    order = []
    while (leaf := plant.tree.oldest_leaf()) is not None:
        order.append(leaf)
        leaf.state = None
        plant.tree.prune(leaf)
    assert order == [second, third, first]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -1], r"in \[0, 2\*\*31\), got -1 to 1"),
        ([2**31], r"in \[0, 2\*\*31\)"),
        ([-(2**40)], r"in \[0, 2\*\*31\)"),
        ([1.5], "row of integers"),
        ("ab", "row of integers"),
        ([None], "row of integers"),
        (np.array([1, -1]), r"got -1 to 1"),
        (np.array([1, -1], np.int32), r"got -1 to 1"),
        (np.array([2**31]), r"in \[0, 2\*\*31\)"),
        (np.array([2**63], np.uint64), r"in \[0, 2\*\*31\)"),
        (np.array([1.0]), "row of integers, got float64"),
        (np.array([[1]]), r"row of integers, got int64 \[1, 1\]"),
    ],
)
def test_tokens_that_are_no_ids_are_refused(tokens, says):
    with pytest.raises(ValueError, match=says):
        encode_tokens(tokens)


def test_one_key_whatever_holds_the_tokens():
    tokens = [0, 1, 2**31 - 1, 150000]
    keys = [encode_tokens(x) for x in (tokens, tuple(tokens), array("q", tokens), np.array(tokens))]
    keys += [encode_tokens(np.array(tokens, t)) for t in (np.int32, np.uint32, np.uint64)]
    assert set(keys) == {array("i", tokens).tobytes()}
    assert encode_tokens([]) == encode_tokens(np.array([], np.int64)) == b""


@pytest.mark.parametrize(("tokens", "pages"), [([], 0), ([1, 2, 3], 1), ([1, 2], 2)])
def test_insert_takes_whole_pages_and_a_number_for_each(tokens, pages):
    tree = RadixTree(2, lambda pages: None)
    with pytest.raises(ValueError, match="whole pages of 2 tokens"):
        tree.insert(encode_tokens(tokens), b"\0\0\0\0" * pages)
    with pytest.raises(ValueError, match="page_size must be >= 1"):
        RadixTree(0, lambda pages: None)
