"""The oracle: the whole method in plain PyTorch, FP64-capable, with loops where loops are clearest.

:mod:`dasc.fast` offers the same names with the same signatures.
"""

from dasc.contract import ConvOutput, DecayGate, DenseState, PackedState, RefreshMerge
from dasc.reference.bit_allocation import (
    allocate_bits,
    decayed_tokens,
    expected_magnitudes,
    head_shares,
    modelled_cost,
    relative_errors,
    unit_importance,
)
from dasc.reference.bits import BITS, PackedBits, allocation_bytes, pack_bits, unit_bytes, unpack_bits
from dasc.reference.chunk import chunk_gdn, chunk_kda
from dasc.reference.conv import causal_conv1d
from dasc.reference.gates import beta_gate, safe_gate, softplus_gate
from dasc.reference.horizons import (
    LayerFractions,
    PairCounts,
    empirical_horizons,
    layer_fractions,
    mixed_pairs,
    one_step_decay,
    retained_fractions,
    state_magnitude,
    static_gate,
    static_horizons,
)
from dasc.reference.int8 import Quantized, dequantize, quantize
from dasc.reference.omission import omission_bound, omission_estimate, remaining_share, settle_tokens
from dasc.reference.packing import pack, pack_slots, unpack, unpack_slots
from dasc.reference.placement import (
    assign_bundles,
    assign_bundles_literal,
    balance_storage,
    bundle_costs,
    head_order,
    inverse_order,
    key_head_order,
    permute_heads,
    place,
)
from dasc.reference.pooled import decode_gdn, decode_kda, prefill_gdn, prefill_kda
from dasc.reference.recurrent import recurrent_gdn, recurrent_kda
from dasc.reference.refresh import (
    AttentionLayer,
    RecurrentLayer,
    RecurrentState,
    next_pow2,
    replay_window,
    suffix_refresh,
    unit_windows,
)
from dasc.reference.selection import RANDOM_MASK_SEEDS, random_mask, select_largest, select_units
from dasc.reference.statistics import (
    Calibration,
    MedianIQR,
    calibrate_gate_input,
    median_iqr,
    spearman,
    within_layer_spearman,
)

__all__ = [
    "BITS",
    "RANDOM_MASK_SEEDS",
    "AttentionLayer",
    "Calibration",
    "ConvOutput",
    "DecayGate",
    "DenseState",
    "LayerFractions",
    "MedianIQR",
    "PackedBits",
    "PackedState",
    "PairCounts",
    "Quantized",
    "RecurrentLayer",
    "RecurrentState",
    "RefreshMerge",
    "allocate_bits",
    "allocation_bytes",
    "assign_bundles",
    "assign_bundles_literal",
    "balance_storage",
    "beta_gate",
    "bundle_costs",
    "calibrate_gate_input",
    "causal_conv1d",
    "chunk_gdn",
    "chunk_kda",
    "decayed_tokens",
    "decode_gdn",
    "decode_kda",
    "dequantize",
    "empirical_horizons",
    "expected_magnitudes",
    "head_order",
    "head_shares",
    "inverse_order",
    "key_head_order",
    "layer_fractions",
    "median_iqr",
    "mixed_pairs",
    "modelled_cost",
    "next_pow2",
    "omission_bound",
    "omission_estimate",
    "one_step_decay",
    "pack",
    "pack_bits",
    "pack_slots",
    "permute_heads",
    "place",
    "prefill_gdn",
    "prefill_kda",
    "quantize",
    "random_mask",
    "recurrent_gdn",
    "recurrent_kda",
    "relative_errors",
    "remaining_share",
    "replay_window",
    "retained_fractions",
    "safe_gate",
    "select_largest",
    "select_units",
    "settle_tokens",
    "softplus_gate",
    "spearman",
    "state_magnitude",
    "static_gate",
    "static_horizons",
    "suffix_refresh",
    "unit_bytes",
    "unit_importance",
    "unit_windows",
    "unpack",
    "unpack_bits",
    "unpack_slots",
    "within_layer_spearman",
]
