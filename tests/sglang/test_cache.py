"""SGLang's own cache over each of its fixtures with recurrent state: dense, with its INT8 pool, and with ours.

The driver asserts at each hit that the state restored is that of exactly the tokens hit, as the pool stores it, and
after each request that every slot is accounted for.
"""

import random
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sglang.cache_driver import Driver
from tests.sglang.cache_settings import Setting, all_settings


@pytest.fixture(params=all_settings(), ids=str)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    with closing(Driver(request.param)) as driver:
        yield driver


@pytest.mark.parametrize("setting", all_settings(["compressed-only"]), ids=str)
def test_a_checkpoint_without_a_place_is_not_cached_and_the_request_ends_well(setting: Setting) -> None:
    """Every slot holds the state of a running request (fault 10)."""
    with closing(Driver(setting, compressed_slots=2)) as driver:
        prompts = [driver.new_tokens(1) for _ in range(2)]
        for prompt in prompts:
            driver.serve(prompt)
        running = [driver.start(prompt + driver.new_tokens(1)) for prompt in prompts]
        assert [r.hit_tokens for r in running] == [driver.grid] * 2
        assert driver.serve(driver.new_tokens(1)) == 0
        assert driver.counters.not_cached["no_room"] == 1
        for r in running:
            driver.finish(r)
        driver.check()


