"""Replay windows (section 4.2) and the scratch memory in which SGLang runs them. Plain arithmetic, without SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MOST_ROWS = 8
MOST_TOKENS = 2048


@dataclass(frozen=True)
class Window:
    """The last tokens of a cached prefix, to be computed once more.

    Attributes:
        row: of the request in SGLang's table of KV slots.
        prefix_tokens: ``n_p``, length of the cached prefix.
        tokens: ids of its last ``W_replay``.
    """

    row: int
    prefix_tokens: int
    tokens: tuple[int, ...]

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.prefix_tokens - len(self.tokens)


@dataclass(frozen=True)
class Replay:
    """One forward over several windows, as lists for the device. Windows follow each other.

    Attributes:
        tokens: ids of all windows.
        positions: of each token in its sequence.
        slots: scratch KV slot of each token.
        token_rows: scratch row of each token.
        rows: scratch row of each window.
        own_rows: row of the request that each window belongs to.
        starts: position of each window's first token, which is how many stored tokens it attends to.
        lengths: tokens of each window.
        copy_rows: request row of each stored token whose K/V shares a page with a window, and so is copied.
        copy_positions: its position.
        copy_slots: scratch KV slot that it is copied to.
        copy_token_rows: scratch row of that slot.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    token_rows: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    own_rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    copy_rows: list[int] = field(default_factory=list)
    copy_positions: list[int] = field(default_factory=list)
    copy_slots: list[int] = field(default_factory=list)
    copy_token_rows: list[int] = field(default_factory=list)

    @property
    def ends(self) -> list[int]:
        """Length of each cached prefix."""
        return [start + length for start, length in zip(self.starts, self.lengths)]


@dataclass(frozen=True)
class Scratch:
    """Memory for the windows that are replayed in one forward. Nothing else uses it, and nothing in it is kept.

    Attributes:
        window_tokens: of the longest window; 0 when there is nothing to replay.
        page_size: of KV, in tokens.
        rows: of the table of KV slots; windows in one forward.
    """

    window_tokens: int
    page_size: int
    rows: int

    @classmethod
    def of(cls, window_tokens: int, page_size: int, requests: int) -> Scratch:
        """For a server of at most ``requests`` at once: room for several windows, unless they are long."""
        most = min(MOST_ROWS, requests, max(1, MOST_TOKENS // window_tokens)) if window_tokens else 0
        return cls(window_tokens, page_size, most)

    @property
    def row_slots(self) -> int:
        """KV slots of one window: whole pages, wherever in a page it starts."""
        pages = -(-(self.window_tokens + self.page_size - 1) // self.page_size)
        return pages * self.page_size

    @property
    def kv_slots(self) -> int:
        """KV slots of all windows of a forward."""
        return self.rows * self.row_slots

    def rounds(self, windows: Sequence[Window], first_row: int, first_slot: int) -> Iterator[tuple[slice, Replay]]:
        """Divide ``windows`` into forwards.

        A page holds K/V of consecutive positions. Stored tokens in the page that a window starts in therefore come
        along as copies.

        Args:
            windows: none longer than ``window_tokens``, none empty.
            first_row: the first scratch row.
            first_slot: the first scratch KV slot, the first of a page.

        Yields:
            Which of ``windows``, and their forward.
        """
        assert first_slot % self.page_size == 0
        assert all(0 < len(w.tokens) <= self.window_tokens for w in windows)
        for begin in range(0, len(windows), self.rows):
            part = slice(begin, min(begin + self.rows, len(windows)))
            replay = Replay()
            for number, window in enumerate(windows[part]):
                self._add(replay, window, first_row + number, first_slot + number * self.row_slots)
            yield part, replay

    def _add(self, replay: Replay, window: Window, row: int, first_slot: int) -> None:
        start, end = window.start, window.prefix_tokens
        page_start = start - start % self.page_size
        replay.tokens.extend(window.tokens)
        replay.positions.extend(range(start, end))
        replay.slots.extend(range(first_slot + start - page_start, first_slot + end - page_start))
        replay.token_rows.extend([row] * len(window.tokens))
        replay.rows.append(row)
        replay.own_rows.append(window.row)
        replay.starts.append(start)
        replay.lengths.append(len(window.tokens))
        replay.copy_rows.extend([window.row] * (start - page_start))
        replay.copy_positions.extend(range(page_start, start))
        replay.copy_slots.extend(range(first_slot, first_slot + start - page_start))
        replay.copy_token_rows.extend([row] * (start - page_start))


def merge_bytes(slot_bytes: int, layers: int, windows: int) -> int:
    """Bytes of the states of one layer that its boundary holds beside the pool: those stored, and those refreshed.

    Args:
        slot_bytes: of a dense slot.
        layers: in a slot.
        windows: of one part.
    """
    return 2 * windows * -(-slot_bytes // layers)
