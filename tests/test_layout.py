"""Where retained units lie in a slot, and what a slot takes, on one rank and on several."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.geometry import DtypePolicy, Quantization, StateGeometry
from dasc.layout import PaddedLayout, RaggedLayout, check_mask, rank_layouts, shard_mask
from dasc.placement import Placement
from dasc.reference.placement import place
from tests.masks import KIMI_LINEAR, KIMI_LINEAR_COUNTS, gdn, kda, kimi_linear_mask, seeded_mask

INT8 = DtypePolicy(quantized="int8")
INT4 = DtypePolicy(quantized="int4")


def geometries() -> st.SearchStrategy[StateGeometry]:
    small = st.integers(1, 3)
    return st.one_of(
        st.builds(gdn, layers=small, key_heads=st.sampled_from([2, 4]), bundle=st.sampled_from([1, 2, 4])),
        st.builds(kda, layers=small, heads=st.sampled_from([2, 4]), k_dim=st.sampled_from([1, 5])),
    )


@given(geometries(), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.integers(0, 2**31 - 1))
def test_ragged_offsets_cut_the_packed_units_into_layers(geometry: StateGeometry, kept: float, seed: int):
    mask = seeded_mask(geometry, seed, kept)
    layout = RaggedLayout.from_mask(geometry, mask)
    assert layout.offsets[0] == 0
    assert layout.offsets[-1] == layout.retained_units == layout.slot_units == int(mask.sum())
    for layer in range(geometry.num_layers):
        part = layout.unit_index[layout.offsets[layer] : layout.offsets[layer + 1]]
        units = [u for u in range(geometry.units_per_layer) if mask[layer, u]]
        assert part.tolist() == [layer * geometry.units_per_layer + u for u in units]
        assert layout.counts[layer] == len(units)
    assert layout.slot_shape == (int(mask.sum()), *geometry.unit_shape)


@given(geometries(), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.integers(0, 2**31 - 1))
def test_padded_layout_reserves_the_widest_layer_everywhere(geometry: StateGeometry, kept: float, seed: int):
    mask = seeded_mask(geometry, seed, kept)
    layout = PaddedLayout.from_mask(geometry, mask)
    widest = max(int(row.sum()) for row in mask)
    assert layout.max_count == widest
    assert layout.slot_units == geometry.num_layers * widest
    assert layout.retained_units == int(mask.sum())
    assert layout.slot_shape == (geometry.num_layers, widest, *geometry.unit_shape)


def test_an_empty_layer_has_no_units_and_no_width():
    geometry = kda(layers=3, heads=1, k_dim=2)
    mask = torch.tensor([[1, 0], [0, 0], [1, 1]], dtype=torch.bool)
    layout = RaggedLayout.from_mask(geometry, mask)
    assert layout.counts == (1, 0, 2)
    assert layout.offsets == (0, 1, 1, 3)
    assert layout.unit_index.tolist() == [0, 4, 5]


def test_slot_bytes_of_gdn_heads():
    # 3 retained heads of V x K = 3 x 5; conv: (2 * (2 heads * 5) + 4 heads * 3) channels, 3 rows, 2 layers
    geometry = gdn(layers=2, key_heads=2, bundle=2, v_dim=3, k_dim=5)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    conv_bytes = 2 * 32 * 3 * 2
    native = RaggedLayout.from_mask(geometry, mask)
    assert (native.temporal_slot_bytes, native.scale_slot_bytes) == (3 * 15 * 4, 0)
    assert native.conv_slot_bytes == conv_bytes
    assert native.slot_bytes == 180 + conv_bytes
    int8 = RaggedLayout.from_mask(geometry, mask, INT8)
    assert (int8.temporal_slot_bytes, int8.scale_slot_bytes) == (3 * 15, 3 * 5 * 4)  # a scale for each (l, h, k)
    assert int8.slot_bytes == 45 + 60 + conv_bytes
    padded = PaddedLayout.from_mask(geometry, mask, INT8)  # two heads in each of two layers
    assert (padded.temporal_slot_bytes, padded.scale_slot_bytes) == (4 * 15, 4 * 5 * 4)
    assert padded.slot_bytes == 60 + 80 + conv_bytes


def test_slot_bytes_of_kda_channels():
    # 3 retained channels of V = 3; conv: (2 * (2 heads * 5) + 2 heads * 3) channels, 3 rows, 1 layer
    geometry = kda(layers=1, heads=2, v_dim=3, k_dim=5)
    mask = torch.tensor([[1, 0, 0, 0, 1, 0, 0, 1, 0, 0]], dtype=torch.bool)
    conv_bytes = 26 * 3 * 2
    assert RaggedLayout.from_mask(geometry, mask).slot_bytes == 3 * 3 * 4 + conv_bytes
    assert RaggedLayout.from_mask(geometry, mask, INT8).slot_bytes == 3 * 3 + 3 * 4 + conv_bytes
    half = DtypePolicy(temporal=torch.bfloat16, conv=torch.float32)
    assert RaggedLayout.from_mask(geometry, mask, half).slot_bytes == 3 * 3 * 2 + 2 * conv_bytes


def test_slot_bytes_and_shapes_in_int4():
    # two codes a byte: GDN heads of V x K = 4 x 5 and KDA channels of V = 4, a scale for each (l, h, k)
    heads, channels = gdn(layers=2, key_heads=2, bundle=2, v_dim=4, k_dim=5), kda(layers=2, heads=2, v_dim=4, k_dim=5)
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    ragged, padded = (layout_type.from_mask(heads, mask, INT4) for layout_type in (RaggedLayout, PaddedLayout))
    assert (ragged.slot_shape, ragged.temporal_slot_bytes, ragged.scale_slot_bytes) == ((3, 2, 5), 30, 60)
    assert (padded.slot_shape, padded.temporal_slot_bytes, padded.scale_slot_bytes) == ((2, 2, 2, 5), 40, 80)
    ragged = RaggedLayout.from_mask(channels, seeded_mask(channels, 0, kept=1.0), INT4)
    assert (ragged.slot_shape, ragged.temporal_slot_bytes, ragged.scale_slot_bytes) == ((20, 2), 40, 80)
    for layout_type in (RaggedLayout, PaddedLayout):
        with pytest.raises(ValueError, match="head_v_dim must be even for INT4, got 3"):
            layout_type.from_mask(gdn(), seeded_mask(gdn(), 0), INT4)


@given(geometries(), st.sampled_from([None, "int8"]))
def test_all_kept_takes_the_dense_bytes_and_none_kept_the_convolution_alone(
    geometry: StateGeometry, quantized: Quantization | None
):
    dtypes = DtypePolicy(quantized=quantized)
    for layout_type in (RaggedLayout, PaddedLayout):
        none = layout_type.from_mask(geometry, seeded_mask(geometry, 0, kept=0.0), dtypes)
        assert none.slot_bytes == geometry.conv_bytes(dtypes)
        everything = layout_type.from_mask(geometry, seeded_mask(geometry, 0, kept=1.0), dtypes)
        assert everything.slot_units == geometry.num_units
        if not quantized:
            assert everything.slot_bytes == geometry.dense_bytes(dtypes)


def test_kimi_linear_slots_take_the_published_bytes():
    mask = kimi_linear_mask()
    off = rank_layouts(KIMI_LINEAR, mask, 2)
    assert tuple(layout.counts for layout in off) == KIMI_LINEAR_COUNTS
    assert [layout.temporal_slot_bytes for layout in off] == [7_570_944, 7_476_224]
    assert [layout.conv_slot_bytes for layout in off] == [737_280, 737_280]
    storage = rank_layouts(KIMI_LINEAR, mask, 2, placement=place(KIMI_LINEAR, mask, 2, "storage"))
    assert [layout.slot_units for layout in storage] == [14_695, 14_695]
    (padded,) = rank_layouts(KIMI_LINEAR, mask, kind="padded")
    assert padded.max_count == 2287


@given(geometries(), st.sampled_from([1, 2]), st.integers(0, 2**31 - 1))
def test_off_keeps_each_ranks_own_width_and_balancing_gives_all_the_same(
    geometry: StateGeometry, ranks: int, seed: int
):
    mask = seeded_mask(geometry, seed)
    rows = mask.view(geometry.num_layers, ranks, -1)
    for placement in (None, place(geometry, mask, ranks, "off")):
        layouts = rank_layouts(geometry, mask, ranks, placement=placement)
        assert [layout.slot_units for layout in layouts] == rows.sum(dim=(0, 2)).tolist()
        assert [layout.counts for layout in layouts] == [tuple(rows[:, r].sum(dim=1).tolist()) for r in range(ranks)]
    for mode in ("storage", "hybrid"):
        placement = place(geometry, mask, ranks, mode)
        layouts = rank_layouts(geometry, mask, ranks, placement=placement)
        assert {layout.slot_units for layout in layouts} == {-(-int(mask.sum()) // ranks)}
        assert tuple(layout.retained_units for layout in layouts) == placement.local_units
        assert all(layout.geometry == geometry.shard(ranks) for layout in layouts)


@given(geometries(), st.sampled_from([1, 2]), st.integers(0, 2**31 - 1))
def test_the_mask_follows_the_heads_to_their_ranks(geometry: StateGeometry, ranks: int, seed: int):
    mask = seeded_mask(geometry, seed)
    placement = place(geometry, mask, ranks, "hybrid")
    units, heads = geometry.units_per_head, geometry.num_value_heads // ranks
    for rank, part in enumerate(shard_mask(geometry, mask, ranks, placement.head_order)):
        assert part.shape == (geometry.num_layers, heads * units)
        for layer in range(geometry.num_layers):
            for i, head in enumerate(placement.rank_heads(rank)[layer].tolist()):
                mine = part[layer, i * units : (i + 1) * units]
                assert torch.equal(mine, mask[layer, head * units : (head + 1) * units])


def test_a_strided_mask_gives_the_same_layout():
    """Fault 26."""
    geometry = kda(layers=2, heads=2, k_dim=3)
    mask = seeded_mask(geometry, 3)
    strided = mask.T.contiguous().T
    for placement in (None, place(geometry, strided, 2, "hybrid")):
        same = rank_layouts(geometry, mask, 2, placement=placement)
        other = rank_layouts(geometry, strided, 2, placement=placement)
        assert all(torch.equal(a.unit_index, b.unit_index) for a, b in zip(same, other, strict=True))


def test_a_layout_keeps_its_own_mask():
    geometry = kda()
    mask = seeded_mask(geometry, 0)
    for layout_type in (RaggedLayout, PaddedLayout):
        layout = layout_type.from_mask(geometry, mask)
        kept = layout.mask.clone()
        mask.logical_not_()
        assert torch.equal(layout.mask, kept)


def test_wrong_masks_are_refused():
    geometry = gdn(layers=2, key_heads=2, bundle=2)
    for wrong in (torch.ones(2, 4), torch.ones(2, 5, dtype=torch.bool), torch.ones(8, dtype=torch.bool), [[True]]):
        with pytest.raises(ValueError, match=r"mask must be torch.bool \(2, 4\)"):
            check_mask(geometry, wrong)  # type: ignore[arg-type]
        for call in (RaggedLayout.from_mask, PaddedLayout.from_mask, rank_layouts):
            with pytest.raises(ValueError, match="mask must be"):
                call(geometry, wrong)  # type: ignore[operator]


def test_wrong_layout_arguments_are_refused():
    geometry = gdn(layers=2, key_heads=4, bundle=2)
    mask = seeded_mask(geometry, 0)
    with pytest.raises(ValueError, match="slot_units must not be negative, got -1"):
        RaggedLayout.from_mask(geometry, mask, slot_units=-1)
    with pytest.raises(ValueError, match="layout must be 'ragged' or 'padded', got 'flat'"):
        rank_layouts(geometry, mask, kind="flat")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="placement is for 2 ranks, the layout for 4"):
        rank_layouts(geometry, mask, 4, placement=place(geometry, mask, 2))
    with pytest.raises(ValueError, match="needs the ragged layout"):
        rank_layouts(geometry, mask, 2, kind="padded", placement=place(geometry, mask, 2, "storage"))
    assert len(rank_layouts(geometry, mask, 2, kind="padded", placement=place(geometry, mask, 2, "off"))) == 2
    for ranks in (3, 0, 8):
        with pytest.raises(ValueError, match=r"shared equally|positive integer"):
            shard_mask(geometry, mask, ranks)


IDENTITY = torch.arange(4).repeat(2, 1)


@pytest.mark.parametrize(
    ("mode", "order", "message"),
    [
        ("hybrid", IDENTITY[:, [0, 1, 2, 2]], "every head once"),
        ("hybrid", IDENTITY + 1, "every head once"),
        ("hybrid", IDENTITY[:, [0, 2, 1, 3]], "adjacent and ascending"),
        ("hybrid", IDENTITY[:, [1, 0, 2, 3]], "adjacent and ascending"),
        ("hybrid", IDENTITY[:, [1, 2, 3, 0]], "adjacent and ascending"),
        ("hybrid", IDENTITY.int(), "head_order must be torch.int64"),
        ("hybrid", IDENTITY[:1], r"head_order must be torch.int64 \(2, 4\)"),
        ("hybrid", IDENTITY.tolist(), "head_order must be torch.int64"),
        ("storage", IDENTITY[:, [2, 3, 0, 1]], "identity for mode 'storage'"),
        ("off", IDENTITY[:, [2, 3, 0, 1]], "identity for mode 'off'"),
        ("none", IDENTITY, "mode must be one of off, storage, hybrid, got 'none'"),
    ],
)
def test_orders_that_take_bundles_apart_or_move_heads_when_they_must_not_are_refused(mode, order, message):
    geometry = gdn(layers=2, key_heads=2, bundle=2)
    with pytest.raises(ValueError, match=message):
        Placement.from_head_order(geometry, seeded_mask(geometry, 0), 2, mode, order)


def test_placements_compare_by_value_and_know_their_ranks_heads():
    geometry = gdn(layers=2, key_heads=2, bundle=2)
    mask = seeded_mask(geometry, 0)
    placement = place(geometry, mask, 2, "storage")
    assert placement.same_as(place(geometry, mask, 2, "storage"))
    assert not placement.same_as(place(geometry, mask, 2, "off"))
    assert not placement.same_as(place(geometry, mask, 1, "storage"))
    assert placement.rank_heads(1).tolist() == [[2, 3], [2, 3]]
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank must be in"):
            placement.rank_heads(rank)
