"""Work handed out over ranks as they come to it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..comm import World, init
from ..kvstore.asynchronous import AsyncStore

_KEY = "given out"


class SharedCount:
    """0, 1, 2, ..., each given to one rank alone; for a `data.SharedSampler`.

    Every rank must make it. An iteration begins at 0, when the last rank has begun it.

    Args:
        world: the ranks; default `hpcdp.init()`.
    """

    def __init__(self, world: World | None = None) -> None:
        self._store = AsyncStore("dist_async", init() if world is None else world)
        self._store.init(_KEY, np.zeros((), np.int64))
        self._first = 0

    def __iter__(self) -> Iterator[int]:
        self._store.barrier()  # nobody takes from the last iteration any more
        self._first = self._next()
        return self._numbers(self._first)

    def given(self) -> int:
        """How many were given out in this iteration, to all ranks together; every rank must call."""
        self._store.barrier()
        return self._next() - self._first

    def _next(self) -> int:
        """What comes next, while nobody takes."""
        found = int(self._store.pull(_KEY).wait())
        self._store.barrier()
        return found

    def _numbers(self, first: int) -> Iterator[int]:
        while True:
            yield self._store.take(_KEY) - first
