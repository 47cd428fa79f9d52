"""Arms share one budget of the fullest rank, and models come from names, plans and checkpoints alike."""

import dataclasses

import pytest

from dasc.cache.simulation import Load, Serving, shared_prefix_load
from dasc.eval.simulate import (
    ARMS,
    Memory,
    arm_config,
    default_native_slots,
    divide_memory,
    fullest_layout,
    kv_bytes,
    load_model,
    model_cost,
    run_arms,
    watermark,
)
from dasc.models import read_checkpoint
from dasc.models.synthetic import GEOMETRIES, example_gate, write_checkpoint
from dasc.planner import build_plan

GIB = 1 << 30
SERVING = Serving(server_limit=16, concurrency=16)


@pytest.fixture(scope="module")
def kimi():
    return load_model("kimi-linear")


def slot_bytes(model, arm, ranks) -> int:
    return fullest_layout(model, arm, ranks).slot_bytes


def memory(state_bytes=GIB, ranks=2, **changes) -> Memory:
    return dataclasses.replace(Memory(ranks, state_bytes, 8 * GIB, 8064, native_slots=20), **changes)


def test_slots_are_those_of_the_fullest_rank(kimi):
    temporal, conv = 7_570_944, 737_280  # rank 0 at TP 2, published
    assert slot_bytes(kimi, ARMS["ragged"], 2) == temporal + conv
    assert slot_bytes(kimi, ARMS["padded"], 2) == 20 * 1268 * 128 * 4 + conv
    assert slot_bytes(kimi, ARMS["storage"], 2) == 14_695 * 128 * 4 + conv
    assert slot_bytes(kimi, ARMS["int8"], 2) == 14_787 * (128 + 4) + conv
    assert slot_bytes(kimi, ARMS["int4"], 2) == 14_787 * (64 + 4) + conv
    assert slot_bytes(kimi, ARMS["wr"], 2) == slot_bytes(kimi, ARMS["ragged"], 2)
    assert fullest_layout(kimi, ARMS["dense"], 2) is None


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("two_pass", [False, True])
def test_pools_and_buffers_stay_within_the_budget_and_leave_less_than_a_slot(kimi, arm, two_pass):
    split = divide_memory(kimi, ARMS[arm], memory(), Serving(server_limit=16, two_pass_refresh=two_pass))
    dense = 20_971_520 + 737_280
    slot = 0 if arm == "dense" else slot_bytes(kimi, ARMS[arm], 2)
    buffers = 2 * (dense + slot) if slot else 0  # a pack and a load under way
    if arm == "wr":
        buffers += dense if two_pass else 16 * 20_971_520 // 20  # one state, or a layer of each running request
    used = (split.native_slots + 1) * dense + ((split.compressed_slots + 1) * slot if slot else 0) + buffers
    assert GIB - (slot or dense) < used <= GIB
    assert split.tmp_bytes == buffers
    if arm != "dense":
        assert split.native_slots == 20


def test_the_cache_is_sized_by_the_split(kimi):
    made = shared_prefix_load(0)
    config = arm_config(kimi, "wr", memory(), made, SERVING)
    split = divide_memory(kimi, ARMS["wr"], memory(), SERVING)
    assert (config.native_slots, config.compressed_slots) == (split.native_slots, split.compressed_slots)
    assert config.native_slot_bytes == 20_971_520 + 737_280
    assert config.compressed_slot_bytes == slot_bytes(kimi, ARMS["wr"], 2)
    assert config.kv_pages == 8 * GIB // 8064
    assert config.refresh_window_tokens == 16
    assert arm_config(kimi, "ragged", memory(), made, SERVING).refresh_window_tokens == 0
    blocks = dataclasses.replace(made, tokens_per_id=512)
    assert arm_config(kimi, "ragged", memory(), blocks, SERVING).kv_pages == 8 * GIB // (8064 * 512)


@pytest.mark.parametrize("arm", ARMS)
def test_memory_too_small_says_how_much_it_takes_and_that_much_is_enough(kimi, arm):
    made = shared_prefix_load(0)
    with pytest.raises(ValueError, match=rf"arm {arm}: .* take \d+ on each of 2 ranks") as error:
        arm_config(kimi, arm, memory(1 << 20), made, SERVING)
    needed = int(str(error.value).rpartition("take ")[2].split()[0])
    config = arm_config(kimi, arm, memory(needed), made, SERVING)
    assert config.compressed_slots == (arm != "dense")
    with pytest.raises(ValueError, match="too small"):
        arm_config(kimi, arm, memory(needed - 1), made, SERVING)


def test_kv_too_small_says_how_much_it_takes(kimi):
    blocks = dataclasses.replace(shared_prefix_load(0), tokens_per_id=512)
    with pytest.raises(ValueError, match=f"512 tokens, which take {512 * 8064}, got 8064"):
        arm_config(kimi, "dense", memory(kv_bytes=8064), blocks, SERVING)


def test_nothing_is_served_before_every_arm_is_known_to_fit(kimi):
    heard = []
    cost = model_cost(kimi, 2, {})
    with pytest.raises(ValueError, match="arm padded"):
        run_arms(
            kimi, ["dense", "padded"], shared_prefix_load(0), [memory(400 << 20)], cost, Serving(concurrency=16),
            lambda what, done: heard.append(what),
        )  # fmt: skip
    assert heard == []
    with pytest.raises(ValueError, match=r"arms must be of dense, .* got 'sparse'"):
        run_arms(kimi, ["sparse"], shared_prefix_load(0), [memory()], cost, Serving(concurrency=16))


