import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.sglang.budget import SPARE_SLOTS, NativeDemand, StateBudget, divide
from dasc.sglang.config import PoolSize

MIB = 1 << 20
# Kimi-Linear on one of two ranks: a dense checkpoint, and one at W_max 16.
KIMI = {"dense_slot_bytes": 20_971_520 + 737_280, "compressed_slot_bytes": 7_570_944 + 737_280}


def kimi(pool: PoolSize, requests: int = 16, dense_slots: int = 96) -> StateBudget:
    return divide(pool, NativeDemand(requests, 1), dense_slots=dense_slots, **KIMI)


@st.composite
def divisions(draw: st.DrawFn) -> dict:
    dense = draw(st.integers(1, 1000))
    per_request = draw(st.integers(1, 4))
    dense_slots = draw(st.integers(1, 200))
    pool = draw(
        st.one_of(
            st.just(PoolSize()),
            st.builds(PoolSize, slots=st.integers(1, 400)),
            st.builds(PoolSize, pool_bytes=st.integers(1, 100_000)),
        )
    )
    return {
        "pool": pool,
        "demand": NativeDemand(draw(st.integers(1, 80)), per_request),
        "dense_slots": dense_slots,
        "dense_slot_bytes": dense,
        "compressed_slot_bytes": draw(st.integers(1, 1000)),
        "tmp_bytes": draw(st.sampled_from([0, 1, 500])),
    }


def divided(case: dict) -> StateBudget | None:
    """``None`` where it is refused."""
    try:
        return divide(**case)
    except ValueError:
        return None


@given(divisions())
def test_all_pools_together_take_no_more_than_the_dense_server_and_every_byte_is_accounted_for(case: dict):
    budget = divided(case)
    if budget is None:
        return
    split = budget.split
    assert split.budget_bytes == (case["dense_slots"] + 1) * case["dense_slot_bytes"]
    assert split.native_bytes == (split.native_slots + 1) * case["dense_slot_bytes"]
    assert split.compressed_bytes == (split.compressed_slots + 1) * case["compressed_slot_bytes"]
    assert split.tmp_bytes == case["tmp_bytes"]
    parts = split.native_bytes + split.compressed_bytes + split.tmp_bytes + split.unused_bytes
    assert parts == split.budget_bytes
    assert split.unused_bytes >= 0
    assert split.compressed_slots >= 1


@given(divisions())
def test_running_requests_never_lack_a_native_slot_and_are_no_more_than_dense_has(case: dict):
    budget = divided(case)
    if budget is None:
        return
    demand = case["demand"]
    assert 1 <= budget.running_limit <= demand.requests
    assert budget.running_limit * demand.slots_per_request + SPARE_SLOTS <= budget.split.native_slots


def test_auto_keeps_as_many_running_requests_as_dense_and_compresses_the_rest():
    budget = kimi(PoolSize())
    assert budget.running_limit == 16
    assert budget.split.native_slots == 16 + SPARE_SLOTS
    rest = 97 * KIMI["dense_slot_bytes"] - 19 * KIMI["dense_slot_bytes"]
    assert budget.split.compressed_slots == rest // KIMI["compressed_slot_bytes"] - 1 == 202


def test_slots_asked_for_are_had_exactly_and_whole_native_slots_take_the_rest():
    budget = kimi(PoolSize(slots=100))
    assert budget.split.compressed_slots == 100
    assert (
        budget.split.native_slots
        == (97 * KIMI["dense_slot_bytes"] - 101 * KIMI["compressed_slot_bytes"]) // KIMI["dense_slot_bytes"] - 1
    )
    assert budget.split.unused_bytes < KIMI["dense_slot_bytes"]


def test_bytes_asked_for_hold_the_reserved_slot_too():
    slot = KIMI["compressed_slot_bytes"]
    assert kimi(PoolSize(pool_bytes=101 * slot)).split.compressed_slots == 100
    assert kimi(PoolSize(pool_bytes=101 * slot - 1)).split.compressed_slots == 99


def test_a_large_compressed_pool_lowers_the_number_of_running_requests():
    budget = kimi(PoolSize(slots=235))
    assert budget.split.native_slots == 5
    assert budget.running_limit == 3


@pytest.mark.parametrize("pool", [PoolSize(slots=1000), PoolSize(pool_bytes=1), PoolSize(pool_bytes=20 << 30)])
def test_a_pool_that_does_not_fit_is_refused_with_what_would(pool: PoolSize):
    with pytest.raises(ValueError, match=f"DASC_POOL must be from 1 to 242 slots .*, got {pool}"):
        kimi(pool)
    assert kimi(PoolSize(slots=242)).running_limit == 1


def test_a_state_memory_too_small_for_any_compressed_pool_is_refused():
    with pytest.raises(
        ValueError, match=r"\(3 dense slots\) has no room for a compressed pool: .* takes 3 native slots"
    ):
        kimi(PoolSize(), dense_slots=3)


def test_requests_with_tracking_slots_take_them_all():
    budget = divide(
        PoolSize(), NativeDemand(4, 3), dense_slots=40, dense_slot_bytes=MIB, compressed_slot_bytes=MIB // 2
    )
    assert budget.split.native_slots == 4 * 3 + SPARE_SLOTS


def test_the_table_tells_each_arms_slots_and_bytes():
    table = kimi(PoolSize()).table().splitlines()
    assert [line.split() for line in table[2:]] == [
        ["dense", "alone", "96", "20.70", "MiB", "1.96", "GiB"],
        ["native", "18", "20.70", "MiB", "393.36", "MiB"],
        ["compressed", "202", "7.92", "MiB", "1.57", "GiB"],
        ["temporary", "0", "B"],
        ["unused", "6.41", "MiB"],
    ]
