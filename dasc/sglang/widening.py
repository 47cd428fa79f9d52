"""How replay windows join a batch, each ahead of its request's new tokens (section 4.2). Plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dasc.sglang.windows import Window


@dataclass(frozen=True)
class Widening:
    """A batch in which window tokens come ahead of the new tokens of their requests.

    Attributes:
        windows: in the order of the requests.
        added: window tokens of each request, 0 without a window.
        new_rows: rows of the widened batch that hold the new tokens, in their order.
        window_rows: rows that hold the window tokens, in the order of ``windows``.
    """

    windows: list[Window] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    new_rows: list[int] = field(default_factory=list)
    window_rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, requests: Sequence[int], lengths: Sequence[int], windows: Sequence[Window]) -> Widening:
        """For a batch.

        Args:
            requests: row of each request in SGLang's table of KV slots.
            lengths: new tokens of each.
            windows: of some of the requests, at most one each.
        """
        by_request = {window.row: window for window in windows}
        assert len(by_request) == len(windows)
        assert set(by_request) <= set(requests)
        widening, row = cls(), 0
        for request, length in zip(requests, lengths, strict=True):
            window = by_request.get(request)
            added = 0
            if window is not None:
                added = len(window.tokens)
                widening.windows.append(window)
                widening.window_rows.extend(range(row, row + added))
            widening.added.append(added)
            widening.new_rows.extend(range(row + added, row + added + length))
            row += added + length
        return widening

    @property
    def total(self) -> int:
        """Tokens of the widened batch."""
        return len(self.new_rows) + len(self.window_rows)

    @property
    def window_tokens(self) -> list[int]:
        """Ids of the window tokens."""
        return [token for window in self.windows for token in window.tokens]

    @property
    def window_positions(self) -> list[int]:
        """Their positions in their sequences."""
        return [place for window in self.windows for place in range(window.start, window.prefix_tokens)]

    def parts(self, most: int) -> Iterator[tuple[list[Window], list[int]]]:
        """The windows and their rows, at most ``most`` windows at a time."""
        row = 0
        for begin in range(0, len(self.windows), most):
            windows = self.windows[begin : begin + most]
            tokens = sum(len(window.tokens) for window in windows)
            yield windows, self.window_rows[row : row + tokens]
            row += tokens