def test_compressed_arms_hold_more_and_hit_more_in_the_same_memory(kimi):
    made = shared_prefix_load(0)
    budget = memory(97 * 21_708_800)
    results = run_arms(kimi, list(ARMS), made, [budget], model_cost(kimi, 2, {}), SERVING)
    by_arm = {r.arm: r for r in results}
    assert list(by_arm) == list(ARMS)
    assert by_arm["dense"].native_slots == 96
    slots = [by_arm[arm].compressed_slots for arm in ("padded", "ragged", "storage", "int8", "int4")]
    assert slots == sorted(slots)
    hits = [by_arm[arm].token_hit_rate for arm in ("dense", "padded", "ragged", "int8", "int4")]
    assert hits == sorted(hits)
    assert hits[-1] > hits[0] + 0.2
    assert by_arm["ragged"].ttft_mean_s < by_arm["dense"].ttft_mean_s
    assert by_arm["wr"].refresh_tokens > 0 == by_arm["ragged"].refresh_tokens
    for r in results:
        assert r.requests == 184
        assert r.ttft_mean_s <= r.ttft_p95_s
        assert r.ttft_mean_s < r.e2e_mean_s < r.seconds
        assert 0 < r.token_hit_rate < 1
        assert sum(r.moved_bytes.values()) > 0
    assert by_arm["dense"].evictions["dense_lru"] > 0 == by_arm["dense"].demotions


def test_balanced_storage_pays_for_its_collectives_and_only_it(kimi):
    made = shared_prefix_load(0)
    costs = [model_cost(kimi, 2, {"collective_latency_s": s}) for s in (0.0, 0.05)]
    without, dear = (run_arms(kimi, ["ragged", "storage"], made, [memory()], cost, SERVING) for cost in costs)
    assert dear[0].ttft_mean_s == without[0].ttft_mean_s
    assert dear[1].ttft_mean_s > without[1].ttft_mean_s + 0.05


def test_a_name_a_plan_and_a_checkpoint_of_one_model_are_simulated_alike(tmp_path):
    geometry = GEOMETRIES["qwen3-next"]
    folder = write_checkpoint(tmp_path / "model", "qwen3_next", example_gate(geometry), geometry)
    plan_file = tmp_path / "qwen.plan"
    build_plan(read_checkpoint(folder), 64).save(plan_file)
    by_name, by_folder, by_plan = (load_model(str(source)) for source in ("qwen3-next", folder, plan_file))
    for other in (by_folder, by_plan):
        assert other.mask.equal(by_name.mask)
        assert (other.w_max, other.replay_tokens) == (by_name.w_max, by_name.replay_tokens) == (64, 64)
        assert other.geometry == by_name.geometry
    assert load_model("qwen3-next", 512).mask.sum() < by_name.mask.sum()
    assert load_model(str(plan_file), 64).w_max == 64
    with pytest.raises(ValueError, match=r"w_max of the plan .* is 64, got 16"):
        load_model(str(plan_file), 16)


def test_a_family_without_estimates_needs_all_its_numbers(kimi):
    strange = dataclasses.replace(kimi, geometry=dataclasses.replace(kimi.geometry, family="glm5_next"))
    with pytest.raises(ValueError, match="KV bytes of a token must be given for the family glm5_next"):
        kv_bytes(strange, 1)
    with pytest.raises(
        ValueError, match="no estimate of costs for the family glm5_next: also give prefill_s_per_token"
    ):
        model_cost(strange, 1, {"step_s": 1.0})
    everything = dataclasses.asdict(model_cost(kimi, 1, {}))
    assert model_cost(strange, 1, everything) == model_cost(kimi, 1, {})
    assert model_cost(kimi, 1, {"step_s": 7.0}).step_s == 7.0
    assert kv_bytes(kimi, 8) == 8064


@pytest.mark.parametrize(
    ("native", "limit", "kept"), [(20, 16, 4), (40, 32, 8), (16, 16, 0), (8, 16, 0), (1, 1, 0), (9, 1, 8)]
)
def test_native_slots_that_no_running_request_can_take_are_kept_free_but_one_slot_is_always_used(native, limit, kept):
    assert watermark(native, limit) == kept


def test_demotions_start_before_a_request_needs_the_slot(kimi):
    made = shared_prefix_load(0)
    configs = {arm: arm_config(kimi, arm, memory(), made, SERVING) for arm in ARMS}
    assert {arm: config.watermark for arm, config in configs.items()} == {
        arm: 0 if arm == "dense" else 4 for arm in ARMS
    }
    (result,) = run_arms(kimi, ["ragged"], made, [memory()], model_cost(kimi, 2, {}), SERVING)
    assert result.demotions > 0
    assert result.as_dict()["forced_waits"] == 0


def test_ranks_that_cannot_share_the_model_are_refused_without_a_word_on_memory(kimi):
    with pytest.raises(ValueError, match=r"shared equally by 3 ranks$"):
        arm_config(kimi, "dense", memory(ranks=3), shared_prefix_load(0), SERVING)


@pytest.mark.parametrize(("limit", "slots"), [(1, 2), (4, 5), (16, 20), (32, 40)])
def test_native_slots_leave_a_quarter_beyond_the_running_requests(limit, slots):
    assert default_native_slots(limit) == slots


def test_a_load_needs_requests(kimi):
    empty = Load("empty", (), ())
    with pytest.raises(ValueError, match="no requests"):
        run_arms(kimi, ["dense"], empty, [memory()], model_cost(kimi, 2, {}), Serving(concurrency=1))
