"""What the functions that both the reference and the fast path offer take and return, checked once for both.

Axes and layouts are in ``CONVENTIONS.md``: ``[B, T, H, K]`` inputs, states ``[N, HV, V, K]``, ``g`` the natural log of
the decay.
"""

from dasc.contract.packing import (
    MIN_ABSMAX,
    QMAX,
    DenseState,
    PackedState,
    check_pack,
    check_slots,
    check_unpack,
    one_slot,
    slots_shape,
    zero_slots,
)
from dasc.contract.recurrences import (
    ConvOutput,
    DecayGate,
    DeltaRuleOutput,
    DeltaRuleShape,
    RefreshMerge,
    check_conv,
    check_cu_seqlens,
    check_delta_rule,
    check_gate,
    check_pooled,
    compute_dtype,
    sequence_spans,
)

__all__ = [
    "MIN_ABSMAX",
    "QMAX",
    "ConvOutput",
    "DecayGate",
    "DeltaRuleOutput",
    "DeltaRuleShape",
    "DenseState",
    "PackedState",
    "RefreshMerge",
    "check_conv",
    "check_cu_seqlens",
    "check_delta_rule",
    "check_gate",
    "check_pack",
    "check_pooled",
    "check_slots",
    "check_unpack",
    "compute_dtype",
    "one_slot",
    "sequence_spans",
    "slots_shape",
    "zero_slots",
]
