"""What a simulated server is asked to do: requests as rows of ids that the cache's tree works on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dasc.cache.checkpoints import CheckpointPolicy

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        conversation: requests of one conversation follow each other, the next is sent after the answer to the last.
        arrival_s: when it is sent, from the start; ``None`` in loads without times.
        prompt: ids of the prompt, int32, at least one.
        output: ids of the answer.
        prompt_tokens: tokens of the prompt, at least one.
        output_tokens: tokens of the answer, at least one.
    """

    conversation: int
    arrival_s: float | None
    prompt: Ids
    output: Ids
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, eq=False)
class Load:
    """Requests in the order they come, conversations in the order of their first request.

    An id stands for ``tokens_per_id`` tokens. With one, the state at the exact end of every answer is stored. With
    more, ids name whole blocks of a trace, and the end of an answer lies inside a block: see
    :func:`~dasc.cache.simulation.mooncake.read_trace`.

    Attributes:
        name: for reports.
        requests: to be measured.
        policies: where the cache takes checkpoints on the way.
        warmup: served one after the other before the others, unmeasured; they fill the cache.
        tokens_per_id: tokens an id stands for.
    """

    name: str
    requests: tuple[Request, ...]
    policies: tuple[CheckpointPolicy, ...]
    warmup: tuple[Request, ...] = ()
    tokens_per_id: int = 1
