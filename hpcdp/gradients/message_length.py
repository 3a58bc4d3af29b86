"""How long messages between nodes are: where links are fast, longer than what TCP likes. A job tries several.

Over TCP a message of `progress.MESSAGE_NBYTES` goes at once, and a longer one waits for its receiver. But Python takes
some 20 us for each, so 60 KB are 3 GB/s at most, and 256 KB 13. Sums do not depend on it.
"""

from __future__ import annotations

import time

import numpy as np

from ..collectives.progress import MESSAGE_NBYTES, Steps, drive, in_lanes, segments, together
from ..comm import Communicator, World
from ..comm.communicator import make_tag
from ..comm.reductions import resolve

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
        drive(together(in_lanes(pairs, exchanged, make_tag(0, 0))))
        return time.perf_counter() - begin

    turns = [[seconds(length) for length in lengths] for _ in range(_TURNS)]
    best = [min(each) for each in zip(*turns, strict=True)]
    first, second = (max(each) for each in zip(*comm.allgather_json(best), strict=True))
    return first, second
