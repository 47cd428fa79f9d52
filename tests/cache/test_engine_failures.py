"""Nothing leaks: requests that go away, transfers that fail, forwards that raise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc.cache import TransferError, check
from dasc.cache.engine import Engine, Request
from dasc.cache.storage import TensorStorage
from tests.cache.engine_runs import build, checked_step, draw_conversations, full_mask, greedy, serve, serving_model

PROMPT = tuple(range(12))


class FailingStorage(TensorStorage):
    """Operations named in ``fail`` break half-way: the temporal state is written, the convolution is not."""

    fail: frozenset[str] = frozenset()

    def _break(self, operation: str, slot: int) -> None:
        if operation in self.fail:
            self.temporal[:, slot] = 7.0
            raise RuntimeError(f"{operation} broke half-way")

    def pack(self, native_slot: int, compressed_slot: int) -> None:
        if "pack" in self.fail:
            raise RuntimeError("pack broke")
        super().pack(native_slot, compressed_slot)

    def load(self, compressed_slot: int, active_slot: int, position: int) -> None:
        self._break("load", active_slot)
        super().load(compressed_slot, active_slot, position)

    def copy(self, pairs) -> None:
        for _, destination in pairs:
            self._break("copy", destination)
        super().copy(pairs)

    def clear(self, slots) -> None:
        for slot in slots:
            self._break("clear", slot)
        super().clear(slots)


def assert_all_given_back(engine: Engine) -> None:
    """After the last request and a flush every slot and page is free again."""
    assert engine.is_idle()
    assert engine.cache.flush() == 0
    engine.cache.step()
    check(engine.cache)
    ledger = engine.cache.ledger
    assert ledger.native.held_slots == ledger.compressed.held_slots == 0
    assert ledger.kv.free_pages == ledger.kv.pages


def drain(engine: Engine) -> dict[str, tuple[int, ...]]:
    answers = {}
    while not engine.is_idle():
        answers |= {a.request.request_id: a.tokens for a in checked_step(engine)}
    return answers


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31 - 1), native=st.integers(2, 5), compressed=st.integers(0, 3))
def test_requests_that_go_away_at_any_point_leak_nothing(seed: int, native: int, compressed: int):
    """Fault 8: waiting, loaded, in prefill, decoding; those that stay are answered as ever."""
    model = serving_model()
    generator = torch.Generator().manual_seed(seed)

    def chance(of: float) -> bool:
        return float(torch.rand((), generator=generator)) < of

    engine = build(model, native=native, compressed=compressed, kv_pages=60, prefill_tokens=6)
    requests = [r for c in draw_conversations(seed % 5, count=4, turns=2) for r in c]
    alive, answers = {}, {}
    while requests or alive:
        while requests and chance(0.6):
            request = requests.pop()
            engine.submit(request)
            alive[request.request_id] = request
        for name in [name for name in alive if chance(0.15)]:
            engine.abort(name)
            del alive[name]
        for answer in checked_step(engine):
            answers[answer.request] = answer.tokens
            del alive[answer.request.request_id]
    for request, tokens in answers.items():
        assert tokens == greedy(model, request.tokens, request.max_new_tokens)
    assert_all_given_back(engine)


def test_rejected_requests_leave_nothing():
    engine = build(serving_model(), kv_pages=8)
    for _ in range(20):
        with pytest.raises(ValueError, match="tokens of KV"):
            engine.submit(Request("a", PROMPT, 1))
    assert_all_given_back(engine)


@pytest.mark.parametrize(("operation", "slots"), [("copy", {"native": 9}), ("load", {"native": 4, "compressed": 9})])
def test_a_hit_that_cannot_be_read_becomes_a_miss(operation: str, slots: dict[str, int]):
    """Fault 9: nobody computes with a slot that was only half written; the order of requests stays."""
    model = serving_model()
    engine = build(model, storage_type=FailingStorage, server_limit=2, **slots)
    engine.submit(Request("warm", PROMPT, 1))
    drain(engine)
    engine._storage.fail = frozenset({operation})
    for name in "abc":
        engine.submit(Request(name, (*PROMPT, ord(name) - 96), 3))
    answers = drain(engine)
    assert list(answers) == ["a", "b", "c"]
    for name, tokens in answers.items():
        assert tokens == greedy(model, (*PROMPT, ord(name) - 96), 3)
    assert engine.cache.counters.failed_loads >= 2
    engine._storage.fail = frozenset()
    engine.submit(Request("d", (*PROMPT, 9), 3))
    assert drain(engine) == {"d": greedy(model, (*PROMPT, 9), 3)}
    assert_all_given_back(engine)


def test_a_slot_that_cannot_even_be_cleared_is_said_and_costs_one_request():
    engine = build(serving_model(), storage_type=FailingStorage, server_limit=1)
    engine._storage.fail = frozenset({"clear"})
    engine.submit(Request("a", PROMPT, 1))
    engine.submit(Request("b", PROMPT, 1))
    assert engine.step() == []  # tried once more, without the cache
    with pytest.raises(TransferError, match=r"\['a'\] could not be cleared"):
        engine.step()
    check(engine.cache)
    engine._storage.fail = frozenset()
    assert list(drain(engine)) == ["b"]
    assert_all_given_back(engine)


def test_packs_that_fail_cost_checkpoints_and_no_answer():
    model = serving_model()
    engine = build(model, native=4, compressed=3, storage_type=FailingStorage)
    engine._storage.fail = frozenset({"pack"})
    conversations = draw_conversations(1, count=3, turns=2)
    for name, answer in serve(engine, conversations).items():
        assert answer.tokens == greedy(model, answer.request.tokens, answer.request.max_new_tokens), name
    counters = engine.cache.counters
    assert counters.failed_packs >= 3
    assert counters.hits["compressed"] == 0
    assert not engine.transfers or {t.kind for t in engine.transfers} <= {"copy"}
    assert_all_given_back(engine)


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_drops_its_own_requests_only(interruption: type[BaseException]):
    model = serving_model()
    engine = build(model, native=6, compressed=2, mask=full_mask(model), server_limit=2)
    engine.submit(Request("warm", PROMPT, 2))
    drain(engine)
    for name in "abc":
        engine.submit(Request(name, (*PROMPT, 3), 2))

    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(model, name)

        def forward(self, batch, states, kv):
            states.temporal[:, [s.state_slot for s in batch.sequences]] = 7.0
            raise interruption("out of memory")

    engine.model = Broken()
    with pytest.raises(interruption, match="out of memory"):
        engine.step()
    check(engine.cache)
    engine.model = model
    assert drain(engine) == {"c": greedy(model, (*PROMPT, 3), 2)}
    assert_all_given_back(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error_not_an_answer(temperature: float):
    model = serving_model()
    engine = build(model, native=6, compressed=2, mask=full_mask(model))

    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(model, name)

        def forward(self, batch, states, kv):
            return model.forward(batch, states, kv) * float("nan")

    engine.model = Broken()
    engine.submit(Request("a", PROMPT, 2, temperature=temperature))
    with pytest.raises(ValueError, match="request 'a': the model's logits hold NaN or infinity"):
        drain(engine)
    assert_all_given_back(engine)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interruption_of_a_transfer_drops_the_requests_of_that_step_only(at: int):
    """A cancellation (no ``Exception``) out of the first checkpoint, a later one, and the end of a request."""
    model = serving_model()
    engine = build(model, native=6, compressed=9, server_limit=2, storage_type=FailingStorage)
    for n in range(3):
        engine.submit(Request(str(n), tuple(range(20 * n, 20 * n + 12)), 2))
    pack, packs = engine._storage.pack, iter(range(1, 99))

    def interrupted(native_slot: int, compressed_slot: int) -> None:
        if next(packs) == at:
            raise KeyboardInterrupt
        pack(native_slot, compressed_slot)

    engine._storage.pack = interrupted
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    check(engine.cache)
    assert not engine._running
    assert drain(engine) == {"2": greedy(model, tuple(range(40, 52)), 2)}
    assert_all_given_back(engine)


def test_a_run_that_ends_in_an_error_leaves_an_idle_engine():
    model = serving_model()
    engine = build(model, server_limit=2)
    good, twice, waits = Request("a", PROMPT, 3), Request("b", PROMPT, 9), Request("c", PROMPT, 1)
    with pytest.raises(ValueError, match="'b' is already in use"):
        engine.run([[twice], [good, twice], [waits]], concurrency=3)
    assert engine.is_idle()
    assert engine.run([[good]], concurrency=1)[0].tokens == greedy(model, PROMPT, 3)
    assert_all_given_back(engine)
