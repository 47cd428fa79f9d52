"""Two tiers over SGLang's own cache: each configuration of its fixtures with recurrent state.

The driver asserts at each hit that the state restored is that of exactly the tokens hit, as its tier stores it, and
after each request that SGLang's tree and our store say the same of every slot (faults 8 and 13).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker
from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver
from sglang.srt.mem_cache.memory_pool import MambaPool

from dasc.cache.entries import Tier
from dasc.cache.transfers import Settled
from dasc.sglang.config import Config
from dasc.sglang.serving import Serving
from dasc.sglang.two_tier import TwoTier
from dasc.sglang.two_tier_component import TwoTierComponent
from tests.sglang.cache_settings import Setting
from tests.sglang.two_tier_driver import TwoTierDriver, two_tier_settings

Made = Callable[..., TwoTierDriver]
each_configuration = pytest.mark.parametrize("setting", two_tier_settings(), ids=str)


@pytest.fixture
def made() -> Iterator[Made]:
    """Makes drivers, and closes them."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(closing(TwoTierDriver(*args, **kwargs)))


@pytest.fixture(params=two_tier_settings(), ids=str)
def driver(request: pytest.FixtureRequest, made: Made) -> TwoTierDriver:
    return made(request.param)


def fill(driver: TwoTierDriver, states: int) -> list[list[int]]:
    """Serve prompts, a step after each, until so many states are cached. Returns the prompts, oldest first."""
    prompts = [driver.new_tokens(1) for _ in range(states)]
    for prompt in prompts:
        driver.serve(prompt)
        driver.step()
    return prompts


# -- insertion and reuse ----------------------------------------------------------------------------------------------


def test_insertion_is_compressed_first_and_spills_when_the_pool_is_full(driver: TwoTierDriver) -> None:
    prompts = fill(driver, 8)
    assert [driver.tier(prompt) for prompt in prompts] == [Tier.COMPRESSED] * 6 + [Tier.DENSE] * 2
    assert driver.counters.stored == {"compressed": 6, "dense": 2}
    for prompt in prompts:
        assert driver.serve(prompt + driver.new_tokens(1)) == driver.grid


def test_what_is_stored_less_what_is_evicted_is_cached(driver: TwoTierDriver) -> None:
    prompt = driver.new_tokens(2)
    for _ in range(4):
        driver.serve(prompt)
    counters = driver.counters
    assert counters.not_cached["duplicate"] > 0
    assert (counters.stored.total(), counters.evictions.total()) == (driver.states_cached, 0)
    fill(driver, 12)
    driver.evict(2)
    assert counters.evictions["tree"] == 2
    assert counters.stored.total() - counters.evictions.total() == driver.states_cached


def test_a_hit_restores_the_state_of_exactly_its_tokens(driver: TwoTierDriver) -> None:
    first, second = driver.new_tokens(2), driver.new_tokens(3)
    assert driver.serve(first) == 0
    assert driver.serve(first + second) == len(first)
    assert driver.serve(first + second + driver.new_tokens(1)) == len(first + second)


def test_a_finished_requests_slot_is_handed_over_without_a_copy(driver: TwoTierDriver) -> None:
    fill(driver, 6)
    prompt = driver.new_tokens(1)
    running = driver.start(prompt)
    slots = {int(slot) for slot in driver._native_slots(running.req)}
    with (
        mock.patch.object(MambaPool, "copy_from", side_effect=AssertionError("copied")),
        mock.patch.object(driver.tiers._mover, "pack", side_effect=AssertionError("packed")),
    ):
        driver.finish(running)
    driver.check()
    entry = driver.entry(prompt)
    assert entry.tier is Tier.DENSE
    assert entry.slot in slots
    assert driver.counters.spills == 1


