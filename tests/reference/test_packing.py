"""Packing is copying: all comparisons are ``torch.equal``.

Fault 13: all parts of a checkpoint come back together, the temporal state, its scales and the convolution rows.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dasc.contract import QMAX
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import Layout, PaddedLayout, RaggedLayout
from dasc.reference.int8 import dequantize, quantize
from dasc.reference.packing import PackedState, pack, unpack

FP32 = DtypePolicy()
INT8 = DtypePolicy(quantized="int8")
INT4 = DtypePolicy(quantized="int4")
QUANTIZED = pytest.mark.parametrize("dtypes", [INT8, INT4], ids=["int8", "int4"])


@dataclass(frozen=True)
class PackingCase:
    """Structure of one packing; the tensors come from the seed."""

    kind: str
    L: int
    N: int
    H: int
    ratio: int
    K: int
    V: int
    width: int
    density: tuple[float, ...]  # of each layer, 0 and 1 among them
    dtypes: DtypePolicy
    scheme: str
    spare: int  # slot units beyond the retained, ragged only
    strided: bool
    seed: int

    @property
    def geometry(self) -> StateGeometry:
        blocks = tuple(2 * layer for layer in range(self.L))
        HV = self.H * self.ratio
        return StateGeometry("toy", self.kind, 2 * self.L, blocks, HV, self.H, self.V, self.K, self.width)

    def build(self) -> tuple[Tensor, Tensor, Layout]:
        """``state [L, N, HV, V, K]``, ``conv [L, N, C, width - 1]`` and the layout."""
        gen = torch.Generator().manual_seed(self.seed)
        g = self.geometry
        mask = torch.rand(g.num_layers, g.units_per_layer, generator=gen) < torch.tensor(self.density)[:, None]
        state = torch.randn(self.N, *g.state_shape, generator=gen).to(self.dtypes.temporal).transpose(0, 1)
        conv = torch.randn(self.N, *g.conv_shape, generator=gen).to(self.dtypes.conv).transpose(0, 1)
        if not self.strided:
            state, conv = state.contiguous(), conv.contiguous()
        if self.scheme == "padded":
            return state, conv, PaddedLayout.from_mask(g, mask, self.dtypes)
        width = int(mask.sum()) + self.spare
        return state, conv, RaggedLayout.from_mask(g, mask, self.dtypes, slot_units=width)


@st.composite
def packing_cases(draw, **fixed):
    L = draw(st.integers(1, 3))
    dtypes = st.builds(
        DtypePolicy,
        temporal=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        conv=st.sampled_from([torch.bfloat16, torch.float32]),
        quantized=st.sampled_from([None, "int8", "int4"]),
    )
    options = {
        "kind": st.sampled_from(["gdn", "kda"]),
        "N": st.integers(0, 3),
        "H": st.integers(1, 2),
        "ratio": st.sampled_from([1, 2, 4]),
        "K": st.sampled_from([1, 2, 5]),
        "width": st.sampled_from([1, 2, 4]),
        "density": st.tuples(*[st.sampled_from([0.0, 0.3, 0.8, 1.0])] * L),
        "dtypes": dtypes,
        "scheme": st.sampled_from(["ragged", "padded"]),
        "spare": st.sampled_from([0, 0, 3]),
        "strided": st.booleans(),
        "seed": st.integers(0, 2**31 - 1),
    }
    case = {name: draw(strategy) for name, strategy in options.items() if name not in fixed} | fixed
    if "V" not in case:
        case["V"] = draw(st.sampled_from([2, 4, 6] if case["dtypes"].quantized == "int4" else [1, 3, 4]))
    return PackingCase(L=L, **case)


def state_mask(layout: Layout) -> Tensor:
    """The mask over the dense state, ``[L, 1, HV, 1, K]`` (or 1), written from the axes alone."""
    g = layout.geometry
    return layout.mask.view(g.num_layers, 1, g.num_value_heads, 1, g.units_per_head)


def packed_equal(a: PackedState, b: PackedState) -> bool:
    scales = a.scales is b.scales if a.scales is None or b.scales is None else torch.equal(a.scales, b.scales)
    return torch.equal(a.temporal, b.temporal) and torch.equal(a.conv, b.conv) and scales


@given(packing_cases(dtypes=FP32))
def test_unpack_of_pack_is_mask_times_state_bit_for_bit(case):
    """Faults 13, 25, 26: all parts return, V and K differ, inputs may be strided."""
    state, conv, layout = case.build()
    restored = unpack(pack(state, conv, layout), layout)
    assert torch.equal(restored.temporal, torch.where(state_mask(layout), state, 0.0))
    assert torch.equal(restored.conv, conv)


@given(packing_cases())
def test_shapes_dtypes_and_bytes_are_those_of_the_layout(case):
    """Fault 24: FP32 stays FP32. Appendix B gives the shapes."""
    state, conv, layout = case.build()
    packed = pack(state, conv, layout)
    if case.scheme == "ragged":
        assert packed.temporal.shape == (case.N, *layout.slot_shape)
    else:
        assert packed.temporal.shape == (case.L, case.N, *layout.slot_shape[1:])
    dtype_of = {None: case.dtypes.temporal, "int8": torch.int8, "int4": torch.uint8}
    assert packed.temporal.dtype == dtype_of[case.dtypes.quantized]
    assert packed.conv.dtype == case.dtypes.conv
    assert packed.temporal.nbytes == case.N * layout.temporal_slot_bytes
    assert packed.conv.nbytes == case.N * layout.conv_slot_bytes
    assert (0 if packed.scales is None else packed.scales.nbytes) == case.N * layout.scale_slot_bytes
    assert (packed.scales is None) == (case.dtypes.quantized is None)
    restored = unpack(packed, layout)
    assert restored.temporal.dtype == case.dtypes.temporal
    assert restored.temporal.is_contiguous()


@given(packing_cases(dtypes=FP32))
def test_each_packed_unit_lies_where_the_layout_says(case):
    state, conv, layout = case.build()
    temporal = pack(state, conv, layout).temporal
    g = layout.geometry
    for layer in range(case.L):
        kept = layout.mask[layer].nonzero().flatten().tolist()
        for place, u in enumerate(kept):
            h, k = divmod(u, g.units_per_head)
            expected = state[layer, :, h] if case.kind == "gdn" else state[layer, :, h, :, k]
            if case.scheme == "ragged":
                assert torch.equal(temporal[:, layout.offsets[layer] + place], expected)
            else:
                assert torch.equal(temporal[layer, :, place], expected)
        if case.scheme == "padded":
            assert not temporal[layer, :, len(kept) :].any()
    if case.scheme == "ragged":
        assert not temporal[:, layout.retained_units :].any()


@given(packing_cases(scheme="padded"))
def test_padded_and_ragged_hold_the_same_values(case):
    state, conv, padded = case.build()
    ragged = RaggedLayout.from_mask(padded.geometry, padded.mask, padded.dtypes)
    from_padded = unpack(pack(state, conv, padded), padded)
    from_ragged = unpack(pack(state, conv, ragged), ragged)
    assert torch.equal(from_padded.temporal, from_ragged.temporal)
    assert torch.equal(from_padded.conv, from_ragged.conv)


@given(packing_cases())
def test_omitted_units_are_never_read(case):
    state, conv, layout = case.build()
    poisoned = torch.where(state_mask(layout), state, torch.nan)
    packed = pack(poisoned, conv, layout)
    assert packed_equal(packed, pack(state, conv, layout))
    assert not unpack(packed, layout).temporal.isnan().any()


@given(packing_cases(dtypes=FP32))
def test_padding_is_never_read(case):
    state, conv, layout = case.build()
    packed = pack(state, conv, layout)
    everything = torch.full_like(packed.temporal, torch.nan)
    if case.scheme == "ragged":
        everything[:, : layout.retained_units] = packed.temporal[:, : layout.retained_units]
    else:
        for layer, count in enumerate(layout.counts):
            everything[layer, :, :count] = packed.temporal[layer, :, :count]
    poisoned = packed._replace(temporal=everything)
    assert torch.equal(unpack(poisoned, layout).temporal, unpack(packed, layout).temporal)


@given(packing_cases())
def test_with_a_base_only_the_retained_units_change(case):
    """WR: the refreshed local units stay, the stored global ones are put over them."""
    state, conv, layout = case.build()
    packed = pack(state, conv, layout)
    base = torch.flip(state, dims=(0, 2)) + 1
    restored = unpack(packed, layout, base=base)
    assert torch.equal(restored.temporal, torch.where(state_mask(layout), unpack(packed, layout).temporal, base))


@given(packing_cases())
def test_no_argument_is_written_to_or_shared_with_a_result(case):
    state, conv, layout = case.build()
    base = state + 1
    packed = pack(state, conv, layout)
    arguments = [state, conv, layout.mask, base, *(part for part in packed if part is not None)]
    before = [x.clone() for x in arguments]
    again = pack(state, conv, layout)
    zero_filled, refreshed = unpack(packed, layout), unpack(packed, layout, base=base)
    for result in (*again, *zero_filled, *refreshed):
        if result is not None:
            result.fill_(7)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))


@given(st.one_of(packing_cases(dtypes=INT8), packing_cases(dtypes=INT4)))
def test_selecting_then_quantising_equals_quantising_then_selecting(case):
    """Scales are per (layer, head, k), so dropping units changes none (appendix E.2)."""
    state, conv, layout = case.build()
    restored = unpack(pack(state, conv, layout), layout)
    whole = dequantize(*quantize(state, v_dim=-2, qmax=QMAX[case.dtypes.quantized]), v_dim=-2)
    assert torch.equal(restored.temporal, torch.where(state_mask(layout), whole, 0.0))


@given(packing_cases(dtypes=INT4))
def test_int4_is_within_half_a_step_and_packs_again_to_the_same_bytes(case):
    state, conv, layout = case.build()
    packed = pack(state, conv, layout)
    restored = unpack(packed, layout).temporal
    step = state.abs().amax(dim=-2, keepdim=True).clamp(min=1e-8) / 7
    error = (restored - torch.where(state_mask(layout), state, 0.0)).abs()
    assert (error <= step / 2 * (1 + 1e-6)).all()
    assert torch.equal(pack(restored, conv, layout).temporal, packed.temporal)


def test_a_byte_of_int4_holds_values_half_of_v_apart():
    """GDN and KDA: the first half of V in the low halves of bytes."""
    codes = torch.tensor(
        [[-7, 0, 3], [1, 7, -2], [5, -1, -7], [7, -7, 0]]
    ).float()  # [V, K], largest code in each column
    codes[0, 1], codes[1, 2] = 0, 7
    expected = (codes[:2].int() % 16 + codes[2:].int() % 16 * 16).to(torch.uint8)
    for kind, shape in (("gdn", (1, 1, 2, 3)), ("kda", (1, 3, 2))):
        case = replace(KDA, kind=kind, L=1, N=1, H=1, K=3, V=4, density=(1.0,), dtypes=INT4)
        state, conv, layout = case.build()
        packed = pack(codes.expand_as(state).contiguous(), conv, layout)
        assert packed.scales.unique().tolist() == [1.0]
        assert torch.equal(packed.temporal, (expected if kind == "gdn" else expected.T).reshape(shape))


def test_int4_of_an_odd_number_of_values_is_refused():
    for kind in ("gdn", "kda"):
        with pytest.raises(ValueError, match="head_v_dim must be even for INT4, got 3"):
            replace(KDA, kind=kind, dtypes=INT4).build()


@given(packing_cases(N=3))
def test_a_batch_packs_as_its_members_do_alone(case):
    state, conv, layout = case.build()
    together = unpack(pack(state, conv, layout), layout)
    for n in range(case.N):
        alone = unpack(pack(state[:, n : n + 1], conv[:, n : n + 1], layout), layout)
        assert torch.equal(together.temporal[:, n : n + 1], alone.temporal)
        assert torch.equal(together.conv[:, n : n + 1], alone.conv)


KDA = PackingCase("kda", 2, 2, 2, 1, 5, 3, 4, (0.4, 0.8), FP32, "ragged", 0, False, seed=1)


@pytest.mark.parametrize("case", [KDA, replace(KDA, scheme="padded"), replace(KDA, kind="gdn")])
def test_wrong_dense_states_are_refused(case):
    state, conv, layout = case.build()
    for wrong in (state[0], state.transpose(-1, -2), state.double(), state.bfloat16(), state[:1], state[:, :, :1]):
        with pytest.raises(ValueError, match="state must"):
            pack(wrong, conv, layout)
    for wrong in (conv[0], conv.float(), conv[:, :1], conv[..., :-1]):
        with pytest.raises(ValueError, match="conv must"):
            pack(state, wrong, layout)


@pytest.mark.parametrize("case", [KDA, replace(KDA, scheme="padded"), replace(KDA, kind="gdn", V=4, dtypes=INT4)])
def test_wrong_packed_states_and_bases_are_refused(case):
    state, conv, layout = case.build()
    packed = pack(state, conv, layout)
    for name in ("temporal", "conv"):
        part = getattr(packed, name)
        for wrong in (part[..., :-1], part.double(), part[:, :1], part[0]):
            with pytest.raises(ValueError, match=r"packed\."):
                unpack(packed._replace(**{name: wrong}), layout)
    with pytest.raises(ValueError, match=r"packed\.scales"):
        unpack(packed._replace(scales=conv if packed.scales is None else None), layout)
    if packed.scales is not None:
        for wrong in (packed.scales.double(), packed.scales[..., :-1]):
            with pytest.raises(ValueError, match=r"packed\.scales"):
                unpack(packed._replace(scales=wrong), layout)
    for wrong in (state.double(), state[:, :1], state.transpose(-1, -2)):
        with pytest.raises(ValueError, match="base must"):
            unpack(packed, layout, base=wrong)


def test_slot_narrower_than_the_retained_units_is_refused():
    """A storage-balanced slot: the transfer between ranks fills it."""
    state, conv, layout = KDA.build()
    narrow = RaggedLayout.from_mask(layout.geometry, layout.mask, FP32, slot_units=layout.retained_units - 1)
    with pytest.raises(ValueError, match="storage-balanced"):
        pack(state, conv, narrow)
    packed = pack(state, conv, layout)
    with pytest.raises(ValueError, match="storage-balanced"):
        unpack(packed._replace(temporal=packed.temporal[:, :-1]), narrow)


@QUANTIZED
def test_a_broken_state_is_refused_only_where_it_is_kept(dtypes):
    state, conv, layout = replace(KDA, V=4, dtypes=dtypes).build()
    kept = state_mask(layout).expand_as(state)
    for broken, refused in ((kept, True), (~kept, False)):
        poisoned = state.clone()
        poisoned[tuple(broken.nonzero()[0])] = torch.inf
        if refused:
            with pytest.raises(ValueError, match="finite"):
                pack(poisoned, conv, layout)
        else:
            pack(poisoned, conv, layout)
