"""Ranks that have run out of data go on with the others, until nobody has any.

While a model is joined, each rank says what it is about to do before anything that all ranks must do together. A rank
without data says that it has none, and does its part of whatever the others have said, with gradients of zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..comm import World
from ..errors import ConfigError, MismatchError

_JOINED = "joined model"
"""What a world keeps the turns under that are taken just now."""


class Turns:
    """What the ranks of one model do together, in turn.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self.events: dict[str, Callable[[Any], object]] = {}
        """What a rank without data does about each event, given what was announced with it."""
        self.active = list(range(world.size))
        """The ranks that had data at the latest turn."""
        self.last_rank = 0
        """The lowest of the ranks that had data at the last turn of the last `joined`."""
        self._world = world
        self.following = False
        """Whether this rank has run out of data, and others have not."""
        self._open = False
        self._divides_by_all = True

    @property
    def divisor(self) -> int:
        """By how many ranks sums of gradients are divided."""
        return self._world.size if self._divides_by_all else len(self.active)

    def announce(self, event: str, what: object = None) -> None:
        """Say that this rank is about to do something that all ranks do together; outside of `joined` nothing happens.

        Args:
            event: one of `events`.
            what: given to those without data; anything that JSON knows.

        Raises:
            MismatchError: ranks with data do different things; on every rank.
        """
        if self._open and not self.following:
            self._meet([event, what])

    @contextmanager
    def joined(self, divides_by_all: bool) -> Iterator[None]:
        """Within it ranks may run out of data; who leaves waits until all have.

        Raises:
            ConfigError: within another one, also of another model, whose turns would be taken for this one's.
        """
        if _JOINED in self._world.kept:
            raise ConfigError(
                "join", expected="one at a time", got="join() within join()", remedy="wrap one module that holds both"
            )
        self._world.kept[_JOINED] = self
        self._open, self._divides_by_all = True, divides_by_all
        try:
            yield
            self.following = True
            last = self.active
            while (said := self._meet(None)) is not None:
                last = self.active
                self.events[said[0]](said[1])
            self.last_rank = last[0]
        finally:
            del self._world.kept[_JOINED]
            self._open, self.following, self._divides_by_all = False, False, True
            self.active = list(range(self._world.size))

    def _meet(self, mine: list[Any] | None) -> list[Any] | None:
        """What the ranks with data are about to do; None where there is none."""
        everyone = self._world.comm.allgather_json(mine)
        self.active = [rank for rank, said in enumerate(everyone) if said is not None]
        if not self.active:
            return None
        first = everyone[self.active[0]]
        for rank in self.active:
            if everyone[rank] != first:
                raise MismatchError(
                    "join", expected=f"the same as on rank {self.active[0]}: {_named(first)}",
                    got=f"{_named(everyone[rank])} on rank {rank}",
                    remedy="ranks may run out of data, but do the same for each batch",
                )  # fmt: skip
        return list(first)


def _named(said: list[Any]) -> str:
    event, what = said
    return f"{event} ({what})" if what is not None else str(event)
