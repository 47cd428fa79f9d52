"""How plugins of the tests say what they see, in lines of the log that :meth:`~tests.sglang.engines.Run.said` finds."""

import json
import os
from typing import Any

import torch


def mark_of(observer: str) -> str:
    """What stands in a line before what an observer saw."""
    return f"{observer} OBSERVER "


def say(observer: str, seen: dict[str, Any]) -> None:
    """In one write: ranks share the stream."""
    os.write(2, f"\n{mark_of(observer)}{json.dumps(seen)}\n".encode())


def say_on_every_rank(observer: str, seen: dict[str, Any], scheduler: Any) -> None:
    """Go on when all ranks have said it: the engine may be shut down as soon as rank 0 has answered."""
    say(observer, seen)
    torch.distributed.barrier(scheduler.tp_cpu_group)
