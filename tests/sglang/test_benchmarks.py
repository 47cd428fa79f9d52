"""The benchmarks of the plugin compare what they say they compare. The load itself is not played here."""

from pathlib import Path

import pytest
import torch
from sglang.srt.mem_cache.mamba_checkpoint_pool import MambaCheckpointPool

from benchmarks import bench_sglang_load, bench_sglang_overhead
from benchmarks.bench_sglang_load import RUNNING, Budget
from tests.sglang.tiny_models import FAMILIES, write_model


@pytest.fixture(scope="module", params=FAMILIES)
def budget(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Budget:
    return Budget(write_model(request.param, tmp_path_factory.mktemp("budget") / "model"))


def test_the_int8_arm_has_the_bytes_of_the_dense_one_and_room_for_as_many_requests(budget: Budget):
    [arm] = (arm for arm in budget.arms() if arm.name == "int8")
    native, slots = arm.arguments["max_mamba_cache_size"], arm.arguments["int8_mamba_ckpt_size"]
    extra, used = budget.used(arm, {"native_slots": native, "checkpoint_slots": slots})
    assert extra == slots
    assert budget.total - budget.int8_slot < used <= budget.total
    assert native // 3 == RUNNING


def test_a_slot_of_sglangs_int8_pool_is_as_large_as_the_budget_says(budget: Budget):
    shape = budget.geometry
    sizes = MambaCheckpointPool.estimate_mem_usage_bytes(
        num_layers=shape.num_layers,
        num_slots=9,
        num_heads=shape.num_value_heads,
        head_v_dim=shape.head_v_dim,
        head_k_dim=shape.head_k_dim,
        conv_shapes=[shape.conv_shape[1:]],
        conv_dtype=torch.float32,
        temporal_dtype=torch.float32,
    )
    assert sizes["total"] == 10 * budget.int8_slot


def test_handles_of_two_tiers_are_not_taken_for_slots(budget: Budget):
    [arm] = (arm for arm in budget.arms() if arm.name == "nr two-tier")
    extra, used = budget.used(arm, {"native_slots": 6, "checkpoint_slots": 36})
    assert extra == 30
    assert used == 7 * budget.dense_slot + 31 * budget.plan_slot


def test_conversations_are_the_seeds():
    first, again, other = (bench_sglang_load.conversations(seed, 3, 4) for seed in (1, 1, 2))
    assert first == again != other
    assert [len(talk) for talk in first] == [4] * 3


def test_every_arm_is_timed_once_a_round():
    times = bench_sglang_overhead.host_work(2)
    assert {what: {arm: len(seconds) for arm, seconds in arms.items()} for what, arms in times.items()} == {
        what: dict.fromkeys(("dense", "int8", "dasc"), 2) for what in ("hit", "insertion")
    }
    assert bench_sglang_overhead.table("host work", times).row_count == 2


def test_moves_are_of_the_true_size(monkeypatch: pytest.MonkeyPatch):
    from benchmarks.gpu import sglang_pools

    seen = []
    build = sglang_pools.running_states
    monkeypatch.setattr(
        sglang_pools,
        "running_states",
        lambda geometry, *more, **named: seen.append(geometry) or build(geometry, *more, **named),
    )
    times = bench_sglang_overhead.moves("kimi_linear", 1)
    assert [set(arms) for arms in times.values()] == [{"dense", "int8", "dasc"}] * 2
    assert [geometry.dense_bytes() for geometry in seen] == [5_427_200]  # an eighth of 41.41 MiB


def test_the_written_report_can_be_made_in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["bench", "--rounds", "1", "--out", str(tmp_path / "new" / "times.json")])
    bench_sglang_overhead.main()
    assert (tmp_path / "new" / "times.json").exists()
