"""The fast path on NVIDIA GPUs, for Hopper first: Triton kernels, forward only.

Raw kernels are in ``*_kernels`` modules, apart from their wrappers, so that they can be interpreted
(``TRITON_INTERPRET=1``) and compiled ahead of time (:mod:`dasc.fast.triton.aot`) without a GPU.
"""

from dasc.fast.triton.checkpoint import pack, pack_slots, unpack, unpack_slots
from dasc.fast.triton.chunk_table import ChunkTable, chunk_table
from dasc.fast.triton.conv import causal_conv1d
from dasc.fast.triton.decode import decode_gdn, decode_kda, recurrent_gdn, recurrent_kda
from dasc.fast.triton.gates import beta_gate, safe_gate, softplus_gate
from dasc.fast.triton.prefill import chunk_gdn, chunk_kda, prefill_gdn, prefill_kda

__all__ = [
    "ChunkTable",
    "beta_gate",
    "causal_conv1d",
    "chunk_gdn",
    "chunk_kda",
    "chunk_table",
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
