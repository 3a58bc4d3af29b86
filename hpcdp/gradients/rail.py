"""What a rank sums with those of other nodes that own the same shard: messages, compressed if asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .. import kernels
from ..arrays import from_host, to_host
from ..collectives import compressed, halving_doubling, ring
from ..collectives.progress import Steps
from ..comm import Communicator, Request, World
from ..comm.communicator import make_tag
from ..comm.reductions import resolve
from ..compression import Compression
from .bucket import Bucket

SHORT_NBYTES = 64 << 10
"""Up to so many bytes the number of messages after one another counts, not their length."""


class Rail:
    """The ranks that own the same shard of every bucket, one a node; or all ranks, where none share memory.

    Args:
        comm: theirs.
        signature: see `make_tag`.
        buckets: those that it will sum.
        compression: how; None: as they are.
    """

    def __init__(
        self, comm: Communicator, signature: int, buckets: Sequence[Bucket], compression: Compression | None
    ) -> None:
        self.comm = comm
        self._signature = signature % comm.signatures
        self.feedback = (
            [compression.for_array(each.shard[1] - each.shard[0], np.dtype(each.mine.dtype)) for each in buckets]
            if compression is not None and comm.size > 1
            else []
        )
        """For every bucket what encodes this rank's shard of it; empty without compression."""
        if self.feedback:
            for name in ("compress", "cast"):
                kernels.load(name)  # not in the first step, for which all ranks wait
        self._padding = [list(_padding(each)) for each in buckets] if self.feedback else []

    def tag(self, bucket: Bucket) -> int:
        """Of the messages of a bucket."""
        return make_tag(self._signature, bucket.number)

    def sum(self, bucket: Bucket, turn: Request | None) -> Steps:
        """Sum this rank's shard over all ranks of the rail, in place in its own row."""
        if self.comm.size == 1:
            return
        first, last = bucket.shard
        shard = bucket.mine[first:last]
        host = to_host(shard)
        tag = self.tag(bucket)
        if self.feedback:
            feedback = self.feedback[bucket.number]
            yield from compressed.allreduce(host, feedback, self.comm, tag, turn)
            for part in self._padding[bucket.number]:  # some codecs send something for nothing
                host[part] = feedback.residual[part] = 0
        else:
            yield from summed(host, self.comm, tag, turn)
        if host is not shard:
            shard[...] = from_host(host, shard)

    def sent_nbytes(self) -> tuple[int, int]:
        """Bytes that all its ranks together send in a step, and what they would without compression."""
        plain = sent = 0
        n = self.comm.size
        for each in self.feedback:
            plain += 2 * (n - 1) * each.residual.nbytes
            sent += compressed.sent_nbytes(each.residual.size, each.residual.dtype, each.codec, n)
        return sent, plain


def summed(x: np.ndarray, comm: Communicator, tag: int, turn: Request | None) -> Steps:
    """Sum ``x``, shape ``(count,)``, in place over all ranks of ``comm``, uncompressed; long ones wait for ``turn``."""
    total = resolve("reduction", "sum", x.dtype)
    if comm.size > 2 and x.nbytes <= SHORT_NBYTES:
        yield from halving_doubling.allreduce(x, total, comm, tag)
    else:
        yield from ring.allreduce(x, total, comm, tag, turn)


def node_nbytes(rail: Rail | None, world: World) -> tuple[float, float]:
    """Bytes that a node sends in a step, mean over the nodes, and what it would without compression; every rank must
    call. Both are 0 without compression."""
    own = (0.0, 0.0) if rail is None else [each / rail.comm.size for each in rail.sent_nbytes()]
    sent, plain = (sum(each) / world.num_nodes for each in zip(*world.comm.allgather_json(own), strict=True))
    return sent, plain


def _padding(bucket: Bucket) -> Iterator[slice]:
    """Elements of this rank's shard that belong to no parameter."""
    first, last = bucket.shard
    at = first
    for slot in sorted(bucket.slots, key=lambda slot: slot.offset):
        if at < min(last, slot.offset):
            yield slice(at - first, min(last, slot.offset) - first)
        at = max(at, slot.offset + slot.count)
    if at < last:
        yield slice(at - first, last - first)
