"""Ranks that were given different things, come late or die: an error on all others, never a hang."""

import pytest

from tests.distributed import jobs
from tests.distributed.ranks import Ranks


@pytest.mark.parametrize(
    ("what", "complaints"),
    [
        ("w_max", ["w_max is 16 on ranks 0, 2, 3 and 64 on rank 1"]),
        ("int8", ["dtypes is float32, bfloat16 on ranks 0, 2, 3 and float32, bfloat16, int8 on rank 1"]),
        ("weights", ["fingerprint of the weights is sha256:0"]),
        ("mask", ["mask is ", "windows is ", "placement is ", "none on rank 1"]),
        ("windows", ["windows is "]),
        ("hybrid", ["placement is storage", "hybrid"]),
        ("no placement", ["none on rank 1"]),
        ("max_batch", ["max_batch is 2 on ranks 0, 2, 3 and 0 on rank 1"]),
    ],
)
def test_ranks_at_odds_all_raise_and_say_in_what_and_where(ranks, what: str, complaints: list[str]):
    outcomes = ranks[4].outcomes(jobs.construct_at_odds, what)
    assert {(o.error_type, o.error) for o in outcomes} == {("RanksDisagreeError", outcomes[0].error)}
    for complaint in complaints:
        assert complaint in outcomes[0].error


@pytest.mark.parametrize(
    ("job", "complaint"),
    [
        (jobs.construct_without_placement, "no placement for 2 ranks"),
        (jobs.construct_without_batch, "max_batch must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_on_all_ranks_alike_is_a_value_error(ranks, job, complaint: str):
    for outcome in ranks[2].outcomes(job):
        assert outcome.error_type == "ValueError"
        assert complaint in outcome.error


def test_a_rank_that_does_not_come_to_compare_is_named_as_such_within_the_timeout(ranks):
    seconds = ranks[4].run(jobs.late_rank)
    assert max(seconds) < 10


def test_a_transfer_has_succeeded_when_it_has_on_every_rank(ranks):
    assert ranks[2].run(jobs.all_outcomes) == [[True, False, False]] * 2


def test_caches_that_ask_each_other_stay_alike_when_packs_fail_on_one_rank(ranks):
    histories = ranks[2].run(jobs.cache_with_failing_packs, True)
    assert histories[0] == histories[1]
    assert histories[0][1] > 0
    apart = ranks[2].run(jobs.cache_with_failing_packs, False)
    assert apart[0] != apart[1]


def test_a_killed_rank_is_an_error_on_the_others_that_names_the_operation():
    ranks = Ranks(4)
    try:
        outcomes = ranks.outcomes(jobs.store_beside_a_killed_rank)
    finally:
        ranks.close()
    assert outcomes[1].error_type == "Died"
    for rank in (0, 2, 3):
        assert outcomes[rank].error_type == "ExchangeError"
        assert f"the all-to-all of a store of 1 checkpoints failed on rank {rank} of 4" in outcomes[rank].error
