"""A seeded schedule: what asynchronous workers do takes effect in an order that can be had again.

Every worker waits before each of its operations until all others wait, too, or have ended; then the seed decides who is
next. So the order depends on nothing but the seed and what the workers do: a run that went wrong can be looked at.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from ..comm import World
from ..comm.threads import ThreadCommunicator
from ..errors import ConfigError
from .arguments import Key
from .table import Table

_LOOK_S = 0.2
"""Between looks whether another worker has failed."""


class Replay:
    """Who may act, decided by a seed; workers are threads. Use `of`.

    Args:
        seed: of the order.
        world: the workers, as one of them sees it.
    """

    def __init__(self, seed: int, world: World) -> None:
        self._random = np.random.default_rng(seed)
        self._check = world.node_memory.check
        self._active = set(range(world.size))
        self._asking: dict[int, Callable[[], bool]] = {}
        self._chosen: int | None = None
        self._changed = threading.Condition()
        self._tables: list[Table] = []

    @classmethod
    def of(cls, world: World, seed: int) -> Replay:
        """One for all workers of ``world``; every rank must call.

        Raises:
            ConfigError: they are processes, or there are servers.
        """
        if not isinstance(world.comm, ThreadCommunicator) or world.whole is not None:
            got = f"{world.library} ranks" if world.whole is None else "servers, too"
            raise ConfigError("kvstore", where="replay", expected="thread ranks alone, hpcdp.comm.threads.run", got=got)
        made: list[Replay | None] = world.comm.meet(cls(seed, world) if world.rank == 0 else None)
        assert made[0] is not None
        return made[0]

    def share(self, world: World, table: Table) -> None:
        """Let each worker see the clocks of keys that lie elsewhere; every rank must call."""
        assert isinstance(world.comm, ThreadCommunicator)
        self._tables = world.comm.meet(table)

    def may_push(self, worker: int, key: Key) -> bool:
        """Whether the bound of staleness lets a worker push, wherever the key lies."""
        cells = (table.items[key].cells[0] for table in self._tables)
        return all(self._tables[0].may_go_on(cell, worker) for cell in cells if cell is not None)

    @contextlib.contextmanager
    def turn(self, worker: int, may_act: Callable[[], bool]) -> Iterator[None]:
        """Within it nobody else acts; waits for this worker's turn, which does not come before ``may_act()``."""
        with self._changed:
            self._asking[worker] = may_act
            self._choose()
            while self._chosen != worker:
                self._changed.wait(_LOOK_S)
                self._check()
        try:
            yield
        finally:
            with self._changed:
                self._chosen = None
                self._choose()

    def meet(self, worker: int, barrier: Callable[[], None]) -> None:
        """Wait in ``barrier()`` for all workers; the others go on meanwhile."""
        self.end(worker)
        barrier()
        with self._changed:
            self._active.add(worker)
        barrier()

    def end(self, worker: int) -> None:
        """This worker does nothing any more."""
        with self._changed:
            self._active.discard(worker)
            self._choose()

    def _choose(self) -> None:
        if self._chosen is None and self._active and self._active <= self._asking.keys():
            able = [worker for worker in sorted(self._asking) if self._asking[worker]()]
            if able:
                self._chosen = able[int(self._random.integers(len(able)))]
                del self._asking[self._chosen]
                self._changed.notify_all()
