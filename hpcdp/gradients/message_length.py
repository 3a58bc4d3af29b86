"""How long messages between nodes are: where links are fast, longer than what TCP likes. A job tries both.

Over TCP a message of `progress.MESSAGE_NBYTES` goes at once, and a longer one waits for its receiver. But Python takes
some 20 us for each, so 60 KB are 3 GB/s at most: two processes of one machine sum 64 MB in 64 to 75 ms by such
messages, and in 27 to 36 by those of 256 KB and more (MPI's own allreduce takes 42). Sums do not depend on it.
"""

from __future__ import annotations

import time

import numpy as np

from ..collectives.progress import MESSAGE_NBYTES, Steps, drive, in_lanes, segments, together
from ..comm import Communicator, World
from ..comm.communicator import make_tag

LONG_NBYTES = 256 << 10
_FROM_NBYTES = 1 << 20
"""Buckets that are shorter go in few messages anyhow."""
_PROBE_NBYTES, _TURNS, _GAIN = 1 << 20, 3, 1.3


def fitting(world: World, comm: Communicator | None, longest_nbytes: int) -> int:
    """Bytes of a message between the ranks of ``comm``, all of which must call with the same, and get the same.

    The first call for as many ranks in a world takes some milliseconds, over 1 Gbit/s 60.

    Args:
        longest_nbytes: of the longest bucket.
    """
    if comm is None or comm.size == 1 or longest_nbytes < _FROM_NBYTES:
        return MESSAGE_NBYTES
    lasting: int = world.keep(("message length", comm.size), lambda: measured(comm))
    return lasting


def measured(comm: Communicator) -> int:
    """See `fitting`: what each rank of ``comm`` sends to the next one arrives sooner so, on the slowest of them."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = np.zeros((2, _PROBE_NBYTES), np.uint8)

    def exchanged(pair: tuple[np.ndarray, np.ndarray], tag: int) -> Steps:
        yield [comm.isend(pair[0], right, tag), comm.irecv(pair[1], left, tag)]

    def seconds(nbytes: int) -> float:
        pairs = list(zip(segments(sent, nbytes), segments(received, nbytes), strict=True))
        comm.barrier()
        begin = time.perf_counter()
        drive(together(in_lanes(pairs, exchanged, make_tag(0, 0))))
        return time.perf_counter() - begin

    turns = [[seconds(nbytes) for nbytes in (MESSAGE_NBYTES, LONG_NBYTES)] for _ in range(_TURNS)]
    best = [min(each) for each in zip(*turns, strict=True)]
    short, long = (max(each) for each in zip(*comm.allgather_json(best), strict=True))
    return LONG_NBYTES if short > _GAIN * long else MESSAGE_NBYTES
