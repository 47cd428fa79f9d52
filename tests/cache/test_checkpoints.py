import logging

import pytest

from dasc.cache import AtJunctions, AtPromptEnd, CacheConfig, EveryTokens, PromptInfo
from dasc.cache.checkpoints import next_stop
from tests.cache.fakes import Host


def stops(policies, prompt, until=10_000):
    found, position = [], 0
    while (position := next_stop(policies, position, prompt)) is not None and position <= until:
        found.append(position)
    return found


def test_every_tokens_stops_at_multiples():
    assert stops((EveryTokens(4),), PromptInfo(10, 2, None), 13) == [4, 8, 12]


@pytest.mark.parametrize(
    ("prompt_tokens", "page", "expected"), [(1, 1, []), (2, 1, [1]), (64, 64, []), (65, 64, [64]), (200, 64, [192])]
)
def test_the_prompt_end_leaves_a_token_to_compute(prompt_tokens, page, expected):
    assert stops((AtPromptEnd(),), PromptInfo(prompt_tokens, page, None)) == expected


def test_policies_together_take_the_nearest_stop():
    prompt = PromptInfo(11, 1, 7)
    assert stops((EveryTokens(4), AtPromptEnd(), AtJunctions()), prompt, 12) == [4, 7, 8, 10, 12]
    assert stops((AtJunctions(),), PromptInfo(11, 1, None)) == []
    assert stops((), prompt) == []


def test_a_distance_that_no_page_boundary_meets_is_refused():
    """Fault 22: what could never be cached is an error, not a silence."""
    with pytest.raises(ValueError, match=r"multiple of the page \(64 tokens\), got 100"):
        CacheConfig(native_slots=1, compressed_slots=0, kv_pages=4, page_size=64, policies=(EveryTokens(100),))
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        EveryTokens(0)


SHARED = list(range(1500))
PROMPTS = [SHARED + [10_000 + 1000 * i + j for j in range(700)] for i in range(3)]


@pytest.mark.parametrize("page", [1, 4, 528])
def test_the_shared_junction_gets_a_checkpoint_when_a_second_request_passes_it(page):
    """Fault 21: 1500 tokens shared, 700 of their own, page (block) up to 528."""
    host = Host(CacheConfig(native_slots=4, compressed_slots=6, kv_pages=9000 // page, page_size=page))
    tail = [7] * (-2200 % page)  # ends on a page, so that the end is stored too
    hits = [host.run(i, prompt, tail)[0] for i, prompt in enumerate(PROMPTS)]
    assert hits == [0, 0, 1500 // page * page]
    host.check_data()


def test_a_junction_too_near_the_last_state_is_passed_over_in_silence(caplog):
    policies = (AtJunctions(min_gain_tokens=8),)
    host = Host(CacheConfig(native_slots=4, compressed_slots=6, kv_pages=100, policies=policies))
    with caplog.at_level(logging.WARNING, "dasc"):
        near = [host.run(i, [1, *[2 + i] * 9])[0] for i in range(4)]
        far = [host.run(9 + i, [20, *range(30, 37), *[40 + i] * 9])[0] for i in range(4)]
    assert near == [0, 0, 0, 0]
    assert far == [0, 0, 8, 8]
    assert caplog.messages == []
    with pytest.raises(ValueError, match="min_gain_tokens must be >= 1, got 0"):
        AtJunctions(0)


def test_a_policy_that_cannot_serve_a_junction_says_so_once(caplog):
    """Fault 21."""
    host = Host(CacheConfig(native_slots=4, compressed_slots=6, kv_pages=9000, policies=(AtPromptEnd(),)))
    with caplog.at_level(logging.WARNING, "dasc"):
        hits = [host.run(i, prompt)[0] for i, prompt in enumerate(PROMPTS)]
    assert hits == [0, 0, 0]
    assert [r.getMessage() for r in caplog.records if "junction at 1500" in r.getMessage()] == [caplog.messages[0]]
    assert host.cache.counters.unserved_junctions == 2


def test_an_identical_prompt_is_served_all_but_a_token_when_a_policy_puts_a_state_there():
    host = Host(CacheConfig(native_slots=4, compressed_slots=6, kv_pages=100, policies=(AtPromptEnd(),)))
    assert [host.run(i, [1, 2, 3, 4])[0] for i in range(3)] == [0, 3, 3]
    alone = Host(CacheConfig(native_slots=4, compressed_slots=6, kv_pages=100, policies=()))
    assert [alone.run(i, [1, 2, 3, 4])[0] for i in range(3)] == [0, 0, 0]
    assert alone.run(9, [1, 2, 3, 4, 5])[0] == 4
