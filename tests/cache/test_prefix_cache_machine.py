"""The whole cache against the oracle, with every slot's data looked at and an integrity check after every step.

Faults 1-10, 12-14, 16, 17, 20, 23 in general; test_faults.py names each.
"""

import os
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dasc.cache import AtJunctions, AtPromptEnd, Backpressure, CacheConfig, EveryTokens, NotCached, check
from tests.cache.fakes import Host
from tests.cache.oracle import Oracle

SEEDS = st.integers(0, 2**16 - 1)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        native=st.integers(1, 4),
        compressed=st.integers(0, 4),
        kv_pages=st.integers(8, 40),
        page=st.sampled_from([1, 2, 4]),
        spill=st.booleans(),
        watermark=st.integers(0, 2),
        dense_cap=st.sampled_from([None, None, 1, 2]),
        every=st.booleans(),
    )
    def build(self, native, compressed, kv_pages, page, spill, watermark, dense_cap, every):
        watermark = min(watermark, native - 1)
        spill = spill or compressed == 0
        policies = (AtJunctions(), EveryTokens(2 * page)) if every else (AtJunctions(), AtPromptEnd())
        config = CacheConfig(
            native_slots=native,
            compressed_slots=compressed,
            kv_pages=kv_pages,
            page_size=page,
            spill=spill,
            watermark=watermark,
            policies=policies,
            native_slot_bytes=8,
            compressed_slot_bytes=3,
            max_dense_bytes=None if dense_cap is None else 8 * dense_cap + 7,
        )
        dense_limit = dense_cap if spill else 0
        self.host = Host(config)
        self.cache = self.host.cache
        self.oracle = Oracle(native, compressed, kv_pages, page, dense_limit, watermark)
        self.seen = [()]
        self.next_id = 0

    # -- drawing --------------------------------------------------------------------------------------------------

    def prompt(self, seed: int) -> tuple[int, ...]:
        """Often a beginning of something seen, then something new from few ids."""
        rng = random.Random(seed)
        base = rng.choice(self.seen[-12:])
        cut = len(base) if rng.random() < 0.4 else rng.randint(0, len(base))
        longest = max(1, min(14, self.oracle.kv_pages * self.oracle.page - cut))
        tokens = base[:cut] + tuple(rng.randrange(3) for _ in range(rng.randint(0 if cut else 1, longest)))
        return tokens[: self.oracle.kv_pages * self.oracle.page]

    def pick(self, seed: int, loaded: bool = True) -> int:
        running = [i for i, r in self.oracle.running.items() if r.state >= 0 or not loaded]
        return running[seed % len(running)]

    def any_loaded(self) -> bool:
        return any(r.state >= 0 for r in self.oracle.running.values())

    # -- requests -------------------------------------------------------------------------------------------------

    @rule(
        seed=SEEDS, lookup=st.sampled_from([True, True, True, False]), store=st.sampled_from([True, True, True, False])
    )
    def acquire(self, seed, lookup, store):
        tokens = self.prompt(seed)
        reserve = seed % 3 if len(tokens) + 2 <= self.oracle.kv_pages * self.oracle.page else 0
        self.next_id += 1
        short_of = self.oracle.acquire(self.next_id, tokens, lookup, store, reserve)
        answer = self.cache.acquire(self.next_id, list(tokens), lookup=lookup, store=store, reserve_tokens=reserve)
        if short_of is not None:
            assert answer == Backpressure(short_of)
            return
        assert answer.hit_tokens == self.oracle.running[self.next_id].hit < len(tokens)
        self.seen.append(tokens)

    @precondition(lambda self: any(r.state < 0 for r in self.oracle.running.values()))
    @rule()
    def load(self):
        assert self.cache.issue_loads() == self.oracle.load()

    @precondition(any_loaded)
    @rule(seed=SEEDS, count=st.integers(1, 6), stop_there=st.booleans())
    def compute(self, seed, count, stop_there):
        request = self.pick(seed)
        run = self.oracle.running[request]
        position = run.state + count
        if stop_there and (stop := self.cache.next_stop(request)) is not None:
            assert stop > run.state
            position = min(position, stop)
        position = min(position, self.oracle.kv_pages * self.oracle.page)
        if position > len(run.tokens):
            rng = random.Random(seed)
            more = tuple(rng.randrange(3) for _ in range(position - len(run.tokens)))
            answer = self.cache.extend(request, list(more))
            assert answer == (None if self.oracle.extend(request, more) else Backpressure("kv"))
            position = min(position, len(run.tokens))
        self.host.compute(request, position)
        run.state = position

    @precondition(any_loaded)
    @rule(seed=SEEDS, rejected=st.integers(1, 3))
    def speculate_and_reject(self, seed, rejected):
        request = self.pick(seed)
        run = self.oracle.running[request]
        if len(run.tokens) + rejected > self.oracle.kv_pages * self.oracle.page:
            return
        guess = (9,) * rejected
        before = run.tokens
        answer = self.cache.extend(request, list(guess))
        assert answer == (None if self.oracle.extend(request, guess) else Backpressure("kv"))
        self.cache.truncate(request, len(before))
        run.tokens = before

    @precondition(any_loaded)
    @rule(seed=SEEDS)
    def checkpoint(self, seed):
        request = self.pick(seed)
        expected = self.oracle.store(request, finished=False)
        self.agree(self.cache.checkpoint(request, self.cache.leases[request].state_position), expected)

    @precondition(lambda self: bool(self.oracle.running))
    @rule(seed=SEEDS)
    def finish(self, seed):
        request = self.pick(seed, loaded=False)
        run = self.oracle.running[request]
        self.seen.append(run.tokens)
        self.agree(self.cache.finish(request), self.oracle.finish(request))

    def agree(self, answer, expected):
        if expected in ("stored", "new"):
            assert not isinstance(answer, NotCached)
        else:
            assert answer == NotCached(expected)

    @precondition(lambda self: bool(self.oracle.running))
    @rule(seed=SEEDS)
    def abort(self, seed):
        request = self.pick(seed, loaded=False)
        self.cache.abort(request)
        self.oracle.end(request)

    @precondition(any_loaded)
    @rule(seed=SEEDS)
    def release_state(self, seed):
        request = self.pick(seed)
        self.cache.release_state(request)
        self.oracle.release_state(request)

    @rule(seed=SEEDS)
    def serve(self, seed):
        """A whole request at once, so that short histories fill the cache too."""
        self.acquire(seed, True, True)
        request = self.next_id
        if request not in self.cache.leases:
            return
        self.load()
        if request not in self.cache.leases:
            return
        run = self.oracle.running[request]
        while run.state < len(run.tokens):
            stop = self.cache.next_stop(request)
            position = len(run.tokens) if stop is None else min(stop, len(run.tokens))
            self.host.compute(request, position)
            run.state = position
            if position == stop:
                self.agree(self.cache.checkpoint(request, position), self.oracle.store(request, finished=False))
        self.seen.append(run.tokens)
        self.agree(self.cache.finish(request), self.oracle.finish(request))

    # -- everything else ------------------------------------------------------------------------------------------

    @rule()
    def step(self):
        self.cache.step()
        self.oracle.step()

    @rule(seed=SEEDS)
    def some_packs_finish(self, seed):
        self.host.mover.run_some(seed)

    @rule(kind=st.sampled_from(["copy", "load", "clear", "pack", "none", "none", "none"]))
    def transfers_break(self, kind):
        self.host.storage.fail = self.oracle.fail = {kind} - {"none", "pack"}
        self.host.mover.packs_fail = self.oracle.packs_fail = kind == "pack"

    @precondition(lambda self: len(self.oracle.entries) > 3)
    @rule(seed=st.integers(0, 9))
    def flush(self, seed):
        if seed == 0:
            self.oracle.flush()
            assert self.cache.flush() == len(self.oracle.entries)

    @rule(seed=SEEDS)
    def look(self, seed):
        tokens = self.prompt(seed)
        digest = self.cache.history_digest()
        match = self.cache.match(list(tokens))
        assert (match.kv_tokens, match.usable_tokens) == self.oracle.match(tokens)
        explanation = self.cache.explain(list(tokens))
        assert explanation.usable_tokens == match.usable_tokens <= match.kv_tokens < len(tokens)
        assert all(match.usable_tokens < position <= len(tokens) for position, _ in explanation.gone)
        assert str(explanation)
        assert self.cache.history_digest() == digest

    # -- always ---------------------------------------------------------------------------------------------------

    @invariant()
    def all_as_it_should_be(self):
        if not hasattr(self, "cache"):
            return
        check(self.cache)
        self.host.poison_free()
        self.host.check_data()
        oracle, ledger = self.oracle, self.cache.ledger
        assert {p: e.tier.value for p, e in self.host.stored().items()} == {
            p: e.tier for p, e in oracle.entries.items()
        }
        by_stamp = sorted(self.host.stored().items(), key=lambda item: item[1].stamp)
        assert [p for p, _ in by_stamp] == sorted(oracle.entries, key=lambda p: oracle.entries[p].stamp)
        assert ledger.native.free_slots == oracle.free_native()
        assert ledger.compressed.free_slots == oracle.free_compressed()
        assert ledger.kv.free_pages == oracle.free_pages()
        assert set(self.cache.leases) == set(oracle.running)
        assert ledger.tree.pages == len(oracle.pages)
        assert ledger.tree.protected_pages == len(oracle.protected())

    def teardown(self):
        """Whatever happened: when all requests are gone and all is flushed, all slots and pages are free."""
        if not hasattr(self, "cache"):
            return
        for request in list(self.cache.leases):
            self.cache.abort(request)
        assert self.cache.flush() == 0
        check(self.cache)
        ledger = self.cache.ledger
        assert ledger.native.free_slots == ledger.native.slots
        assert ledger.compressed.free_slots == ledger.compressed.slots
        assert ledger.kv.free_pages == ledger.kv.pages
        assert ledger.tree.nodes == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=60 if os.environ.get("DASC_HYPOTHESIS") == "nightly" else 40)


