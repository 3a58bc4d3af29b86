"""The inter-node part of a reduction, along the rails.

How long messages between nodes are: where links are fast, longer than what TCP likes. A job tries several.

Over TCP a message of `progress.MESSAGE_NBYTES` goes at once, and a longer one waits for its receiver. But Python takes
some 20 us for each, so 60 KB are 3 GB/s at most, and 256 KB 13. Sums do not depend on it.

What a rank sums with those of other nodes that own the same shard: messages, compressed if asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from typing import Protocol

import numpy as np

from .. import kernels
from ..collectives import compressed, halving_doubling, ring
from ..comm import Communicator, Reduction, Request, World
from ..comm.communicator import Messages, Steps, make_tag, resolve
from ..comm.tasks import MESSAGE_NBYTES, in_lanes, run_until_complete, segments, together
from ..compression import Compression, ErrorFeedback
from ..core.arrays import Array, from_host, to_host
from .buckets import Bucket, Slot

LONGER_NBYTES = (256 << 10, 1 << 20)
"""4 MB are no sooner: on links of 10 and 25 Gbit/s they took as long as 1 MB, and in memory."""
_FROM_NBYTES = 1 << 20
"""Buckets that are shorter go in few messages anyhow."""
_MESSAGES, _TURNS = 4, 3
_GAIN = 1.1
"""What makes a step worth it: turns vary by some percent."""


def fitting(world: World, comm: Communicator | None, longest_nbytes: int) -> int:
    """Bytes of a message between the ranks of ``comm``, all of which must call with the same, and get the same.

    The first call for as many ranks in a world takes some milliseconds, over 1 Gbit/s 110.

    Args:
        longest_nbytes: of the longest bucket.
    """
    if comm is None or comm.size == 1 or longest_nbytes < _FROM_NBYTES:
        return MESSAGE_NBYTES
    lasting: int = world.keep(("message length", comm.size), lambda: measured(comm))
    return lasting


def measured(comm: Communicator) -> int:
    """See `fitting`: the longest of which each is worth it over the one before, on the slowest rank of ``comm``."""
    chosen = MESSAGE_NBYTES
    for longer in LONGER_NBYTES:
        before, then = _seconds(comm, (chosen, longer), _MESSAGES * longer)
        if before <= _GAIN * then:
            break
        chosen = longer
    return chosen


def _seconds(comm: Communicator, lengths: tuple[int, int], nbytes: int) -> tuple[float, float]:
    """Of messages of each of two lengths, in turn: what each rank sends to the next one is added up there, and the sum
    sent on, as in a ring."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    own, received = np.zeros((2, nbytes // 4), np.float32)
    total = resolve("reduction", "sum", own.dtype)

    def exchanged(pair: tuple[np.ndarray, np.ndarray], tag: int) -> Steps:
        yield [comm.isend(pair[0], right, tag), comm.irecv(pair[1], left, tag)]
        total.into(*pair)
        yield [comm.isend(pair[0], right, tag), comm.irecv(pair[1], left, tag)]

    def seconds(length: int) -> float:
        pairs = list(zip(segments(own, length), segments(received, length), strict=True))
        comm.barrier()
        begin = time.perf_counter()
        run_until_complete(together(in_lanes(pairs, exchanged, make_tag(0, 0))))
        return time.perf_counter() - begin

    turns = [[seconds(length) for length in lengths] for _ in range(_TURNS)]
    best = [min(each) for each in zip(*turns, strict=True)]
    first, second = (max(each) for each in zip(*comm.allgather_json(best), strict=True))
    return first, second


SHORT_NBYTES = 64 << 10
"""Up to so many bytes the number of messages after one another counts, not their length."""


class Coder(Protocol):
    """What encodes this rank's part of each bucket for other nodes, and remembers what they have not got yet.

    Of parameters that no rank has used in a step, the ``unsent`` of its sums, it keeps that: nobody would use it.
    """

    @property
    def comm(self) -> Communicator:
        """The ranks that sum the same parts."""
        ...

    @property
    def feedback(self) -> Sequence[ErrorFeedback]:
        """For every bucket what encodes that part; empty where nothing is compressed."""
        ...

    def columns(self, number: int) -> tuple[int, int]:
        """Of bucket ``number`` the part: the first column, and one after the last."""
        ...

    def sent_nbytes(self) -> tuple[int, int]:
        """Bytes that all ranks of `comm` together send in a step, and what they would without compression; 0 where
        nothing is compressed."""
        ...