def test_a_hit_while_its_pack_is_under_way_is_served_exactly(driver: TwoTierDriver) -> None:
    prompt = driver.new_tokens(1)
    driver.serve(prompt)
    assert driver.tier(prompt) is Tier.DEMOTING
    running = driver.start(prompt + driver.new_tokens(1))
    assert running.hit_tokens == len(prompt)
    driver.step()
    assert driver.tiers.entry(torch.tensor(1)).tier is Tier.DEMOTING, "locked: it stays where it is"
    driver.finish(running)
    driver.step()
    assert driver.tier(prompt) is Tier.COMPRESSED


def test_a_batch_loads_from_both_tiers(driver: TwoTierDriver) -> None:
    prompts = fill(driver, 8)
    pool, mamba_pool = driver.tiers, driver.pool.mamba_pool
    entries = [driver.entry(prompt) for prompt in (prompts[0], prompts[-1], prompts[1])]
    for entry in entries:
        pool.lock(entry)
    slots = driver.pool.mamba_allocator.alloc(3)
    pool.load_to_active(mamba_pool, torch.tensor([entry.serial for entry in entries]), slots)
    for prompt, entry, slot in zip((prompts[0], prompts[-1], prompts[1]), entries, slots.tolist()):
        driver._exact = entry.tier is Tier.DENSE
        for found, wanted in zip(driver._read(slot), driver.restored(prompt)):
            assert torch.equal(found, wanted)
        pool.unlock(entry)
    driver.pool.mamba_allocator.free(slots)
    driver.check()


def test_a_state_that_the_tree_has_already_takes_no_second_slot(driver: TwoTierDriver) -> None:
    prompt = driver.new_tokens(1)
    for _ in range(3):
        assert driver.serve(prompt) == 0
        driver.step()
    assert driver.states_cached == 1
    assert driver.counters.not_cached["duplicate"] == 2


@each_configuration
def test_without_spill_nothing_dense_is_left_at_rest(setting: Setting, made: Made) -> None:
    driver = made(setting, dense_limit=0)
    prompts = fill(driver, 9)
    assert [driver.matched([*prompt, 0]) > 0 for prompt in prompts] == [False] * 3 + [True] * 6
    assert all(driver.tier(prompt) is Tier.COMPRESSED for prompt in prompts[3:])


# -- reclamation ------------------------------------------------------------------------------------------------------


def test_when_both_tiers_are_full_the_oldest_state_goes_and_a_dense_one_is_demoted(driver: TwoTierDriver) -> None:
    """Faults 12 and 14: every slot is used; the age of a state, not its tier, decides."""
    capacity = driver.tiers.num_slots
    prompts = fill(driver, capacity)
    assert driver.states_cached >= capacity - 2  # slots that the last request tracked in
    survivors = [prompt for prompt in prompts if driver.matched([*prompt, 0])]
    assert survivors == prompts[-len(survivors) :]
    assert driver.counters.evictions["compressed_lru"] or len(survivors) == capacity
    driver.serve(driver.new_tokens(1))
    assert not driver.matched([*survivors[0], 0])
    assert driver.matched([*survivors[-1], 0])


@each_configuration
def test_the_watermark_is_kept_off_the_path_of_requests(setting: Setting, made: Made) -> None:
    """A step demotes before anybody asks, and that is no use of the state: its place in the order stays."""
    driver = made(setting, 24, watermark=12)
    prompts = fill(driver, 10)
    driver.step()
    assert driver.tiers.store.native.free_slots == 12
    assert all(driver.tier(prompt) is Tier.COMPRESSED for prompt in prompts)
    assert driver.counters.forced_waits == 0


@each_configuration
def test_a_demotion_keeps_the_place_in_the_order(setting: Setting, made: Made) -> None:
    driver = made(setting, 2, native_slots=8)
    old, older = fill(driver, 2)
    dense = fill(driver, 2)
    driver.evict(2)  # the compressed ones
    assert not driver.matched([*old, 0])
    assert not driver.matched([*older, 0])
    driver.tiers.store.reclaim(7)  # the older of the two dense
    driver.step()
    assert [driver.entry(prompt).tier for prompt in dense] == [Tier.COMPRESSED, Tier.DENSE]


