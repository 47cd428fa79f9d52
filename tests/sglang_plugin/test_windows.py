import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.sglang.windows import Scratch, Window

pages = st.sampled_from([1, 2, 16, 64])


@st.composite
def scratch_and_windows(draw: st.DrawFn) -> tuple[Scratch, list[Window]]:
    scratch = Scratch.of(draw(st.integers(1, 70)), draw(pages), draw(st.integers(1, 5)))
    windows = []
    for row in range(draw(st.integers(1, 12))):
        prefix = draw(st.integers(1, 300))
        length = draw(st.integers(1, min(prefix, scratch.window_tokens)))
        windows.append(
            Window(row + 1, prefix, tuple(draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))))
        )
    return scratch, windows


@given(scratch_and_windows())
def test_every_window_is_replayed_once_and_in_order(case: tuple[Scratch, list[Window]]) -> None:
    scratch, windows = case
    rounds = list(scratch.rounds(windows, 100, scratch.page_size))
    assert [w for part, _ in rounds for w in windows[part]] == windows
    assert [t for _, replay in rounds for t in replay.tokens] == [t for w in windows for t in w.tokens]
    positions = [p for w in windows for p in range(w.start, w.prefix_tokens)]
    assert [p for _, replay in rounds for p in replay.positions] == positions
    for part, replay in rounds:
        assert 1 <= len(replay.rows) <= scratch.rows
        assert (replay.own_rows, replay.ends) == (
            [w.row for w in windows[part]],
            [w.prefix_tokens for w in windows[part]],
        )


@given(scratch_and_windows())
def test_a_replay_stays_inside_the_scratch_and_shares_nothing(case: tuple[Scratch, list[Window]]) -> None:
    scratch, windows = case
    first_row, first_slot = 100, 7 * scratch.page_size
    for _, replay in scratch.rounds(windows, first_row, first_slot):
        used = replay.slots + replay.copy_slots
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(first_slot, first_slot + scratch.kv_slots))
        assert set(replay.rows) == set(range(first_row, first_row + len(replay.rows)))


@given(scratch_and_windows())
def test_each_page_of_a_scratch_row_holds_consecutive_positions(case: tuple[Scratch, list[Window]]) -> None:
    """Attention by pages reads a whole page, so what is stored in the window's first page has to come along."""
    scratch, windows = case
    page = scratch.page_size
    for _, replay in scratch.rounds(windows, 100, 7 * page):
        table = {
            (row, position): slot
            for row, position, slot in [
                *zip(replay.token_rows, replay.positions, replay.slots),
                *zip(replay.copy_token_rows, replay.copy_positions, replay.copy_slots),
            ]
        }
        for row, start, end in zip(replay.rows, replay.starts, replay.ends):
            first = start - start % page
            assert {p for r, p in table if r == row} == set(range(first, end))
            for position in range(first, end):
                assert table[row, position] % page == position % page
                assert table[row, position] // page == table[row, position - position % page] // page
        assert set(zip(replay.copy_rows, replay.copy_token_rows)) <= set(zip(replay.own_rows, replay.rows))


@pytest.mark.parametrize(
    ("window", "requests", "rows"), [(16, 100, 8), (16, 3, 3), (512, 100, 4), (4096, 100, 1), (0, 9, 0)]
)
def test_scratch_is_bounded(window: int, requests: int, rows: int) -> None:
    assert Scratch.of(window, 1, requests).rows == rows
    assert Scratch.of(window, 1, requests).kv_slots == rows * window
