"""One test a row of the list of faults others shipped, 1-14, 16-18 and 20-23, named for what must hold.

Row 15 (the state of each sequence of a ragged batch at its own boundary) and 19 (continuing from a state by few tokens)
concern recurrences and the engine. There is more on rows 1, 2, 7 and 12 in test_radix.py and test_pools.py, on 21 and
22 in test_checkpoints.py, and the machine meets most of them in every combination.
"""

import random

import pytest

from dasc.cache import AtJunctions, Backpressure, CacheConfig, EveryTokens, NotCached, StateEntry, Tier, check
from tests.cache.fakes import POISON, ZERO, Host, state_of


def host(native=4, compressed=4, kv_pages=4000, **options) -> Host:
    options = {"policies": ()} | options
    return Host(CacheConfig(native_slots=native, compressed_slots=compressed, kv_pages=kv_pages, **options))


def end_of_test(it: Host) -> None:
    check(it.cache)
    it.poison_free()
    it.check_data()


def test_01_children_sit_under_their_own_keys_after_every_split():
    it = host(native=8, compressed=20)
    rng = random.Random(1)
    base = [rng.randrange(50) for _ in range(60)]
    for i in range(20):
        it.run(i, [*base[: rng.randint(1, 60)], 100 + i])
        check(it.cache)


@pytest.mark.parametrize("length", [63, 64, 65])
def test_02_lookups_around_a_page_boundary_make_no_empty_node(length):
    it = host(page_size=64)
    it.run("a", list(range(128)))
    it.start("b", list(range(length)))
    check(it.cache)
    it.cache.abort("b")
    assert it.cache.ledger.tree.nodes == 1
    assert it.cache.match(list(range(length))).kv_tokens == (length - 1) // 64 * 64


def test_03_a_shorter_lookup_in_between_spoils_no_later_hit():
    it = host()
    tokens = list(range(256))
    it.run("a", tokens)
    assert it.run("b", tokens[:255])[0] == 0
    assert it.run("c", [*tokens, 7, 8])[0] == 256
    assert it.run("d", [*tokens, 7, 8])[0] == 256
    assert it.run("e", [*tokens[:255], 9])[0] == 255
    end_of_test(it)


def test_04_a_state_that_appears_under_a_request_does_not_upset_its_unlock():
    it = host()
    it.start("first", [1, 2, 3, 4])
    it.start("second", [1, 2, 3, 4])
    it.compute("first", 4)
    it.compute("second", 4)
    entry = it.cache.checkpoint("first", 4)
    assert it.cache.checkpoint("second", 4) is entry, "the second finds what the first has left"
    assert entry.locks == 2
    it.cache.release_state("first")
    it.cache.release_state("first")
    assert entry.locks == 1
    it.cache.abort("first")
    it.cache.abort("second")
    assert entry.locks == 0
    end_of_test(it)


def test_05_a_node_under_a_demotion_survives_the_deletion_of_its_children():
    it = host(native=4, compressed=2)
    it.run("parent", [1, 2])
    parent = it.stored()[(1, 2)]
    it.cache.ledger.store.lock(parent)  # as a hit would, so that the pack cannot be committed
    it.run("child", [1, 2, 3])
    it.cache.ledger.store.evict(it.stored()[(1, 2, 3)], "x")
    assert parent.tier is Tier.DEMOTING
    assert list(it.stored()) == [(1, 2)]
    it.cache.ledger.store.unlock(parent)
    it.cache.step()
    end_of_test(it)
    assert parent.tier is Tier.COMPRESSED


def test_06_a_hit_refreshes_only_the_state_it_used():
    """128 sessions of several turns: those used last keep their last state, whatever lies on their paths."""
    it = host(native=8, compressed=128, kv_pages=128 * 40, policies=(EveryTokens(4),))
    history = {s: [s, s, s, s] for s in range(128)}
    for turn in range(2):
        for s in range(128):
            history[s] += [1000 + turn, s]
            it.run((s, turn), history[s])
            it.cache.step()
    used = it.stored()[tuple(history[127])]
    above = it.stored().get(tuple(history[127][:4]))
    stamp = None if above is None else above.stamp
    it.start("again", [*history[127], 5])
    assert used.stamp == max(e.stamp for e in it.stored().values())
    if above is not None:
        assert above.stamp == stamp
    it.cache.abort("again")
    last = [tuple(history[s]) in it.stored() for s in range(128)]
    assert sum(last[64:]) == 64, "the warmer half keeps its leaves"
    end_of_test(it)


def test_06_a_hit_makes_the_kv_it_used_the_youngest():
    it = host(kv_pages=10)
    it.run("a", [1, 1, 1, 1])
    it.run("b", [2, 2, 2, 2])
    it.start("c", [1, 1, 1, 1, 9])
    it.cache.abort("c")
    it.start("d", [3, 3, 3, 3])
    assert set(it.stored()) == {(1, 1, 1, 1)}
    end_of_test(it)


