"""The published equal-memory figures: slots by two ways of counting, and what is predicted from the Dense rows."""

import pytest

from dasc.eval.published import PUBLISHED, own_slots, predict_published, published_model
from dasc.eval.simulate import ARMS
from dasc.layout import rank_layouts


@pytest.fixture(scope="module")
def predictions():
    return {(p.published.model, p.published.arm): p for p in predict_published(seeds=(0, 1))}


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model} {row.arm}")
def test_published_slots_count_the_temporal_payload_of_both_ranks(row):
    model = published_model(row.model)
    dense = model.geometry.temporal_bytes()
    layout = ARMS[row.arm].layout
    stored = dense
    if layout is not None:
        stored = sum(x.temporal_slot_bytes for x in rank_layouts(model.geometry, model.mask, 2, kind=layout))
    assert 96 * dense // stored == row.slots


def test_our_slots_count_the_fullest_rank_convolution_the_reserved_slot_and_buffers():
    slots = {(row.model, row.arm): own_slots(published_model(row.model), row.arm) for row in PUBLISHED}
    assert slots == {
        ("kimi-linear", "dense"): 96,
        ("kimi-linear", "padded"): 147,
        ("kimi-linear", "ragged"): 245,
        ("qwen3-next", "dense"): 96,
        ("qwen3-next", "padded"): 92,
        ("qwen3-next", "ragged"): 122,
    }


@pytest.mark.parametrize("model", ["kimi-linear", "qwen3-next"])
def test_ragged_hits_more_than_padded_and_padded_no_less_than_dense_and_times_are_the_reverse(predictions, model):
    dense, padded, ragged = (predictions[model, arm] for arm in ("dense", "padded", "ragged"))
    assert ragged.hit_rate > padded.hit_rate >= dense.hit_rate
    assert ragged.own_hit_rate > max(padded.own_hit_rate, dense.own_hit_rate)
    assert ragged.ttft_ms < padded.ttft_ms <= dense.ttft_ms * 1.005
    assert ragged.own_ttft_ms < min(padded.own_ttft_ms, dense.own_ttft_ms)
    # buffers take more of Qwen3-Next's memory than the padded layout saves
    assert (padded.own_hit_rate > dense.own_hit_rate) == (model == "kimi-linear")


def test_only_the_dense_rows_are_fitted(predictions):
    for (model, arm), p in predictions.items():
        assert p.scale == predictions[model, "dense"].scale
        if arm == "dense":
            assert p.ttft_ms == pytest.approx(p.published.ttft_ms)


def test_predictions_come_as_near_as_documented(predictions):
    for key, p in predictions.items():
        assert abs(p.hit_rate - p.published.hit_rate) < 0.10, key
        error = p.ttft_ms / p.published.ttft_ms - 1
        assert abs(error) < (0.65 if key == ("kimi-linear", "ragged") else 0.10), key


def test_other_models_and_no_seeds_are_refused():
    with pytest.raises(ValueError, match="kimi-k3"):
        published_model("kimi-k3")
    with pytest.raises(ValueError, match="seeds"):
        predict_published(seeds=())
