"""Floor 3: data, batches that parts take as they come to them. Imports: errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from .resumable import Resumable
from .samplers import at_least, one_of, shuffled


class SharedSampler(Resumable):
    """Batches that parts take as they come to them, so that a slower part does fewer.

    One global order, alike on all parts, is cut into batches; a part takes the batch of the next number that nobody
    has, until there is none left. A position is one in that order: batches of what is left of an epoch may have another
    size than those before.

    Args:
        n: number of samples in the data set.
        batch_size: samples of one batch, which one part takes.
        numbers: 0, 1, 2, ..., each given to one part alone; each iteration of it begins at 0 again, on all parts. A
            method ``given() -> int``, if it has one, says on all parts, when all call, how many all have together.
        shuffle, seed: as `ShardedSampler`.
        last: what becomes of a short last batch: "keep" or "discard".

    Raises:
        ConfigError: a value outside of that.
    """

    decides = ("n", "shuffle", "seed", "last")

    def __init__(
        self, n: int, batch_size: int, numbers: Iterable[int], shuffle: bool = True, seed: int = 0, last: str = "keep"
    ) -> None:
        self.n, self.batch_size = at_least("n", n, 0), at_least("batch_size", batch_size, 1)
        self.shuffle, self.seed = bool(shuffle), at_least("seed", seed, 0)
        self.last = one_of("last", last, ("keep", "discard"))
        self.numbers = numbers
        self.taken = 0
        """How many batches of this epoch were taken, by all parts, when this part took its last one."""
        self._blank = 0
        """The first batches count as if they had so many samples more, where they had another size."""

    def batches(self, done: int | None = None) -> Iterator[np.ndarray]:
        order = shuffled(self.n, self.seed, self.epoch) if self.shuffle else np.arange(self.n)
        if done is None:
            self._blank = 0
        first = self.taken = done or 0
        for number in self.numbers:
            if first + number >= len(self):
                return
            self.taken = first + number + 1
            end = self.taken * self.batch_size - self._blank
            yield order[end - self.batch_size : end]

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._blank = 0
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        blank = {"blank": self._blank} if self._blank else {}
        return super().state_dict() | {"batch_size": self.batch_size} | blank

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state({"blank": 0, **state})

    def taken_over(self, state: Mapping[str, Any], done: int) -> int:
        """See `Resumable.taken_over`; the samples that were taken count, whatever the size of their batches."""
        taken = min(max(0, done * state["batch_size"] - state.get("blank", 0)), self.n)
        batches = -(-taken // self.batch_size)
        self._blank = batches * self.batch_size - taken
        return batches

    def close(self) -> None:
        """Let this iteration end early, for all parts, where ``numbers`` has a method ``close``; one part calls."""
        close = getattr(self.numbers, "close", None)
        if close is not None:
            close()

    def place(self, before: int, used: int, ended: bool) -> tuple[int, bool]:
        """See `Resumable.place`; what any part has taken counts, also where it has not come to use it."""
        given = getattr(self.numbers, "given", None)
        done = self.taken if given is None else min(before + given(), len(self))
        return done, done == len(self)

    def __len__(self) -> int:
        """The number of batches an epoch, all parts together."""
        count = self.n + self._blank
        return count // self.batch_size if self.last == "discard" else -(-count // self.batch_size)
