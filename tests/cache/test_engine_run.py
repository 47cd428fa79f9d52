"""Clients, order, and what a run writes down."""

import itertools

import pytest

from dasc.cache import AtPromptEnd, InlineMover, ThreadMover
from dasc.cache.engine import Engine, Request
from tests.cache.engine_runs import build, draw_conversations, full_mask, serve, serving_model


def test_a_client_sends_its_next_turn_when_the_last_is_answered():
    engine = build(serving_model(), server_limit=2)
    conversations = draw_conversations(1, count=5, turns=3)
    submitted, in_flight, most = [], set(), 0
    submit = engine.submit

    def watched(request: Request) -> None:
        nonlocal most
        submit(request)
        submitted.append(request.request_id)
        in_flight.add(request.request_id)
        most = max(most, len(in_flight))

    engine.submit = watched
    seen = []

    def note(answer) -> None:
        in_flight.remove(answer.request.request_id)
        seen.append(answer)

    answers = engine.run(conversations, concurrency=3, on_answer=note)
    assert answers == seen
    assert most == 3
    assert submitted[:3] == ["0.0", "1.0", "2.0"]
    for c in range(5):
        turns = [name for name in submitted if name.startswith(f"{c}.")]
        assert turns == [f"{c}.{t}" for t in range(3)]
        records = [next(a.record for a in answers if a.request.request_id == name) for name in turns]
        for before, after in itertools.pairwise(records):
            assert after.arrival_s >= before.arrival_s + before.e2e_s
    assert submitted.index("3.0") > min(submitted.index(f"{c}.2") for c in range(3))


def test_requests_start_in_the_order_they_came():
    engine = build(serving_model(), native=2, server_limit=3, prefill_tokens=4)
    for name in "abcdef":
        first = ord(name) - ord("a")
        engine.submit(Request(name, tuple(range(first, first + (5 if name in "ad" else 20))), 2))
    started = []
    while not engine.is_idle():
        engine.step()
        started += [name for name in engine._running if name not in started]
        assert len(engine._running) <= 2  # slots, below the limit: the others wait
    assert sorted(started) == started
    assert engine.cache.counters.backpressure["native"] > 0


def test_a_request_waits_until_there_is_kv_for_all_of_its_answer():
    """Each takes 4 + 7 tokens of 16: one at a time, and the first is never stopped half-way."""
    engine = build(serving_model(), kv_pages=16, server_limit=4)
    requests = [[Request(name, tuple(range(n, n + 4)), 8)] for n, name in enumerate("abc")]
    assert sorted(serve(engine, requests)) == ["a", "b", "c"]
    assert engine.cache.counters.backpressure["kv"] > 0
    assert max(step.decode_sequences for step in engine.steps) == 1


def test_no_conversations_are_no_work():
    engine = build(serving_model())
    assert engine.run([], concurrency=4) == []
    assert engine.run([[], []], concurrency=1) == []
    assert engine.steps == []


@pytest.mark.parametrize("mover_type", [InlineMover, ThreadMover])
def test_records_account_for_every_token_and_byte(mover_type):
    model = serving_model()
    ticks = itertools.count()
    engine = build(
        model,
        native=4,
        compressed=4,
        mask=full_mask(model, 0.5),
        window=3,
        policies=(AtPromptEnd(),),
        mover_type=mover_type,
        clock=lambda: float(next(ticks)),
    )
    answers = serve(engine, draw_conversations(4, count=5, turns=3))
    engine.close()
    counters, storage = engine.cache.counters, engine._storage
    records = [a.record for a in answers.values()]
    computed = sum(r.prompt_tokens - r.hit_tokens for r in records)
    assert sum(s.prefill_tokens for s in engine.steps) == computed
    assert sum(s.decode_sequences for s in engine.steps) == sum(r.output_tokens - 1 for r in records)
    assert sum(s.refresh_tokens for s in engine.steps) == counters.refresh_tokens > 0
    pairs = sum(p * (p + 1) // 2 - h * (h + 1) // 2 for p, h in ((r.prompt_tokens, r.hit_tokens) for r in records))
    for r in records:
        if r.tier == "compressed":  # each replayed token attends to all before it
            pairs += sum(position + 1 for position in range(max(r.hit_tokens - 3, 0), r.hit_tokens))
    assert sum(s.prefill_pairs for s in engine.steps) == pairs
    assert all(s.seconds > 0 for s in engine.steps)
    for tier in ("dense", "compressed", "miss"):
        mine = [r for r in records if r.tier == tier]
        assert len(mine) == counters.hits[tier]
        assert sum(r.hit_tokens for r in mine) == counters.hit_tokens[tier]
    assert all(0 < r.ttft_s <= r.e2e_s for r in records)
    assert all((r.ttft_s == r.e2e_s) == (r.output_tokens == 1) for r in records)
    assert all(a.record.output_tokens == len(a.tokens) == a.request.max_new_tokens for a in answers.values())

    by_kind = {kind: [t for t in engine.transfers if t.kind == kind] for kind in ("load", "store", "demote", "copy")}
    assert {t.bytes for kind in ("load", "store", "demote") for t in by_kind[kind]} == {storage.compressed_slot_bytes}
    assert len(by_kind["load"]) == counters.hits["compressed"]
    assert len(by_kind["demote"]) == counters.demotions > 0
    assert len(by_kind["store"]) == counters.stored["compressed"] > 0
    copies = counters.hits["dense"] + counters.stored["dense"] - counters.spills
    assert sum(t.bytes for t in by_kind["copy"]) == copies * storage.native_slot_bytes > 0
    assert all(t.seconds > 0 for t in engine.transfers)


def test_one_copy_of_several_states_is_one_record():
    engine = build(serving_model(), native=4)
    engine._mover.copy([(1, 2), (3, 4)])
    assert [(t.kind, t.bytes) for t in engine.transfers] == [("copy", 2 * engine._storage.native_slot_bytes)]


def test_an_engine_without_a_thread_closes_too():
    engine: Engine = build(serving_model())
    engine.close()
