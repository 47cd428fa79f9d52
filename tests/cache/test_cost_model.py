"""Every constant and formula of the cost model by itself, and the estimates against their derivation."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.cache.simulation import MODEL_SIZES, CostModel, estimate_cost, parse_costs, read_costs
from dasc.models.synthetic import GEOMETRIES

NAMES = [field.name for field in dataclasses.fields(CostModel)]
FREE = CostModel(**dict.fromkeys(NAMES, 0.0))


def cost(**values: float) -> CostModel:
    return dataclasses.replace(FREE, **values)


@pytest.mark.parametrize(
    ("name", "prefill_only", "mixed", "decode_only"),
    [
        ("step_s", 1, 1, 1),
        ("prefill_s_per_token", 5, 5, 0),
        ("prefill_s_per_pair", 35, 35, 0),
        ("decode_step_s", 0, 1, 1),
        ("decode_s_per_sequence", 0, 3, 3),
        ("decode_s_per_context_token", 0, 70, 70),
        ("load_latency_s", 0, 0, 0),
        ("two_pass_s", 0, 0, 0),
    ],
)
def test_a_pass_pays_each_constant_as_often_as_documented(name, prefill_only, mixed, decode_only):
    model = cost(**{name: 2.0})
    assert model.forward_s(5, 35, 0, 0) == 2 * prefill_only
    assert model.forward_s(5, 35, 3, 70) == 2 * mixed
    assert model.forward_s(0, 0, 3, 70) == 2 * decode_only


@pytest.mark.parametrize("kind", ["load", "store", "demote", "copy"])
def test_a_transfer_pays_its_latency_and_bytes_and_nothing_else(kind):
    model = cost(**{f"{kind}_latency_s": 3.0, f"{kind}_s_per_byte": 0.5, "step_s": 100.0})
    assert model.transfer_s(kind, 8) == 7.0
    assert all(model.transfer_s(other, 8) == 0 for other in {"load", "store", "demote", "copy"} - {kind})


batches = {
    "sequences": st.integers(1, 64),
    "context": st.integers(1, 10**6),
    "step_s": st.floats(1e-6, 1e-1),
    "per_token": st.floats(0, 1e-4),
}


@given(steps=st.integers(1, 60), **batches)
def test_many_decode_passes_at_once_take_as_long_as_one_by_one(steps, sequences, context, step_s, per_token):
    model = cost(step_s=step_s, decode_step_s=1e-3, decode_s_per_sequence=1e-4, decode_s_per_context_token=per_token)
    one_by_one = [model.forward_s(0, 0, sequences, context + i * sequences) for i in range(steps)]
    assert math.isclose(model.decode_s(steps, sequences, context), math.fsum(one_by_one), rel_tol=1e-12)


@given(seconds=st.floats(-1, 1e4), **batches)
def test_the_passes_that_fill_a_time_are_the_fewest_that_do(seconds, sequences, context, step_s, per_token):
    model = cost(step_s=step_s, decode_s_per_context_token=per_token)
    steps = model.decode_steps_until(seconds, sequences, context)
    slack = 1e-9 * max(seconds, 0)
    assert steps >= 1
    assert model.decode_s(steps, sequences, context) >= seconds - slack
    assert steps == 1 or model.decode_s(steps - 1, sequences, context) < seconds + slack


def test_a_factor_applies_to_every_constant():
    model = CostModel(**{name: float(i) for i, name in enumerate(NAMES)})
    assert dataclasses.astuple(model.scaled(3)) == tuple(3 * x for x in dataclasses.astuple(model))
    for factor in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="factor"):
            model.scaled(factor)


@pytest.mark.parametrize("value", [-1e-9, 1e6 + 1, math.inf, math.nan, "1", True, None])
def test_a_constant_that_is_no_time_is_refused_by_name(value):
    with pytest.raises(ValueError, match="prefill_s_per_token"):
        FREE.replaced({"prefill_s_per_token": value})


def test_the_largest_constants_and_loads_give_finite_times():
    largest = CostModel(**dict.fromkeys(NAMES, 1e6))
    assert math.isfinite(largest.forward_s(10**9, 10**18, 10**6, 10**15) + largest.decode_s(10**9, 10**6, 10**15))
    assert largest.decode_steps_until(1e30, 10**6, 10**15) >= 1
    with pytest.raises(ValueError, match="step_s must be from 0 to 1000000 s"):
        largest.scaled(2)


def test_an_unknown_constant_is_refused_and_the_known_ones_named():
    with pytest.raises(ValueError, match=r"'prefill'.*prefill_s_per_token"):
        FREE.replaced({"prefill": 1.0})


def test_costs_come_from_names_and_files_the_last_one_winning(tmp_path):
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({"step_s": 1.0, "load_latency_s": 2}))
    values = parse_costs(["step_s=9", str(file), "load_latency_s=3e-3"])
    assert values == {"step_s": 1.0, "load_latency_s": 0.003}
    assert FREE.replaced(values).load_latency_s == 0.003


@pytest.mark.parametrize("text", ["{", "[1]", "3", '{"step_s":'])
def test_a_file_that_holds_no_costs_is_refused_by_name(tmp_path, text):
    file = tmp_path / "cost.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"cost\.json"):
        read_costs(file)


def test_a_value_that_is_no_number_is_refused_by_name():
    with pytest.raises(ValueError, match=r"step_s.*'fast'"):
        parse_costs(["step_s=fast"])


def test_the_estimates_follow_from_their_derivation():
    model = estimate_cost(MODEL_SIZES["kimi_linear"], 8)
    rate = 8 * 989.4e12 * 0.3
    bandwidth = 8 * 3.35e12 * 0.6
    assert model.step_s == pytest.approx(27 * 150e-6)
    assert model.prefill_s_per_token == pytest.approx(2 * 3e9 / rate)
    assert model.prefill_s_per_pair == pytest.approx(2 * 7 * 32 * (192 + 128) / rate)
    assert model.decode_step_s == pytest.approx(3e9 / bandwidth)
    assert model.decode_s_per_sequence == pytest.approx((3e9 + 2 * 43_417_600) / bandwidth)
    assert model.decode_s_per_context_token == pytest.approx(7 * 576 * 2 / (bandwidth / 8))  # each rank reads all of it
    assert model.load_s_per_byte == pytest.approx(2 / (bandwidth / 8))


def test_kv_heads_are_shared_by_ranks_until_each_has_one():
    sizes = {ranks: MODEL_SIZES["qwen3_next"].kv_bytes_per_token(ranks) for ranks in (1, 2, 8)}
    assert sizes == {1: 24_576, 2: 12_288, 8: 12_288}
    assert MODEL_SIZES["kimi_linear"].kv_bytes_per_token(8) == MODEL_SIZES["kimi_linear"].kv_bytes_per_token(1) == 8064


@pytest.mark.parametrize("family", MODEL_SIZES)
def test_a_second_pass_costs_what_was_published_at_both_windows(family):
    model = estimate_cost(MODEL_SIZES[family], 2)
    assert model.two_pass_s + 16 * model.two_pass_s_per_token == pytest.approx(61.8e-3)
    assert model.two_pass_s + 1024 * model.two_pass_s_per_token == pytest.approx(393.3e-3)


def test_the_sizes_agree_with_the_geometries():
    for geometry in GEOMETRIES.values():
        size = MODEL_SIZES[geometry.family]
        assert size.dense_state_bytes == geometry.dense_bytes()
        assert size.blocks == geometry.num_blocks
        assert size.attention_layers == geometry.num_blocks - geometry.num_layers


def test_estimates_need_a_rank():
    with pytest.raises(ValueError, match="ranks"):
        estimate_cost(MODEL_SIZES["kimi_linear"], 0)
