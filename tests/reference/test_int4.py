"""Two codes in a byte."""

import pytest
import torch

from dasc.contract import QMAX
from dasc.reference.int4 import pack_nibbles, unpack_nibbles
from dasc.reference.int8 import dequantize, quantize


def test_every_byte_is_two_codes_and_comes_back():
    packed = torch.arange(256, dtype=torch.uint8)
    codes = unpack_nibbles(packed[:, None], -1)
    assert codes.dtype == torch.int8
    low, high = codes.T
    assert [(low % 16 + high % 16 * 16) & 255 for low, high in codes.tolist()] == list(range(256))
    assert (low.min(), low.max(), high.min(), high.max()) == (-8, 7, -8, 7)
    assert torch.equal(pack_nibbles(codes, -1)[:, 0], packed)


@pytest.mark.parametrize("v_dim", [-1, -2])
def test_halves_of_the_axis_share_bytes(v_dim: int):
    codes = torch.randint(-7, 8, (3, 6, 4), dtype=torch.int8, generator=torch.manual_seed(0))
    packed = pack_nibbles(codes, v_dim)
    first, second = codes.movedim(v_dim, 0).chunk(2)
    for i, row in enumerate(packed.movedim(v_dim, 0)):
        assert torch.equal(row.int(), (first[i].int() & 15) + 16 * (second[i].int() & 15))
    assert torch.equal(unpack_nibbles(packed, v_dim), codes)


@pytest.mark.parametrize("v_dim", [-1, -2])
def test_codes_are_from_minus_7_to_7_and_the_error_is_half_a_step(v_dim: int):
    x = torch.randn(50, 6, 4, generator=torch.manual_seed(0)) * torch.logspace(-6, 6, 50)[:, None, None]
    q, scales = quantize(x, v_dim, qmax=QMAX["int4"])
    assert q.unique().tolist() == list(range(-7, 8))
    step = x.abs().amax(dim=v_dim, keepdim=True) / 7
    assert torch.equal(scales.unsqueeze(v_dim), step)
    assert ((dequantize(q, scales, v_dim) - x).abs() <= step / 2 * (1 + 1e-6)).all()


def test_an_odd_number_of_codes_is_refused():
    with pytest.raises(ValueError, match=r"codes must have an even number of elements in axis -2, got \[3, 2\]"):
        pack_nibbles(torch.zeros(3, 2, dtype=torch.int8), -2)
