"""The tier policy alone, as a server with a tree of its own would use it."""

import pytest

from dasc.cache import NotCached, SlotPool, StateEntry, Tier, TwoTierStore
from tests.cache.fakes import FakeStorage, LateMover


class Bench:
    """A store with its pools; ``finish`` runs a request to its end, ``tiers`` lists what is where, oldest first."""

    def __init__(self, native: int, compressed: int, **options) -> None:
        self.storage = FakeStorage(native, compressed)
        self.mover = LateMover(self.storage)
        self.native, self.compressed = SlotPool("native", native), SlotPool("compressed", compressed)
        self.gone: list[tuple[int, str]] = []
        self.entries: list[StateEntry] = []
        self.store = TwoTierStore(
            self.native,
            self.compressed,
            self.mover,
            on_evict=lambda entry, cause: self.gone.append((entry.position, cause)),
            **options,
        )

    def finish(self, position: int):
        slot = self.store.allocate(position)
        assert slot is not None
        entry = self.store.adopt(slot, position, position)
        if isinstance(entry, NotCached):
            self.store.release(slot, position)
            return entry
        self.store.compress(entry)
        self.entries.append(entry)
        return entry

    def tiers(self) -> list[tuple[int, str]]:
        alive = [e for e in self.entries if e.tier is not Tier.ABSENT]
        return [(e.position, e.tier.value) for e in sorted(alive, key=lambda e: e.stamp)]


def filled(native: int, compressed: int, **options) -> Bench:
    """Compressed entries 1.., then dense ones up to a full native pool; positions are the order of age."""
    bench = Bench(native, compressed, **options)
    for position in range(1, native + compressed + 1):
        bench.finish(position)
        bench.store.settle()
    assert [tier for _, tier in bench.tiers()] == ["compressed"] * compressed + ["dense"] * native
    return bench


# -- insertion --------------------------------------------------------------------------------------------------------


def test_insertion_is_compressed_first_and_keeps_the_source_until_the_transfer_is_complete():
    bench = Bench(2, 1)
    entry = bench.finish(7)
    assert (entry.tier, entry.pinned, bench.native.free_slots, bench.compressed.free_slots) == (
        Tier.DEMOTING,
        True,
        1,
        0,
    )
    assert bench.native.owner_of(entry.slot) is entry
    source = entry.slot
    bench.store.step()
    assert (entry.tier, entry.pinned, bench.native.free_slots) == (Tier.COMPRESSED, False, 2)
    assert bench.native.owner_of(source) is None
    assert bench.compressed.owner_of(entry.slot) is entry


def test_a_full_compressed_pool_makes_a_finished_request_hand_its_slot_over_without_a_copy():
    bench = Bench(3, 1)
    bench.finish(1)
    slot = bench.store.allocate("r")
    entry = bench.store.adopt(slot, "r", 2)
    bench.store.compress(entry)
    assert (entry.tier, entry.slot) == (Tier.DENSE, slot)
    assert bench.storage.native[slot] == "never written", "nothing was moved"
    assert bench.store.counters.spills == 1


def test_without_spill_the_oldest_compressed_makes_room_and_nothing_dense_stays():
    bench = Bench(2, 2, dense_limit=0)
    for position in (1, 2, 3, 4):
        bench.finish(position)
        bench.store.step()
    assert bench.tiers() == [(3, "compressed"), (4, "compressed")]
    assert bench.gone == [(1, "room"), (2, "room")]
    for entry in bench.entries[-2:]:
        bench.store.lock(entry)
    assert bench.finish(5) is NotCached.NO_ROOM
    assert bench.native.free_slots == 2


def test_the_dense_arm_is_plain_lru():
    bench = filled(3, 0)
    bench.store.touch(bench.entries[0])
    bench.finish(4)
    assert bench.gone == [(2, "dense_lru")]
    assert bench.tiers() == [(3, "dense"), (1, "dense"), (4, "dense")]


def test_a_running_requests_checkpoint_takes_free_room_then_the_oldests_place_then_says_not_cached():
    """Fault 10."""
    bench = Bench(4, 1, watermark=1)
    active = bench.store.allocate("r")
    tiers = []
    for position in (1, 2, 3):
        bench.storage.native[active] = position
        entry = bench.store.checkpoint(active, position)
        bench.entries.append(entry)
        tiers.append(entry.tier)
        table = bench.storage.compressed if entry.tier is Tier.COMPRESSED else bench.storage.native
        assert table[entry.slot] == position
    assert tiers == [Tier.COMPRESSED, Tier.DENSE, Tier.DENSE]
    assert bench.native.free_slots == 1, "the watermark is left to running requests"
    assert bench.native.owner_of(active) == "r"
    assert bench.store.checkpoint(active, 4).tier is Tier.COMPRESSED
    assert bench.gone == [(1, "room")]
    assert bench.store.checkpoint(active, 5).tier is Tier.DENSE
    assert bench.gone == [(1, "room"), (2, "room")]


