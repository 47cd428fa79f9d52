"""Whatever breaks, and wherever a call is cut off: nothing lost, nothing leaked, and a counter that says so."""

import random
import threading

import pytest

from dasc.cache import AtJunctions, Backpressure, CacheConfig, EveryTokens, ThreadMover, check
from tests.cache.fakes import Host, Interrupted, LateMover

ARMS = {
    "dense": {"compressed_slots": 0},
    "compressed": {"compressed_slots": 3, "spill": False},
    "two-tier": {"compressed_slots": 3},
}


def config(arm: str) -> CacheConfig:
    policies = (AtJunctions(), EveryTokens(4))
    return CacheConfig(native_slots=3, kv_pages=60, watermark=1, policies=policies, **ARMS[arm])


def life(host: Host, seed: int, requests: int = 8):
    """A generator of calls on the cache, each safe to repeat when it was cut off."""
    rng = random.Random(seed)
    cache = host.cache
    seen = [[1]]
    for request in range(requests):
        base = rng.choice(seen)
        prompt = base[: rng.randint(1, len(base))] + [rng.randrange(4) for _ in range(rng.randint(1, 6))]
        yield cache.step
        yield lambda r=request, p=prompt: r in cache.leases or cache.acquire(r, p)
        yield cache.issue_loads
        if request not in cache.leases:
            continue
        end = len(prompt)
        while request in cache.leases and cache.leases[request].state_position < end:
            stop = cache.next_stop(request)
            host.compute(request, end if stop is None else min(stop, end))
            position = cache.leases[request].state_position
            if position == stop:
                yield lambda r=request, p=position: cache.checkpoint(r, p)
        seen.append(prompt)
        yield lambda r=request: r in cache.leases and cache.finish(r)
    yield cache.flush


def drain_and_check(host: Host) -> None:
    cache = host.cache
    for request in list(cache.leases):
        cache.abort(request)
    cache.step()
    assert cache.flush() == 0
    cache.step()
    check(cache)
    ledger = cache.ledger
    assert ledger.native.free_slots == ledger.native.slots
    assert ledger.compressed.free_slots == ledger.compressed.slots
    assert ledger.kv.free_pages == ledger.kv.pages


def agreeing_host(arm: str) -> Host:
    """Asking the other ranks is a point at which a call may be cut off, too."""
    host = Host(config(arm), agree=lambda ok: host.storage.before("agree") or ok)
    return host


def operations(arm: str, seed: int) -> list[str]:
    host = agreeing_host(arm)
    happened: list[str] = []
    host.storage.before = happened.append
    for call in life(host, seed):
        call()
    drain_and_check(host)
    return happened


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("seed", range(2))
def test_a_call_cut_off_at_any_transfer_can_be_repeated_and_leaves_nothing_behind(arm, seed):
    """Cancellation at each await point: each submit, wait, copy, load, clear and vote of a life, one at a time."""
    happened = operations(arm, seed)
    kinds = set(happened)
    assert kinds >= {"clear", "agree"} | ({"copy"} if arm == "dense" else {"submit", "wait", "pack", "load"})
    for point in range(len(happened)):
        host = agreeing_host(arm)
        count = 0

        def cut(operation, point=point):
            nonlocal count
            count += 1
            if count == point + 1:
                raise Interrupted(operation)

        host.storage.before = cut
        interrupted = 0
        for call in life(host, seed):
            try:
                call()
            except Interrupted:
                interrupted += 1
                check(host.cache)
                host.poison_free()
                call()
            check(host.cache)
            host.poison_free()
            host.check_data()
        assert interrupted == 1
        drain_and_check(host)


