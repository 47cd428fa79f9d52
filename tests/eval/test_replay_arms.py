"""Equal memory: what each arm makes of the same bytes."""

import re

import pytest
import torch

from dasc.eval.replay_arms import ARMS, build_engine, prepare_arm
from dasc.eval.served_model import state_dtypes
from dasc.layout import PaddedLayout, RaggedLayout
from dasc.reference import remaining_share, static_horizons
from tests.eval.replay_runs import dense_slot_bytes, tiny_served, tiny_serving


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("name", ARMS)
def test_every_arm_fits_the_same_budget_and_fills_it(kind: str, name: str):
    """Fault 12; pools, staging and scratch, in bytes of the tensors that are there. KV is apart and equal."""
    served = tiny_served(kind)
    serving = tiny_serving(served)
    prepared = prepare_arm(name, 16, served, serving)
    engine = build_engine(prepared, served, serving)
    engine.close()
    storage, split = engine._storage, prepared.split
    used = storage.native_bytes + storage.compressed_bytes + split.tmp_bytes
    least_slot = dense_slot_bytes(served) if prepared.layout is None else prepared.layout.slot_bytes
    assert serving.memory_bytes - least_slot < used <= serving.memory_bytes
    assert used + split.unused_bytes == split.budget_bytes == serving.memory_bytes
    assert (storage.native_slots, storage.compressed_slots) == (split.native_slots, split.compressed_slots)
    assert engine.cache.ledger.kv.pages == engine._kv.rows.shape[1] == 2000
    assert (split.tmp_bytes > 0) == ARMS[name].compressed


def test_arms_differ_in_what_they_are_called_for():
    served = tiny_served()
    serving = tiny_serving(served)
    arms = {name: prepare_arm(name, 16, served, serving) for name in ARMS}
    slots = {name: arm.split.compressed_slots for name, arm in arms.items()}
    assert slots["int4"] > slots["int8"] > slots["nr"] == slots["random"] == slots["compressed-only"] > slots["padded"]
    assert slots["nr"] >= slots["wr"]
    assert slots["dense"] == slots["off"] == 0
    assert [name for name, arm in arms.items() if arm.replay_tokens] == ["wr", "auto"]
    assert arms["wr"].replay_tokens == 16
    assert arms["wr"].split.tmp_bytes - arms["nr"].split.tmp_bytes == 2 * 16 * 16 * 4 * 2  # two requests, one layer
    assert isinstance(arms["nr"].layout, RaggedLayout)
    assert isinstance(arms["padded"].layout, PaddedLayout)
    padded = tiny_serving(served, layout="padded")
    assert isinstance(prepare_arm("wr", 16, served, padded).layout, PaddedLayout)
    engine = build_engine(arms["compressed-only"], served, serving)
    assert engine.cache.config.dense_limit == 0
    engine.close()


def test_auto_replays_what_wr_does_unless_the_prompt_is_long():
    """In the engine, too. The threshold falls with the tolerance, and is that of the weights."""
    served = tiny_served()
    wr = prepare_arm("wr", 16, served, tiny_serving(served))
    thresholds = []
    for tolerance in (0.5, 0.1, 1e-3):
        serving = tiny_serving(served, tolerance=tolerance)
        auto = prepare_arm("auto", 16, served, serving)
        assert (auto.replay_tokens, auto.split) == (wr.replay_tokens, wr.split)
        thresholds.append(auto.refresh_below_tokens)
        horizons = static_horizons(served.checkpoint.gate, served.checkpoint.family.default_gate_input)
        assert remaining_share(horizons, auto.layout.mask, thresholds[-1]) <= tolerance
        engine = build_engine(auto, served, serving)
        engine.close()
        assert engine.cache.config.refresh_window(30, 30 + thresholds[-1]) == 0
        assert engine.cache.config.refresh_window(30, 29 + thresholds[-1]) == 16
    assert 0 < thresholds[0] < thresholds[1] < thresholds[2] <= 16
    assert wr.refresh_below_tokens is None


def test_a_cutoff_below_every_horizon_leaves_nothing_to_refresh():
    served = tiny_served(horizons_tokens=(5.0, 64.0))
    arm = prepare_arm("wr", 4, served, tiny_serving(served))
    assert arm.layout.mask.all()
    assert arm.replay_tokens == 0
    assert arm.split == prepare_arm("nr", 4, served, tiny_serving(served)).split


@pytest.mark.parametrize("name", ARMS)
def test_too_little_memory_is_said_with_how_much_it_takes(name: str):
    served = tiny_served()
    with pytest.raises(
        ValueError, match=f"arm {name}: a budget of {dense_slot_bytes(served)} bytes is too small"
    ) as caught:
        prepare_arm(name, 16, served, tiny_serving(served, dense_slots=1))
    needed = int(re.search(r"take (\d+)$", str(caught.value))[1])
    serving = tiny_serving(served)
    prepare_arm(name, 16, served, type(serving)(needed, 2000, 2, 16))
    with pytest.raises(ValueError, match=f"take {needed}$"):
        prepare_arm(name, 16, served, type(serving)(needed - 1, 2000, 2, 16))


def test_random_masks_keep_as_many_units_of_each_layer_and_change_with_the_seed():
    served = tiny_served()
    serving = tiny_serving(served)
    chosen = prepare_arm("nr", 16, served, serving).layout.mask
    masks = [prepare_arm("random", 16, served, serving, seed=seed).layout.mask for seed in (0, 1, 5)]
    for mask in masks:
        assert torch.equal(mask.sum(dim=1), chosen.sum(dim=1))
        assert not torch.equal(mask, chosen)
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])  # five masks, as in the paper


def test_states_keep_what_the_model_computes():
    """Convolution rows in BF16 would make an FP32 model's answers depend on its chunks."""
    dtypes = state_dtypes(tiny_served().model, quantized="int8")
    assert (dtypes.temporal, dtypes.conv, dtypes.quantized) == (torch.float32, torch.float32, "int8")


def test_unknown_arms_are_refused():
    served = tiny_served()
    with pytest.raises(ValueError, match=r"arms must be of dense, nr, wr.*, got 'warm'"):
        prepare_arm("warm", 16, served, tiny_serving(served))
