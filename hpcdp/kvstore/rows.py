"""What lies beside a key's value in the memory of a node: rows to push to, and how far its ranks are.

A push makes a round with those of the same number of the other ranks. What a rank posts in it says that it has come
(which ranks that push and pull in one post first, see `direct`), that its row is filled, that its part is summed, that
the value is new.
"""

from __future__ import annotations

import numpy as np

from ..comm.shared import Milestones, NodeMemory
from ..errors import HpcdpError, MismatchError
from ..gradients.bucket import Bucket
from ..gradients.buckets import plan
from .arguments import Key
from .updaters import summary

COME, FILLED, SUMMED = 1, 2, 3
_LEAST_PHASES = 4
_FAILED = np.dtype([("round", np.int64), ("why", "S200")])


class Rows:
    """Of one key. Every rank of the node must make it.

    Args:
        memory: the node's.
        number: of the key in its store.
        value: what the key begins with.
        num_parts: how many ranks of the node own a part.
        updates_alone: which rank of the node updates where an update needs the whole value.
        width: elements of a part that are exchanged at once, where ranks push and pull in one.
    """

    def __init__(
        self,
        memory: NodeMemory,
        number: int,
        key: Key,
        value: np.ndarray,
        num_parts: int,
        updates_alone: int,
        width: int,
    ) -> None:
        layout = plan([(f"key {key!r}", value.shape, value.dtype)])
        (count,), (slot,) = layout.counts, layout.slots
        self.ends = np.empty(memory.size + 1, np.int64)
        """Where the parts of the node's ranks begin and end: whole cache lines, and no more than there are elements."""
        parts = [layout.shard(0, num_parts, part)[1] for part in range(num_parts)]
        self.ends[:] = [0, *(min(end, value.size) for end in parts), *[value.size] * (memory.size - num_parts)]
        part = int(self.ends[memory.rank]), int(self.ends[memory.rank + 1])
        self.bucket = Bucket(number, [slot], memory.alloc((memory.size, count), value.dtype), memory.rank, part)
        self.flat = memory.alloc((count,), value.dtype)
        """The value, as long as a row."""
        self.stored = self.flat[: value.size].reshape(value.shape)
        if memory.rank == 0:
            self.stored[...] = value
        self.pieces = max(1, -(-int(np.diff(self.ends).max()) // width))
        self.phases = max(_LEAST_PHASES, 2 * self.pieces + 1)
        """How many numbers of the milestones belong to a round; the last says that the value is new."""
        self.milestones = Milestones(memory)
        self.counters = self.milestones.counters()
        self.label = f"pushpull of key {key!r}"
        self.updates_alone = updates_alone
        self.rounds = 0
        """Pushes of this rank; that of the same number of every rank makes a round."""
        self._memory = memory
        failed = memory.alloc((memory.size,), _FAILED)
        self._failed, self._reasons = failed["round"], failed["why"]
        """For every rank of the node the last round whose update failed there, and why."""
        self._rates = memory.alloc((memory.size,), np.float64)
        """For every rank of the node the learning rate of the round, from its first post on."""

    @property
    def size(self) -> int:
        """Elements of the value."""
        return int(self.ends[-1])

    def behind(self) -> list[int]:
        """The ranks of the node that have not pushed as often as this one."""
        return self.milestones.behind(self.rounds * self.phases + COME)

    def reached(self, number: int, phase: int) -> Reached:
        """That all ranks of the node have got so far in round ``number``."""
        return Reached(self.milestones, number * self.phases + phase)

    def post(self, number: int, phase: int) -> Reached:
        """Say that this rank has got so far, for others to wait for and for itself, too."""
        self.milestones.post(number * self.phases + phase)
        return self.reached(number, phase)

    def say_rate(self, rate: float) -> None:
        """Before the first post of a round: the learning rate that this rank has for it."""
        self._rates[self._memory.rank] = rate

    def check_rates(self, name: str, ranks: list[int]) -> None:
        """When all have posted: raise `MismatchError` on all ranks of the node unless they have the same rate."""
        rates = self._rates.tolist()
        if any(rate != rates[0] for rate in rates):
            at = next(at for at, rate in enumerate(rates) if rate != rates[0])
            got = f"{rates[0]:g} on rank {ranks[0]}, {rates[at]:g} on rank {ranks[at]}"
            raise MismatchError("push", where=name, expected="the same learning rate on all ranks", got=got)

    def fail(self, number: int, error: Exception) -> None:
        """Let the others know, when the value is new, that it is not."""
        self._reasons[self._memory.rank] = summary(error).encode(errors="backslashreplace")
        self._failed[self._memory.rank] = number

    def check(self, number: int, name: str, ranks: list[int]) -> None:
        """When the value is new.

        Args:
            ranks: those of the node, as the world numbers them.

        Raises:
            HpcdpError: the update of another rank has failed in this round.
        """
        failing = np.flatnonzero(self._failed == number)
        if failing.size:
            why = bytes(self._reasons[failing[0]]).decode(errors="ignore")
            raise HpcdpError("push", where=name, expected="an update", got=f"{why} on rank {ranks[failing[0]]}")

    def over(self, value: np.ndarray) -> Bucket:
        """A bucket of ``value`` itself, for a rank that shares with nobody: a sum over nodes needs no row."""
        return Bucket(self.bucket.number, self.bucket.slots, value.reshape(1, -1), 0, self.bucket.shard)

    def whole(self) -> np.ndarray:
        """The sum of a round, from the parts in the rows of the node's ranks, shape ``(size,)``."""
        whole = np.empty(self.size, self.flat.dtype)
        for local, (first, last) in enumerate(zip(self.ends[:-1], self.ends[1:], strict=True)):
            whole[first:last] = self.bucket.rows[local, first:last]
        return whole


class Reached:
    """That all ranks of a node have posted a milestone: a request, so a stage of a machine."""

    def __init__(self, milestones: Milestones, milestone: int) -> None:
        self._milestones, self._milestone = milestones, milestone

    def test(self) -> bool:
        """Whether they have."""
        return self._milestones.reached(self._milestone)

    def wait(self) -> None:
        """Block until they have."""
        self._milestones.wait(self._milestone)