def test_with_everything_locked_or_demoting_an_optional_checkpoint_is_not_cached():
    """Fault 10."""
    bench = filled(3, 1)
    bench.store.lock(bench.entries[0])
    bench.store.evict(bench.entries[1], "x")
    active = bench.store.allocate("r")
    bench.store.lock(bench.entries[2])
    bench.store.lock(bench.entries[3])
    before = bench.tiers()
    assert bench.store.checkpoint(active, 9) is NotCached.NO_ROOM
    assert bench.tiers() == before
    assert bench.store.allocate("s") is None


# -- the three cases of appendix B.2 ----------------------------------------------------------------------------------


def test_case_1_with_compressed_space_the_oldest_dense_is_demoted_and_keeps_its_age():
    bench = filled(3, 2)
    bench.store.evict(bench.entries[1], "x")
    bench.gone.clear()
    assert bench.store.allocate("r") is not None
    assert bench.tiers() == [(1, "compressed"), (3, "compressed"), (4, "dense"), (5, "dense")]
    assert bench.gone == []
    assert bench.store.counters.demotions == 1


def test_case_2_both_full_and_the_oldest_is_dense_so_it_is_evicted():
    bench = filled(2, 2)
    for entry in bench.entries[:2]:
        bench.store.touch(entry)
    assert bench.store.allocate("r") is not None
    assert bench.gone == [(3, "dense_lru")]
    assert bench.tiers() == [(4, "dense"), (1, "compressed"), (2, "compressed")]


def test_case_3_both_full_and_the_oldest_is_compressed_so_its_slot_takes_the_oldest_dense():
    bench = filled(2, 2)
    freed = bench.entries[0].slot
    assert bench.store.allocate("r") is not None
    assert bench.gone == [(1, "compressed_lru")]
    assert bench.tiers() == [(2, "compressed"), (3, "compressed"), (4, "dense")]
    assert bench.entries[2].slot == freed


@pytest.mark.parametrize("locked", [[], [0], [0, 1]])
def test_nothing_dense_is_backpressure_and_costs_no_compressed_entry(locked):
    bench = Bench(2, 2)
    for position in (1, 2):
        bench.finish(position)
    bench.store.settle()
    for i in locked:
        bench.store.lock(bench.entries[i])
    assert bench.store.allocate("r") is not None
    assert bench.store.allocate("s") is not None
    assert bench.store.allocate("t") is None
    assert not bench.store.reclaim(1)
    assert bench.gone == []
    assert bench.tiers() == [(1, "compressed"), (2, "compressed")]


def test_locked_entries_are_passed_over_in_age_order():
    bench = filled(3, 1)
    bench.store.lock(bench.entries[0])
    bench.store.lock(bench.entries[1])
    assert bench.store.allocate("r") is not None
    assert bench.gone == [(3, "dense_lru")], "the compressed one is locked, so the oldest eligible is dense"
    bench.store.unlock(bench.entries[1])
    assert bench.store.allocate("s") is not None
    assert bench.gone == [(3, "dense_lru"), (2, "dense_lru")]


def test_a_step_reclaims_down_to_the_watermark_in_age_order():
    bench = Bench(4, 3, watermark=2)
    for position in (1, 2, 3, 4, 5, 6):
        bench.finish(position)
        bench.store.settle()
    bench.store.evict(bench.entries[0], "x")
    bench.store.evict(bench.entries[1], "x")
    bench.gone.clear()
    assert bench.native.free_slots == 1
    bench.store.step()
    assert [p.entry.position for p in bench.store.packs.under_way()] == [4]
    assert bench.native.free_slots == 1, "not before the pack is committed"
    bench.store.step()
    assert bench.native.free_slots == 2
    assert len(bench.store.packs) == 0


# -- transactional demotion -------------------------------------------------------------------------------------------


def test_a_demotion_commits_only_when_the_locks_of_concurrent_hits_are_gone():
    bench = Bench(2, 2)
    entry = bench.finish(1)
    bench.store.lock(entry)
    bench.store.step()
    assert (entry.tier, bench.store.packs.releasing) == (Tier.DEMOTING, 0)
    bench.store.unlock(entry)
    assert bench.store.packs.releasing == 1
    bench.store.step()
    assert entry.tier is Tier.COMPRESSED


