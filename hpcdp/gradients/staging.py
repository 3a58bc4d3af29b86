"""Sums over nodes of what lies on GPUs: in segments through host memory, one on the network while others are copied.

A bucket has two slots of pinned memory. Each takes every other segment::

    slot 0:   to the host | network          | back      | to the host | network ...
    slot 1:               | to the host      | network   | back        | to the host ...

So the network carries one segment while the next comes and the last one goes. Copies go on two streams of their own,
one each way, which a GPU does at once; what follows what is said by events, and the host waits for none but that before
a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..arrays import Array
from ..collectives.progress import LANES, Steps, in_lanes, segments, together
from ..comm import Request
from ..comm.node_rows import NodeRows
from ..comm.steps import StepsTo, Until
from ..streams import Event, Streams

SLOTS = 2
SEGMENT_NBYTES = 2 << 20
"""The longest segment: long enough for a copy to go at full speed, and for a ring to cut it into messages."""

Sum = Callable[[np.ndarray, int, Request | None], Steps]
"""``sum(x, tag, turn)`` sums ``x`` in place over other nodes, with up to `LANES` tags from ``tag`` on."""


class _Slot:
    """Pinned memory, shape ``(nbytes,)``, the events behind what was copied there, and behind what was taken back."""

    def __init__(self, streams: Streams, nbytes: int) -> None:
        self.memory = streams.pinned(nbytes)
        self.brought, self.returned = streams.event(), streams.event()


class Staging:
    """The slots of all buckets of a rank.

    Args:
        streams: of its GPU.
        nbytes: of this rank's part of each bucket.
    """

    def __init__(self, streams: Streams, nbytes: Sequence[int]) -> None:
        self._streams = streams
        self._down, self._up = streams.stream(), streams.stream()
        self._ready = [streams.event() for _ in nbytes]
        self._slots = [[_Slot(streams, _slot_nbytes(each)) for _ in range(SLOTS if each else 0)] for each in nbytes]

    def sum(
        self, number: int, part: Array, row: NodeRows, total: Sum, tag: int, turn: Request | None
    ) -> StepsTo[Sequence[Event]]:
        """Sum ``part``, contiguous, of bucket ``number`` in place with ``total``.

        It is read behind what ``row.stream`` has been given until now. Returns the events behind which the sum is
        there.
        """
        if part.size == 0:
            return ()
        streams, slots = self._streams, self._slots[number]
        streams.record(self._ready[number], row.stream)
        streams.wait_event(self._down, self._ready[number])
        pieces = segments(part, SEGMENT_NBYTES)

        def through(piece: Array, lane: int) -> Steps:
            return self._through(slots[lane], piece, row, total, tag + lane * LANES, turn)

        yield from together(in_lanes(pieces, through, 0, SLOTS))
        return tuple(slot.returned for slot in slots[: len(pieces)])

    def _through(self, slot: _Slot, piece: Array, row: NodeRows, total: Sum, tag: int, turn: Request | None) -> Steps:
        streams, host = self._streams, slot.memory[: piece.nbytes].view(piece.dtype)
        streams.wait_event(self._down, slot.returned)  # the segment before has left the slot
        streams.copy_async(host, piece, self._down)
        streams.record(slot.brought, self._down)

        def brought() -> bool:
            row.check()
            return streams.query(slot.brought)

        yield [Until(brought)]
        yield from total(host, tag, turn)
        streams.copy_async(piece, host, self._up)
        streams.record(slot.returned, self._up)


def _slot_nbytes(nbytes: int) -> int:
    """Enough for the longest of nearly equal segments."""
    return -(-nbytes // -(-nbytes // SEGMENT_NBYTES)) + 8 if nbytes else 0
