"""Reads traces of real traffic in the Mooncake format: lengths, times and hashes of 512-token blocks."""

from __future__ import annotations

import itertools
import json
import os
from typing import Any

import numpy as np

from dasc.cache.checkpoints import AtJunctions, AtPromptEnd
from dasc.cache.simulation.load import Load, Request

BLOCK_TOKENS = 512
_MAX_TOKENS = 10**9
_MAX_MS = 10**15


def read_trace(path: str | os.PathLike[str], *, tokens_per_id: int = BLOCK_TOKENS) -> Load:
    """A load from JSON lines of ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids``.

    A hash id stands for a block of ``tokens_per_id`` prompt tokens and all before it, so the cache's tree works on
    block ids: one id is one "token" of the cache and one page of KV. Three consequences, the same for every arm:

    - The last block of a prompt is shared only when it is full. A part of a block gets an id of its own, even where the
      trace repeats one (as it does for identical prompts): a cache of whole blocks could not reuse it.
    - Checkpoints lie on block boundaries: one after the last whole block of each prompt, which serves the next turn of
      its conversation, and at junctions. A prompt of whole blocks computes its last one again, since a hit leaves
      something to compute.
    - The blocks that an answer fills get ids of their own, too: the trace does not say which later request contains it.
      Hits past the prompt of the turn before are therefore not counted; a server would have up to an answer's length
      more of them.

    Raises:
        ValueError: naming file and line: broken JSON, a missing or wrong field, a length below 1 (a time below 0), a
            number of hashes that does not fit ``input_length``, or a time before the one of the line above.
        OSError: when the file cannot be read.
    """
    if tokens_per_id < 1:
        raise ValueError(f"tokens_per_id must be >= 1, got {tokens_per_id}")
    requests: list[Request] = []
    numbers: dict[int, int] = {}  # hash ids of any size to small ones, in order of appearance
    private = itertools.count(2**31 - 1, -1)  # ids of blocks that nothing shares, from the top down
    first_ms = last_ms = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                timestamp, prompt_tokens, output_tokens, hash_ids = _fields(line, tokens_per_id)
                if timestamp < last_ms:
                    raise ValueError(f"timestamp must not go back, got {timestamp} ms after {last_ms}")
            except ValueError as error:
                raise ValueError(f"{path}, line {line_number}: {error}") from error
            if not requests:
                first_ms = timestamp
            last_ms = timestamp
            whole = [numbers.setdefault(i, len(numbers)) for i in hash_ids[: prompt_tokens // tokens_per_id]]
            own = next(private)
            part = [own] if prompt_tokens % tokens_per_id else []
            blocks = -(-(prompt_tokens + output_tokens) // tokens_per_id)
            requests.append(
                Request(
                    conversation=len(requests),
                    arrival_s=(timestamp - first_ms) / 1000,
                    prompt=np.array(whole + part, dtype=np.int32),
                    output=np.full(blocks - len(whole) - len(part), own, dtype=np.int32),
                    prompt_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                )
            )
    if not requests:
        raise ValueError(f"{path}: holds no requests")
    policies = (AtPromptEnd(), AtJunctions())
    return Load(os.path.basename(path), tuple(requests), policies, tokens_per_id=tokens_per_id)


def _fields(line: str, tokens_per_id: int) -> tuple[int, int, int, list[int]]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got a {type(entry).__name__}")
    timestamp = _whole_number(entry, "timestamp", 0, _MAX_MS)
    prompt_tokens = _whole_number(entry, "input_length", 1, _MAX_TOKENS)
    output_tokens = _whole_number(entry, "output_length", 1, _MAX_TOKENS)
    hash_ids = entry.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(i) is int for i in hash_ids):
        raise ValueError(f"hash_ids must be a list of whole numbers, got {str(hash_ids)[:60]}")
    blocks = -(-prompt_tokens // tokens_per_id)
    if len(hash_ids) != blocks:
        raise ValueError(
            f"{prompt_tokens} tokens take {blocks} blocks of {tokens_per_id}, but there are {len(hash_ids)} hash_ids"
        )
    return timestamp, prompt_tokens, output_tokens, hash_ids


def _whole_number(entry: dict[str, Any], name: str, least: int, most: int) -> int:
    value = entry.get(name)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be a whole number of {least} to {most}, got {value!r}")
    return value
