"""The engine's answers: what a cache may and may not change about them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc.cache import AtJunctions, AtPromptEnd, CacheConfig, EveryTokens, ThreadMover, Tier
from dasc.cache.engine import Engine, Request
from dasc.cache.storage import TensorStorage
from dasc.geometry import DtypePolicy
from tests.cache.engine_runs import (
    LogitsOf,
    build,
    draw_conversations,
    full_mask,
    greedy,
    serve,
    serving_model,
    tokens_of,
)
from tests.models.hybrid_runs import MODELS, VOCAB, assert_close, isolated


def expected(model, conversations) -> dict[str, tuple[int, ...]]:
    requests = [r for conversation in conversations for r in conversation]
    return {r.request_id: greedy(model, r.tokens, r.max_new_tokens) for r in requests}


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_dense_hits_give_the_tokens_of_no_cache_at_all(kind: str, gate: str):
    """Under memory pressure: hits, misses, spills and evictions, all of them."""
    model = serving_model(kind, gate)
    conversations = draw_conversations(1, count=6, turns=3)
    engine = build(model, native=7, kv_pages=120)
    answers = serve(engine, conversations)
    assert tokens_of(answers) == expected(model, conversations)
    counters = engine.cache.counters
    assert counters.hits["dense"] >= 3
    assert counters.evictions["dense_lru"] >= 3
    assert counters.hits["compressed"] == 0


def test_the_cache_turned_off_neither_hits_nor_stores():
    model = serving_model()
    conversations = draw_conversations(1, count=3, turns=2, lookup=False, store=False)
    engine = build(model)
    assert tokens_of(serve(engine, conversations)) == expected(model, conversations)
    assert engine.cache.counters.hits == {"miss": 6}
    assert engine.cache.ledger.tree.nodes == 0


@pytest.mark.parametrize(("kind", "gate"), MODELS)
@pytest.mark.parametrize("spill", [True, False])
def test_a_plan_that_keeps_everything_answers_as_dense_does(kind: str, gate: str, spill: bool):
    """Two tiers, or compressed checkpoints only, evicting; refresh has nothing to do and changes nothing."""
    model = serving_model(kind, gate)
    conversations = draw_conversations(2, count=6, turns=3)
    engine = build(model, native=4, compressed=5, spill=spill, window=4, layout="padded" if spill else "ragged")
    assert tokens_of(serve(engine, conversations)) == expected(model, conversations)
    counters = engine.cache.counters
    assert counters.hits["compressed"] >= 3
    assert sum(counters.evictions.values()) >= 3
    assert bool(counters.spills) == spill
    assert engine.cache.ledger.store.dense_count == 0 or spill


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_plan_that_keeps_everything_equals_dense_to_the_last_bit(kind: str):
    """The same hits in the same batches, from the other tier."""
    model = serving_model(kind)
    conversations = draw_conversations(3, count=3, turns=2)
    runs = []
    for slots in ({"native": 20}, {"native": 8, "compressed": 16}):
        engine = build(model, **slots)
        seen = LogitsOf(engine)
        serve(engine, conversations)
        runs.append((seen.logits, sum(engine.cache.counters.hit_tokens.values())))
    assert engine.cache.counters.hits["compressed"]
    assert runs[0][1] == runs[1][1] > 0
    assert len(runs[0][0]) == len(runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0]))


@settings(max_examples=12)
@given(
    prefill_tokens=st.integers(1, 20),
    server_limit=st.integers(1, 5),
    concurrency=st.integers(1, 6),
    native=st.integers(2, 9),
    compressed=st.integers(0, 4),
    page_size=st.sampled_from([1, 2, 4]),
    every=st.sampled_from([None, 4, 8]),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
)
def test_answers_depend_on_no_chunk_no_batch_and_no_memory(
    prefill_tokens: int,
    server_limit: int,
    concurrency: int,
    native: int,
    compressed: int,
    page_size: int,
    every: int | None,
    temperature: float,
    seed: int,
):
    """Faults 8, 9, 11, 19, 20, 22: whatever is free is NaN, and the cache adds up after every step."""
    model = serving_model("kda" if seed % 2 else "gdn", dtype=torch.float64)
    conversations = draw_conversations(seed, count=4, turns=2, temperature=temperature)
    policies = (AtPromptEnd(), AtJunctions()) if every is None else (EveryTokens(every),)
    engine = build(
        model,
        native=native,
        compressed=compressed,
        page_size=page_size,
        kv_pages=160 // page_size,
        policies=policies,
        server_limit=server_limit,
        prefill_tokens=prefill_tokens,
    )
    answers = tokens_of(serve(engine, conversations, concurrency))
    assert answers == unhurried(seed, temperature)


def unhurried(seed: int, temperature: float) -> dict[str, tuple[int, ...]]:
    """Each request alone, prompts whole, nothing cached."""
    key = (seed, temperature)
    if key not in UNHURRIED:
        model = serving_model("kda" if seed % 2 else "gdn", dtype=torch.float64)
        off = {"lookup": False, "store": False, "temperature": temperature}
        conversations = draw_conversations(seed, count=4, turns=2, **off)
        UNHURRIED[key] = tokens_of(serve(build(model, server_limit=1, prefill_tokens=99), conversations))
        if temperature == 0:
            assert UNHURRIED[key] == expected(model, conversations)
    return UNHURRIED[key]


UNHURRIED: dict[tuple[int, float], dict[str, tuple[int, ...]]] = {}


def test_drawn_tokens_depend_on_the_seed_alone():
    model, prompt = serving_model(), tuple(range(10))

    def drawn(*seeds: int, temperature: float = 1.5) -> list[tuple[int, ...]]:
        requests = [[Request(str(n), prompt, 6, temperature=temperature, seed=s)] for n, s in enumerate(seeds)]
        return list(tokens_of(serve(build(model), requests)).values())

    a, b, again = drawn(1, 2, 1)
    assert a == again != b
    assert drawn(2)[0] == b
    assert drawn(1, temperature=1e-6)[0] == greedy(model, prompt, 6)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("prefill_tokens", [1, 3, 7, 64])
def test_every_checkpoint_holds_the_state_of_its_own_position(kind: str, prefill_tokens: int):
    """Faults 15, 16, 21, 22: chunks smaller and larger than the distance, several requests in a batch, junctions."""
    model = serving_model(kind, dtype=torch.float64)
    engine = build(
        model,
        native=30,
        compressed=4,
        page_size=2,
        policies=(EveryTokens(6), AtPromptEnd(), AtJunctions()),
        prefill_tokens=prefill_tokens,
    )
    conversations = draw_conversations(5, count=3, turns=2, longest=14)
    serve(engine, conversations)
    engine.cache.ledger.store.settle()
    positions = set()
    for node in engine.cache.ledger.tree.walk():
        if node.state is None:
            continue
        prefix = torch.frombuffer(bytearray(node.prefix()), dtype=torch.int32).long()
        assert node.state.position == len(prefix)
        positions.add(len(prefix))
        if node.state.tier is Tier.COMPRESSED:
            engine._storage.load(node.state.slot, 0, len(prefix))
            slot = 0
        else:
            slot = node.state.slot
        _, states, _ = isolated(model, prefix)
        assert_close(engine._storage.temporal[:, slot], states.temporal[:, 0])
        assert_close(engine._storage.conv[:, slot], states.conv[:, 0])
    stops = {p for c in conversations for r in c for p in range(6, len(r.tokens) + 1, 6)}
    assert stops <= positions
    assert {(len(r.tokens) - 1) // 2 * 2 for c in conversations for r in c} <= positions


def test_chunks_stop_where_a_checkpoint_is_due_and_decoding_goes_on_beside_them():
    model = serving_model()
    engine = build(model, prefill_tokens=5, policies=(AtPromptEnd(),), server_limit=2)
    engine.submit(Request("a", tuple(range(3)), 9))
    engine.submit(Request("b", tuple(range(20, 33)), 1))
    shapes = []
    while not engine.is_idle():
        engine.step()
        step = engine.steps[-1]
        shapes.append((step.prefill_tokens, step.prefill_pairs, step.decode_sequences, step.decode_pairs))
    # a: 2 + 1 prompt tokens, then decodes; b: 3, then 4 (one of five is a's), 5, and its last one alone
    assert shapes == [
        (2 + 3, 3 + 6, 0, 0),
        (1 + 4, 3 + 4 * 3 + 10, 0, 0),
        (5, 5 * 7 + 15, 1, 4),
        (1, 13, 1, 5),
        *((0, 0, 1, context) for context in range(6, 12)),
    ]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_background_mover_changes_no_answer(kind: str):
    model = serving_model(kind)
    conversations = draw_conversations(7, count=6, turns=3)
    runs = []
    for options in ({}, {"mover_type": ThreadMover}):
        engine = build(model, native=5, compressed=4, mask=full_mask(model, 0.5), watermark=1, **options)
        runs.append((tokens_of(serve(engine, conversations)), engine.cache.history_digest()))
        engine.close()
    assert runs[0] == runs[1]
    assert engine.cache.counters.demotions


def test_an_engine_says_what_does_not_fit():
    model = serving_model()
    engine = build(model, kv_pages=8)
    engine.submit(Request("a", (1, 2), 1))
    for request, message in (
        (Request("a", (1,), 1), "'a' is already in use"),
        (Request("b", (1, VOCAB), 1), rf"\[0, {VOCAB}\), got 1 to {VOCAB}"),
        (Request("b", (-1,), 1), "got -1 to -1"),
        (Request("b", (1,) * 7, 3), "9 tokens of KV, but there are 8"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(request)
    engine.submit(Request("b", (1,) * 7, 2))
    with pytest.raises(ValueError, match="'c' neither waits nor runs"):
        engine.abort("c")
    with pytest.raises(ValueError, match=r"concurrency must be >= 1 and the engine idle, got 1 and is_idle\(\)=False"):
        engine.run([], concurrency=1)
    with pytest.raises(ValueError, match="server_limit and prefill_tokens"):
        build(model, server_limit=0)
    storage = TensorStorage(model.config.geometry, 3, DtypePolicy())
    with pytest.raises(ValueError, match=r"\(4, 0\) native and compressed slots, got \(3, 0\)"):
        Engine(model, CacheConfig(4, 0, 9), storage, server_limit=1, prefill_tokens=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": ()}, "at least one token"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be finite"),
        ({"temperature": float("nan")}, "got nan"),
    ],
)
def test_requests_that_cannot_be_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Request(**{"request_id": "a", "tokens": (1,), "max_new_tokens": 1} | fields)
