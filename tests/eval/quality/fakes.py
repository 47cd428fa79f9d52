"""Items of made-up text, and a backend that answers by rule and caches whole warm prompts."""

from collections.abc import Callable, Sequence

from dasc.eval.items import Ask, Item
from dasc.eval.quality.backend import BackendError, Query, Reply, Residency


def text_item(name: str, asks: Sequence[str] = ("?",), *, task: str = "task", warm_tokens: int = 8, **options) -> Item:
    """Its prompt is ``warm_tokens`` letters; each ask adds its own, and the right answer is ``yes``."""
    warm = (name + "." * warm_tokens)[:warm_tokens]
    prompts = tuple(Ask(warm + ask, ("yes",)) for ask in asks)
    return Item(name, task, warm, prompts, "exact", options.pop("max_new_tokens", 3), **options)


class FakeBackend:
    """A letter is a token. A measured prompt is served by the longest warm prompt that it begins with.

    Attributes:
        asked: every request, in order.
        batches: how many each call to ``ask`` had.
        flushes: so far.

    Args:
        answer: of a measured request, by its prompt and its number among the equal ones since the last flush.
        slots: most warm prompts held; the oldest go.
        fail_after: requests after which the backend fails, once.
        tells: whether it can tell what is resident.
        replay_evictions: how many checkpoints each measured batch drops.
    """

    def __init__(
        self,
        answer: Callable[[str, int], str] = lambda prompt, number: "yes",
        *,
        slots: int = 100,
        fail_after: int | None = None,
        tells: bool = True,
        replay_evictions: int = 0,
        name: str = "fake",
    ) -> None:
        self.asked: list[Query] = []
        self.batches: list[int] = []
        self.flushes = 0
        self._answer, self._slots, self._fail_after, self._tells = answer, slots, fail_after, tells
        self._replay_evictions, self._name = replay_evictions, name
        self._evictions = 0
        self._warm: list[str] = []
        self._seen: dict[str, int] = {}

    def flush(self) -> None:
        self.flushes += 1
        self._warm, self._seen = [], {}

    def ask(self, queries: Sequence[Query], concurrency: int, on_reply: Callable[[], None]) -> list[Reply]:
        self.batches.append(len(queries))
        replies = [self._reply(query, on_reply) for query in queries]
        if not queries[0].warm:
            self._evictions += self._replay_evictions
        return replies

    def _reply(self, query: Query, on_reply: Callable[[], None]) -> Reply:
        if self._fail_after == len(self.asked):
            self._fail_after = None
            raise BackendError("the fake is out of order")
        self.asked.append(query)
        on_reply()
        cached = max([len(w) for w in self._warm if query.prompt.startswith(w) and w != query.prompt], default=0)
        if query.warm:
            self._warm.append(query.prompt)
            if len(self._warm) > self._slots:
                del self._warm[0]
                self._evictions += 1
            return Reply(query.name, "warm", len(query.prompt), 0, "length", None)
        number = self._seen[query.prompt] = self._seen.get(query.prompt, -1) + 1
        return Reply(query.name, self._answer(query.prompt, number), len(query.prompt), cached, "length", 0.5)

    def residency(self) -> Residency:
        return Residency(self._slots - len(self._warm), self._evictions) if self._tells else Residency()

    def settings(self) -> dict[str, object]:
        return {"name": self._name}

    def close(self) -> None:
        pass
