"""At equal bytes two tiers hold more than either alone: SGLang's cache, conversations of several turns, five seeds."""

from __future__ import annotations

import dataclasses
import random
from contextlib import closing

import pytest

from dasc.sglang.budget import NativeDemand, divide
from dasc.sglang.config import PoolSize
from tests.sglang.cache_driver import Driver
from tests.sglang.cache_settings import DTYPES, Setting, all_settings, geometry, layout
from tests.sglang.two_tier_driver import TwoTierDriver

DENSE_SLOTS = 12
CONVERSATIONS, TURNS = 14, 4


def with_large_heads(setting: Setting) -> Setting:
    """In the other tests' small states the convolution is most of the bytes, and that is never compressed."""
    cfg = dataclasses.replace(setting.cfg, mamba_head_dim=64, mamba_state_size=64, mamba_intermediate_size=256)
    return dataclasses.replace(setting, cfg=cfg)


SETTINGS = [
    with_large_heads(setting)
    for setting in all_settings(["compressed-only"])
    if not setting.cfg.enable_mamba_extra_buffer and not setting.cfg.has_swa
]


def hit_tokens(driver: Driver, seed: int) -> int:
    """Tokens found in the cache by conversations whose turns come in any order."""
    choose = random.Random(seed)
    turns = [number for number in range(CONVERSATIONS) for _ in range(TURNS)]
    choose.shuffle(turns)
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    found = 0
    for number in turns:
        prompt = histories[number] + driver.new_tokens(choose.randint(1, 3))
        answer = driver.new_tokens(1)[: choose.randint(1, 8)]
        found += driver.serve(prompt, answer)
        histories[number] = prompt + answer
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_at_equal_bytes_more_tokens_are_cached_than_by_either_tier_alone(setting: Setting, seed: int) -> None:
    split = divide(
        PoolSize(),
        NativeDemand(requests=4, slots_per_request=1),
        dense_slots=DENSE_SLOTS,
        dense_slot_bytes=geometry(setting).dense_bytes(DTYPES),
        compressed_slot_bytes=layout(setting).slot_bytes,
    ).split
    assert split.native_bytes + split.compressed_bytes <= (DENSE_SLOTS + 1) * geometry(setting).dense_bytes(DTYPES)

    def sized(arm: str, native_slots: int) -> Setting:
        return Setting(dataclasses.replace(setting.cfg, mamba_cache_size=native_slots), setting.kind, arm)

    with closing(Driver(sized("dense", DENSE_SLOTS))) as driver:
        dense = hit_tokens(driver, seed)
    with closing(Driver(sized("compressed-only", split.native_slots), split.compressed_slots)) as driver:
        compressed_only = hit_tokens(driver, seed)
    with closing(TwoTierDriver(setting, split.compressed_slots, native_slots=split.native_slots)) as driver:
        two_tier = hit_tokens(driver, seed)
    assert two_tier > max(dense, compressed_only)