def test_a_running_request_that_hit_a_dense_state_does_not_lock_it_once_it_is_loaded(driver: TwoTierDriver) -> None:
    prompts = fill(driver, 7)
    running = driver.start(prompts[-1] + driver.new_tokens(1))
    assert driver.tiers.locked_native == 1
    driver.prefilled(running)
    assert driver.tiers.locked_native == 0
    driver.abort(running)
    driver.check()


@each_configuration
def test_a_hit_waits_for_a_slot_that_is_not_its_own_state(setting: Setting, made: Made) -> None:
    """Fault 10: when only the hit itself could be reclaimed, the request is not admitted, and nothing is lost."""
    driver = made(setting, 1, native_slots=6)
    [_, dense] = fill(driver, 2)
    driver._patch(driver, "_extend", lambda running, tokens: None)  # the fixture admits whatever comes
    serving = Serving(Config(plan="unread", mode="two-tier"))
    adder = SimpleNamespace(tree_cache=driver.cache, can_run_list=[])
    admit = functools.partial(TwoTier(serving).admit, lambda adder, req: AddReqResult.CONTINUE, adder)
    taken = driver.pool.mamba_allocator.alloc(5)
    waiting = driver.start(dense + driver.new_tokens(1))
    assert waiting.hit_tokens == 0
    assert not waiting.req.kv.holds_mamba
    assert admit(waiting.req) is AddReqResult.OTHER
    assert serving.counters.backpressure["native"] == 1
    assert driver.tier(dense) is Tier.DENSE
    driver.pool.mamba_allocator.free(taken)
    admitted = driver.start(dense + driver.new_tokens(1))
    assert admitted.hit_tokens == len(dense)
    assert admit(admitted.req) is AddReqResult.CONTINUE


@pytest.mark.usefixtures("unwinding")
def test_a_watermark_above_the_native_pool_stops_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    serving = Serving(Config(plan="unread", mode="two-tier", watermark=13))
    slots = SimpleNamespace(mamba_pool=SimpleNamespace(size=12))
    with pytest.raises(SystemExit):
        TwoTier(serving).make_tree(None, SimpleNamespace(params=SimpleNamespace(req_to_token_pool=slots)))
    assert "DASC_WATERMARK must be at most the 12 native slots, got 13" in capsys.readouterr().err


# -- what SGLang checks -----------------------------------------------------------------------------------------------


def leaks(driver: TwoTierDriver) -> bool:
    """What SGLang's own check says when idle."""
    observer = SimpleNamespace(
        tree_cache=driver.cache,
        req_to_token_pool=driver.pool,
        token_to_kv_pool_allocator=driver.allocator,
        session_held_mamba_slots=lambda: 0,
    )
    checker = SimpleNamespace(
        tree_cache=driver.cache,
        req_to_token_pool=driver.pool,
        pool_stats_observer=observer,
        _check_pool_invariant=SchedulerInvariantChecker._check_pool_invariant,
    )
    checker._check_mamba_pool_with_int8 = functools.partial(
        SchedulerInvariantChecker._check_mamba_pool_with_int8, checker
    )
    stats = SchedulerPoolStatsObserver._get_mamba_token_info(observer)
    assert 0 <= stats.mamba_usage <= 1
    return SchedulerInvariantChecker._check_mamba_pool(checker, stats)[0]


def test_cached_states_are_no_leak_in_whatever_tier(driver: TwoTierDriver) -> None:
    for _ in range(driver.tiers.num_slots + 3):
        driver.serve(driver.new_tokens(1))
        assert not leaks(driver)
    driver.reset()
    assert not leaks(driver)
    assert driver.pool.mamba_allocator.available_size() == driver.tiers.native_slots


