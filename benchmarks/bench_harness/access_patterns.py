"""The bare access patterns that bound an allreduce over memory shared by a node's ranks.

Each pattern sums ``rows`` (shape ``(ranks, count)``, float32, one row written by each rank) so that every rank ends
with the sum, with nothing around it but spinning flags: no Python between the steps, no checks, no choice of algorithm.
They are the yardstick of `bench_floor.py`, never a part of the library.

``flags`` has shape ``(2 * ranks * counters.STRIDE,)``, int32, zeroed once: a counter for barriers and one for progress
for each rank. Every rank is a process or thread of its own and calls the same pattern with the same shapes and
``epoch``. The patterns return the epoch to pass next.
"""

from __future__ import annotations

import numpy as np
from numba import types

from hpcdp.kernels import shm_exchange
from hpcdp.kernels.jit import kernel

PATTERNS = ("everyone sums all", "owner sums, others copy", "owner writes back", "pipelined pull", "staged in and out")
"""The names of the patterns of `timed_exchange`; the last one is for arrays that are not in shared memory."""

_PATTERN = "int64(float32[:, ::1], float32[::1], float32[::1], int32[::1], int64, int64)"

# A block's two inputs and its output fit in a first-level cache. A segment of the pipeline fits in a second-level one;
# shorter segments only add waits (1 MB took 100 us in segments of 32 KiB and 72 us in segments of 256 KiB).
_BLOCK = 2048
_SEGMENT = 65536
_LINE = 16
_SPINS_BEFORE_YIELD = 20000

_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_CLOCK_MONOTONIC = 1


@kernel("int64(int64[::1])")
def _now_ns(clock: np.ndarray) -> int:
    _clock_gettime(_CLOCK_MONOTONIC, clock.ctypes)
    return clock[0] * 1_000_000_000 + clock[1]


@kernel("void(int32[::1], int64, int64)")
def _wait_for(flags: np.ndarray, counter: int, value: int) -> None:
    spins = 0
    while shm_exchange.load(flags, counter * shm_exchange.STRIDE) < value:
        spins += 1
        if spins > _SPINS_BEFORE_YIELD:
            _sched_yield()


