"""Published figures of the three models, to the last digit where the public record is exact."""

import pytest
import torch

from dasc.accounting import (
    bottleneck_compression,
    checkpoint_compression,
    quantized_only_compression,
    temporal_compression,
)
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import rank_layouts
from dasc.reference.horizons import layer_fractions, retained_fractions
from dasc.reference.placement import place

KIMI_LINEAR = StateGeometry(
    family="kimi_linear",
    kind="kda",
    num_blocks=27,
    recurrent_layers=(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 16, 17, 18, 20, 21, 22, 24, 25),
    num_value_heads=32,
    num_key_heads=32,
    head_v_dim=128,
    head_k_dim=128,
)
QWEN3_NEXT = StateGeometry(
    family="qwen3_next",
    kind="gdn",
    num_blocks=48,
    recurrent_layers=tuple(block for block in range(48) if block % 4 != 3),
    num_value_heads=32,
    num_key_heads=16,
    head_v_dim=128,
    head_k_dim=128,
)
# Which 69 of the 93 blocks are recurrent does not enter any figure here.
KIMI_K3 = StateGeometry(
    family="kimi_k3",
    kind="kda",
    num_blocks=93,
    recurrent_layers=tuple(range(69)),
    num_value_heads=96,
    num_key_heads=96,
    head_v_dim=128,
    head_k_dim=128,
)

# Kimi-Linear at W_max = 16: retained (head, k) units of each KDA layer, heads 0-15 and heads 16-31.
RANK_0 = (600, 568, 558, 933, 890, 1268, 742, 588, 793, 868, 963, 590, 893, 310, 612, 673, 907, 1058, 568, 405)
RANK_1 = (266, 836, 176, 1096, 870, 1019, 534, 547, 913, 261, 781, 1165, 846, 516, 703, 975, 630, 986, 847, 635)


