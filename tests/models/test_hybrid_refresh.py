"""One-pass suffix refresh (section 4.2) against two: ``dasc.reference.suffix_refresh``, then a plain prefill."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dasc.fast
import dasc.reference
from dasc.models.hybrid import Batch, HybridModel, KVPool, SequenceInput, StatePool
from dasc.models.hybrid.batch import WindowKV, pack
from dasc.models.hybrid.weights import Linear
from dasc.reference import RecurrentState, suffix_refresh
from tests.models.hybrid_runs import (
    MODELS,
    assert_close,
    isolated,
    nan_pools,
    random_tokens,
    reference_stack,
    tiny_model,
)

MODES = ("replayed", "cached")
SLOTS = 8


@dataclass(frozen=True)
class Hit:
    """A request that found ``prefix`` tokens cached, replays ``window`` of them and has ``new`` tokens of its own."""

    prefix: int
    window: int
    new: int


def draw_mask(model: HybridModel, share: float, seed: int) -> Tensor:
    """Global units, each with the given chance."""
    shape = (model.config.geometry.num_layers, model.config.geometry.units_per_layer)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def unit_mask(model: HybridModel, mask: Tensor) -> Tensor:
    """``[L, HV, 1, 1 or K]``, to be read beside a temporal state."""
    geometry = model.config.geometry
    return mask.view(geometry.num_layers, geometry.num_value_heads, 1, geometry.units_per_head)


class Requests:
    """Cached prefixes, run densely; then every local unit of their states is lost (NaN in its place)."""

    def __init__(self, model: HybridModel, hits: list[Hit], mask: Tensor, seed: int = 0) -> None:
        self.model, self.hits, self.mask = model, hits, mask
        self.tokens = [random_tokens(h.prefix + h.new, seed + n) for n, h in enumerate(hits)]
        order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))
        self.kv_slots = order[: sum(len(t) for t in self.tokens)].split([len(t) for t in self.tokens])
        self.states, self.kv = nan_pools(model, SLOTS)
        for n, h in enumerate(hits):
            if h.prefix:
                prefix = SequenceInput(self.tokens[n][: h.prefix], 0, n + 1, self.kv_slots[n][: h.prefix])
                model.forward(Batch((prefix,)), self.states, self.kv)
        for n, h in enumerate(hits):
            if h.window:
                stored = self.states.temporal[:, n + 1]
                stored.copy_(torch.where(unit_mask(model, mask), stored, float("nan")))

    def copies(self) -> tuple[StatePool, KVPool]:
        return StatePool(self.states.temporal.clone(), self.states.conv.clone()), KVPool(self.kv.rows.clone())

    def sequence(self, n: int, *, windows: bool) -> SequenceInput:
        hit, tokens = self.hits[n], self.tokens[n]
        window = tokens[hit.prefix - hit.window : hit.prefix] if windows and hit.window else None
        return SequenceInput(tokens[hit.prefix :], hit.prefix, n + 1, self.kv_slots[n], window=window)

    def one_pass(self, window_kv: WindowKV) -> tuple[Tensor, StatePool, KVPool]:
        states, kv = self.copies()
        sequences = tuple(self.sequence(n, windows=True) for n in range(len(self.hits)))
        batch = Batch(sequences, global_units=self.mask, window_kv=window_kv)
        return self.model.forward(batch, states, kv, all_tokens=True), states, kv

    def two_passes(self, window_kv: WindowKV) -> tuple[Tensor, StatePool, KVPool]:
        """Each request alone: the oracle's replay, its states stored, then a prefill without any window."""
        states, kv = self.copies()
        logits = []
        for n, hit in enumerate(self.hits):
            if hit.window:
                refreshed = self.oracle(n, window_kv)
                states.temporal[:, n + 1] = torch.stack([state.temporal for state in refreshed])
                states.conv[:, n + 1] = torch.stack([state.conv for state in refreshed])
            batch = Batch((self.sequence(n, windows=False),))
            logits.append(self.model.forward(batch, states, kv, all_tokens=True))
        return torch.cat(logits), states, kv

    def oracle(self, n: int, window_kv: WindowKV) -> list[RecurrentState]:
        hit, pools = self.hits[n], self.states
        stored = zip(pools.temporal[:, n + 1], pools.conv[:, n + 1])
        window = self.tokens[n][hit.prefix - hit.window : hit.prefix]
        return suffix_refresh(
            reference_stack(self.model),
            self.model.embedding[window],
            states=[RecurrentState(temporal, conv) for temporal, conv in stored],
            kv=list(self.kv.rows[:, self.kv_slots[n][: hit.prefix]]),
            masks=self.mask,
            prefix_tokens=hit.prefix,
            window_kv=window_kv,
        )


