"""What :mod:`dasc.reference` offers for serving, under the same names and signatures, fast. Forward only, no autograd.

Each function takes one argument more, ``impl``: ``"cpu"``, ``"triton"`` or ``"auto"``. :func:`chosen_impl` tells what
a call would run, by which rule, or why it cannot; nothing falls back silently.
"""

from dasc.contract import (
    ConvOutput,
    DecayGate,
    DeltaRuleOutput,
    DenseState,
    PackedState,
    RefreshMerge,
)
from dasc.fast.choice import Impl, chosen_impl
from dasc.fast.layer_parts import beta_gate, causal_conv1d, safe_gate, softplus_gate
from dasc.fast.packing import pack, pack_slots, unpack, unpack_slots
from dasc.fast.pooled import decode_gdn, decode_kda, prefill_gdn, prefill_kda
from dasc.fast.recurrences import chunk_gdn, chunk_kda, recurrent_gdn, recurrent_kda

__all__ = [
    "ConvOutput",
    "DecayGate",
    "DeltaRuleOutput",
    "DenseState",
    "Impl",
    "PackedState",
    "RefreshMerge",
    "beta_gate",
    "causal_conv1d",
    "chosen_impl",
    "chunk_gdn",
    "chunk_kda",
    "decode_gdn",
    "decode_kda",
    "pack",
    "pack_slots",
    "prefill_gdn",
    "prefill_kda",
    "recurrent_gdn",
    "recurrent_kda",
    "safe_gate",
    "softplus_gate",
    "unpack",
    "unpack_slots",
]
