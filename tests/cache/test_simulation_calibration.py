"""Constants come back from the records they made, and the report says what the records cannot tell."""

import dataclasses
import json

import numpy as np
import pytest

from dasc.cache import CacheConfig
from dasc.cache.records import StepRecord, TransferRecord
from dasc.cache.simulation import (
    MODEL_SIZES,
    Serving,
    calibrate,
    estimate_cost,
    read_records,
    shared_prefix_load,
    simulate,
)
from dasc.cache.simulation.calibration import STEP_COSTS

COST = estimate_cost(MODEL_SIZES["kimi_linear"], 2)


@pytest.fixture(scope="module")
def recorded():
    config = CacheConfig(
        native_slots=24,
        compressed_slots=60,
        kv_pages=1 << 20,
        native_slot_bytes=21_708_800,
        compressed_slot_bytes=8_308_224,
    )
    serving = Serving(server_limit=16, concurrency=16, chunk_tokens=1024, mixed_passes=True)
    return simulate(shared_prefix_load(0), config, COST, serving, record=True)


def test_a_simulated_run_gives_its_own_costs_back(recorded):
    result = calibrate(recorded.steps, recorded.transfers)
    for name in STEP_COSTS:
        assert getattr(result.cost, name) == pytest.approx(getattr(COST, name), rel=1e-5), name
    (step,) = (fit for fit in result.fits if fit.kind == "step")
    assert step.rows == len(recorded.steps)
    assert step.worst_error < 1e-6
    assert not step.undetermined
    kinds = {t.kind for t in recorded.transfers}
    assert {"load", "store", "demote"} <= kinds
    for kind in kinds:
        size = next(t.bytes for t in recorded.transfers if t.kind == kind)
        assert result.cost.transfer_s(kind, size) == pytest.approx(COST.transfer_s(kind, size))


def test_noise_moves_constants_a_little_and_shows_in_the_error(recorded):
    rng = np.random.default_rng(0)
    noisy = [
        dataclasses.replace(s, seconds=s.seconds * f) for s, f in zip(recorded.steps, rng.uniform(0.9, 1.1, 10**5))
    ]
    result = calibrate(noisy)
    for work in ((800, 10**6, 0, 0), (0, 0, 16, 25_000), (500, 10**5, 15, 20_000)):
        assert result.cost.forward_s(*work) == pytest.approx(COST.forward_s(*work), rel=0.06)
    (fit,) = result.fits
    assert 0.03 < fit.mean_error < 0.07
    assert 0.08 < fit.worst_error < 0.13
    assert abs(fit.total_error) < 1e-6


def test_times_with_a_long_tail_still_add_up(recorded):
    rng = np.random.default_rng(0)
    tail = np.exp(rng.normal(0, 1, len(recorded.steps)))
    noisy = [dataclasses.replace(s, seconds=s.seconds * f) for s, f in zip(recorded.steps, tail)]
    result = calibrate(noisy)
    assert abs(result.fits[0].total_error) < 1e-3
    assert result.fits[0].mean_error > 0.5


def test_replayed_tokens_count_as_prefill_tokens():
    steps = [StepRecord(n, 0, 2 * n, 0, 0, 1.0 + 3 * n * 0.5) for n in (1, 5, 9)]
    assert calibrate(steps).cost.prefill_s_per_token == pytest.approx(0.5)


def test_no_constant_is_negative_whatever_the_records_say():
    steps = [StepRecord(n, 0, 0, 0, 0, 10.0 - n) for n in range(1, 9)]  # more tokens, less time
    result = calibrate(steps)
    assert min(dataclasses.astuple(result.cost)) == 0
    assert result.fits[0].worst_error > 0.1


