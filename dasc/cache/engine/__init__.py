"""A serving engine over the cache and a hybrid model. Apart from the rest of the cache, which knows no tensors."""

from dasc.cache.engine.engine import Engine
from dasc.cache.engine.request import Answer, Request

__all__ = ["Answer", "Engine", "Request"]
