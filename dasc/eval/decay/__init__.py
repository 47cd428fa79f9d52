"""How long an omission hurts, measured: errors of states and logits by tokens since the hit, and whom to refresh.

:func:`follow` goes on with given tokens after a hit; :func:`ask_after` asks questions after new tokens; both are run
over tasks by :func:`measure_decay`. The bound is in :mod:`dasc.reference.omission`.
"""

from dasc.eval.decay.follow import follow
from dasc.eval.decay.measure import DecayReport, DecaySettings, measure_decay
from dasc.eval.decay.suffixes import ask_after

__all__ = ["DecayReport", "DecaySettings", "ask_after", "follow", "measure_decay"]
