"""Refresh windows (eq. 7) and the suffix refresh on a small FP64 stack: recurrent, attention, recurrent."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.reference.conv import causal_conv1d
from dasc.reference.gates import beta_gate, softplus_gate
from dasc.reference.recurrent import recurrent_gdn
from dasc.reference.refresh import (
    AttentionLayer,
    RecurrentLayer,
    RecurrentState,
    next_pow2,
    replay_window,
    suffix_refresh,
    unit_windows,
)
from tests.reference.measures import recurrent_of

HIDDEN, HV, K, V, WIDTH = 6, 2, 4, 3, 4
CHANNELS = HV * (2 * K + V)
BOTH = pytest.mark.parametrize("channel_gate", [False, True], ids=["gdn", "kda"])
MODES = pytest.mark.parametrize("window_kv", ["replayed", "cached"])


def tokens(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


# --- windows ---------------------------------------------------------------------------------------------------------


def test_powers_of_two_are_their_own_next_power():
    exact = tokens(*(math.ldexp(1.0, e) for e in range(-1074, 1024)))
    assert torch.equal(next_pow2(exact), exact)


@given(st.floats(min_value=0, exclude_min=True, max_value=2.0**1023))
def test_next_power_of_two_is_the_least_that_is_not_smaller(x):
    power = next_pow2(tokens(x)).item()
    assert math.frexp(power)[0] == 0.5
    assert power >= x
    assert power / 2 < x or power == 5e-324


def test_a_hair_above_a_power_of_two_doubles_and_zero_maps_to_4():
    above = math.nextafter(16.0, 17.0)
    assert next_pow2(tokens(0.0, 0.3, 1.0, 16.0, above, math.inf)).tolist() == [4, 0.5, 1, 16, 32, math.inf]


def test_windows_are_clamped_powers_of_two_for_local_units_and_0_for_global_ones():
    horizons = torch.stack([tokens(0, 0.3, 4, math.nextafter(4.0, 5.0), 17), tokens(64, 65, 100, 1e9, math.inf)])
    local = torch.zeros(2, 5, dtype=torch.bool)
    assert unit_windows(horizons, local, 64).tolist() == [[4, 4, 4, 8, 32], [64, 64, 64, 64, 64]]
    # W_max itself is the largest window, a power of two or not
    assert unit_windows(horizons, local, 100).tolist() == [[4, 4, 4, 8, 32], [64, 100, 100, 100, 100]]
    windows = unit_windows(horizons, horizons > 64, 64)
    assert windows.dtype == torch.int64
    assert windows.tolist() == [[4, 4, 4, 8, 32], [64, 0, 0, 0, 0]]


@given(st.lists(st.floats(0, 2000), min_size=2, max_size=8), st.integers(4, 1024))
def test_a_longer_horizon_never_has_a_shorter_window(horizons, w_max):
    windows = unit_windows(tokens(*sorted(horizons))[None], torch.zeros(1, len(horizons), dtype=torch.bool), w_max)
    assert (windows.diff() >= 0).all()
    assert windows.min() >= 4
    assert windows.max() <= w_max


def test_replay_is_the_longest_window_within_the_prefix():
    windows = torch.tensor([[4, 0, 8], [0, 32, 4]])
    assert replay_window(windows, 1000) == 32
    assert replay_window(windows, 20) == 20
    assert replay_window(windows, 0) == 0
    assert replay_window(torch.zeros(2, 3, dtype=torch.int64), 1000) == 0


def test_wrong_windows_are_refused():
    horizons, local = torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.bool)
    for w_max in (3, 0, -4, 16.0):
        with pytest.raises(ValueError, match="w_max"):
            unit_windows(horizons, local, w_max)
    with pytest.raises(ValueError, match="mask"):
        unit_windows(horizons, local.long(), 16)
    with pytest.raises(ValueError, match="mask"):
        unit_windows(horizons, local[:1], 16)
    for wrong in (horizons.float(), -horizons, horizons * math.nan):
        with pytest.raises(ValueError, match="horizons"):
            unit_windows(wrong, local, 16)
    with pytest.raises(ValueError, match="prefix_tokens"):
        replay_window(local.long(), -1)


# --- the stack -------------------------------------------------------------------------------------------------------


def recurrent_layer(channel_gate, seed):
    gen = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64) / math.sqrt(shape[0])

    gate_shape = (HV, K) if channel_gate else (HV,)
    to_qkv, to_b, to_hidden = weight(HIDDEN, CHANNELS), weight(HIDDEN, HV), weight(HV * V, HIDDEN)
    to_a = weight(HIDDEN, math.prod(gate_shape))
    taps, A_log, dt_bias = weight(CHANNELS, WIDTH), weight(HV) - 1.5, weight(*gate_shape)

    def run(x, state):
        mixed = causal_conv1d((x @ to_qkv)[None], taps, initial_state=state.conv[None])
        q, k, v = (t.unflatten(-1, (HV, -1)) for t in mixed.y.split([HV * K, HV * K, HV * V], dim=-1))
        g = softplus_gate((x @ to_a).unflatten(-1, gate_shape), A_log, dt_bias)[None]
        beta = beta_gate(x @ to_b)[None]
        out = recurrent_of(channel_gate)(q, k, v, g, beta, initial_state=state.temporal[None], use_qk_l2norm=True)
        return x + out.o[0].flatten(1) @ to_hidden, RecurrentState(out.final_state[0], mixed.final_state[0])

    return RecurrentLayer(run)


def attention_layer(seed):
    gen = torch.Generator().manual_seed(seed)
    to_q, to_k, to_v = torch.randn(3, HIDDEN, HIDDEN, generator=gen, dtype=torch.float64) / math.sqrt(HIDDEN)

    def project_kv(x, position):
        where = torch.arange(position, position + len(x), dtype=torch.float64).sin()[:, None]
        return torch.stack([x @ to_k + where, x @ to_v], dim=1)

    def attend(x, kv):
        keys, values = kv.unbind(1)
        causal = torch.ones(len(x), len(kv), dtype=torch.bool).tril(len(kv) - len(x))
        scores = (x @ to_q @ keys.mT).masked_fill(~causal, -math.inf)
        return x + scores.softmax(-1) @ values

    return AttentionLayer(project_kv, attend)


def small_stack(channel_gate, seed=0):
    return [recurrent_layer(channel_gate, seed), attention_layer(seed + 1), recurrent_layer(channel_gate, seed + 2)]


def zero_state():
    temporal, conv = torch.zeros(HV, V, K), torch.zeros(CHANNELS, WIDTH - 1)
    return RecurrentState(temporal.double(), conv.double())


def run_prefix(layers, x):
    """Exact states and KV after the tokens ``x``."""
    states, kv = [], []
    for layer in layers:
        if isinstance(layer, RecurrentLayer):
            x, state = layer.run(x, zero_state())
            states.append(state)
        else:
            kv.append(layer.project_kv(x, 0))
            x = layer.attend(x, kv[-1])
    return states, kv


def embeddings(n, seed=0):
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw_masks(channel_gate, seed, layers=2):
    """At least one local unit in every layer."""
    units = HV * K if channel_gate else HV
    masks = torch.rand(layers, units, generator=torch.Generator().manual_seed(seed)) < 0.5
    masks[:, seed % units] = False
    return masks


def over_state(mask):
    return mask.view(HV, 1, -1).expand(HV, V, K)


def zero_filled(states, masks):
    """What loading a checkpoint without refresh leaves: local units zero."""
    return [RecurrentState(s.temporal * over_state(m), s.conv) for s, m in zip(states, masks, strict=True)]


def copies(nested):
    return [RecurrentState(s.temporal.clone(), s.conv.clone()) for s in nested]


# --- suffix refresh --------------------------------------------------------------------------------------------------


@BOTH
@MODES
def test_without_local_units_nothing_is_run_and_nothing_changes(channel_gate, window_kv):
    def never(*_):
        raise AssertionError("ran")

    layers = [RecurrentLayer(never), AttentionLayer(never, never), RecurrentLayer(never)]
    states, kv = run_prefix(small_stack(channel_gate), embeddings(9))
    masks = torch.ones_like(draw_masks(channel_gate, 0))
    for window in (0, 4):
        got = suffix_refresh(
            layers, embeddings(window), states=states, kv=kv, masks=masks, prefix_tokens=9, window_kv=window_kv
        )
        for new, old in zip(got, states, strict=True):
            assert torch.equal(new.temporal, old.temporal)
            assert torch.equal(new.conv, old.conv)
            assert new.temporal is not old.temporal


@BOTH
@MODES
@given(seed=st.integers(0, 10**6), prefix=st.integers(1, 12))
def test_a_window_over_the_whole_prefix_restores_every_local_unit(channel_gate, window_kv, seed, prefix):
    """Also the case of a prefix shorter than the unit windows ask for, and of one token."""
    layers, x, masks = small_stack(channel_gate, seed), embeddings(prefix, seed), draw_masks(channel_gate, seed)
    exact, kv = run_prefix(layers, x)
    states = zero_filled(exact, masks)
    got = suffix_refresh(layers, x, states=states, kv=kv, masks=masks, prefix_tokens=prefix, window_kv=window_kv)
    for new, old in zip(got, exact, strict=True):
        torch.testing.assert_close(new.temporal, old.temporal, rtol=1e-10, atol=1e-12)


@BOTH
@MODES
@given(seed=st.integers(0, 10**6), window=st.integers(1, 12))
def test_global_units_convolution_rows_and_kv_stay_bit_identical(channel_gate, window_kv, seed, window):
    layers, x, masks = small_stack(channel_gate, seed), embeddings(12, seed), draw_masks(channel_gate, seed)
    exact, kv = run_prefix(layers, x)
    states = zero_filled(exact, masks)
    given_states, given_kv, given_x = copies(states), [rows.clone() for rows in kv], x.clone()
    got = suffix_refresh(layers, x[-window:], states=states, kv=kv, masks=masks, prefix_tokens=12, window_kv=window_kv)
    for new, old, before, mask in zip(got, exact, given_states, masks, strict=True):
        kept = over_state(mask)
        assert torch.equal(new.temporal[kept], old.temporal[kept])
        assert (new.temporal != 0)[~kept].all()  # refreshed, not left at zero
        assert torch.equal(new.conv, old.conv)
        assert not torch.equal(new.temporal, before.temporal)
    for state, before in zip(states, given_states, strict=True):
        assert torch.equal(state.temporal, before.temporal)
        assert torch.equal(state.conv, before.conv)
    assert all(torch.equal(rows, before) for rows, before in zip(kv, given_kv, strict=True))
    assert torch.equal(x, given_x)


@BOTH
@MODES
def test_everything_starts_from_zero_in_the_scratch(channel_gate, window_kv):
    """What the checkpoint holds, global units and convolution rows too, has no way into the refreshed units."""
    layers, x, masks = small_stack(channel_gate), embeddings(12), draw_masks(channel_gate, 3)
    exact, kv = run_prefix(layers, x)
    stored = zero_filled(exact, masks)
    others = [RecurrentState(torch.full_like(s.temporal, 7.0), torch.full_like(s.conv, 7.0)) for s in stored]
    one, two = (
        suffix_refresh(layers, x[-5:], states=s, kv=kv, masks=masks, prefix_tokens=12, window_kv=window_kv)
        for s in (stored, others)
    )
    for a, b, mask in zip(one, two, masks, strict=True):
        assert torch.equal(a.temporal[~over_state(mask)], b.temporal[~over_state(mask)])


@BOTH
def test_a_single_layer_refreshes_to_its_run_over_the_window_from_zero(channel_gate):
    layer, x, masks = recurrent_layer(channel_gate, 0), embeddings(12), draw_masks(channel_gate, 0, layers=1)
    exact, _ = run_prefix([layer], x)
    for window in (1, 4, 11):
        (got,) = suffix_refresh(
            [layer], x[-window:], states=zero_filled(exact, masks), kv=[], masks=masks, prefix_tokens=12
        )
        _, scratch = layer.run(x[-window:], zero_state())
        assert torch.equal(got.temporal, torch.where(over_state(masks[0]), exact[0].temporal, scratch.temporal))


def test_the_error_of_a_local_head_is_the_state_before_the_window_as_its_decay_leaves_it():
    """At most epsilon of that state once the window reaches the horizon; no convolution, one g a head."""
    g = tokens(-0.5, -0.05)
    horizons = math.log(1e-3) / g
    masks = torch.zeros(1, HV, dtype=torch.bool)

    def run(x, state):
        q, k, v = (t.unflatten(-1, (HV, -1))[None] for t in x.split([HV * K, HV * K, HV * V], dim=-1))
        rate, beta = g.expand(1, len(x), HV), torch.full((1, len(x), HV), 0.5, dtype=torch.float64)
        out = recurrent_gdn(q, k, v, rate, beta, initial_state=state.temporal[None], use_qk_l2norm=True)
        return x, RecurrentState(out.final_state[0], state.conv)

    x = torch.randn(400, CHANNELS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact, _ = run_prefix([RecurrentLayer(run)], x)
    for window in (1, 4, *unit_windows(horizons[None], masks, 256)[0].tolist()):
        (got,) = suffix_refresh([RecurrentLayer(run)], x[-window:], states=exact, kv=[], masks=masks, prefix_tokens=400)
        before, _ = run_prefix([RecurrentLayer(run)], x[:-window])
        error = (got.temporal - exact[0].temporal).norm(dim=(1, 2))
        lost = before[0].temporal.norm(dim=(1, 2))
        assert (error <= lost * (g * window).exp() + 1e-14).all()
        assert (error[horizons <= window] <= 1e-3 * lost[horizons <= window]).all()
        assert error[1] > 0


@BOTH
def test_the_two_kinds_of_window_kv_differ_only_behind_an_attention_layer(channel_gate):
    layers, x, masks = small_stack(channel_gate), embeddings(12), draw_masks(channel_gate, 0)
    exact, kv = run_prefix(layers, x)
    replayed, cached = (
        suffix_refresh(layers, x[-5:], states=exact, kv=kv, masks=masks, prefix_tokens=12, window_kv=window_kv)
        for window_kv in ("replayed", "cached")
    )
    assert torch.equal(replayed[0].temporal, cached[0].temporal)
    local = ~over_state(masks[1])
    assert (replayed[1].temporal != cached[1].temporal)[local].all()
    # neither is exact: the first layer's history before the window is missing from what the second one reads
    assert not torch.allclose(cached[1].temporal[local], exact[1].temporal[local])


@MODES
def test_attention_reads_the_rows_that_the_mode_says(window_kv):
    calls = []

    def project_kv(x, position):
        calls.append(("project", len(x), position))
        return -torch.ones(len(x), 1)

    def attend(x, kv):
        calls.append(("attend", len(x), kv.flatten().tolist()))
        return x

    suffix_refresh(
        [AttentionLayer(project_kv, attend), recurrent_layer(False, 0)],
        embeddings(3),
        states=[zero_state()],
        kv=[torch.arange(8.0)[:, None]],
        masks=torch.tensor([[True, False]]),
        prefix_tokens=8,
        window_kv=window_kv,
    )
    if window_kv == "replayed":
        assert calls == [("project", 3, 5), ("attend", 3, [0, 1, 2, 3, 4, -1, -1, -1])]
    else:
        assert calls == [("attend", 3, [0, 1, 2, 3, 4, 5, 6, 7])]


def to_double(run):
    return lambda x, state: run(x, RecurrentState(state.temporal.double(), state.conv.double()))


@BOTH
def test_states_keep_their_dtype(channel_gate):
    """Fault 24."""
    layers, x, masks = small_stack(channel_gate), embeddings(12), draw_masks(channel_gate, 0)
    exact, kv = run_prefix(layers, x)
    stored = [RecurrentState(s.temporal.float(), s.conv.bfloat16()) for s in exact]
    fine = suffix_refresh(layers, x[-4:], states=exact, kv=kv, masks=masks, prefix_tokens=12)
    wide = [RecurrentLayer(to_double(layer.run)) if isinstance(layer, RecurrentLayer) else layer for layer in layers]
    got = suffix_refresh(wide, x[-4:], states=stored, kv=kv, masks=masks, prefix_tokens=12)
    for new, reference in zip(got, fine, strict=True):
        assert torch.equal(new.temporal, reference.temporal.float())
        assert torch.equal(new.conv, reference.conv.bfloat16())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"window_inputs": embeddings(13)}, "window_inputs"),
        ({"window_inputs": embeddings(0)}, "window_inputs"),
        ({"window_kv": "exact"}, "window_kv"),
        ({"states": []}, "states and kv"),
        ({"kv": []}, "states and kv"),
        ({"kv": [torch.zeros(11, 2, HIDDEN)]}, "kv"),
        ({"masks": torch.zeros(2, HV)}, "masks"),
        ({"masks": torch.zeros(1, HV, dtype=torch.bool)}, "masks"),
        ({"masks": torch.zeros(2, HV + 1, dtype=torch.bool)}, "masks"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, named):
    arguments = {
        "window_inputs": embeddings(4),
        "states": [zero_state(), zero_state()],
        "kv": [torch.zeros(12, 2, HIDDEN, dtype=torch.float64)],
        "masks": torch.zeros(2, HV, dtype=torch.bool),
        "prefix_tokens": 12,
    }
    suffix_refresh(small_stack(False), **arguments)
    with pytest.raises(ValueError, match=f"^{named} must"):
        suffix_refresh(small_stack(False), **{**arguments, **change})