def assert_same(found: tuple[Tensor, StatePool, KVPool], expected: tuple[Tensor, StatePool, KVPool]) -> None:
    assert_close(found[0], expected[0])
    slots = ~expected[1].conv.isnan().flatten(2).any(2)[0]  # written ones
    assert_close(found[1].temporal[:, slots], expected[1].temporal[:, slots])
    assert_close(found[1].conv[:, slots], expected[1].conv[:, slots])
    rows = ~expected[2].rows[0].isnan().any(1)
    assert_close(found[2].rows[:, rows], expected[2].rows[:, rows])


@st.composite
def hit_lists(draw: st.DrawFn) -> list[Hit]:
    """Batches with and without windows, of prefixes shorter and longer, and of single tokens."""
    hits = []
    for _ in range(draw(st.integers(1, 4))):
        prefix = draw(st.integers(0, 20))
        window = draw(st.one_of(st.just(0), st.integers(0, prefix)))
        hits.append(Hit(prefix, window, draw(st.one_of(st.just(1), st.integers(1, 7)))))
    return hits


@pytest.mark.parametrize("window_kv", MODES)
@pytest.mark.parametrize(("kind", "gate"), MODELS)
@settings(max_examples=12)
@given(
    hits=hit_lists(),
    share=st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]),
    seed=st.integers(0, 2**31 - 1),
    period=st.sampled_from([2, 3]),
)
@example(hits=[Hit(70, 65, 3), Hit(70, 67, 1), Hit(1, 1, 1), Hit(9, 0, 1)], share=0.5, seed=0, period=3)
@example(hits=[Hit(12, 5, 1), Hit(7, 5, 1), Hit(5, 5, 1), Hit(30, 0, 1)], share=0.5, seed=1, period=2)
def test_one_pass_gives_the_numbers_of_two_passes(
    kind: str, gate: str, window_kv: WindowKV, hits: list[Hit], share: float, seed: int, period: int
):
    """Windows off the blocks of 64, prefixes as short as the window, refresh beside plain hits, misses and decoding."""
    model = tiny_model(kind, gate, attention_period=period)
    requests = Requests(model, hits, draw_mask(model, share, seed), seed)
    assert_same(requests.one_pass(window_kv), requests.two_passes(window_kv))


@pytest.mark.parametrize("window_kv", MODES)
@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_a_window_over_the_whole_prefix_gives_the_dense_answer(kind: str, gate: str, window_kv: WindowKV):
    """No history is missing then, so refresh is exact whatever was omitted."""
    model = tiny_model(kind, gate)
    hit = Hit(19, 19, 4)
    requests = Requests(model, [hit], draw_mask(model, 0.4, seed=5))
    logits, states, _ = requests.one_pass(window_kv)
    expected, dense, _ = isolated(model, requests.tokens[0])
    assert_close(logits, expected[19:])
    assert_close(states.temporal[:, 1], dense.temporal[:, 0])


@pytest.mark.parametrize("window_kv", MODES)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_without_local_units_a_window_changes_nothing(kind: str, window_kv: WindowKV):
    """W_max below every horizon: compressed equals dense."""
    model = tiny_model(kind)
    requests = Requests(model, [Hit(30, 6, 5)], draw_mask(model, 2.0, seed=0))
    logits, _, _ = requests.one_pass(window_kv)
    assert_close(logits, isolated(model, requests.tokens[0])[0][30:])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_longer_window_comes_nearer_to_dense_and_zero_fill_is_further_off(kind: str):
    """What refresh is for; also shows that the tests above do not compare equal nothings."""
    model = tiny_model(kind)
    mask = draw_mask(model, 0.3, seed=2)
    errors = []
    for window in (1, 60):
        requests = Requests(model, [Hit(64, window, 6)], mask)
        dense = isolated(model, requests.tokens[0])[0][64:]
        errors.append(float((requests.one_pass("replayed")[0] - dense).norm() / dense.norm()))
    states, kv = requests.copies()
    states.temporal[:, 1] = states.temporal[:, 1].nan_to_num(0.0)
    zero_filled = model.forward(Batch((requests.sequence(0, windows=False),)), states, kv, all_tokens=True)
    errors.append(float((zero_filled - dense).norm() / dense.norm()))
    assert errors[1] < 0.5 * errors[0]
    assert errors[1] < 0.5 * errors[2]
    assert errors[1] > 1e-6  # an approximation still


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_the_two_choices_of_window_kv_differ(kind: str):
    model = tiny_model(kind)
    requests = Requests(model, [Hit(20, 8, 3)], draw_mask(model, 0.5, seed=2))
    replayed, cached = (requests.one_pass(mode)[0] for mode in MODES)
    assert (replayed - cached).norm() > 1e-6 * replayed.norm()


