"""When requests reach the server: at times of their own, or when the client has its last answer."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence

from dasc.cache.simulation.load import Request


class Arrivals:
    """Requests still to come, earliest first, in the order of the load at equal times.

    Attributes:
        queue: heap of ``(time, order, request)``; whoever serves them takes from it.

    Args:
        requests: in order.
        concurrency: conversations under way at a time (closed loop), or ``None`` for an open loop.
        start_s: time 0 of the load.
        time_scale: of the requests' own times.

    Raises:
        ValueError: for an open loop of requests without times.
    """

    def __init__(
        self, requests: Sequence[Request], *, concurrency: int | None, start_s: float, time_scale: float = 1.0
    ) -> None:
        self.queue: list[tuple[float, int, Request]] = []
        self._order = 0
        self._turns: dict[int, collections.deque[Request]] = {}
        self._not_begun: collections.deque[int] = collections.deque()
        if concurrency is None:
            for request in requests:
                if request.arrival_s is None:
                    raise ValueError("an open loop needs a load with times of arrival; give a concurrency instead")
                self._send(start_s + request.arrival_s * time_scale, request)
            return
        for request in requests:
            self._turns.setdefault(request.conversation, collections.deque()).append(request)
        self._not_begun.extend(self._turns)
        for _ in range(min(concurrency, len(self._not_begun))):
            self._begin_conversation(start_s)

    def _send(self, time_s: float, request: Request) -> None:
        self._order += 1
        heapq.heappush(self.queue, (time_s, self._order, request))

    def _begin_conversation(self, time_s: float) -> None:
        if self._not_begun:
            self._send(time_s, self._turns[self._not_begun.popleft()].popleft())

    def answered(self, request: Request, time_s: float) -> None:
        """Tell the client, which sends the conversation's next request, or begins another conversation."""
        turns = self._turns.get(request.conversation)
        if turns:
            self._send(time_s, turns.popleft())
        else:
            self._begin_conversation(time_s)
