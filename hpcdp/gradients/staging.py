"""Sums over nodes of what lies on GPUs: in segments through host memory, some on the network while others are copied.

A bucket has `SLOTS` slots of pinned memory, through which its segments go in turn, and of those `ON_THE_NETWORK` are
summed at a time::

    slot 0:   to the host | network          | back      | to the host | network ...
    slot 1:               | to the host | network          | back      | to the host ...
    slot 2:                             | to the host | network          | back ...

Copies go on two streams of their own, one each way, which a GPU does at once. What follows what is said by events, and
the host waits for none but that before a message; it sees that one late, after a nap, and meanwhile the copies go on:
those of all slots are given to the stream at once, and the next one of a slot when its sum goes back, behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..arrays import Array
from ..collectives.progress import LANES, TAGS, Steps, segments, together
from ..comm import Request
from ..comm.node_rows import NodeRows
from ..comm.steps import StepsTo, Until
from ..streams import Event, Stream, Streams

SEGMENT_NBYTES = 8 << 20
"""The longest segment: long enough for a copy to take longer than the host needs for what comes with one, and for a
ring to cut it into messages. On an H200 each copy takes 10 us besides its bytes: 256 MB in segments of 4 MiB take a
tenth longer."""

ON_THE_NETWORK = TAGS // LANES
"""So many segments are summed at a time: as many as have tags of their own."""

SLOTS = 2 * ON_THE_NETWORK
"""A bucket has pinned memory for so many segments: while half of them are summed, the others are copied."""

_WIDEST = 8
"""Bytes of an element at most: segments are as long as whole elements are."""

Sum = Callable[[np.ndarray, int, Request | None], Steps]
"""``sum(x, tag, turn)`` sums ``x`` in place over other nodes, with up to `LANES` tags from ``tag`` on."""


class _Slot:
    """Pinned memory, shape ``(nbytes,)``, the events behind what was copied there, and behind what was taken back."""

    def __init__(self, streams: Streams, nbytes: int, *copied_by: Stream) -> None:
        self.memory = streams.pinned(nbytes, *copied_by)
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
        ways = self._down, self._up
        self._slots = [[_Slot(streams, size, *ways) for size in _slot_nbytes(each)] for each in nbytes]

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
        for slot, piece in zip(slots, pieces, strict=False):
            self._bring(slot, piece)

        def every(lane: int) -> Steps:
            for at in range(lane, len(pieces), ON_THE_NETWORK):
                slot, host = slots[at % SLOTS], _host(slots[at % SLOTS], pieces[at])
                yield [self._brought(slot, row)]
                yield from total(host, tag + lane * LANES, turn)
                streams.copy_async(pieces[at], host, self._up)
                streams.record(slot.returned, self._up)
                if at + SLOTS < len(pieces):
                    self._bring(slot, pieces[at + SLOTS])

        yield from together([every(lane) for lane in range(min(ON_THE_NETWORK, len(pieces)))])
        return tuple(slot.returned for slot in slots[: len(pieces)])

    def _bring(self, slot: _Slot, piece: Array) -> None:
        """Copy a segment to the host behind what was taken back from its slot."""
        streams = self._streams
        streams.wait_event(self._down, slot.returned)
        streams.copy_async(_host(slot, piece), piece, self._down)
        streams.record(slot.brought, self._down)

    def _brought(self, slot: _Slot, row: NodeRows) -> Until:
        def is_there() -> bool:
            row.check()
            return self._streams.query(slot.brought)

        return Until(is_there)


def _host(slot: _Slot, piece: Array) -> np.ndarray:
    return slot.memory[: piece.nbytes].view(piece.dtype)


def _slot_nbytes(nbytes: int) -> list[int]:
    """Of each slot: enough for the longest of nearly equal segments, and no more slots than there are.

    Not a byte more: CuPy's pool takes the next power of two, which a whole segment is.
    """
    if nbytes == 0:
        return []
    number = -(-nbytes // SEGMENT_NBYTES)
    return [-(-nbytes // (number * _WIDEST)) * _WIDEST] * min(SLOTS, number)
