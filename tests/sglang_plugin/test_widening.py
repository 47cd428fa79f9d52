from hypothesis import given
from hypothesis import strategies as st

from dasc.sglang.widening import Widening
from dasc.sglang.windows import Window, merge_bytes


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[Window]]:
    """Requests by row, their new tokens, and the windows of some of them in any order."""
    requests = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6, unique=True))
    lengths = [draw(st.integers(1, 9)) for _ in requests]
    windows = []
    for row in draw(st.lists(st.sampled_from(requests), unique=True)):
        prefix = draw(st.integers(1, 20))
        tokens = draw(st.lists(st.integers(100, 999), min_size=1, max_size=prefix))
        windows.append(Window(row, prefix, tuple(tokens)))
    return requests, lengths, windows


@given(batches())
def test_each_window_is_ahead_of_its_requests_new_tokens(batch: tuple[list[int], list[int], list[Window]]) -> None:
    requests, lengths, windows = batch
    widening = Widening.of(requests, lengths, windows)
    by_row = {window.row: window for window in windows}
    expected, new = [], 0
    for request, length in zip(requests, lengths):
        window = by_row.get(request)
        if window is not None:
            places = range(window.prefix_tokens - len(window.tokens), window.prefix_tokens)
            expected += [("window", token, place) for token, place in zip(window.tokens, places)]
        expected += [("new", token, None) for token in range(new, new + length)]
        new += length
    rows = dict(zip(widening.new_rows, (("new", token, None) for token in range(new))))
    of_windows = zip(widening.window_tokens, widening.window_positions)
    rows |= dict(zip(widening.window_rows, (("window", token, place) for token, place in of_windows), strict=True))
    assert [rows[row] for row in range(widening.total)] == expected
    assert widening.added == [len(by_row[r].tokens) if r in by_row else 0 for r in requests]


@given(batches(), st.integers(1, 4))
def test_parts_are_bounded_and_together_all_windows(
    batch: tuple[list[int], list[int], list[Window]], most: int
) -> None:
    widening = Widening.of(*batch)
    parts = list(widening.parts(most))
    assert all(1 <= len(windows) <= most for windows, _ in parts)
    assert [window for windows, _ in parts for window in windows] == widening.windows
    assert [row for _, rows in parts for row in rows] == widening.window_rows
    assert all(len(rows) == sum(len(w.tokens) for w in windows) for windows, rows in parts)


def test_the_states_held_at_a_boundary_are_two_layers_for_each_window() -> None:
    assert merge_bytes(slot_bytes=301, layers=3, windows=4) == 2 * 4 * 101