def test_a_slot_that_nobody_gives_back_is_a_leak(driver: TwoTierDriver) -> None:
    fill(driver, 8)
    slot = driver.pool.mamba_allocator.alloc(1)
    assert leaks(driver)
    driver.pool.mamba_allocator.free(slot)
    assert not leaks(driver)


def test_a_state_that_no_node_has_is_a_leak(driver: TwoTierDriver) -> None:
    fill(driver, 8)
    with mock.patch.object(TwoTierComponent, "_free_mamba_value"):
        driver.evict(1)
    assert leaks(driver)


def test_a_slot_is_given_back_once(driver: TwoTierDriver) -> None:
    """Fault 7's kind: what breaks the ownership of a slot raises."""
    fill(driver, 7)
    slot = driver.pool.mamba_allocator.alloc(1)
    driver.pool.mamba_allocator.free(slot)
    with pytest.raises(ValueError, match="already free"):
        driver.pool.mamba_allocator.free(slot)
    [dense] = [e.slot for e in driver.tiers._entries.values() if e.tier is Tier.DENSE]
    with pytest.raises(ValueError, match="belongs to"):
        driver.pool.mamba_allocator.free(torch.tensor([dense]))


# -- whatever happens -------------------------------------------------------------------------------------------------


def test_reset_frees_everything_and_waits_for_packs(driver: TwoTierDriver) -> None:
    prompt = driver.new_tokens(2)
    driver.serve(prompt)
    assert len(driver.tiers.store.packs) == 1
    driver.reset()
    driver.check()
    assert driver.states_cached == 0
    assert driver.tiers.available_size() == driver.tiers.num_slots
    assert driver.serve(prompt + driver.new_tokens(1)) == 0


def test_a_pack_that_fails_leaves_the_state_dense(driver: TwoTierDriver) -> None:
    """Fault 9."""
    prompt = driver.new_tokens(1)
    driver.tiers._mover.pack = lambda native, compressed: Settled(RuntimeError("no"))
    driver.serve(prompt)
    driver.step()
    assert driver.tier(prompt) is Tier.DENSE
    assert driver.counters.failed_packs == 1
    assert driver.serve(prompt + driver.new_tokens(1)) == len(prompt)


@settings(max_examples=6)
@given(seed=st.integers(0, 2**31 - 1))
@each_configuration
def test_whatever_requests_do_tree_and_store_agree_and_states_are_right(setting: Setting, seed: int) -> None:
    """Prompts that share starts, in chunks, several at a time, finished, aborted and evicted in any order."""
    choose = random.Random(seed)
    made = TwoTierDriver(
        setting,
        choose.choice([1, 3, 12]),
        native_slots=choose.choice([18, 24]),  # four requests, their tracking, and the dense states that they load
        dense_limit=choose.choice([None, None, 0, 2]),
        watermark=choose.choice([0, 4]),
    )
    with closing(made) as driver:
        starts = [driver.new_tokens(3) for _ in range(3)]
        for _ in range(60):
            if choose.random() < 0.3:
                driver.step()
            driver.play_any(choose, starts)
            driver.check()
        for running in list(driver.running):
            driver.finish(running)
            driver.check()
        assert not leaks(driver)
        driver.evict(driver.states_cached)
        driver.check()
        assert driver.states_cached == 0


@each_configuration
def test_all_ranks_choose_alike(setting: Setting, made: Made) -> None:
    """Choices follow from the calls alone, not from when packs are done."""
    digests = []
    for late in (True, False):
        choose = random.Random(3)
        driver = made(setting, 3, native_slots=18)
        if not late:
            driver._patch(driver.tiers._mover, "pack", type(driver.tiers._mover).pack.__get__(driver.tiers._mover))
        starts = [driver.new_tokens(3) for _ in range(3)]
        for _ in range(40):
            driver.step()
            driver.play_any(choose, starts)
        digests.append(driver.tiers.store.history.digest())
        driver.close()
    assert digests[0] == digests[1]
