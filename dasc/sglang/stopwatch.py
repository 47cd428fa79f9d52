"""How long work takes on the device that does it, without waiting for it."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up durations. Those of a GPU come in late, when later work is timed and they have ended.

    Args:
        add: called with seconds.
        device: where the work is done; one other than CUDA is timed by the clock, which is right when calls block.
    """

    def __init__(self, add: Callable[[float], None], device: torch.device) -> None:
        self._add = add
        self._device = device
        self._pending: collections.deque[tuple[torch.Event, torch.Event]] = collections.deque()

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time what is queued on the present stream inside."""
        if self._device.type != "cuda":
            started = time.perf_counter()
            yield
            self._add(time.perf_counter() - started)
            return
        begin, end = torch.Event(self._device, enable_timing=True), torch.Event(self._device, enable_timing=True)
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._add(begin.elapsed_time(end) / 1e3)