def kimi_linear_mask() -> torch.Tensor:
    """A mask with the published counts. Where in its rank and layer a unit lies, no figure here depends on."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(20, 2, 2048, dtype=torch.bool)
    for layer, counts in enumerate(zip(RANK_0, RANK_1, strict=True)):
        for rank, count in enumerate(counts):
            mask[layer, rank, torch.randperm(2048, generator=generator)[:count]] = True
    return mask.flatten(1)


# geometry


@pytest.mark.parametrize(
    ("geometry", "units", "temporal_bytes", "conv_bytes", "layers", "bundle"),
    [
        (KIMI_LINEAR, 81_920, 41_943_040, 1_474_560, 20, 1),
        (QWEN3_NEXT, 1_152, 75_497_472, 1_769_472, 36, 2),
        (KIMI_K3, 847_872, 434_110_464, 15_261_696, 69, 1),
    ],
    ids=lambda value: value.family if isinstance(value, StateGeometry) else None,
)
def test_models_have_the_published_units_and_bytes(geometry, units, temporal_bytes, conv_bytes, layers, bundle):
    assert geometry.num_layers == layers
    assert geometry.bundle == bundle
    assert geometry.num_units == units
    assert geometry.temporal_bytes() == temporal_bytes
    assert geometry.conv_bytes() == conv_bytes
    assert geometry.dense_bytes() == temporal_bytes + conv_bytes


# Kimi-Linear at W_max = 16


def test_published_counts_add_up():
    assert sum(RANK_0) == 14_787
    assert sum(RANK_1) == 14_602
    mask = kimi_linear_mask()
    assert int(mask.sum()) == 29_389
    assert mask.numel() == 81_920
    assert mask.double().mean().item() == pytest.approx(0.35875, abs=5e-6)


def test_temporal_slot_bytes_of_each_rank():
    ranks = rank_layouts(KIMI_LINEAR, kimi_linear_mask(), 2)
    assert [layout.counts for layout in ranks] == [RANK_0, RANK_1]
    assert [layout.temporal_slot_bytes for layout in ranks] == [7_570_944, 7_476_224]
    assert KIMI_LINEAR.shard(2).temporal_bytes() == 20_971_520


def test_ragged_layout_gains_over_padded():
    mask = kimi_linear_mask()
    (ragged,), (padded,) = (rank_layouts(KIMI_LINEAR, mask, kind=kind) for kind in ("ragged", "padded"))
    assert padded.max_count == 2_287
    c_ragged, c_padded = (temporal_compression(KIMI_LINEAR, [layout]) for layout in (ragged, padded))
    assert c_ragged == pytest.approx(2.787, abs=5e-4)
    assert c_padded == pytest.approx(1.791, abs=5e-4)
    assert c_ragged / c_padded == pytest.approx(1.556, abs=5e-4)


def test_layer_fractions_of_figures_6_and_7():
    layers = layer_fractions(retained_fractions(kimi_linear_mask(), KIMI_LINEAR))
    assert layers.lowest == pytest.approx(0.179, abs=5e-4)
    assert layers.highest == pytest.approx(0.558, abs=5e-4)
    assert layers.mean.quantile(0.5).item() == pytest.approx(0.360, abs=5e-4)
    assert layers.mean[KIMI_LINEAR.recurrent_layers.index(21)].item() == pytest.approx(0.375, abs=5e-4)


def test_checkpoint_compression_of_the_whole_model():
    layouts = rank_layouts(KIMI_LINEAR, kimi_linear_mask())
    assert checkpoint_compression(KIMI_LINEAR, layouts) == pytest.approx(2.628, abs=5e-4)


def test_bottleneck_compression_without_and_with_storage_balancing():
    mask = kimi_linear_mask()
    off = rank_layouts(KIMI_LINEAR, mask, 2, placement=place(KIMI_LINEAR, mask, 2, "off"))
    assert bottleneck_compression(off) == pytest.approx(2.613, abs=5e-4)
    placement = place(KIMI_LINEAR, mask, 2, "storage")
    assert placement.slot_units == 14_695
    assert placement.stored_units == (14_695, 14_694)
    assert placement.moved_units == 92
    balanced = rank_layouts(KIMI_LINEAR, mask, 2, placement=placement)
    assert bottleneck_compression(balanced) == pytest.approx(2.628, abs=5e-4)


# INT8 (table 3, appendix E)


def test_int8_with_selection():
    int8 = DtypePolicy(quantized="int8")
    layouts = rank_layouts(KIMI_LINEAR, kimi_linear_mask(), dtypes=int8)
    assert checkpoint_compression(KIMI_LINEAR, layouts) == pytest.approx(8.11, abs=5e-3)


def test_int8_alone_is_3_88_of_the_temporal_payload_and_3_53_of_the_checkpoint():
    """Appendix E.1 gives 3.88 for the whole checkpoint; its own geometry gives that for the temporal payload alone."""
    int8 = DtypePolicy(quantized="int8")
    everything = torch.ones(20, 4096, dtype=torch.bool)
    layouts = rank_layouts(KIMI_LINEAR, everything, dtypes=int8)
    for temporal_only in (
        quantized_only_compression(KIMI_LINEAR, int8, with_conv=False),
        temporal_compression(KIMI_LINEAR, layouts),
    ):
        assert temporal_only == pytest.approx(3.88, abs=5e-3)
    for whole in (
        quantized_only_compression(KIMI_LINEAR, int8, with_conv=True),
        checkpoint_compression(KIMI_LINEAR, layouts),
    ):
        assert whole == pytest.approx(3.53, abs=5e-3)
    assert temporal_compression(KIMI_LINEAR, layouts, scales=False) == 4.0


# capacities (figure 4)


def test_limit_of_kimi_linear_is_its_convolution_rows():
    nothing = torch.zeros(20, 4096, dtype=torch.bool)
    layouts = rank_layouts(KIMI_LINEAR, nothing)
    assert layouts[0].slot_bytes == KIMI_LINEAR.conv_bytes()
    assert checkpoint_compression(KIMI_LINEAR, layouts) == pytest.approx(29.4, abs=0.05)


@pytest.mark.parametrize(
    ("capacity", "fraction", "tolerance"),
    [(2.64, 0.357, 6e-4), (7.06, 0.112, 6e-4), (14.72, 0.035, 6e-4), (28.24, 0.0015, 6e-5)],
)
def test_published_capacity_implies_its_retained_fraction(capacity, fraction, tolerance):
    stored = KIMI_LINEAR.dense_bytes() / capacity - KIMI_LINEAR.conv_bytes()
    implied = stored / KIMI_LINEAR.temporal_bytes()
    assert implied == pytest.approx(fraction, abs=tolerance)
    mask = torch.zeros(81_920, dtype=torch.bool)
    mask[: round(implied * 81_920)] = True
    layouts = rank_layouts(KIMI_LINEAR, mask.view(20, 4096))
    assert checkpoint_compression(KIMI_LINEAR, layouts) == pytest.approx(capacity, abs=5e-3)
