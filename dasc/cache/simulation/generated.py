"""Made-up loads with the published statistics of the real ones. The same seed gives the same load."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from dasc.cache.checkpoints import AfterPrompt, AtJunctions
from dasc.cache.simulation.load import Load, Request

VOCABULARY = 150_000

PREFIX_QUANTILES = ((0.0, 365), (0.5, 1262), (0.9, 1913), (0.99, 2075), (1.0, 2100))
"""Shared-prefix tokens: published median, p90 and p99; the ends make the mean the published 1,242."""
GROUP_SIZES = {1: 1, 2: 4, 3: 8, 4: 9, 5: 6, 6: 5, 7: 4, 8: 1, 9: 1, 10: 1}
"""Groups by number of requests: 184 requests in 40 groups, mean 4.6, p90 7, max 10, as published."""

CONTEXT_CAP_TOKENS = 16_384
FIRST_PROMPT_TOKENS = (1024, 8192)


def shared_prefix_load(seed: int = 0) -> Load:
    """184 requests in 40 groups that share a prefix, the load of the published equal-memory figures.

    Published are the number of requests, prefix lengths and group sizes. Not published, and chosen here once:

    - What follows the prefix: a user turn of ShareGPT, of 94 tokens in the mean, answered with 348 (both log-normal).
    - One unmeasured warm-up request a group, the prefix alone, as in the paper's replays (section 5.1). Without any, no
      cache could reach the published 0.973: 40 of 184 requests would come first of their group.
    - The order: shuffled. Each request is a client of its own.
    - States are stored after each prompt as well as after each answer and at junctions, as SGLang does, whose figures
      they are. So every request leaves two.
    """
    rng = np.random.default_rng(seed)
    sizes = [size for size, groups in GROUP_SIZES.items() for _ in range(groups)]
    ends, lengths = zip(*PREFIX_QUANTILES, strict=True)
    prefix_tokens = rng.permutation(np.interp(np.linspace(0, 1, len(sizes)), ends, lengths).round().astype(int))
    count = sum(sizes)
    turn_tokens = rng.permutation(_log_normal(count, mean=94, sigma=1.0, low=4, high=1024))
    answer_tokens = rng.permutation(_log_normal(count, mean=348, sigma=0.8, low=8, high=1024))
    prefixes = [_ids(rng, length) for length in prefix_tokens]
    warmup = [Request(-1 - i, None, prefix, _ids(rng, 1), len(prefix), 1) for i, prefix in enumerate(prefixes)]
    groups = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    requests = []
    for number, (group, turn, answer) in enumerate(zip(groups, turn_tokens, answer_tokens, strict=True)):
        prompt = np.concatenate([prefixes[group], _ids(rng, turn)])
        requests.append(Request(number, None, prompt, _ids(rng, answer), len(prompt), int(answer)))
    return Load("shared-prefix", tuple(requests), (AfterPrompt(), AtJunctions()), tuple(warmup))


def wildchat_load(seed: int = 0, conversations: int = 256, turns: int = 4) -> Load:
    """Conversations of the size of appendix C.3: first prompts of 1k to 8k tokens, replies of at most 1,024.

    First prompts are log-uniform. Later user turns have 296 tokens and replies 441 in the mean, as in WildChat, before
    both (log-normal) are capped at 1,024. A turn that would pass 16k tokens ends its conversation; of four none does.

    Raises:
        ValueError: for no conversations or turns.
    """
    if conversations < 1 or turns < 1:
        raise ValueError(f"conversations and turns must be >= 1, got {conversations} and {turns}")
    rng = np.random.default_rng(seed)
    shape = (conversations, turns)
    low, high = np.log(FIRST_PROMPT_TOKENS)
    user = rng.permutation(_log_normal(conversations * turns, mean=296, sigma=1.0, low=8, high=1024)).reshape(shape)
    reply = rng.permutation(_log_normal(conversations * turns, mean=441, sigma=0.8, low=8, high=1024)).reshape(shape)
    spread = (np.arange(conversations) + 0.5) / conversations
    user[:, 0] = rng.permutation(np.exp(low + spread * (high - low)).round())
    requests = []
    for conversation in range(conversations):
        tokens = _ids(rng, user[conversation].sum() + reply[conversation].sum())
        end = 0
        for asked, answered in zip(user[conversation].tolist(), reply[conversation].tolist(), strict=True):
            start, end = end + asked, end + asked + answered
            if end > CONTEXT_CAP_TOKENS:
                break
            requests.append(Request(conversation, None, tokens[:start], tokens[start:end], start, answered))
    return Load("wildchat", tuple(requests), (AtJunctions(),))


def _ids(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    return rng.integers(0, VOCABULARY, int(count), dtype=np.int32)


def _log_normal(count: int, *, mean: float, sigma: float, low: int, high: int) -> NDArray[np.int64]:
    """Whole numbers at evenly spaced quantiles of a log-normal distribution, so that every seed has the same ones."""
    normal = NormalDist(np.log(mean) - sigma**2 / 2, sigma)
    values = [np.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    return np.clip(np.round(values), low, high).astype(np.int64)
