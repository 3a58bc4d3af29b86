"""Sums over nodes of what lies on GPUs, by messages from and to their memory: for MPI libraries that take arrays there.

A library reads and writes such memory at once, whatever a stream has still to do. So a message is posted when an event
has passed that is behind all that the stream was given before, and what has come is there when the message is
complete::

    GPU     reduce-scatter in the node |               | add up |               | add up | ...
    event                              | passes                 | passes                 | passes
    MPI                                | send, receive          | send, receive          | send ...

Segments and the order of each sum are those of `staging`, and so are the bits. But a message is a whole chunk of a
segment: of n nodes the n-th part of 8 MiB. Short messages (`collectives.progress.MESSAGE_NBYTES`) keep host memory
flowing over TCP. From a GPU's memory libraries send nothing without a handshake but a few KB; then the adapter reads it
there, or they bring it through memory of their own, in pieces of 512 KB to 4 MB (UCX's ``RNDV_FRAG_SIZE``) or of 1 MB
(MPICH's ``CH4_OFI_GPU_PIPELINE_BUFFER_SZ``). So each message more is a handshake more, and here an event and a kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ..arrays import Array
from ..collectives.progress import Steps, in_lanes, segments, together
from ..comm import Communicator, Reduction, Request
from ..comm.node_rows import NodeRows
from ..comm.steps import StepsTo, Until, wait_for
from ..streams import Event, Stream, Streams
from . import staging
from .rail import lanes_of_segment


class Direct:
    """What takes the place of a `staging.Staging`.

    Args:
        streams: of this rank's GPU.
        num_buckets: so many.
        comm: the ranks that sum the same parts; one a node. Its messages take arrays on GPUs.
    """

    def __init__(self, streams: Streams, num_buckets: int, comm: Communicator) -> None:
        self._streams, self._comm = streams, comm
        self._stream = streams.stream()
        self._ready, self._summed = ([streams.event() for _ in range(num_buckets)] for _ in range(2))
        self._free: list[Event] = []

    def sum(self, number: int, part: Array, row: NodeRows, tag: int, turn: Request | None) -> StepsTo[Sequence[Event]]:
        """Sum ``part``, contiguous, of bucket ``number`` in place over all ranks.

        It is read behind what ``row.stream`` has been given until now. Returns the events behind which the sum is
        there.
        """
        if part.size == 0 or self._comm.size == 1:
            return ()
        streams = self._streams
        streams.record(self._ready[number], row.stream)

        def is_ready() -> bool:
            row.check()
            return streams.query(self._ready[number])

        yield [Until(is_ready)]  # not on the stream: there it would hold up the sums of other buckets
        comm = _Link(self._comm, streams, self._stream, row.check, self._free)

        def through(segment: Array, own_tag: int) -> Steps:
            with streams.on_device(), self._stream:
                machines = lanes_of_segment(segment, _SUM, comm, own_tag, segment.nbytes, turn)
            return together([_given_to(streams, self._stream, each) for each in machines])

        yield from together(in_lanes(segments(part, staging.SEGMENT_NBYTES), through, tag))
        streams.record(self._summed[number], self._stream)
        return (self._summed[number],)


def _add(total: Array, x: Array) -> None:
    total += x


_SUM = Reduction("sum", _add)


def _given_to(streams: Streams, stream: Stream, steps: Steps) -> Steps:
    """``steps``, whose operations on arrays go to ``stream``, and its memory comes from there."""
    while True:
        with streams.on_device(), stream:
            stage = next(steps, None)
        if stage is None:
            return
        yield stage


class _Link:
    """A communicator of arrays on a GPU, whose messages wait for what a stream was given before them."""

    def __init__(
        self, comm: Communicator, streams: Streams, stream: Stream, check: Callable[[], None], free: list[Event]
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._comm, self._streams, self._stream, self._check, self._free = comm, streams, stream, check, free
        self._waiting: deque[tuple[Event, _Posted, Callable[[], Request]]] = deque()

    def isend(self, x: Array, dest: int, tag: int = 0) -> _Posted:
        return self._behind(partial(self._comm.isend, x, dest, tag))

    def irecv(self, x: Array, source: int, tag: int = 0) -> _Posted:
        return self._behind(partial(self._comm.irecv, x, source, tag))

    def _behind(self, post: Callable[[], Request]) -> _Posted:
        event = self._free.pop() if self._free else self._streams.event()
        self._streams.record(event, self._stream)
        message = _Posted(self)
        self._waiting.append((event, message, post))
        return message

    def post(self) -> None:
        """Post what may go, whoever asks: who waits for a message may have to send one before."""
        while self._waiting:
            self._check()
            event, message, post = self._waiting[0]
            if not self._streams.query(event):
                return
            self._waiting.popleft()
            self._free.append(event)
            with self._streams.on_device():
                message.request = post()


class _Posted:
    """A message of a link that is posted when its event has passed."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self.request: Request | None = None

    def test(self) -> bool:
        self._link.post()
        return self.request is not None and self.request.test()

    def wait(self) -> None:
        wait_for(self.test)