def test_07_giving_back_what_was_not_taken_raises():
    it = host()
    it.run("a", [1, 2])
    entry = it.stored()[(1, 2)]
    with pytest.raises(ValueError, match="is not locked"):
        it.cache.ledger.store.unlock(entry)
    for call in (it.cache.finish, it.cache.abort, it.cache.release_state, it.cache.next_stop):
        with pytest.raises(ValueError, match="'a' is not running"):
            call("a")
    end_of_test(it)


def test_08_match_then_abort_or_reject_any_number_of_times_leaks_nothing():
    it = host(native=3, compressed=2, kv_pages=30)
    it.run("a", [1, 2, 3, 4])
    for i in range(300):
        answer = it.cache.acquire(i, [1, 2, 3, 4, 5] if i % 2 else [6] * (i % 25 + 1))
        if not isinstance(answer, Backpressure) and i % 3 == 0:
            it.cache.issue_loads()
        if not isinstance(answer, Backpressure) and i % 5:
            it.cache.abort(i)
        check(it.cache)
    for request in list(it.cache.leases):
        it.cache.abort(request)
    it.cache.step()
    ledger = it.cache.ledger
    assert ledger.native.free_slots == 3
    assert ledger.kv.free_pages + ledger.tree.pages == 30


@pytest.mark.parametrize("operation", ["copy", "load", "clear"])
def test_09_a_transfer_that_breaks_half_way_leaves_nobody_a_slot_that_was_not_written(operation):
    it = host(compressed=0 if operation == "copy" else 4)
    if operation != "clear":
        it.run("a", [1, 2])
        it.cache.step()
    it.poison_free()
    for request in ("b", "c"):
        it.cache.acquire(request, [1, 2, 3])
    it.storage.fail = {operation}
    assert it.cache.issue_loads() == ["b", "c"]
    assert it.cache.leases == {}
    end_of_test(it)
    it.storage.fail = set()
    assert it.start("b", [1, 2, 3], lookup=False).hit_tokens == 0
    assert it.cache.counters.failed_loads == 2


@pytest.mark.parametrize("compressed", [0, 1])
def test_09_a_checkpoint_that_breaks_half_way_is_not_stored(compressed):
    it = host(compressed=compressed)
    it.start("a", [1, 2])
    it.compute("a", 2)
    it.storage.fail = {"copy", "pack"}
    assert it.cache.checkpoint("a", 2) is NotCached.TRANSFER_FAILED
    assert it.stored() == {}
    end_of_test(it)


def test_10_an_optional_checkpoint_with_everything_in_use_is_not_cached():
    it = host(native=2, compressed=1)
    it.run("a", [1, 2])
    it.cache.step()
    it.start("b", [1, 2, 3])
    it.start("c", [4, 5])
    it.compute("c", 2)
    assert it.cache.checkpoint("c", 2) is NotCached.NO_ROOM
    assert it.cache.counters.not_cached["no_room"] == 1
    assert it.cache.acquire("d", [1]) == Backpressure("native")
    end_of_test(it)


def test_11_a_slot_handed_out_again_starts_from_zero():
    it = host(native=1, compressed=0)
    it.start("a", [1, 2])
    it.compute("a", 2)
    slot = it.cache.leases["a"].slot
    it.cache.abort("a")
    assert it.storage.native[slot] == state_of([1, 2])
    lease = it.start("b", [3])
    assert lease.slot == slot
    assert it.storage.native[slot] == ZERO


@pytest.mark.parametrize("watermark", [0, 3])
def test_12_every_slot_and_page_can_be_used(watermark):
    it = host(native=5, compressed=3, kv_pages=40, watermark=watermark)
    for i in range(5):
        it.start(("r", i), [i] * 8)
    assert it.cache.ledger.native.free_slots == it.cache.ledger.kv.free_pages == 0
    for i in range(5):
        it.compute(("r", i), 8)
        assert isinstance(it.cache.finish(("r", i)), StateEntry)
    occupancy = it.cache.ledger.occupancy()
    assert (occupancy["native_free"], occupancy["compressed_free"], occupancy["kv_pages_free"]) == (0, 0, 0)
    assert len(it.stored()) == 5
    it.cache.step()
    end_of_test(it)


@pytest.mark.parametrize("compressed", [0, 6])
def test_13_all_parts_of_a_checkpoint_come_back_together(compressed):
    """Store, free, take the slots for others, store again, load: every part is that of its own tokens."""
    it = host(native=6, compressed=compressed)
    it.run("a", [1, 2, 3])
    it.cache.step()
    it.cache.flush()
    it.poison_free()
    for i in range(4):
        it.run(("b", i), [7, i])
        it.cache.step()
    it.run("a", [1, 2, 3])
    it.cache.step()
    it.poison_free()
    lease = it.start("again", [1, 2, 3, 4])
    assert it.storage.native[lease.slot] == state_of([1, 2, 3])


