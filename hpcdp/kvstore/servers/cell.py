"""A part of a key in the memory of a node, which every rank there reads and changes by itself, under a lock.

A count tells its version, and is odd while somebody changes it: the kernel frees the lock of a rank that dies then, and
the next one sees by the count that the value is half new.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...comm.locks import NodeLocks
from ...comm.shared import NodeMemory
from ...errors import HpcdpError
from ...optim import Optimizer
from ..updaters import apply_rule, new_state

_COUNT, _HOLDER, _STEPS, _TICKETS, _TURN, _NUMBERS = 0, 1, 2, 3, 4, 8
AWAY = np.iinfo(np.int64).max
"""The clock of a worker that holds nobody back."""
BACK = -1
"""Instead of a clock: as before it was `AWAY`."""

Change = Callable[[np.ndarray], object]
"""Changes a flat value in place."""


class Cell:
    """One part. Every rank of the node must make it, in the same order.

    Args:
        name: for errors.
        memory: the node's.
        locks: the node's.
        lock: its number among them.
        count, dtype: of the part.
        num_workers: how many clocks it keeps.
    """

    def __init__(
        self, name: str, memory: NodeMemory, locks: NodeLocks, lock: int, count: int, dtype: np.dtype, num_workers: int
    ) -> None:
        self.name = name
        self.flat = memory.alloc((count,), dtype)
        """The value, shape ``(count,)``."""
        self.states: dict[str, np.ndarray] = {}
        """The optimizer's, by name, like `flat`."""
        self.clocks = memory.alloc((num_workers,), np.int64)
        """How often each worker has pushed; `AWAY` for one that holds nobody back."""
        self._clocks_before = memory.alloc((num_workers,), np.int64)
        self._numbers = memory.alloc((_NUMBERS,), np.int64)
        self._memory, self._locks, self._lock = memory, locks, lock

    @property
    def version(self) -> int:
        """How many pushes have taken effect."""
        return int(self._numbers[_COUNT]) // 2

    @property
    def steps(self) -> int:
        """How many updates the optimizer has made."""
        return int(self._numbers[_STEPS])

    @property
    def turn(self) -> int:
        """The ticket that is served next."""
        return int(self._numbers[_TURN])

    def ticket(self) -> int:
        """The next one: operations of a key that lies in several parts take effect in the same order in all of them."""
        with self._locks.hold(self._lock):
            self._numbers[_TICKETS] += 1
            return int(self._numbers[_TICKETS]) - 1

    def may_push(self, worker: int, staleness: int) -> bool:
        """Whether a worker leads by no more than ``staleness`` pushes, or has been away."""
        clock = int(self.clocks[worker])
        return clock == AWAY or clock - int(self.clocks.min()) <= staleness

    def behind(self, worker: int, staleness: int) -> list[int]:
        """The workers that hold it back."""
        return np.flatnonzero(self.clocks < self.clocks[worker] - staleness).tolist()

    def tick(self, worker: int) -> None:
        """Count a push of a worker."""
        if self.clocks[worker] == AWAY:  # it has come back: from where the slowest is
            others = self.clocks[self.clocks != AWAY]
            self.clocks[worker] = others.min() if others.size else 0
        self.clocks[worker] += 1

    def set_clock(self, worker: int, number: int) -> None:
        """Set a worker's clock to 0, to `AWAY`, or `BACK` to what it was before that."""
        if number == BACK and self.clocks[worker] == AWAY:
            self.clocks[worker] = self._clocks_before[worker]
        elif number != BACK:
            if self.clocks[worker] != AWAY:
                self._clocks_before[worker] = self.clocks[worker]
            self.clocks[worker] = number

    def change(self, change: Change, rank: int, ticketed: bool = False) -> int:
        """Let a push take effect, alone. Returns the version that it has made.

        Raises:
            HpcdpError: a rank has died in the middle of an earlier one.
        """
        numbers = self._numbers
        with self._locks.hold(self._lock):
            try:
                self._check()
                numbers[_HOLDER] = rank
                numbers[_COUNT] += 1
                try:
                    change(self.flat)
                except BaseException:
                    numbers[_COUNT] -= 1
                    raise
                numbers[_COUNT] += 1
            finally:
                numbers[_TURN] += ticketed
            return int(numbers[_COUNT]) // 2

    def update(self, rule: Optimizer, received: np.ndarray, flat: np.ndarray) -> None:
        """Within `change`: apply a rule."""
        self._numbers[_STEPS] += 1
        try:
            apply_rule(rule, flat, received, self.states, int(self._numbers[_STEPS]))
        except BaseException:
            self._numbers[_STEPS] -= 1
            raise

    def read(self, take: Change, ticketed: bool = False) -> int:
        """Call ``take(flat)`` while nobody changes it; it must not, either. Returns the version that it has seen.

        Raises:
            HpcdpError: as `change`.
        """
        with self._locks.hold(self._lock, shared=not ticketed):
            try:
                self._check()
                take(self.flat)
                return int(self._numbers[_COUNT]) // 2
            finally:
                self._numbers[_TURN] += ticketed

    def assign(self, value: np.ndarray) -> None:
        """Set the value; that is no new version."""
        with self._locks.hold(self._lock):
            self.flat[:] = value

    def write_state(self, name: str, value: np.ndarray) -> None:
        """Set one of the states."""
        with self._locks.hold(self._lock):
            self.states[name][:] = value

    def set_steps(self, steps: int) -> None:
        """Set how often the rule has updated."""
        with self._locks.hold(self._lock):
            self._numbers[_STEPS] = steps

    def keep_states_of(self, rule: Optimizer) -> None:
        """Make room for a rule's state, zero as it begins; every rank of the node must call."""
        self._numbers[_STEPS] = 0
        like = new_state(rule, self.flat[:0])
        self.states = {name: self._memory.alloc((self.flat.size,), like[name].dtype) for name in rule.state_names()}

    def _check(self) -> None:
        if self._numbers[_COUNT] % 2:
            raise HpcdpError(
                "key-value store",
                where=self.name,
                expected="a whole value",
                got=f"one that rank {self._numbers[_HOLDER]} has changed by half when it died",
                remedy="start again from the last checkpoint",
            )