@pytest.mark.parametrize("seed", range(6))
def test_a_long_random_life_agrees_with_the_oracle(seed):
    """What short drawn histories seldom reach: a cache that has been full for a long time."""
    rng = random.Random(seed)
    machine = CacheMachine()
    machine.build(
        native=rng.randint(2, 5),
        compressed=[0, 2, 5][seed % 3],
        kv_pages=rng.randint(30, 80),
        page=[1, 2][seed % 2],
        spill=seed != 5,
        watermark=1,
        dense_cap=None,
        every=seed % 2 == 0,
    )
    for _ in range(250):
        draw = rng.randrange(2**16)
        choice = rng.random()
        running = machine.oracle.running
        if choice < 0.2:
            machine.serve(draw)
        elif choice < 0.3:
            machine.acquire(draw, True, True)
        elif choice < 0.4 and any(r.state < 0 for r in running.values()):
            machine.load()
        elif choice < 0.6 and machine.any_loaded():
            machine.compute(draw, rng.randint(1, 6), True)
        elif choice < 0.65 and machine.any_loaded():
            machine.checkpoint(draw)
        elif choice < 0.8 and running:
            machine.finish(draw)
        elif choice < 0.9:
            machine.step()
        elif choice < 0.97:
            machine.some_packs_finish(draw)
        elif choice < 0.98:
            machine.transfers_break(rng.choice(["copy", "load", "clear", "pack"]))
        else:
            machine.transfers_break("none")
        machine.all_as_it_should_be()
    machine.teardown()