def test_14_whichever_tier_can_pay_is_evicted():
    """The oldest goes, be it dense or compressed, when a newer checkpoint needs room."""
    for touched, evicted in ((False, (1,)), (True, (2,))):
        it = host(native=2, compressed=1)
        it.run("compressed", [1])
        it.cache.step()
        it.run("dense", [2])
        if touched:
            it.start("use", [1, 9])
            it.cache.abort("use")
        it.start("running", [3])
        it.compute("running", 1)
        assert isinstance(it.cache.checkpoint("running", 1), StateEntry)
        assert evicted not in it.stored()
        assert len(it.stored()) == 2
        end_of_test(it)


def test_16_a_checkpoint_carries_the_position_its_state_is_at():
    """Block 1600, prompt 2002, first chunk 364: never a state at 1600 that holds the one at 364."""
    it = host(policies=(EveryTokens(1600),))
    tokens = list(range(2002))
    it.start("a", tokens)
    assert it.cache.next_stop("a") == 1600
    it.compute("a", 364)
    with pytest.raises(ValueError, match="position must be that of the state, 364, got 1600"):
        it.cache.checkpoint("a", 1600)
    assert it.cache.next_stop("a") == 1600
    it.compute("a", 1600)
    assert it.cache.checkpoint("a", 1600).position == 1600
    with pytest.raises(ValueError, match=r"position must be in \[1600, 2002\], got 364"):
        it.cache.advance("a", 364)
    it.compute("a", 2002)
    it.cache.finish("a")
    assert {len(prefix): entry.position for prefix, entry in it.stored().items()} == {1600: 1600, 2002: 2002}
    end_of_test(it)


def test_17_a_state_that_was_never_written_is_refused():
    it = host()
    lease = it.cache.acquire("a", [1, 2])
    assert it.storage.native[lease.slot] == POISON
    with pytest.raises(ValueError, match="call issue_loads first"):
        it.cache.advance("a", 2)
    with pytest.raises(ValueError, match="position must be that of the state"):
        it.cache.checkpoint("a", 2)
    assert it.cache.finish("a") is NotCached.NO_STATE
    it.start("b", [1, 2])
    assert it.cache.checkpoint("b", 0) is NotCached.NO_STATE
    assert it.cache.finish("b") is NotCached.NO_STATE
    assert it.stored() == {}
    end_of_test(it)


def test_18_rejected_speculative_tokens_leave_a_checkpoint_as_if_they_had_never_been():
    stored = []
    for guesses in ((), (50, 51, 52)):
        it = host()
        it.start("a", [1, 2, 3])
        it.compute("a", 3)
        it.cache.extend("a", [4])
        if guesses:
            it.cache.extend("a", guesses)
            it.cache.truncate("a", 4)
        it.compute("a", 4)
        with pytest.raises(ValueError, match=r"tokens must be in \[4, 4\], got 3"):
            it.cache.truncate("a", 3)
        it.cache.checkpoint("a", 4)
        it.cache.extend("a", [5])
        it.compute("a", 5)
        it.cache.finish("a")
        it.cache.step()
        end_of_test(it)
        stored.append({prefix: (entry.tier, entry.slot, entry.stamp) for prefix, entry in it.stored().items()})
        assert set(it.stored()) == {(1, 2, 3, 4), (1, 2, 3, 4, 5)}
    assert stored[0] == stored[1]


def test_20_kv_without_a_state_is_no_hit():
    it = host()
    it.run("a", list(range(100)))
    match = it.cache.match([*range(60), 500])
    assert (match.kv_tokens, match.usable_tokens, match.entry, match.junction) == (60, 0, None, 60)
    assert it.run("b", [*range(60), 500])[0] == 0
    assert it.cache.counters.unserved_kv_tokens == 60


def test_21_a_shared_junction_is_served_from_the_third_request_on():
    it = host(policies=(AtJunctions(),))
    shared = list(range(1500))
    hits = [it.run(i, shared + [10_000 * (i + 1) + j for j in range(700)])[0] for i in range(3)]
    assert hits == [0, 0, 1500]


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_22_any_prefill_chunk_meets_every_stop(chunk):
    """A chunk smaller than the distance of checkpoints, or no divisor of it, changes nothing about them."""
    it = host(native=2, compressed=9, policies=(EveryTokens(64),))
    tokens = list(range(200))
    it.start("a", tokens)
    while (position := it.cache.leases["a"].state_position) < 200:
        stop = it.cache.next_stop("a")
        it.compute("a", min(position + chunk, stop, 200))
        if it.cache.leases["a"].state_position == stop:
            assert isinstance(it.cache.checkpoint("a", stop), StateEntry)
    it.cache.finish("a")
    assert sorted(len(prefix) for prefix in it.stored()) == [64, 128, 192, 200]
    end_of_test(it)


def test_23_editing_the_last_turn_restores_the_deepest_state_before_the_edit():
    it = host(compressed=20)
    history: list[int] = []
    for turn in range(4):
        history += [100 * turn + i for i in range(20)]
        it.run(turn, history)
    edited = [*history[:70], 9999]
    assert it.cache.match(edited).kv_tokens == 70
    assert it.run("edit", edited)[0] == 60
    assert it.run("on", [*history, 1])[0] == 80, "the old branch is still there"
    end_of_test(it)
