"""Experiments on the states of cached prefixes, without a cache: prefill, change a copy of what is kept, and go on.

``Prefixes.of`` prefills contexts densely. An arm is a function from prefixes to prefixes: it changes a copy of what a
cache would hold of them. ``ask`` puts questions to prefixes and scores the answers; ``advance`` goes on with given
tokens and returns their logits and the prefixes that are longer by them.
"""

from dasc.eval.states.answers import Answers, Measure, ask
from dasc.eval.states.arms import Arm, Codec, refresh, retain, zero_both, zero_full_kv, zero_linear, zero_temporal
from dasc.eval.states.prefixes import Prefixes, advance

__all__ = [
    "Answers",
    "Arm",
    "Codec",
    "Measure",
    "Prefixes",
    "advance",
    "ask",
    "refresh",
    "retain",
    "zero_both",
    "zero_full_kv",
    "zero_linear",
    "zero_temporal",
]
