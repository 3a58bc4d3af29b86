"""Ranks that run out of data: they take part in the operations of others with zeros, until all have joined.

Before each operation on all ranks, a rank announces it to those that have joined, by a short sum that it does not wait
for. A joined rank, which announces nothing, waits for the sum and then takes part in the operation. If nobody has
announced anything, all ranks have joined.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from ..collectives import allreduce, iallreduce
from ..comm import World
from ..errors import MismatchError

_SHORT_NBYTES = 256
"""The length of an announcement in bytes; a longer one follows in a message of its own."""
_HEADER = np.dtype(np.int32)


class Turns:
    """The announcements of one world's ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._turn = 0

    def announce(self, event: dict[str, Any]) -> None:
        """Announce an operation of this rank; every rank that has not joined must call, with the same event."""
        if self._world.size > 1:
            self._turn += 1
            text = json.dumps(event).encode()
            short, long = _messages(text)
            iallreduce(short, "max", self._world)
            if long.size:
                iallreduce(long, "max", self._world)

    def join(self, take_part: Callable[[dict[str, Any]], object]) -> int:
        """Call ``take_part`` with each event of other ranks until all have joined; return the last rank that joined."""
        world = self._world
        joined_at = self._turn
        while world.size > 1 and (event := self._next()) is not None:
            self._turn += 1
            take_part(event)
        last = np.array([joined_at * world.size + world.rank])
        return int(allreduce(last, "max", world)[0]) % world.size

    def _next(self) -> dict[str, Any] | None:
        short = iallreduce(np.zeros(_SHORT_NBYTES, np.uint8), "max", self._world).wait()
        nbytes = int(short[: _HEADER.itemsize].view(_HEADER)[0])
        if not nbytes:
            return None
        text = short[_HEADER.itemsize :][:nbytes]
        if nbytes > text.size:
            text = iallreduce(np.zeros(nbytes, np.uint8), "max", self._world).wait()
        try:
            return json.loads(text.tobytes())  # type: ignore[no-any-return]
        except ValueError:  # the maximum of different announcements
            raise MismatchError(
                "join", expected="the same operation on all ranks with data", got="different ones",
                remedy="call the same operations in the same order on all ranks",
            ) from None  # fmt: skip


def _messages(text: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the short message of an announcement, and the long one, empty if the short one has the text."""
    short = np.zeros(_SHORT_NBYTES, np.uint8)
    short[: _HEADER.itemsize].view(_HEADER)[0] = len(text)
    encoded = np.frombuffer(text, np.uint8)
    if len(text) <= _SHORT_NBYTES - _HEADER.itemsize:
        short[_HEADER.itemsize :][: len(text)] = encoded
        return short, encoded[:0]
    return short, encoded.copy()
