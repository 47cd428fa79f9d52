import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.cache.lru import LruHeap


@dataclass(eq=False)
class Item:
    serial: int
    stamp: int
    eligible: bool = True
    queue: object = None


@given(seed=st.integers(0, 2**31 - 1))
def test_the_oldest_is_what_a_scan_would_find_and_stale_records_stay_few(seed):
    rng = random.Random(seed)
    heap = LruHeap(lambda item: item.eligible)
    items: list[Item] = []
    for now in range(300):
        action = rng.random()
        item = rng.choice(items) if items else None
        if item is None or action < 0.3:
            items.append(Item(len(items) + now * 1000, now))
            heap.push(items[-1])
        elif action < 0.5:
            item.stamp = now
        elif action < 0.7:
            item.eligible = not item.eligible
            if item.eligible:
                heap.push(item)
        elif action < 0.8:
            heap.discard(item)
            items.remove(item)
        scanned = min((i for i in items if i.eligible), key=lambda i: i.stamp, default=None)
        assert heap.oldest() is scanned
        assert len(heap) <= 2 * len(items) + 65


def test_discarding_many_does_not_keep_them_alive():
    heap = LruHeap(lambda item: item.eligible)
    items = [Item(i, i) for i in range(1000)]
    for item in items:
        heap.push(item)
    for item in items[1:]:
        heap.discard(item)
    assert len(heap) < 100
    assert heap.oldest() is items[0]


def test_an_item_stands_in_one_order_at_a_time():
    first, second = LruHeap(lambda item: True), LruHeap(lambda item: True)
    item = Item(1, 1)
    first.push(item)
    with pytest.raises(AssertionError):
        second.push(item)
    first.discard(item)
    second.push(item)
    assert first.oldest() is None
    assert second.oldest() is item
