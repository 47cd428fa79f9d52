"""Whether a compressed hit is refreshed depends on how many new tokens its prompt has, and on nothing else."""

import pytest
import torch

from dasc.cache import AtPromptEnd, CacheConfig
from dasc.cache.engine import Request
from tests.cache.engine_runs import LogitsOf, build, checked_step, full_mask, serving_model
from tests.cache.test_engine_refresh import TOLERANCE, oracle
from tests.models.hybrid_runs import assert_close, random_tokens

HIT, WINDOW, BELOW = 20, 9, 6


@pytest.mark.parametrize("new_tokens", [1, BELOW - 1, BELOW, BELOW + 20])
def test_a_hit_is_refreshed_only_when_few_new_tokens_follow(new_tokens: int):
    """Judged by the logits, in chunks smaller than the new tokens."""
    model = serving_model("kda", "softplus")
    mask = torch.rand(full_mask(model).shape, generator=torch.Generator().manual_seed(1)) < 0.5
    tokens = random_tokens(HIT + new_tokens, 2)
    engine = build(
        model,
        compressed=4,
        mask=mask,
        spill=False,
        window=WINDOW,
        refresh_below=BELOW,
        policies=(AtPromptEnd(),),
        prefill_tokens=4,
    )
    seen = LogitsOf(engine)
    for prompt in ((*tokens[:HIT].tolist(), 0), tuple(tokens.tolist())):
        engine.submit(Request(str(len(prompt)), prompt, 1))
        while not engine.is_idle():
            checked_step(engine)
    window = WINDOW if new_tokens < BELOW else 0
    assert engine.cache.counters.refresh_tokens == sum(s.refresh_tokens for s in engine.steps) == window
    other = oracle(model, tokens, HIT, mask, 0 if window else WINDOW)[-1]
    assert_close(seen.logits[-1][-1], oracle(model, tokens, HIT, mask, window)[-1], TOLERANCE[model.dtype])
    assert (seen.logits[-1][-1] - other).abs().max() > 100 * TOLERANCE[model.dtype]


def config(**fields: int | None) -> CacheConfig:
    return CacheConfig(native_slots=1, compressed_slots=1, kv_pages=1, refresh_window_tokens=8, **fields)


def test_without_a_threshold_every_hit_is_refreshed():
    assert config().refresh_window(100, 10_000) == 8
    assert config().refresh_window(5, 10_000) == 5


def test_the_threshold_itself_is_not_refreshed():
    assert config(refresh_below_tokens=3).refresh_window(100, 102) == 8
    assert config(refresh_below_tokens=3).refresh_window(100, 103) == 0
    assert config(refresh_below_tokens=0).refresh_window(100, 101) == 0


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match="refresh_below_tokens must not be negative, got -1"):
        config(refresh_below_tokens=-1)
