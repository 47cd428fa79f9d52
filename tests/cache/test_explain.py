import pytest

from dasc.cache import CacheConfig, EveryTokens
from dasc.cache.explain import REASONS
from tests.cache.fakes import Host, LateMover


def host(**options) -> Host:
    config = {"native_slots": 2, "compressed_slots": 1, "kv_pages": 40, "policies": ()} | options
    return Host(CacheConfig(**config))


def test_nothing_stored():
    explanation = host().cache.explain([1, 2, 3])
    assert explanation == (3, 0, 0, None, ())
    assert "Nothing with this beginning" in str(explanation)
    assert "no state is known to have been stored" in str(explanation)


def test_a_hit_and_a_tombstone_beyond_it():
    it = host(compressed_slots=4, policies=(EveryTokens(2),))
    it.run("a", [1, 2, 3, 4, 5, 6])
    entry = it.stored()[(1, 2, 3, 4)]
    it.cache.ledger.store.evict(entry, "room")
    explanation = it.cache.explain([1, 2, 3, 4, 5])
    assert explanation == (5, 4, 2, "compressed", ((4, "room"),))
    assert "2 of 5 tokens can be reused (compressed)." in str(explanation)
    assert "KV matches up to 4, but no state is stored past 2 (tombstone)." in str(explanation)
    assert "State at 4: evicted: the oldest, to store a newer checkpoint." in str(explanation)


def opted_out(it: Host) -> None:
    it.run("a", [1, 2, 3, 4], store=False)


def flush(it: Host) -> None:
    it.run("a", [1, 2, 3, 4])
    it.cache.flush()


def aborted(it: Host) -> None:
    it.start("a", [1, 2, 3, 4])
    it.compute("a", 4)
    it.cache.abort("a")


def kv(it: Host) -> None:
    it.run("a", [1, 2, 3, 4])
    it.run("b", [9] * 40)


def no_room(it: Host) -> None:
    it.run("b", [5, 6])
    it.cache.step()
    it.start("c", [5, 6, 7])  # refers to the one compressed state
    it.start("a", [1, 2, 3, 4])
    it.compute("a", 4)
    it.cache.checkpoint("a", 4)


def transfer_failed(it: Host) -> None:
    it.mover.packs_fail = True
    it.start("a", [1, 2, 3, 4])
    it.compute("a", 4)
    it.cache.checkpoint("a", 4)


@pytest.mark.parametrize("act", [opted_out, flush, aborted, kv, no_room, transfer_failed], ids=lambda act: act.__name__)
def test_the_cause_of_a_missing_state_is_remembered(act):
    it = host()
    act(it)
    explanation = it.cache.explain([1, 2, 3, 4, 5])
    assert explanation.gone == ((4, act.__name__),)
    assert REASONS[act.__name__] in str(explanation)


def test_a_request_that_ends_inside_a_page_says_so():
    it = host(page_size=4)
    it.run("a", [1, 2, 3, 4, 5])
    assert it.cache.explain([1, 2, 3, 4, 5, 6]).gone == ((5, "unaligned"),)
    assert it.cache.counters.not_cached["unaligned"] == 1


def test_a_state_of_the_whole_prompt_is_no_hit_but_is_mentioned():
    it = host()
    it.run("a", [1, 2, 3])
    explanation = it.cache.explain([1, 2, 3])
    assert explanation.usable_tokens == 0
    assert explanation.gone == ((3, "whole_prompt"),)
    assert "at least one token" in str(explanation)


def test_the_latest_word_counts_and_memory_is_bounded():
    it = host(explain_records=2)
    it.run("a", [1, 2], store=False)
    it.run("b", [1, 2])
    it.cache.flush()
    assert it.cache.explain([1, 2, 3]).gone == ((2, "flush"),)
    for i in range(5):
        it.run(i, [5, i], store=False)
    assert it.cache.explain([1, 2, 3]).gone == ()
    assert len(it.cache.ledger.gone) == 2


def test_a_failed_pack_that_drops_a_state_is_named():
    it = Host(CacheConfig(native_slots=2, compressed_slots=1, kv_pages=9, spill=False, policies=()), LateMover)
    it.mover.packs_fail = True
    it.run("a", [1, 2])
    it.cache.step()
    assert it.cache.explain([1, 2, 3]).gone == ((2, "pack_failed"),)
