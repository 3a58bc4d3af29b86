"""A seeded schedule: what asynchronous workers do takes effect in an order that can be had again.

Every worker waits before each of its operations until all others wait, too, or have ended; then the seed decides who is
next. So the order depends on nothing but the seed and what the workers do: a run that went wrong can be looked at.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np

from ...comm import World
from ...comm.threads import ThreadCommunicator
from ...errors import ConfigError
from .table import Table

_LOOK_S = 0.2
"""Between looks whether another worker has failed."""


class Replay:
    """Who may act, decided by a seed; workers are threads. Use `of`.

    Args:
        world: the workers, as one of them sees it.
    """

    def __init__(self, world: World) -> None:
        self._random = np.random.default_rng()
        self._check = world.node_memory.check
        self._stores = [0] * world.size
        """That each worker has."""
        self._away: set[int] = set()
        self._asking: dict[int, Callable[[], bool]] = {}
        self._chosen: int | None = None
        self._changed = threading.Condition()

    @classmethod
    def of(cls, world: World, seed: int | None) -> Replay | None:
        """One for all workers and asynchronous stores of ``world``, from the first on that has a seed; all ranks call.

        Raises:
            ConfigError: they are processes, or there are servers.
        """
        kept: Replay | None = world.kept.get(cls)
        if seed is None:
            return kept
        if not isinstance(world.comm, ThreadCommunicator) or world.whole is not None:
            got = f"{world.library} ranks" if world.whole is None else "servers, too"
            raise ConfigError("kvstore", where="replay", expected="thread ranks alone, hpcdp.comm.threads.run", got=got)
        if kept is None:
            made: list[Replay | None] = world.comm.meet(cls(world) if world.rank == 0 else None)
            kept = world.kept[cls] = made[0]
            assert kept is not None
        if world.rank == 0:
            kept._random = np.random.default_rng(seed)
        return kept

    def share(self, world: World, table: Table) -> list[Table]:
        """A store more of each worker; all workers' tables of it, which see the clocks of keys that lie elsewhere."""
        assert isinstance(world.comm, ThreadCommunicator)
        with self._changed:
            self._stores[world.rank] += 1
        return world.comm.meet(table)

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

    @contextlib.contextmanager
    def meeting(self, worker: int) -> Iterator[None]:
        """Within it this worker, which waits for all others, is not waited for; all workers come here."""
        with self._changed:
            self._away.add(worker)
            self._choose()
        try:
            yield
        finally:
            with self._changed:
                self._away.discard(worker)

    def end(self, worker: int) -> None:
        """A store less of this worker; after the last one it does nothing any more."""
        with self._changed:
            self._stores[worker] -= 1
            self._choose()

    def _choose(self) -> None:
        active = {worker for worker, stores in enumerate(self._stores) if stores} - self._away
        if self._chosen is None and active and active <= self._asking.keys():
            able = [worker for worker in sorted(self._asking) if self._asking[worker]()]
            if able:
                self._chosen = able[int(self._random.integers(len(able)))]
                del self._asking[self._chosen]
                self._changed.notify_all()