class InterNodeReduction:
    """The ranks that own the same shard of every bucket, one a node; or all ranks, where none share memory.

    Args:
        comm: theirs.
        signature: see `make_tag`.
        buckets: those that it will sum.
        compression: how; None: as they are.
        message_nbytes: about the longest message, on all ranks alike; sums do not depend on it.
    """

    def __init__(
        self,
        comm: Communicator,
        signature: int,
        buckets: Sequence[Bucket],
        compression: Compression | None,
        message_nbytes: int = MESSAGE_NBYTES,
    ) -> None:
        self.comm, self._message_nbytes = comm, message_nbytes
        self._signature = signature % comm.signatures
        self.feedback = (
            [compression.for_array(each.shard[1] - each.shard[0], np.dtype(each.mine.dtype)) for each in buckets]
            if compression is not None and comm.size > 1
            else []
        )
        """See `Coder`."""
        self._shards = [each.shard for each in buckets]
        if self.feedback:
            kernels.load("compress")  # not in the first step, for which all ranks wait
        self._padding = [padding(each.slots, each.shard) for each in buckets] if self.feedback else []

    def tag(self, bucket: Bucket) -> int:
        """Of the messages of a bucket."""
        return make_tag(self._signature, bucket.number)

    def sum(self, bucket: Bucket, turn: Request | None, unsent: Sequence[Slot] = ()) -> Steps:
        """Sum this rank's shard over all ranks of the rail, in place in its own row.

        Args:
            unsent: see `Coder`.
        """
        if self.comm.size == 1:
            return
        first, last = bucket.shard
        shard = bucket.mine[first:last]
        host = to_host(shard)
        tag = self.tag(bucket)
        if self.feedback:
            feedback = self.feedback[bucket.number]
            kept = set_aside(feedback.residual, unsent, bucket.shard)
            yield from compressed.allreduce(host, feedback, self.comm, tag, turn)
            for part in self._padding[bucket.number]:  # some codecs send something for nothing
                host[part] = feedback.residual[part] = 0
            put_back(feedback.residual, host, kept)
        else:
            total = resolve("reduction", "sum", host.dtype)
            yield from together(lanes_of_segment(host, total, self.comm, tag, self._message_nbytes, turn))
        if host is not shard:
            shard[...] = from_host(host, shard)

    def columns(self, number: int) -> tuple[int, int]:
        """See `Coder`."""
        return self._shards[number]

    def sent_nbytes(self) -> tuple[int, int]:
        """See `Coder`."""
        return compressed.sent_and_plain_nbytes(self.feedback, self.comm.size)


def lanes_of_segment(
    x: Array, total: Reduction, comm: Messages, tag: int, nbytes: int, turn: Request | None
) -> list[Steps]:
    """The machines that add up a segment by ``total`` in place, each with a tag of its own, in messages of at most
    about ``nbytes``; the same bits, however long those are."""
    if _is_short(x, comm):
        return halving_doubling.lanes(x, total, comm, tag)
    return ring.lanes_of_chunks(x, total, ring.Ring.through(comm), tag, nbytes, turn)


def _is_short(x: Array, comm: Messages) -> bool:
    return comm.size > 2 and x.nbytes <= SHORT_NBYTES


def node_nbytes(coder: Coder | None, world: World) -> tuple[float, float]:
    """Bytes that a node sends in a step, mean over the nodes, and what it would without compression; every rank must
    call. Both are 0 without compression."""
    own = (0.0, 0.0) if coder is None else [each / coder.comm.size for each in coder.sent_nbytes()]
    sent, plain = (sum(each) / world.num_nodes for each in zip(*world.comm.allgather_json(own), strict=True))
    return sent, plain


def slots_by_bucket(buckets: Sequence[Bucket], names: Set[str]) -> dict[int, list[Slot]]:
    """Return the slots of the parameters ``names``, by the number of their bucket."""
    slots = {bucket.number: [slot for slot in bucket.slots if slot.name in names] for bucket in buckets if names}
    return {number: of_bucket for number, of_bucket in slots.items() if of_bucket}


def set_aside(residual: Array, slots: Sequence[Slot], columns: tuple[int, int]) -> list[tuple[slice, Array]]:
    """Make what was not sent yet of ``slots`` zero, in an array of these ``columns``; return what it was, and where."""
    first, last = columns
    ends = [(max(first, slot.offset), min(last, slot.offset + slot.count)) for slot in slots]
    parts = [slice(begin - first, end - first) for begin, end in ends if begin < end]
    kept = [(part, residual[part].copy()) for part in parts]
    for part in parts:
        residual[part] = 0
    return kept


def put_back(residual: Array, total: Array, kept: Sequence[tuple[slice, Array]]) -> None:
    """Undo `set_aside` when the sum is there, which is ``total``: some codecs send something for nothing."""
    for part, values in kept:
        residual[part] = values
        total[part] = 0


def padding(slots: Sequence[Slot], columns: tuple[int, int]) -> list[slice]:
    """Those of the ``columns`` of a bucket that belong to no parameter; 0 is the first of these columns."""
    return list(_gaps(slots, *columns))


def _gaps(slots: Sequence[Slot], first: int, last: int) -> Iterator[slice]:
    at = first
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if at < min(last, slot.offset):
            yield slice(at - first, min(last, slot.offset) - first)
        at = max(at, slot.offset + slot.count)
    if at < last:
        yield slice(at - first, last - first)