def test_the_target_of_an_interrupted_pack_is_nobodys_until_the_pack_has_ended():
    host = Host(CacheConfig(native_slots=3, compressed_slots=1, kv_pages=20, policies=()))
    host.start("a", [1, 2])
    host.compute("a", 2)

    def interrupt(operation):
        if operation == "wait":
            raise Interrupted

    host.storage.before = interrupt
    with pytest.raises(Interrupted):
        host.cache.checkpoint("a", 2)
    host.storage.before = lambda operation: None
    host.run("b", [3])
    assert host.stored()[(3,)].tier.value == "dense", "the one compressed slot may still be written"
    host.mover.run_some(0b11)
    host.check_data()
    host.cache.step()
    host.run("c", [4])
    host.cache.step()
    assert host.stored()[(4,)].tier.value == "compressed"
    host.check_data()
    drain_and_check(host)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("what", ["pack", "copy", "load", "clear"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_transfers_that_fail_at_random_cost_hits_but_nothing_else(arm, what, share):
    host = Host(config(arm))
    rng = random.Random(what + arm)
    for call in life(host, 3, requests=40):
        failing = rng.random() < share
        host.mover.packs_fail = failing and what == "pack"
        host.storage.fail = {what} if failing and what != "pack" else set()
        call()
        check(host.cache)
        host.poison_free()
        host.check_data()
    counters = host.cache.counters
    if what == "pack" and arm != "dense":
        assert counters.failed_packs > 0
    if what == "clear":
        assert counters.failed_loads > 0
    host.storage.fail = set()
    drain_and_check(host)


@pytest.mark.parametrize("arm", ARMS)
def test_no_memory_for_a_slot_is_backpressure_and_passes(arm):
    host = Host(config(arm))
    leases = [host.start(i, [i, i]) for i in range(3)]
    assert host.cache.acquire("late", [1, 1, 2]) == Backpressure("native")
    assert host.cache.acquire("late", [1, 1, 2]) == Backpressure("native")
    assert host.cache.counters.backpressure["native"] == 2
    host.cache.abort(leases[0].request_id)
    assert not isinstance(host.cache.acquire("late", [1, 1, 2]), Backpressure)
    drain_and_check(host)


def test_no_pages_is_backpressure_known_before_anything_is_evicted():
    host = Host(config("two-tier"))
    host.run("cached", [1, 2, 3, 4, 5])
    host.start("big", [7] * 50)
    before = set(host.stored())
    assert host.cache.acquire("bigger", [8] * 11) == Backpressure("kv")
    assert host.cache.extend("big", [8] * 11) == Backpressure("kv")
    assert set(host.stored()) == before
    assert host.cache.counters.backpressure["kv"] == 2
    host.cache.abort("big")
    host.start("bigger", [8] * 11)
    drain_and_check(host)


def test_a_request_that_stands_in_its_own_way_gets_through():
    """One native slot, held by the very state the request would use."""
    host = Host(CacheConfig(native_slots=1, compressed_slots=0, kv_pages=20, policies=()))
    host.run("a", [1, 2, 3])
    assert host.start("b", [1, 2, 3, 4]).hit_tokens == 0
    host.cache.abort("b")
    two = Host(CacheConfig(native_slots=1, compressed_slots=1, kv_pages=20, policies=()))
    two.run("a", [1, 2, 3])
    assert two.start("b", [1, 2, 3, 4]).hit_tokens == 3, "it is demoted out of the way and still serves"
    drain_and_check(host)
    drain_and_check(two)


@pytest.mark.parametrize("arm", ["compressed", "two-tier"])
def test_a_dead_worker_stops_packing_and_nothing_else(arm):
    host = Host(config(arm), ThreadMover)
    for i, call in enumerate(life(host, 4, requests=30)):
        if i == 20:
            host.mover.close()
        call()
        check(host.cache)
    assert host.cache.counters.failed_packs > 0
    assert host.cache.counters.requests > 20
    drain_and_check(host)


def test_packs_cancelled_while_they_wait_are_rolled_back():
    host = Host(config("two-tier"), ThreadMover)
    gate = threading.Event()
    host.storage.before = lambda operation: operation == "pack" and gate.wait(10)
    for i in range(2):
        host.start(i, [i])
        host.compute(i, 1)
        host.cache.finish(i)
    first, second = host.cache.ledger.store.packs.under_way()
    assert second.ticket.cancel()
    gate.set()
    host.cache.step()
    assert [first.entry.tier.value, second.entry.tier.value] == ["compressed", "dense"]
    assert host.cache.counters.failed_packs == 1
    check(host.cache)
    host.check_data()
    host.mover.close()


def test_a_clock_that_goes_backwards_changes_no_choice_and_is_counted():
    times = iter(range(10**6, 0, -1))
    backwards = Host(config("two-tier"), clock=lambda: next(times))
    normal = Host(config("two-tier"))
    for one, other in zip(life(backwards, 5), life(normal, 5)):
        one()
        other()
    assert backwards.cache.history_digest() == normal.cache.history_digest()
    assert backwards.cache.counters.clock_errors > 0
    assert backwards.cache.counters.stall_s == 0
    assert normal.cache.counters.clock_errors == 0


def test_waiting_for_packs_is_counted():
    ticks = iter(range(10**6))
    host = Host(config("two-tier"), clock=lambda: float(next(ticks)))
    host.run("a", [1])
    host.cache.step()
    assert host.cache.counters.stall_s == host.cache.counters.commits == 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.acquire("r", [1]), "already running"),
        (lambda c: c.acquire("s", []), "takes >= 1 token"),
        (lambda c: c.acquire("s", [1], reserve_tokens=-1), "reserves >= 0, got 1 and -1"),
        (lambda c: c.acquire("s", [-1]), "token ids"),
        (lambda c: c.acquire("s", [1] * 61), "take 61 KV pages, but there are 60"),
        (lambda c: c.extend("r", [2**40]), "token ids"),
        (lambda c: c.advance("r", 4), r"position must be in \[0, 2\], got 4"),
        (lambda c: c.truncate("r", 1), r"tokens must be in \[2, 2\], got 1"),
        (lambda c: c.checkpoint("s", 1), "'s' is not running"),
        (lambda c: c.match([2**31]), "token ids"),
        (lambda c: c.explain(["a"]), "row of integers"),
    ],
)
def test_wrong_calls_raise_and_change_nothing(call, says):
    host = Host(config("two-tier"), LateMover)
    host.start("r", [1, 2])
    digest = host.cache.history_digest()
    with pytest.raises(ValueError, match=says):
        call(host.cache)
    assert host.cache.history_digest() == digest
    check(host.cache)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"native_slots": 0}, "native_slots must be >= 1, got 0"),
        ({"kv_pages": 0}, "kv_pages must be >= 1"),
        ({"compressed_slots": -1}, "compressed_slots must not be negative"),
        ({"watermark": 2}, "watermark must be below native_slots = 2, got 2"),
        ({"max_dense_bytes": -1}, "max_dense_bytes must not be negative"),
        ({"compressed_slots": 0, "spill": False}, "nothing can be cached"),
        ({"compressed_slots": 0, "max_dense_bytes": 9, "native_slot_bytes": 10}, "a dense one 10"),
    ],
)
def test_configurations_that_cannot_work_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        CacheConfig(**({"native_slots": 2, "compressed_slots": 2, "kv_pages": 4} | options))


def test_byte_caps_bound_each_tier():
    host = Host(
        CacheConfig(
            native_slots=8,
            compressed_slots=8,
            kv_pages=100,
            native_slot_bytes=10,
            compressed_slot_bytes=4,
            max_dense_bytes=25,
            max_compressed_bytes=13,
            policies=(),
        )
    )
    for i in range(20):
        host.run(i, [i, 1])
        host.cache.step()
        occupancy = host.cache.ledger.occupancy()
        assert occupancy["dense_bytes"] <= 25
        assert occupancy["compressed_bytes"] <= 13
        check(host.cache)
    assert (occupancy["dense"], occupancy["compressed"]) == (2, 3)