def test_what_records_do_not_show_is_reported_and_zero(recorded):
    prefill_only = calibrate([s for s in recorded.steps if s.decode_sequences == 0])
    shown = {"decode_step_s", "decode_s_per_sequence", "decode_s_per_context_token"}
    assert shown <= set(prefill_only.fits[0].undetermined)
    assert prefill_only.cost.decode_step_s == 0
    assert {"load_latency_s", "two_pass_s", "collective_latency_s"} <= set(prefill_only.unmeasured)
    same_size = calibrate([], [TransferRecord("load", 100, 1.0), TransferRecord("load", 100, 1.2)])
    assert same_size.fits[0].undetermined == ("load_latency_s", "load_s_per_byte")
    assert same_size.determined == {}
    two_sizes = calibrate([], [TransferRecord("load", 100, 1.0), TransferRecord("load", 300, 2.0)])
    assert two_sizes.cost.load_latency_s == pytest.approx(0.5)
    assert two_sizes.cost.load_s_per_byte == pytest.approx(0.005)
    assert two_sizes.fits[0].undetermined == ()
    assert two_sizes.determined == pytest.approx({"load_latency_s": 0.5, "load_s_per_byte": 0.005})
    assert not shown & prefill_only.determined.keys()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_record_without_a_time_is_refused(seconds):
    with pytest.raises(ValueError, match="step record must take a positive, finite time"):
        calibrate([StepRecord(1, 1, 0, 0, 0, seconds)])


def test_no_records_are_refused():
    with pytest.raises(ValueError, match="at least one record"):
        calibrate([], [])


def test_records_are_read_as_written(recorded, tmp_path):
    file = tmp_path / "records.json"
    steps, transfers = recorded.steps[:9], recorded.transfers[:9]
    data = {
        "steps": [dataclasses.asdict(s) for s in steps],
        "transfers": [dataclasses.asdict(t) for t in transfers],
        "x": 1,
    }
    file.write_text(json.dumps(data))
    assert read_records(file) == (steps, transfers)


STEP = {
    "prefill_tokens": 1,
    "prefill_pairs": 1,
    "refresh_tokens": 0,
    "decode_sequences": 0,
    "decode_pairs": 0,
    "seconds": 1,
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "'steps' or 'transfers'"),
        ("{}", "'steps' or 'transfers'"),
        ('{"steps": 3}', "steps must be a list"),
        (json.dumps({"steps": [STEP, {"seconds": 1}]}), r"steps\[1\] must be an object of"),
        (json.dumps({"steps": [STEP | {"prefill_tokens": -1}]}), r"steps\[0\].prefill_tokens"),
        (json.dumps({"steps": [STEP | {"seconds": "1"}]}), r"steps\[0\].seconds"),
        (json.dumps({"steps": [STEP | {"seconds": True}]}), r"steps\[0\].seconds"),
        (json.dumps({"steps": [STEP, STEP | {"seconds": float("inf")}]}), r"steps\[1\].seconds"),
        (json.dumps({"steps": [STEP | {"seconds": float("nan")}]}), r"steps\[0\].seconds"),
        (json.dumps({"steps": [STEP | {"seconds": 1.1e6}]}), r"steps\[0\].seconds"),
        (json.dumps({"steps": [STEP | {"seconds": 5e-324}]}), r"steps\[0\].seconds"),
        (json.dumps({"steps": [STEP | {"decode_pairs": 2**63}]}), r"steps\[0\].decode_pairs"),
        (json.dumps({"steps": [STEP | {"decode_pairs": 10**400}]}), r"steps\[0\].decode_pairs"),
        (json.dumps({"steps": [STEP | {"decode_pairs": 0.5}]}), r"steps\[0\].decode_pairs"),
        (json.dumps({"transfers": [{"kind": "load", "bytes": -1, "seconds": 1}]}), r"transfers\[0\].bytes"),
        (json.dumps({"transfers": [{"kind": "move", "bytes": 1, "seconds": 1}]}), r"transfers\[0\].kind"),
    ],
)
def test_a_broken_file_of_records_is_refused_by_name_and_entry(tmp_path, text, message):
    file = tmp_path / "records.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"records\.json.*{message}"):
        read_records(file)
