"""SGLang as it is, on a CPU with stand-ins for its kernels: the ground that the plugin's tests stand on."""

import pytest
import torch

from tests.sglang import runs
from tests.sglang.measures import assert_same_distributions, tokens
from tests.sglang.tiny_models import FAMILIES

pytestmark = pytest.mark.parametrize("family", FAMILIES)


def test_sglang_and_dascs_engine_answer_alike(family: str) -> None:
    """Same tokens, same hits, and log-probabilities as near as one precision allows (faults 19 and 25)."""
    found = runs.dense(family).answers[0]
    assert tokens(found) == tokens(runs.peer_dense(family))
    assert_same_distributions(found, runs.peer_dense(family), runs.peer_dense(family, torch.float32))
    hits = [[answer.cached_tokens for answer in answers] for answers in found]
    assert hits == [[answer.cached_tokens for answer in answers] for answers in runs.peer_dense(family)]
    assert all(hit > 0 for turns in hits for hit in turns[1:])


def test_a_cached_answer_is_the_cold_one(family: str) -> None:
    run = runs.dense(family)
    cold = [answer for step in run.answers[4:] for [answer] in step]
    assert [answer.cached_tokens for answer in cold] == [0] * len(cold)
    assert [answer.tokens for answer in cold] == [row for rows in tokens(run.answers[0]) for row in rows]


def test_conversations_at_once_are_answered_as_one_after_the_other(family: str) -> None:
    alone, together = runs.dense(family).answers[:2]
    assert tokens(together) == tokens(alone)


def test_two_ranks_and_prompts_in_chunks_answer_as_one_rank(family: str) -> None:
    run = runs.dense_two_ranks(family)
    for found in run.answers:
        assert tokens(found) == tokens(runs.peer_dense(family))
        assert_same_distributions(found, runs.peer_dense(family), runs.peer_dense(family, torch.float32))
