"""What an engine or a simulation measured: one record a step, a transfer and a request. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TransferKind = Literal["load", "store", "demote", "copy"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass over a batch.

    Attributes:
        prefill_tokens: new prompt tokens computed.
        prefill_pairs: query-key pairs their full attention reads; a chunk of ``n`` after ``c`` tokens reads
            ``n * c + n (n + 1) / 2``, and a replay window of ``w`` before position ``c`` as many as a chunk there.
        refresh_tokens: replay tokens computed beside them (section 4.2).
        decode_sequences: sequences that decoded one token.
        decode_pairs: sum of their context lengths.
        seconds: wall clock, or simulated time.
    """

    prefill_tokens: int
    prefill_pairs: int
    refresh_tokens: int
    decode_sequences: int
    decode_pairs: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One movement of checkpoint data.

    Attributes:
        kind: load (compressed to active), store (active to compressed), demote (dense to compressed) or copy (dense
            hit).
        bytes: moved.
        seconds: taken.
    """

    kind: TransferKind
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from arrival to its last token.

    Attributes:
        request_id: its name.
        arrival_s: when the client sent it, from the start of the run.
        ttft_s: from arrival to the first output token.
        e2e_s: from arrival to the last.
        prompt_tokens: of the prompt.
        hit_tokens: of them, served by a state checkpoint.
        tier: ``"dense"``, ``"compressed"`` or ``"miss"``.
        output_tokens: generated.
    """

    request_id: str
    arrival_s: float
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    hit_tokens: int
    tier: str
    output_tokens: int
