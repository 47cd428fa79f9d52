"""Decay-aware compression of recurrent-state checkpoints (dasc)."""

__version__ = "0.1.0"
