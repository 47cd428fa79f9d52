import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.cache import PagePool, SlotPool


def test_every_usable_slot_can_be_handed_out_and_slot_0_never_is():
    """Fault 12."""
    pool = SlotPool("native", 5)
    slots = [pool.alloc(i + 1) for i in range(5)]
    assert sorted(slots) == [1, 2, 3, 4, 5]
    assert pool.alloc("late") is None
    assert (pool.free_slots, pool.held_slots) == (0, 5)


def test_slots_come_in_an_order_that_only_the_calls_decide():
    first, second = SlotPool("a", 4), SlotPool("b", 4)
    for pool in (first, second):
        for owner in "xyz":
            pool.alloc(owner)
        pool.free(2, "y")
        pool.free(1, "x")
    assert first.free_list() == second.free_list()
    assert [first.alloc(i) for i in "uvw"] == [second.alloc(i) for i in "uvw"] == [1, 2, 4]


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda p: p.free(2, "other"), "already free"),
        (lambda p: p.free(1, "other"), "belongs to"),
        (lambda p: p.free(0, "me"), r"must be in \[1, 3\], got 0"),
        (lambda p: p.free(4, "me"), r"must be in \[1, 3\], got 4"),
        (lambda p: p.transfer(1, "other", "me"), "belongs to"),
        (lambda p: p.transfer(2, "me", "other"), "already free"),
        (lambda p: p.transfer(1, "me", None), "must not be None"),
        (lambda p: p.alloc(None), "must not be None"),
    ],
)
def test_misuse_of_a_slot_raises_and_changes_nothing(misuse, says):
    pool = SlotPool("native", 3)
    assert pool.alloc("me") == 1
    with pytest.raises(ValueError, match=says):
        misuse(pool)
    assert pool.free_list() == (3, 2)
    assert pool.owner_of(1) == "me"


def test_a_slot_given_away_is_no_longer_the_givers():
    pool = SlotPool("native", 1)
    pool.alloc("me")
    pool.transfer(1, "me", "you")
    with pytest.raises(ValueError, match="belongs to 'you'"):
        pool.free(1, "me")
    pool.free(1, "you")
    with pytest.raises(ValueError, match="already free"):
        pool.free(1, "you")


def test_pools_refuse_impossible_sizes():
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        SlotPool("native", -1)
    for pages, size in ((-1, 1), (4, 0)):
        with pytest.raises(ValueError, match="pages must be >= 0"):
            PagePool(pages, size)
    with pytest.raises(ValueError, match="must not be negative"):
        PagePool(1, 1).alloc(-1)


@given(pages=st.integers(0, 30), seed=st.integers(0, 2**31 - 1))
def test_pages_are_conserved_and_never_shared(pages, seed):
    """Fault 8."""
    rng = np.random.default_rng(seed)
    pool = PagePool(pages, 4)
    held: list[bytes] = []
    for _ in range(30):
        if held and rng.random() < 0.5:
            pool.free(held.pop(int(rng.integers(len(held)))))
        else:
            count = int(rng.integers(0, 8))
            run = pool.alloc(count)
            assert (run is None) == (count > pages - sum(len(r) // 4 for r in held))
            held += [run] if run is not None else []
        ids = np.frombuffer(b"".join(held), np.int32)
        assert len(set(ids.tolist())) == len(ids)
        assert pool.free_pages + len(ids) == pages
        assert set(np.flatnonzero(pool.held_mask()).tolist()) == set(ids.tolist())


def test_all_pages_can_be_handed_out():
    pool = PagePool(7, 1)
    assert sorted(np.frombuffer(pool.alloc(7), np.int32).tolist()) == list(range(7))


def test_misuse_of_pages_raises_and_changes_nothing():
    pool = PagePool(4, 1)
    run = pool.alloc(3)
    pool.free(run[:4])
    for wrong, says in (
        (run, "already free"),
        (np.array([4], np.int32).tobytes(), r"must be in \[0, 4\)"),
        (np.array([-1], np.int32).tobytes(), r"must be in \[0, 4\)"),
    ):
        with pytest.raises(ValueError, match=says):
            pool.free(wrong)
        assert pool.free_pages == 2


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2)])
def test_tokens_take_whole_pages(tokens, pages):
    assert PagePool(4, 64).pages_for(tokens) == pages