@pytest.mark.parametrize("window_kv", MODES)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_replay_writes_no_kv_and_convolution_rows_are_the_stored_ones(kind: str, window_kv: WindowKV):
    model = tiny_model(kind)
    requests = Requests(model, [Hit(20, 9, 1), Hit(13, 5, 1)], draw_mask(model, 0.5, seed=2))
    before_states, before_kv = requests.copies()
    _, states, kv = requests.one_pass(window_kv)
    untouched = torch.ones(400, dtype=torch.bool)
    untouched[torch.stack([slots[-1] for slots in requests.kv_slots])] = False
    assert torch.equal(bits(kv.rows[:, untouched]), bits(before_kv.rows[:, untouched]))
    # one token moves the rows up by one: the older ones must be those that were stored
    assert torch.equal(states.conv[:, 1:3, :, :-1], before_states.conv[:, 1:3, :, 1:])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int64)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_each_projection_runs_once_over_all_packed_tokens(kind: str, monkeypatch: pytest.MonkeyPatch):
    """... and of windows that read the cache no K/V is projected, nor anything after the last recurrent layer."""
    model = tiny_model(kind, num_experts=0)
    requests = Requests(model, [Hit(20, 8, 3), Hit(20, 0, 1), Hit(9, 5, 2)], draw_mask(model, 0.5, seed=2))
    rows: dict[int, list[int]] = {}
    plain = Linear.__call__

    def counted(self: Linear, x: Tensor) -> Tensor:
        rows.setdefault(id(self), []).append(len(x))
        return plain(self, x)

    monkeypatch.setattr(Linear, "__call__", counted)
    first_recurrent, first_attention, last_recurrent, last_attention = model.blocks
    kv_linear = (lambda a: a.k) if kind == "gdn" else (lambda a: a.kv_down)
    for window_kv, kv_rows in (("replayed", 13 + 6), ("cached", 6)):
        rows.clear()
        requests.one_pass(window_kv)
        assert all(len(calls) == 1 for calls in rows.values())
        assert rows[id(first_recurrent.mixer.qkv)] == [13 + 6]
        assert rows[id(first_recurrent.mlp.up)] == [13 + 6]
        assert rows[id(first_attention.mixer.q)] == [13 + 6]
        assert rows[id(kv_linear(first_attention.mixer))] == [kv_rows]
        assert rows[id(last_recurrent.mixer.qkv)] == [13 + 6]
        assert rows[id(last_recurrent.mlp.up)] == [6]
        assert rows[id(last_attention.mixer.q)] == [6]


@pytest.mark.parametrize("period", [2, 3])
@pytest.mark.parametrize("window_kv", MODES)
@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_a_state_refreshed_without_new_tokens_is_the_oracles(kind: str, gate: str, window_kv: WindowKV, period: int):
    """... alone, and beside a request that has new tokens; nothing else changes."""
    model = tiny_model(kind, gate, attention_period=period)
    requests = Requests(model, [Hit(20, 8, 0), Hit(9, 9, 0), Hit(13, 5, 2)], draw_mask(model, 0.5, seed=2))
    for together in ([0], [0, 1], [0, 2], [2, 1]):
        states, kv = requests.copies()
        batch = Batch(tuple(requests.sequence(n, windows=True) for n in together), requests.mask, window_kv)
        assert all(group.rows.numel() for group in pack(batch, model.device).groups)
        logits = model.forward(batch, states, kv, all_tokens=True)
        assert len(logits) == (2 if 2 in together else 0)
        for n in set(together) - {2}:
            oracle = requests.oracle(n, window_kv)
            assert_close(states.temporal[:, n + 1], torch.stack([state.temporal for state in oracle]))
            assert torch.equal(states.conv[:, n + 1], requests.states.conv[:, n + 1])
        if 2 not in together:
            assert torch.equal(bits(kv.rows), bits(requests.kv.rows))


def test_a_sequence_with_neither_tokens_nor_window_and_last_logits_of_one_without_tokens_are_refused():
    none, slots = torch.empty(0, dtype=torch.int64), torch.arange(3)
    with pytest.raises(ValueError, match="at least one new token when there is no window"):
        SequenceInput(none, 3, 0, slots)
    model = tiny_model("gdn")
    alone = SequenceInput(none, 3, 0, slots, window=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="all_tokens must be true"):
        model.forward(Batch((alone,), draw_mask(model, 0.5, seed=0)), *nan_pools(model))


def test_a_model_with_other_operators_shares_the_weights():
    model = tiny_model("kda")
    other = model.with_ops(dasc.fast)
    assert (model.ops, other.ops, other.blocks is model.blocks) == (dasc.reference, dasc.fast, True)