@pytest.mark.parametrize("setting", all_settings(["compressed-only"]), ids=str)
def test_a_request_without_a_state_to_cache_takes_nobodys_place(setting: Setting) -> None:
    """With the extra buffer, one that ends before the first place of the grid; with none, one that is aborted."""
    with closing(Driver(setting, compressed_slots=2)) as driver:
        prompts = [driver.new_tokens(1) for _ in range(2)]
        for prompt in prompts:
            driver.serve(prompt)
        short = driver.start(driver.new_tokens(1)[: driver.grid // 2])
        driver.finish(short) if driver.cfg.enable_mamba_extra_buffer else driver.abort(short)
        driver.check()
        assert [driver.matched([*prompt, 0]) for prompt in prompts] == [driver.grid] * 2
        assert (driver.counters.stored.total(), driver.counters.evictions.total()) == (2, 0)


@pytest.mark.parametrize("setting", all_settings(["compressed-only"]), ids=str)
def test_what_is_stored_less_what_is_evicted_is_cached(setting: Setting) -> None:
    with closing(Driver(setting, compressed_slots=3)) as driver:
        prompt = driver.new_tokens(2)
        for _ in range(4):
            driver.serve(prompt)
        counters, cached = driver.counters, driver.states_cached
        assert (counters.stored, counters.evictions) == ({"compressed": cached}, {})
        assert counters.not_cached["duplicate"] > 0
        for _ in range(5):
            driver.serve(driver.new_tokens(1))
        assert counters.stored.total() - counters.evictions.total() == driver.states_cached == 3


def test_a_hit_restores_the_state_of_exactly_its_tokens(driver: Driver) -> None:
    first, second = driver.new_tokens(2), driver.new_tokens(3)
    assert driver.serve(first) == 0
    assert driver.serve(first + second) == len(first)
    assert driver.serve(first + second + driver.new_tokens(1)) == len(first + second)


def test_answers_extend_what_can_be_hit_where_states_are_cached_anywhere(driver: Driver) -> None:
    prompt, answer = driver.new_tokens(2), driver.new_tokens(1)[:5]
    driver.serve(prompt, answer)
    known = len(prompt) if driver.cfg.enable_mamba_extra_buffer else len(prompt + answer)
    assert driver.serve(prompt + answer + driver.new_tokens(1)) == known


def test_a_split_moves_no_state_and_a_hit_stops_at_the_deepest_one(driver: Driver) -> None:
    """Faults 3 and 20: tokens with KV but without a state are no hit."""
    whole = driver.new_tokens(4)
    driver.serve(whole)
    branch = driver.start(whole[: 2 * driver.grid] + driver.new_tokens(1))
    assert branch.hit_tokens == 0
    driver.abort(branch)
    driver.check()
    assert driver.matched(whole[: 3 * driver.grid]) == 0
    assert driver.serve(whole + driver.new_tokens(1)) == len(whole)


def test_what_a_running_request_was_served_from_is_not_evicted(driver: Driver) -> None:
    prompt, other = driver.new_tokens(1), driver.new_tokens(1)
    driver.serve(prompt)
    driver.serve(other)
    running = driver.start(prompt + driver.new_tokens(1))
    driver.evict(driver.capacity)
    assert driver.matched([*other, 0]) == 0
    assert driver.matched([*prompt, 0]) == len(prompt)
    driver.abort(running)
    driver.check()
    driver.evict(driver.capacity)
    assert driver.states_cached == 0


def test_the_least_recently_used_state_is_evicted(driver: Driver) -> None:
    """Fault 6: a hit makes the state that it used the youngest, and no other."""
    prompts = [driver.new_tokens(1) for _ in range(3)]
    for prompt in prompts:
        driver.serve(prompt)
    driver.abort(driver.start(prompts[0] + driver.new_tokens(1)))
    assert driver.evict(1) == 1
    driver.check()
    assert [driver.matched([*prompt, 0]) > 0 for prompt in prompts] == [True, False, True]


def test_a_state_that_the_tree_has_already_takes_no_second_slot(driver: Driver) -> None:
    prompt = driver.new_tokens(2)
    for _ in range(4):
        driver.serve(prompt)
    # with the extra buffer SGLang also stores the last place where an equal prompt, less one token, can hit (fault 21)
    assert driver.states_cached == (2 if driver.cfg.enable_mamba_extra_buffer else 1)


def test_each_chunk_of_a_prompt_leaves_a_state(driver: Driver) -> None:
    """Faults 15 and 16: each at its own position."""
    prompt = driver.new_tokens(4)
    running = driver.start(prompt, first=driver.grid)
    for _ in range(3):
        driver.go_on(running, driver.grid)
        driver.check()
    driver.finish(running)
    driver.check()
    assert driver.states_cached == 4
    for grids in (1, 2, 3, 4):
        part = prompt[: grids * driver.grid]
        driver.abort(driver.start(part + driver.new_tokens(1)))
        assert driver.matched([*part, 0]) == len(part)


def test_requests_that_hit_one_state_do_not_touch_it_or_each_other(driver: Driver) -> None:
    shared = driver.new_tokens(2)
    driver.serve(shared)
    running = [driver.start(shared + driver.new_tokens(1)) for _ in range(3)]
    assert [r.hit_tokens for r in running] == [len(shared)] * 3
    assert len({r.slot for r in running}) == 3
    for r in running:
        driver.finish(r)
        driver.check()
    assert driver.serve(shared + driver.new_tokens(1)) == len(shared)


def test_aborted_requests_leave_every_slot_as_it_was(driver: Driver) -> None:
    """Fault 8: match then abort, any number of times."""
    shared = driver.new_tokens(1)
    driver.serve(shared)
    for _ in range(3 * driver.cfg.max_num_reqs):
        driver.abort(driver.start(shared + driver.new_tokens(1)))
        driver.check()
    assert driver.states_cached == 1


def test_under_pressure_every_slot_is_used_and_the_youngest_states_stay(driver: Driver) -> None:
    """Fault 12."""
    prompts = [driver.new_tokens(1) for _ in range(driver.capacity + 5)]
    for prompt in prompts:
        assert driver.serve(prompt) == 0
    assert driver.states_cached == driver.capacity
    assert driver.serve(prompts[-1] + driver.new_tokens(1)) == driver.grid
    assert driver.serve(prompts[0] + driver.new_tokens(1)) == 0


def test_reset_frees_everything(driver: Driver) -> None:
    prompt = driver.new_tokens(2)
    driver.serve(prompt)
    driver.serve(prompt + driver.new_tokens(1))
    driver.reset()
    driver.check()
    assert driver.states_cached == 0
    assert driver.serve(prompt + driver.new_tokens(1)) == 0


@settings(max_examples=4)
@given(seed=st.integers(0, 2**31 - 1))
@pytest.mark.parametrize("setting", all_settings(), ids=str)
def test_whatever_requests_do_slots_add_up_and_states_are_right(setting: Setting, seed: int) -> None:
    """Prompts that share starts, in chunks, several at a time, finished, aborted and evicted in any order."""
    choose = random.Random(seed)
    with closing(Driver(setting, compressed_slots=choose.choice([1, 3, 24]))) as driver:
        starts = [driver.new_tokens(3) for _ in range(3)]
        for _ in range(40):
            driver.play_any(choose, starts)
            driver.check()
        for running in list(driver.running):
            driver.finish(running)
            driver.check()
        driver.evict(driver.states_cached)
        driver.check()
        assert driver.states_cached == 0
