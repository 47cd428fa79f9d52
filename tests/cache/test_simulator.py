"""The simulation against hand-made sums, against a naive server pass by pass, and against the cache's own rules."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.cache import AtJunctions, AtPromptEnd, CacheConfig, check
from dasc.cache.checkpoints import AfterPrompt
from dasc.cache.records import StepRecord
from dasc.cache.simulation import CostModel, Load, Request, Serving, read_trace, simulate
from dasc.cache.simulation.arrivals import Arrivals
from dasc.cache.simulation.mover import SimulatedMover
from dasc.cache.simulation.server import Server
from tests.cache.naive_server import NaiveServer
from tests.cache.traces import TRACE, needs_trace

FREE = CostModel(**dict.fromkeys((f.name for f in dataclasses.fields(CostModel)), 0.0))
COST = CostModel(
    step_s=1.0,
    prefill_s_per_token=0.01,
    prefill_s_per_pair=0.001,
    decode_step_s=0.5,
    decode_s_per_sequence=0.1,
    decode_s_per_context_token=0.0003,
    load_latency_s=0.2,
    load_s_per_byte=0.01,
    store_latency_s=0.3,
    store_s_per_byte=0.02,
    demote_latency_s=0.7,
    demote_s_per_byte=0.03,
    copy_latency_s=0.15,
    copy_s_per_byte=0.005,
    collective_latency_s=0.05,
    two_pass_s=2.0,
    two_pass_s_per_token=0.1,
)
DENSE = CacheConfig(native_slots=40, compressed_slots=0, kv_pages=5000, native_slot_bytes=10)
TWO_TIER = dataclasses.replace(DENSE, compressed_slots=40, compressed_slot_bytes=4)
ONE_AT_A_TIME = Serving(server_limit=1, concurrency=1)


def request(ids, output=2, conversation=0, arrival_s=None) -> Request:
    prompt = np.array(ids, dtype=np.int32)
    answer = 10_000 + np.arange(output, dtype=np.int32)
    return Request(conversation, arrival_s, prompt, answer, len(prompt), output)


def load(*requests: Request, **options) -> Load:
    return Load("test", requests, (AtJunctions(),), **options)


def decode_s(contexts, sequences=1) -> float:
    return sum(1.5 + 0.1 * sequences + 0.0003 * context for context in contexts)


def test_a_lone_request_takes_what_its_passes_cost():
    lone = load(request(range(10), output=4))
    result = simulate(lone, DENSE, COST, dataclasses.replace(ONE_AT_A_TIME, chunk_tokens=4), record=True)
    (record,) = result.requests
    assert record.ttft_s == pytest.approx(3 * 1.0 + 10 * 0.01 + 55 * 0.001)
    assert record.e2e_s == pytest.approx(record.ttft_s + decode_s([11, 12, 13]))
    assert (record.prompt_tokens, record.hit_tokens, record.tier, record.output_tokens) == (10, 0, "miss", 4)
    assert [(s.prefill_tokens, s.prefill_pairs) for s in result.steps] == [
        (4, 10),
        (4, 26),
        (2, 19),
        (0, 0),
        (0, 0),
        (0, 0),
    ]
    assert result.seconds == record.e2e_s == pytest.approx(sum(s.seconds for s in result.steps))


def test_the_next_turn_computes_what_the_last_state_has_not_seen():
    first = request(range(20), output=5)
    second = request([*first.prompt, *first.output, 1, 2, 3])
    result = simulate(load(first, second), DENSE, COST, ONE_AT_A_TIME)
    assert result.requests[1].hit_tokens == 24, "the last token of an answer was never fed back"
    assert result.requests[1].tier == "dense"
    pairs = sum(range(25, 29))
    assert result.requests[1].ttft_s == pytest.approx(0.15 + 10 * 0.005 + 1 + 4 * 0.01 + pairs * 0.001)
    assert result.moved_bytes == {"copy": 10}
    assert result.requests[1].arrival_s == result.requests[0].e2e_s


@pytest.mark.parametrize("two_pass", [False, True])
def test_a_compressed_hit_pays_for_its_load_and_its_refresh(two_pass):
    first = request(range(20), output=5)
    second = request([*first.prompt, *first.output, 1, 2, 3])
    config = dataclasses.replace(TWO_TIER, refresh_window_tokens=16)
    serving = dataclasses.replace(ONE_AT_A_TIME, two_pass_refresh=two_pass, collective=True)
    result = simulate(load(first, second), config, COST, serving)
    record = result.requests[1]
    assert (record.tier, record.hit_tokens, result.refresh_tokens) == ("compressed", 24, 16)
    store = 0.3 + 4 * 0.02 + 0.05  # the pack under way since the end of the first, which the next step waits for
    transfer = 0.2 + 4 * 0.01 + 0.05
    refresh = 2.0 + 16 * 0.1 if two_pass else 16 * 0.01 + sum(range(9, 25)) * 0.001
    assert record.ttft_s == pytest.approx(store + transfer + refresh + 1 + 4 * 0.01 + sum(range(25, 29)) * 0.001)
    assert result.counters["stall_s"] == pytest.approx(2 * store), "the last pack is waited for, too"
    assert result.seconds == pytest.approx(record.arrival_s + record.e2e_s), "but answers no request"
    assert result.moved_bytes == {"store": 4 + 4, "load": 4}


def test_a_window_is_capped_by_the_prefix():
    first = request(range(5), output=1)
    second = request([*first.prompt, 7, 8])
    config = dataclasses.replace(TWO_TIER, refresh_window_tokens=16)
    assert simulate(load(first, second), config, COST, ONE_AT_A_TIME).refresh_tokens == 5


def test_packs_follow_each_other_in_the_background_and_demotions_have_their_own_price():
    mover = SimulatedMover(TWO_TIER, COST, collective=True)
    store = 0.3 + 4 * 0.02 + 0.05
    demote = 0.7 + 4 * 0.03 + 0.05
    first = mover.pack(1, 1)
    mover.counters.demotions += 1
    second = mover.pack(2, 2)
    assert mover.now == 0, "nobody waits yet"
    second.result()
    assert mover.now == pytest.approx(store + demote)
    first.result()
    assert mover.now == pytest.approx(store + demote), "waiting never turns the clock back"
    mover.now += 10
    third = mover.pack(3, 3)
    third.result()
    assert mover.now == pytest.approx(store + demote + 10 + store)
    mover.copy([(1, 2), (3, 4)])
    mover.clear([5])
    assert mover.now == pytest.approx(store + demote + 10 + store + 0.15 + 2 * 10 * 0.005)
    assert mover.moved_bytes == {"store": 8, "demote": 4, "copy": 20}


def test_decoding_waits_for_prefill_unless_passes_are_mixed():
    requests = [request(range(4), 9, 0, 0.0), request(range(100, 104), 2, 1, 2.0)]
    one_by_one, mixed = (
        simulate(load(*requests), DENSE, COST, Serving(mixed_passes=m), record=True) for m in (False, True)
    )
    assert all(s.decode_sequences == 0 for s in one_by_one.steps if s.prefill_tokens)
    assert [s.decode_sequences for s in mixed.steps if s.prefill_tokens] == [0, 1]
    assert mixed.seconds < one_by_one.seconds


def test_arrivals_are_served_at_the_next_pass_and_not_before():
    early = request(range(4), 50, 0, 0.0)
    late = request(range(100, 104), 1, 1, 20.0)
    result = simulate(load(early, late), DENSE, COST, Serving())
    record = next(r for r in result.requests if r.arrival_s == 20.0)
    prefill = 1 + 4 * 0.01 + 10 * 0.001
    assert prefill <= record.ttft_s < prefill + decode_s([60]), "it waits for the pass under way, no longer"
    halved = simulate(load(early, late), DENSE, COST, Serving(time_scale=0.5))
    assert min(r.arrival_s for r in halved.requests if r.arrival_s) == 10.0


class CountingCost(CostModel):
    calls = 0

    def decode_s(self, *args):
        type(self).calls += 1
        return super().decode_s(*args)


def test_a_batch_that_only_decodes_is_advanced_in_one_go():
    cost = CountingCost(**dataclasses.asdict(COST))
    requests = [request([i, 1], output=2000 + (i > 1), conversation=i) for i in range(4)]
    simulate(load(*requests), dataclasses.replace(DENSE, kv_pages=9000), cost, Serving(concurrency=4))
    assert CountingCost.calls == 2


def test_a_demotion_started_while_a_batch_decodes_holds_up_its_next_pass():
    old = tuple(request([10 * i, 1], output=1, conversation=-1 - i) for i in (1, 2))  # one compressed, one spilled
    new = [request([i, 1, 2], output=40, conversation=i) for i in (1, 2)]
    config = dataclasses.replace(TWO_TIER, native_slots=3, compressed_slots=1, watermark=1)
    cost = dataclasses.replace(COST, demote_latency_s=50.0)
    result = simulate(load(*new, warmup=old), config, cost, Serving(concurrency=2))
    assert result.counters["demotions"] == 1
    pack = 50 + 4 * 0.03
    first_pass = decode_s([8], sequences=2)
    store = 0.3 + 4 * 0.02  # of the last state, when all is over
    assert result.counters["stall_s"] == pytest.approx(pack - first_pass, abs=2 * store)
    assert result.requests[0].e2e_s > pack + decode_s([8] * 38, sequences=2)


@st.composite
def situations(draw):
    """A load with shared prefixes, a tight cache and a way of serving, for both servers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31 - 1)))
    blocks = draw(st.booleans())
    tokens_per_id = 7 if blocks else 1
    history: list[np.ndarray] = [np.empty(0, dtype=np.int32)]
    requests = []
    closed = draw(st.booleans())
    for number in range(draw(st.integers(1, 20))):
        base = history[int(rng.integers(len(history)))]
        own = rng.integers(0, 50, int(rng.integers(1, 12)), dtype=np.int32)
        part = int(rng.integers(0, tokens_per_id))
        prompt = np.concatenate([base, own, np.array([1000 + number] if part else [], dtype=np.int32)])
        prompt_tokens = (len(prompt) - (part > 0)) * tokens_per_id + part
        output_tokens = int(rng.integers(1, 9))
        more = output_tokens if not blocks else -(-(prompt_tokens + output_tokens) // 7) - len(prompt)
        output = np.full(more, 2000 + number, dtype=np.int32)
        history += [prompt[: len(base) + len(own)], prompt[: len(base) + len(own) // 2]]
        if not blocks:
            history.append(np.concatenate([prompt, output]))
        conversation = int(rng.integers(0, 5)) if closed else number
        requests.append(Request(conversation, float(rng.uniform(0, 40)), prompt, output, prompt_tokens, output_tokens))
    if not closed:
        requests.sort(key=lambda r: r.arrival_s)
    end = AtPromptEnd() if blocks else AfterPrompt()
    policies = draw(st.sampled_from([(AtJunctions(),), (end, AtJunctions())]))
    warm = draw(st.integers(0, 2))
    made = Load("drawn", tuple(requests[warm:] or requests), policies, tuple(requests[:warm]), tokens_per_id)
    native = draw(st.integers(1, 8))
    compressed = draw(st.sampled_from([0, 1, 2, 3, 30]))
    config = CacheConfig(
        native_slots=native,
        compressed_slots=compressed,
        kv_pages=max(len(r.prompt) + len(r.output) for r in requests) + draw(st.sampled_from([0, 40, 500, 500])),
        spill=compressed == 0 or draw(st.booleans()),
        watermark=draw(st.sampled_from([0, native // 2, native - 1])),
        native_slot_bytes=10,
        compressed_slot_bytes=4,
        refresh_window_tokens=draw(st.sampled_from([0, 4])),
        policies=policies,
    )
    serving = Serving(
        server_limit=draw(st.integers(1, 6)),
        concurrency=draw(st.integers(1, 5)) if closed else None,
        time_scale=draw(st.sampled_from([0.1, 1.0])),
        chunk_tokens=draw(st.sampled_from([1, 5, 64])),
        mixed_passes=draw(st.booleans()),
        two_pass_refresh=draw(st.booleans()),
        collective=draw(st.booleans()),
    )
    return made, config, serving


@given(situations())
def test_the_simulation_equals_a_naive_server_pass_by_pass(situation):
    made, config, serving = situation
    naive = NaiveServer(config, COST, serving, made)
    naive.serve(made.warmup, 1)
    naive.records.clear()
    naive.serve(made.requests, serving.concurrency)
    result = simulate(made, config, COST, serving)
    assert len(result.requests) == len(made.requests)
    for ours, theirs in zip(result.requests, naive.records):
        assert dataclasses.astuple(ours)[4:] == dataclasses.astuple(theirs)[4:]
        for name in ("arrival_s", "ttft_s", "e2e_s"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9, abs=1e-9), name


@given(situations())
def test_nothing_is_lost_and_no_limit_passed(situation):
    made, config, serving = situation
    server = Server(
        config, COST, server_limit=serving.server_limit, chunk_tokens=serving.chunk_tokens,
        tokens_per_id=made.tokens_per_id, mixed_passes=serving.mixed_passes, record=True,
    )  # fmt: skip
    server.run(Arrivals(made.requests, concurrency=serving.concurrency, start_s=0.0))
    check(server.cache)
    assert server.cache.leases == {}
    assert sorted(r.prompt_tokens for r in server.finished) == sorted(r.prompt_tokens for r in made.requests)
    assert all(0 < r.ttft_s <= r.e2e_s for r in server.finished)
    assert all(r.hit_tokens < r.prompt_tokens for r in server.finished)
    for step in server.steps:
        assert isinstance(step, StepRecord)
        assert step.decode_sequences <= serving.server_limit
        assert step.prefill_tokens <= serving.chunk_tokens
    computed = sum(s.prefill_tokens for s in server.steps)
    assert computed == sum(r.prompt_tokens - r.hit_tokens for r in server.finished)
    assert sum(s.decode_sequences for s in server.steps) == sum(r.output_tokens - 1 for r in server.finished)


@given(situations(), st.integers(1, 3))
def test_a_closed_loop_never_has_more_conversations_than_clients(situation, concurrency):
    made, config, serving = situation
    result = simulate(made, config, COST, dataclasses.replace(serving, concurrency=concurrency))
    spans = sorted((r.arrival_s, r.arrival_s + r.e2e_s) for r in result.requests)
    for start, _ in spans:
        assert sum(a <= start < b - 1e-9 for a, b in spans) <= concurrency


@given(situations(), st.floats(0.01, 100))
def test_a_factor_on_all_costs_stretches_a_closed_loop_and_changes_nothing_else(situation, factor):
    made, config, serving = situation
    serving = dataclasses.replace(serving, concurrency=3)
    one, other = (simulate(made, config, cost, serving).requests for cost in (COST, COST.scaled(factor)))
    for a, b in zip(one, other):
        assert (a.hit_tokens, a.tier) == (b.hit_tokens, b.tier)
        assert b.ttft_s == pytest.approx(a.ttft_s * factor, rel=1e-6)


def test_warm_up_fills_the_cache_and_is_not_counted():
    turns = [request(range(20 + 2 * i), output=1) for i in range(3)]
    config = dataclasses.replace(TWO_TIER, refresh_window_tokens=16)
    result = simulate(load(turns[2], warmup=tuple(turns[:2])), config, COST, ONE_AT_A_TIME, record=True)
    (record,) = result.requests
    assert (record.hit_tokens, record.arrival_s) == (22, 0.0)
    assert result.counters["requests"] == 1
    assert result.counters["hits"] == {"compressed": 1, "miss": 0}
    assert result.refresh_tokens == 16
    assert sum(s.prefill_tokens for s in result.steps) == 2
    assert result.moved_bytes == {"load": 4, "store": 4}
    assert [t.kind for t in result.transfers] == ["load", "store"]


def served_sequentially(made: Load) -> int:
    """Hit tokens when requests come one by one and nothing is ever evicted, from sets of prefixes alone."""
    states: set[tuple[int, ...]] = set()
    known: set[tuple[int, ...]] = set()  # prefixes of states: KV that stays
    served = 0
    for r in made.requests:
        ids = tuple(r.prompt.tolist())
        prefixes = [ids[:n] for n in range(1, len(ids))]
        kv = sum(1 for _ in itertools.takewhile(known.__contains__, prefixes))
        hit = max((n for n in range(1, kv + 1) if ids[:n] in states), default=0)
        served += hit * made.tokens_per_id
        stored = [n for n in {kv, len(ids) - 1} if n > hit]
        states |= {ids[:n] for n in stored}
        known |= {ids[:n] for last in stored for n in range(1, last + 1)}
    return served


@needs_trace
def test_hits_on_the_real_trace_equal_a_count_over_sets_of_prefixes():
    made = read_trace(TRACE)
    made = dataclasses.replace(made, requests=made.requests[:2500])
    config = CacheConfig(native_slots=2, compressed_slots=10_000, kv_pages=200_000)
    result = simulate(made, config, COST, ONE_AT_A_TIME)
    hit_tokens = sum(r.hit_tokens for r in result.requests)
    assert hit_tokens == served_sequentially(made)
    assert hit_tokens > 0.2 * sum(r.prompt_tokens for r in result.requests)


@needs_trace
def test_more_memory_never_hits_less_on_the_real_trace():
    made = read_trace(TRACE)
    made = dataclasses.replace(made, requests=made.requests[:1500])
    rates = []
    for slots in (20, 100, 500):
        config = CacheConfig(native_slots=40, compressed_slots=slots, kv_pages=20_000)
        rates.append(sum(r.hit_tokens for r in simulate(made, config, COST.scaled(1e-3), Serving()).requests))
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server_limit": 0}, "server_limit"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"concurrency": 0}, "concurrency"),
        ({"time_scale": 0.0}, "time_scale"),
        ({"time_scale": float("nan")}, "time_scale"),
    ],
)
def test_a_way_of_serving_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Serving(**change)


def test_what_cannot_be_simulated_is_refused():
    short = load(request(range(10), output=4))
    with pytest.raises(ValueError, match="KV for 13 tokens is too small: a request takes 14"):
        simulate(short, dataclasses.replace(DENSE, kv_pages=13), COST, ONE_AT_A_TIME)
    simulate(short, dataclasses.replace(DENSE, kv_pages=14), COST, ONE_AT_A_TIME)
    with pytest.raises(ValueError, match="page_size 2"):
        simulate(short, dataclasses.replace(DENSE, page_size=2), COST, ONE_AT_A_TIME)
    with pytest.raises(ValueError, match="needs a load with times"):
        simulate(short, DENSE, COST, Serving())
    with pytest.raises(ValueError, match="step_s"):
        simulate(short, DENSE, FREE, ONE_AT_A_TIME)


def test_progress_is_told_now_and_then():
    heard: list[int] = []
    requests = [request([i, 1], output=1, conversation=i) for i in range(600)]
    simulate(load(*requests), DENSE, COST, Serving(concurrency=8), progress=heard.append)
    assert len(heard) == 2
    assert heard == sorted(heard)
