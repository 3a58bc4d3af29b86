"""The closing exchange of a step: a few numbers summed over all ranks, every one of which has then left backward."""

from __future__ import annotations

import numpy as np

from ..collectives import halving_doubling
from ..collectives.progress import Progress, Steps, drive
from ..comm import Communicator, World
from ..comm.communicator import OPERATION_BITS, make_tag
from ..comm.reductions import resolve
from ..comm.watchdog import WatchedGate
from .lane import Lane

CLOSING_OPERATION = (1 << OPERATION_BITS) - 1
"""Its number among those of the buckets' reductions."""

_MARKS = (1 << 20) - 1  # sums of their squares over all ranks are exact in float64


class ClosingExchange:
    """For the steps of one reducer. All ranks must make it together.

    Args:
        world: the ranks.
        comm: all of them, where messages are needed; None: they meet at ``gate``.
        gate: of this node's ranks.
        lane: where messages progress beside others; None: in this thread.
        signature: see `make_tag`.
    """

    def __init__(
        self, world: World, comm: Communicator | None, gate: WatchedGate, lane: Lane | None, signature: int
    ) -> None:
        self._size = world.size
        self._progress = Progress.of(world)
        self._comm = comm
        self._gate = gate
        self._lane = lane
        self._signature = signature

    def tally(self, *numbers: float) -> list[float]:
        """The sums of a few ``numbers`` over all ranks, the same bits on each; all must call with as many, and wait."""
        if self._size == 1:
            return list(numbers)
        with self._progress.watchdog.watching("the closing exchange of a step"):
            self._progress.finish()  # as before any blocking collective
            if self._comm is None:
                return self._gate.tally(*numbers)
            sums = np.array(numbers, np.float64)
            if self._lane is None:
                drive(self._machine(sums, self._comm))
            else:
                asked, comm = self._lane.engine.variable("closing exchange"), self._comm
                self._lane.launch(lambda turn: self._machine(sums, comm), [asked], CLOSING_OPERATION, asked.name)
                self._lane.wait(asked)
            return sums.tolist()

    def tally_alike(self, settings: tuple[float, ...], *numbers: float) -> tuple[list[float], bool]:
        """As `tally`; and whether all ranks have passed the same ``settings``, which are numbers as well."""
        mark = float(hash(settings) & _MARKS)
        *sums, marks, squares = self.tally(*numbers, mark, mark * mark)
        return sums, marks * marks == squares * self._size  # exactly where all are the same, and only there

    def _machine(self, sums: np.ndarray, comm: Communicator) -> Steps:
        tag = make_tag(self._signature % comm.signatures, CLOSING_OPERATION)
        yield from halving_doubling.allreduce(sums, resolve("tally", "sum", sums.dtype), comm, tag)