def test_commits_keep_the_order_in_which_packs_began_whatever_finishes_first():
    bench = Bench(3, 3)
    for position in (1, 2, 3):
        bench.finish(position)
    for ticket in reversed(bench.mover.tickets):
        ticket.run()
    order = []
    free = bench.native.free
    bench.native.free = lambda slot, owner: (order.append(owner.position), free(slot, owner))
    bench.store.step()
    assert order == [1, 2, 3]


def test_an_allocation_waits_for_the_oldest_pack_only():
    bench = Bench(3, 3)
    for position in (1, 2, 3):
        bench.finish(position)
    assert bench.store.allocate("r") is not None
    assert bench.tiers() == [(1, "compressed"), (2, "demoting"), (3, "demoting")]
    assert bench.store.counters.forced_waits == 1


def test_a_failed_pack_loses_nothing():
    bench = filled(2, 2)
    bench.store.evict(bench.entries[0], "x")
    bench.mover.packs_fail = True
    assert bench.store.reclaim(1)
    assert bench.entries[2].pinned
    bench.store.settle()
    assert bench.tiers() == [(2, "compressed"), (3, "dense"), (4, "dense")]
    assert bench.compressed.free_slots == 1
    assert bench.store.counters.failed_packs == 1


def test_an_allocation_gets_through_when_every_pack_fails():
    bench = filled(2, 1)
    bench.store.evict(bench.entries[0], "x")
    bench.gone.clear()
    bench.mover.packs_fail = True
    assert bench.store.allocate("r") is not None
    assert bench.gone == [(2, "dense_lru")]
    assert bench.compressed.free_slots == 1


def test_evicting_an_entry_under_a_pack_waits_for_the_pack():
    bench = Bench(2, 1)
    entry = bench.finish(1)
    bench.store.evict(entry, "kv")
    assert entry.tier is Tier.ABSENT
    assert bench.mover.tickets[0].ran
    assert (bench.native.free_slots, bench.compressed.free_slots) == (2, 1)


# -- recency and locks ------------------------------------------------------------------------------------------------


def test_one_order_spans_both_tiers():
    bench = filled(2, 2)
    bench.store.touch(bench.entries[1])
    order = []
    while (entry := bench.store.oldest()) is not None:
        order.append(entry.position)
        bench.store.evict(entry, "x")
    assert order == [1, 3, 4, 2]


def test_lock_and_unlock_pair_up_and_protect():
    """Faults 4, 7."""
    bench = filled(1, 1)
    entry = bench.entries[0]
    with pytest.raises(ValueError, match="is not locked"):
        bench.store.unlock(entry)
    bench.store.lock(entry)
    bench.store.lock(entry)
    with pytest.raises(ValueError, match="with 2 locks"):
        bench.store.evict(entry, "x")
    bench.store.unlock(entry)
    bench.store.unlock(entry)
    bench.store.evict(entry, "x")
    for use in (bench.store.lock, lambda e: bench.store.evict(e, "x")):
        with pytest.raises(ValueError, match=r"gone|absent"):
            use(entry)


def test_misuse_is_refused():
    bench = Bench(2, 1)
    slot = bench.store.allocate("r")
    with pytest.raises(ValueError, match="position must be a positive"):
        bench.store.adopt(slot, "r", 0)
    with pytest.raises(ValueError, match="belongs to"):
        bench.store.adopt(slot, "other", 1)
    with pytest.raises(ValueError, match="position must be a positive"):
        bench.store.checkpoint(slot, 0)
    entry = bench.store.adopt(slot, "r", 1)
    bench.store.lock(entry)
    with pytest.raises(ValueError, match="dense and unlocked, got dense with 1 locks"):
        bench.store.compress(entry)
    for options in ({"watermark": -1}, {"dense_limit": -1}):
        with pytest.raises(ValueError, match="must not be negative"):
            Bench(1, 1, **options)


def test_finding_a_victim_does_not_slow_down_with_the_number_of_entries():
    steps = []
    for size in (100, 10_000):
        bench = filled(size, 0)
        for entry in bench.entries[: size // 2]:
            bench.store.lock(entry)
        count = 0
        eligible = bench.store.queues[Tier.DENSE]._eligible

        def counted(entry, eligible=eligible):
            nonlocal count
            count += 1
            return eligible(entry)

        bench.store.queues[Tier.DENSE]._eligible = counted
        for i in range(50):
            bench.store.allocate(("r", i))
        steps.append(count - size // 2)
    assert steps[0] == steps[1]
