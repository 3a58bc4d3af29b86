"""One order in which a node's ranks start what they must all start in one order, such as collectives of NCCL.

Ranks become ready for things in different orders: a reduction goes on when its messages have come. The first rank of
the node decides: what all are ready for is started next. It writes that down in the node's memory, and nobody waits.
"""

from __future__ import annotations

import threading

import numpy as np

from .shared import Milestones, NodeMemory

THINGS = 1024
"""So many may be told apart."""


class AgreedOrder:
    """Made by all ranks of a node together.

    Each rank says `ready` for a thing, asks until it `is_turn` of that, starts it, and says `pass_on`; by any thread,
    as what is summed on the lane and what is gathered by who waits for it may share an order.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._decides = memory.rank == 0
        self._ready = Milestones(memory, THINGS)
        self._decided = Milestones(memory)
        # None is overwritten too early: a thing is decided again only when all have started what it was decided for.
        self._decisions = memory.alloc((THINGS,), np.int64)
        self._rounds = np.zeros(THINGS, np.int64)
        """How often this rank has become ready for each thing."""
        self._deciding = threading.Lock()
        self._awaited: set[int] = set()
        """What this rank is ready for, and nothing is decided about; where it decides."""
        self._num_decided = self._num_started = 0

    def rounds(self, thing: int) -> int:
        """How often this rank has been `ready` for ``thing``."""
        return int(self._rounds[thing])

    def ready(self, thing: int) -> None:
        """Say that this rank is ready for ``thing``, a number below `THINGS`; again only when it has started it."""
        self._rounds[thing] += 1
        self._ready.post(int(self._rounds[thing]), thing)
        if self._decides:
            self._awaited.add(thing)

    def is_turn(self, thing: int) -> bool:
        """Whether this rank is to start ``thing`` now; never blocks."""
        if self._decides:
            self._decide()
        decided = self._decided.reached(self._num_started + 1, ranks=1)
        return decided and int(self._decisions[self._num_started % THINGS]) == thing

    def pass_on(self) -> None:
        """Say that this rank has started the thing whose turn it was."""
        self._num_started += 1

    def _decide(self) -> None:
        with self._deciding:
            for thing in sorted(self._awaited):
                if self._ready.reached(int(self._rounds[thing]), thing):
                    self._awaited.remove(thing)
                    self._decisions[self._num_decided % THINGS] = thing
                    self._num_decided += 1
                    self._decided.post(self._num_decided)