@kernel("int64(int32[::1], int64, int64)")
def barrier(flags: np.ndarray, rank: int, epoch: int) -> int:
    """Wait until every rank has called it with this ``epoch``, and return ``epoch + 1``."""
    shm_exchange.store(flags, rank * shm_exchange.STRIDE, np.int32(epoch + 1))
    for other in range(flags.size // (2 * shm_exchange.STRIDE)):
        _wait_for(flags, other, epoch + 1)
    return epoch + 1


@kernel("void(float32[::1], float32[::1], float32[::1])")
def _add(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    for i in range(out.size):
        out[i] = a[i] + b[i]


@kernel("void(float32[::1], float32[::1])")
def _accumulate(total: np.ndarray, x: np.ndarray) -> None:
    for i in range(total.size):
        total[i] += x[i]


@kernel("void(float32[::1], float32[::1])")
def _accumulate_in_both(a: np.ndarray, b: np.ndarray) -> None:
    for i in range(a.size):
        total = a[i] + b[i]
        a[i] = total
        b[i] = total


@kernel("void(float32[::1], float32[::1])")
def _copy(out: np.ndarray, x: np.ndarray) -> None:
    for i in range(out.size):
        out[i] = x[i]


@kernel("void(float32[::1], float32[:, ::1], int64, int64)")
def _sum_rows(out: np.ndarray, rows: np.ndarray, first: int, last: int) -> None:
    _add(out[first:last], rows[0, first:last], rows[1, first:last])
    for row in range(2, rows.shape[0]):
        _accumulate(out[first:last], rows[row, first:last])


@kernel("int64(int64, int64, int64)")
def _shard_start(rank: int, ranks: int, count: int) -> int:
    """Return the start of a rank's shard; shards are whole cache lines, so no line has two owners."""
    lines = (count + _LINE - 1) // _LINE
    return min(count, (lines * rank // ranks) * _LINE)


@kernel(_PATTERN)
def _everyone_sums_all(
    rows: np.ndarray, shared: np.ndarray, out: np.ndarray, flags: np.ndarray, rank: int, epoch: int
) -> int:
    epoch = barrier(flags, rank, epoch)
    for first in range(0, out.size, _BLOCK):
        _sum_rows(out, rows, first, min(out.size, first + _BLOCK))
    return barrier(flags, rank, epoch)


@kernel(_PATTERN)
def _owner_sums_others_copy(
    rows: np.ndarray, shared: np.ndarray, out: np.ndarray, flags: np.ndarray, rank: int, epoch: int
) -> int:
    ranks, count = rows.shape
    start, stop = _shard_start(rank, ranks, count), _shard_start(rank + 1, ranks, count)
    epoch = barrier(flags, rank, epoch)
    for first in range(start, stop, _BLOCK):
        last = min(stop, first + _BLOCK)
        _sum_rows(shared, rows, first, last)
        _copy(out[first:last], shared[first:last])
    epoch = barrier(flags, rank, epoch)
    _copy(out[:start], shared[:start])
    _copy(out[stop:], shared[stop:])
    return barrier(flags, rank, epoch)


@kernel(_PATTERN)
def _owner_writes_back(
    rows: np.ndarray, shared: np.ndarray, out: np.ndarray, flags: np.ndarray, rank: int, epoch: int
) -> int:
    ranks, count = rows.shape
    start, stop = _shard_start(rank, ranks, count), _shard_start(rank + 1, ranks, count)
    epoch = barrier(flags, rank, epoch)
    if ranks == 2:
        _accumulate_in_both(rows[rank, start:stop], rows[1 - rank, start:stop])
    else:
        for first in range(start, stop, _BLOCK):
            last = min(stop, first + _BLOCK)
            _sum_rows(shared, rows, first, last)
            for row in range(ranks):
                _copy(rows[row, first:last], shared[first:last])
    return barrier(flags, rank, epoch)


@kernel(_PATTERN)
def _pipelined_pull(
    rows: np.ndarray, shared: np.ndarray, out: np.ndarray, flags: np.ndarray, rank: int, epoch: int
) -> int:
    ranks, count = rows.shape
    start, stop = _shard_start(rank, ranks, count), _shard_start(rank + 1, ranks, count)
    largest = 0
    for owner in range(ranks):
        largest = max(largest, _shard_start(owner + 1, ranks, count) - _shard_start(owner, ranks, count))
    steps = (largest + _SEGMENT - 1) // _SEGMENT
    # Every rank's progress ends a call at the same value, so its own is where the others start too.
    done = shm_exchange.load(flags, (ranks + rank) * shm_exchange.STRIDE)
    epoch = barrier(flags, rank, epoch)
    for step in range(steps + 1):
        if step < steps:
            first = min(stop, start + step * _SEGMENT)
            last = min(stop, first + _SEGMENT)
            for row in range(ranks):
                if row != rank:
                    _accumulate(rows[rank, first:last], rows[row, first:last])
            shm_exchange.store(flags, (ranks + rank) * shm_exchange.STRIDE, np.int32(done + step + 1))
        if step > 0:
            for distance in range(1, ranks):
                owner = (rank + distance) % ranks
                end = _shard_start(owner + 1, ranks, count)
                first = min(end, _shard_start(owner, ranks, count) + (step - 1) * _SEGMENT)
                last = min(end, first + _SEGMENT)
                _wait_for(flags, ranks + owner, done + step)
                _copy(rows[rank, first:last], rows[owner, first:last])
    return barrier(flags, rank, epoch)


@kernel(_PATTERN)
def _staged_in_and_out(
    rows: np.ndarray, shared: np.ndarray, out: np.ndarray, flags: np.ndarray, rank: int, epoch: int
) -> int:
    ranks, count = rows.shape
    start, stop = _shard_start(rank, ranks, count), _shard_start(rank + 1, ranks, count)
    _copy(rows[rank, :start], out[:start])
    _copy(rows[rank, stop:], out[stop:])
    epoch = barrier(flags, rank, epoch)
    if ranks == 2:
        _accumulate_in_both(out[start:stop], rows[1 - rank, start:stop])
    else:
        for first in range(start, stop, _BLOCK):
            last = min(stop, first + _BLOCK)
            for row in range(ranks):
                if row != rank:
                    _accumulate(out[first:last], rows[row, first:last])
            for row in range(ranks):
                if row != rank:
                    _copy(rows[row, first:last], out[first:last])
    epoch = barrier(flags, rank, epoch)
    _copy(out[:start], rows[rank, :start])
    _copy(out[stop:], rows[rank, stop:])
    return barrier(flags, rank, epoch)


@kernel(
    "int64(int64, float32[:, ::1], float32[::1], float32[::1], int32[::1], int64, int64, int64[::1])",
)
def timed_exchange(
    pattern: int,
    rows: np.ndarray,
    shared: np.ndarray,
    out: np.ndarray,
    flags: np.ndarray,
    rank: int,
    epoch: int,
    clock: np.ndarray,
) -> int:
    """One exchange after a barrier; ``clock[2]`` (shape ``(3,)``, int64) becomes the nanoseconds it took this rank.

    0, everyone sums all: each rank reads every row and writes the whole sum to its own ``out``.
    1, owner sums, others copy: each rank sums its shard into ``shared``, and then copies the rest into its ``out``.
    2, owner writes back: each rank sums its shard and writes it into every row.
    3, pipelined pull: each rank sums a segment of its shard in its own row, then pulls the others' previous segment:
    only reads cross between cores.
    4, staged in and out: the input is in ``out``; each rank copies what others own into its row, adds the rows to its
    shard, writes the sum back into the lines that it has just read, and copies out what the others have written there.
    ``shared`` (one for all ranks) and ``out`` (one for each) have shape ``(count,)``. The sum is in ``out`` after
    patterns 0, 1 and 4, and in the rows after 2 and 3.
    """
    epoch = barrier(flags, rank, epoch)
    begin = _now_ns(clock)
    if pattern == 0:
        epoch = _everyone_sums_all(rows, shared, out, flags, rank, epoch)
    elif pattern == 1:
        epoch = _owner_sums_others_copy(rows, shared, out, flags, rank, epoch)
    elif pattern == 2:
        epoch = _owner_writes_back(rows, shared, out, flags, rank, epoch)
    elif pattern == 3:
        epoch = _pipelined_pull(rows, shared, out, flags, rank, epoch)
    else:
        epoch = _staged_in_and_out(rows, shared, out, flags, rank, epoch)
    clock[2] = _now_ns(clock) - begin
    return epoch


@kernel("int64(int32[::1], int64, int64, int64, int64[::1])")
def ping_pong(flags: np.ndarray, rank: int, epoch: int, rounds: int, clock: np.ndarray) -> int:
    """Bounces one cache line ``rounds`` times between ranks 0 and 1; ``clock[2]`` becomes the nanoseconds of all."""
    epoch = barrier(flags, rank, epoch)
    begin = _now_ns(clock)
    for i in range(epoch + 1, epoch + rounds + 1):
        if rank == 0:
            shm_exchange.store(flags, 0, np.int32(i))
            _wait_for(flags, 1, i)
        elif rank == 1:
            _wait_for(flags, 0, i)
            shm_exchange.store(flags, shm_exchange.STRIDE, np.int32(i))
    clock[2] = _now_ns(clock) - begin
    return epoch + rounds
