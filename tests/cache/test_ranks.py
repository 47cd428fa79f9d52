"""Ranks that see one history hold the same slots, whatever their transfers' timing; and when they do not, it shows."""

import random
import time

import pytest

from dasc.cache import AtJunctions, CacheConfig, EveryTokens, ThreadMover, check
from tests.cache.fakes import Host, LateMover

CONFIG = CacheConfig(
    native_slots=5,
    compressed_slots=6,
    kv_pages=200,
    watermark=1,
    policies=(AtJunctions(), EveryTokens(8)),
)


def play(host: Host, seed: int, steps: int = 60, between=lambda step: None) -> list[str]:
    """One history of requests, some aborted, some running side by side; the digest after each scheduler step."""
    rng = random.Random(seed)
    cache = host.cache
    conversations = [[i] for i in range(6)]
    digests = []
    for step in range(steps):
        cache.step()
        between(step)
        speaker = rng.choice(conversations)
        prompt = speaker + [rng.randrange(40) for _ in range(rng.randint(1, 9))]
        cache.acquire(step, prompt[-40:])
        cache.issue_loads()
        for request in list(cache.leases):
            action = rng.random()
            if action < 0.6:
                end = len(host.tokens(request))
                while (stop := cache.next_stop(request)) is not None and stop <= end:
                    host.compute(request, stop)
                    cache.checkpoint(request, stop)
                host.compute(request, end)
                speaker[:] = host.tokens(request)
                cache.finish(request)
            elif action < 0.7:
                cache.abort(request)
        check(cache)
        host.check_data()
        digests.append(cache.history_digest())
    return digests


class SlowPacks(ThreadMover):
    """Packs that take a random time on a real thread."""

    def __init__(self, storage, seed: int) -> None:
        super().__init__(storage)
        rng = random.Random(seed)
        storage.before = lambda operation: time.sleep(rng.choice([0, 0, 0.002])) if operation == "pack" else None


@pytest.mark.parametrize("seed", range(3))
def test_slot_maps_are_a_pure_function_of_the_history(seed):
    hosts = [Host(CONFIG, lambda storage, rank=rank: SlowPacks(storage, rank)) for rank in range(3)]
    late = Host(CONFIG, LateMover)
    rng = random.Random(seed)
    runs = [play(host, seed) for host in hosts]
    runs.append(play(late, seed, between=lambda step: late.mover.run_some(rng.randrange(256))))
    assert all(run == runs[0] for run in runs)
    maps = [
        {prefix: (e.tier, e.slot, e.stamp, e.serial) for prefix, e in host.stored().items()} for host in [*hosts, late]
    ]
    assert all(m == maps[0] for m in maps)
    assert len(maps[0]) > 5
    for host in hosts:
        assert host.cache.counters.commits > 5
        host.mover.close()


def swap_free_slots(host: Host) -> None:
    pool = host.cache.ledger.native
    pool._free[-2:] = pool._free[:-3:-1]


def touch_the_oldest(host: Host) -> None:
    store = host.cache.ledger.store
    store.touch(store.oldest())


@pytest.mark.parametrize("plant", [swap_free_slots, touch_the_oldest])
def test_a_planted_disagreement_is_detected(plant):
    planted_at = []

    def disturb(step):
        store = other.cache.ledger.store
        if step >= 20 and not planted_at and other.cache.ledger.native.free_slots > 1 and store.oldest() is not None:
            planted_at.append(step)
            plant(other)

    one, other = Host(CONFIG), Host(CONFIG)
    digests, disturbed = play(one, 5), play(other, 5, between=disturb)
    assert digests[: planted_at[0]] == disturbed[: planted_at[0]]
    assert digests[-1] != disturbed[-1]
    differ = [a != b for a, b in zip(digests, disturbed)]
    assert differ == sorted(differ), "once apart, apart for good"


def test_a_pack_that_fails_on_one_rank_is_rolled_back_on_all_when_they_ask_each_other():
    rng = random.Random(3)
    outcomes = []
    alone = Host(CONFIG, agree=lambda ok: outcomes.append(ok) or ok)
    play(alone, 7)
    decided = [ok and rng.random() < 0.7 for ok in outcomes * 3]

    def follow():
        answers = iter(decided)
        return lambda ok: next(answers) and ok

    runs = []
    for _ in range(2):
        host = Host(CONFIG, agree=follow())
        runs.append(play(host, 7))
        assert host.cache.counters.failed_packs > 0
    assert runs[0] == runs[1]
    assert runs[0] != play(Host(CONFIG), 7)
