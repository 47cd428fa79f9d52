from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


class RanksByWorld(dict[int, Ranks]):
    def __missing__(self, world: int) -> Ranks:
        self[world] = Ranks(world)
        return self[world]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RanksByWorld]:
    """``ranks[world]``: processes that all tests share; they are started when first asked for."""
    started = RanksByWorld()
    yield started
    for each in started.values():
        each.close()
