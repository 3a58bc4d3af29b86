"""Work handed out over ranks as they come to it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...comm import World, init
from ...kvstore.asynchronous import AsyncStore

_KEY = "given out"
_FAR = 1 << 40
"""More than are given out in one iteration."""


class SharedCount:
    """0, 1, 2, ..., each given to one rank alone; for a `data.SharedSampler`.

    Every rank must make it. An iteration begins at 0, when the last rank has begun it.

    Args:
        world: the ranks; default `hpcdp.init()`.
    """

    def __init__(self, world: World | None = None) -> None:
        self._world = init() if world is None else world
        self._store = AsyncStore("dist_async", self._world)
        self._store.init(_KEY, np.zeros((), np.int64))
        self._given = 0

    def __iter__(self) -> Iterator[int]:
        self._store.barrier()  # nobody takes from the last iteration any more
        first = int(self._store.pull(_KEY).wait())
        self._store.barrier()
        self._given = 0
        return self._numbers(first)

    def given(self) -> int:
        """How many were given out in this iteration, to all ranks together; every rank must call."""
        return max(self._world.comm.allgather_json(self._given))

    def close(self) -> None:
        """Give out no more in this iteration, to any rank; one rank calls, or several."""
        self._store.take(_KEY, _FAR)

    def _numbers(self, first: int) -> Iterator[int]:
        while (number := self._store.take(_KEY) - first) < _FAR:
            self._given = number + 1
            yield number
