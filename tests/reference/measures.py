"""How far two runs of a delta rule are apart, worst (sequence, head) first."""

import torch
from torch import Tensor

from dasc.contract import DeltaRuleOutput
from dasc.reference.chunk import chunk_gdn, chunk_kda
from dasc.reference.recurrent import recurrent_gdn, recurrent_kda

FP32_EPS = torch.finfo(torch.float32).eps


def recurrent_of(channel_gate: bool):
    return recurrent_kda if channel_gate else recurrent_gdn


def chunk_of(channel_gate: bool):
    return chunk_kda if channel_gate else chunk_gdn


def relative_rms(got: Tensor, expected: Tensor, dims: tuple[int, ...]) -> Tensor:
    """RMS of the difference over RMS of the expected, over ``dims``; the rest of the axes stay."""
    got, expected = got.double(), expected.double()
    # values this small are zeros for every purpose, and subnormal ones have no relative precision
    size = expected.square().mean(dims).sqrt() + 1e-250
    return (got - expected).square().mean(dims).sqrt() / size


def errors(got: DeltaRuleOutput, expected: DeltaRuleOutput) -> tuple[Tensor, Tensor]:
    """Relative RMS of the outputs ``[B, HV]`` and of the final states ``[N, HV]``."""
    return relative_rms(got.o, expected.o, (1, 3)), relative_rms(got.final_state, expected.final_state, (2, 3))


def assert_same(got: DeltaRuleOutput, expected: DeltaRuleOutput, tolerance: float = 1e-10) -> None:
    """Shapes and dtypes agree, and the worst (sequence, head) is within ``tolerance`` relative RMS."""
    for part, worst in zip(DeltaRuleOutput._fields, errors(got, expected), strict=True):
        assert getattr(got, part).shape == getattr(expected, part).shape
        assert getattr(got, part).dtype == getattr(expected, part).dtype
        if getattr(expected, part).numel():
            assert worst.max() <= tolerance, f"{part}: worst relative RMS {worst.max():.3g} > {tolerance:.3g}"


def assert_budget(got: Tensor, plain: Tensor, exact: Tensor, dims: tuple[int, ...], floor: float) -> None:
    """``got`` and ``plain``, the reference in the kernel's precision, against ``exact``; errors taken over ``dims``.

    Args:
        floor: what ``got`` may add to twice the error of ``plain``: a head's own error may be small by luck.
    """
    assert (got.shape, got.dtype) == (plain.shape, plain.dtype)
    assert got.isfinite().all()
    if got.numel():
        error, of_plain = relative_rms(got, exact, dims), relative_rms(plain, exact, dims)
        excess = (error - 2 * of_plain - floor).max()
        assert excess <= 0, f"{excess / FP32_EPS:.2f} eps over the budget"
