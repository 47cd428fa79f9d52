import time

import pytest
import torch

from dasc.sglang.stopwatch import Stopwatch


def test_seconds_inside_add_up() -> None:
    seconds: list[float] = []
    stopwatch = Stopwatch(seconds.append, torch.device("cpu"))
    for _ in range(2):
        with stopwatch.timed():
            time.sleep(0.01)
    assert len(seconds) == 2
    assert min(seconds) >= 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_is_timed_without_waiting_for_it() -> None:
    seconds: list[float] = []
    stopwatch = Stopwatch(seconds.append, torch.device("cuda"))
    with stopwatch.timed():
        torch.cuda._sleep(1_000_000_000)
    assert seconds == []
    torch.cuda.synchronize()
    with stopwatch.timed():
        pass
    assert seconds[0] > 0.1
