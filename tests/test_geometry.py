from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.geometry import DtypePolicy, StateGeometry, dtype_name

# 2 of 3 blocks recurrent, 4 value heads on 2 key heads, V = 3, K = 5, 2 convolution rows
GDN = StateGeometry("toy", "gdn", 3, (0, 2), 4, 2, head_v_dim=3, head_k_dim=5, conv_width=3)
KDA = replace(GDN, kind="kda")


@st.composite
def geometries(draw):
    H = draw(st.integers(1, 6))
    blocks = draw(st.integers(1, 5))
    layers = draw(st.sets(st.integers(0, blocks - 1), min_size=1))
    return StateGeometry(
        "toy",
        draw(st.sampled_from(["gdn", "kda"])),
        blocks,
        tuple(sorted(layers)),
        H * draw(st.sampled_from([1, 2, 4])),
        H,
        head_v_dim=draw(st.integers(1, 8)),
        head_k_dim=draw(st.integers(1, 8)),
        conv_width=draw(st.integers(1, 4)),
    )


def test_gdn_counts_by_hand():
    assert GDN.num_layers == 2
    assert GDN.bundle == 2
    assert GDN.units_per_head == 1
    assert GDN.units_per_layer == 4
    assert GDN.num_units == 8
    assert GDN.unit_shape == (3, 5)
    assert GDN.unit_elements == 15
    assert GDN.scales_per_unit == 5
    assert GDN.state_shape == (2, 4, 3, 5)
    assert GDN.conv_segments == (10, 10, 12)
    assert GDN.conv_shape == (2, 32, 2)


def test_kda_counts_by_hand():
    assert KDA.units_per_head == 5
    assert KDA.units_per_layer == 20
    assert KDA.num_units == 40
    assert KDA.unit_shape == (3,)
    assert KDA.unit_elements == 3
    assert KDA.scales_per_unit == 1
    assert KDA.state_shape == GDN.state_shape


@pytest.mark.parametrize("geometry", [GDN, KDA])
def test_bytes_by_hand(geometry):
    assert geometry.temporal_bytes() == 2 * 4 * 3 * 5 * 4
    assert geometry.conv_bytes() == 2 * 32 * 2 * 2
    assert geometry.dense_bytes() == 480 + 256
    other = DtypePolicy(temporal=torch.bfloat16, conv=torch.float32)
    assert geometry.temporal_bytes(other) == 240
    assert geometry.conv_bytes(other) == 512
    assert geometry.temporal_bytes(DtypePolicy(quantized="int8")) == 480  # the dense state is never quantised


@given(geometries())
def test_units_tile_the_state(geometry):
    elements = torch.Size(geometry.state_shape).numel()
    assert geometry.num_units * geometry.unit_elements == elements
    assert torch.Size(geometry.unit_shape).numel() == geometry.unit_elements
    scales = geometry.num_layers * geometry.num_value_heads * geometry.head_k_dim
    assert geometry.num_units * geometry.scales_per_unit == scales
    assert geometry.temporal_bytes() == elements * 4
    assert geometry.conv_bytes() == torch.Size(geometry.conv_shape).numel() * 2


@given(geometries(), st.integers(1, 8))
def test_ranks_share_units_and_bytes_equally_or_are_refused(geometry, ranks):
    """Fault 28: never 0 heads on a rank, never an uneven split by accident."""
    if geometry.num_key_heads % ranks:
        with pytest.raises(ValueError, match="cannot be shared equally"):
            geometry.shard(ranks)
        return
    local = geometry.shard(ranks)
    assert local.num_value_heads >= 1
    assert local.bundle == geometry.bundle
    assert local.num_units * ranks == geometry.num_units
    assert local.dense_bytes() * ranks == geometry.dense_bytes()
    assert tuple(segment * ranks for segment in local.conv_segments) == geometry.conv_segments


@pytest.mark.parametrize(("heads", "ranks"), [(2, 4), (16, 3)])
def test_heads_that_ranks_cannot_share_are_named(heads, ranks):
    """Fault 28."""
    geometry = replace(GDN, num_value_heads=heads, num_key_heads=heads)
    with pytest.raises(ValueError, match=f"{heads} key heads .* by {ranks} ranks"):
        geometry.shard(ranks)


@pytest.mark.parametrize("ranks", [0, -1, 1.0, True])
def test_degree_that_is_not_a_positive_integer_is_refused(ranks):
    with pytest.raises(ValueError, match="tensor-parallel degree"):
        GDN.check_ranks(ranks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mamba"}, "kind must be"),
        ({"num_blocks": 0}, "num_blocks must be a positive integer, got 0"),
        ({"head_k_dim": -1}, "head_k_dim must be"),
        ({"head_v_dim": 2.0}, "head_v_dim must be"),
        ({"conv_width": True}, "conv_width must be"),
        ({"num_value_heads": 3}, "multiple of key heads, got 3 and 2"),
        ({"family": None}, "family must be"),
        ({"recurrent_layers": (0, 1.0)}, "must be integers"),
        ({"recurrent_layers": (False, True)}, "must be integers"),
        ({"recurrent_layers": ()}, "no recurrent layers"),
        ({"recurrent_layers": (2, 0)}, "distinct, ascending"),
        ({"recurrent_layers": (0, 0)}, "distinct, ascending"),
        ({"recurrent_layers": (0, 3)}, r"within \[0, 3\)"),
        ({"recurrent_layers": (-1, 0)}, r"within \[0, 3\)"),
    ],
)
def test_wrong_geometry_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(GDN, **changes)


def test_layers_given_as_a_list_make_an_equal_geometry():
    assert replace(GDN, recurrent_layers=[0, 2]) == GDN


@pytest.mark.parametrize("wrong", [torch.int8, "float32", None])
@pytest.mark.parametrize("field", ["temporal", "conv"])
def test_dtypes_that_are_not_floating_point_are_refused(field, wrong):
    with pytest.raises(ValueError, match=f"{field} must be a floating-point torch dtype"):
        DtypePolicy(**{field: wrong})


@pytest.mark.parametrize("wrong", [True, "int2", 8])
def test_another_form_of_codes_is_refused(wrong):
    with pytest.raises(ValueError, match="quantized must be None, 'int8' or 'int4', got"):
        DtypePolicy(quantized=wrong)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_stored_unit_by_hand(kind):
    """V is halved in INT4; scales are one for each k, in the dtype of the state."""
    geometry = replace(GDN, kind=kind, head_v_dim=6)
    k = (5,) if kind == "gdn" else ()
    units = 5 if kind == "gdn" else 1
    for quantized, V, size, scales in ((None, 6, 2, 0), ("int8", 6, 1, 2), ("int4", 3, 1, 2)):
        dtypes = DtypePolicy(torch.bfloat16, quantized=quantized)
        assert geometry.stored_unit_shape(dtypes) == (V, *k)
        assert geometry.stored_unit_bytes(dtypes) == V * units * size
        assert geometry.unit_scale_bytes(dtypes) == units * scales
    with pytest.raises(ValueError, match="head_v_dim must be even for INT4, got 3"):
        replace(geometry, head_v_dim=3).stored_unit_bytes(dtypes)


def test_dense_default_is_fp32_temporal_and_bf16_convolution():
    assert DtypePolicy() == DtypePolicy(torch.float32, torch.bfloat16, quantized=None)
    assert DtypePolicy().stored_temporal == torch.float32
    assert DtypePolicy(quantized="int8").stored_temporal == torch.int8
    assert DtypePolicy(quantized="int4").stored_temporal == torch.uint8
    assert dtype_name(torch.bfloat16) == "bfloat16"
