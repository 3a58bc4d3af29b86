"""Exchanges of private arrays through memory shared by a node's ranks, each in one call that can stop and go on.

The ranks use the two halves of a staging buffer in turn: whoever writes a half again has waited for everybody in the
exchange between, so nobody reads it any more. Sums run in the order of the ranks.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from .machine_code import kernel
from .sync import STRIDE, post, wait_all

NOT_YET, DONE, DIFFERENT = 0, 1, 2
"""What an exchange returns: a peer was not there in time (the same call again goes on from there), done, or the ranks
have called with different arrays or reductions."""

SEQUENCE, HALF, POSITION, PHASE, ME, SPINS, SLEEP_NS = range(7)
STATE_LENGTH = 8
"""What an exchange knows, int64: the number of its last post and the half to use (kept from call to call), the first
element of the current chunk and the phase in it (zero between calls), and what never changes: this rank's number in the
node, how often to look before sleeping, nanoseconds of sleep before giving up."""

DTYPES = (np.dtype("float32"), np.dtype("float64"), np.dtype("int64"))
"""What these are called for."""

_BLOCK = 2048


def state_of(rank: int, patience: np.ndarray) -> np.ndarray:
    """The state of this rank before its first exchange; ``patience`` as `hpcdp.comm.shared_memory.NodeMemory` has
    it."""
    state = np.zeros(STATE_LENGTH, np.int64)
    state[ME], state[[SPINS, SLEEP_NS]] = rank, patience
    return state


_counters_t = types.Array(types.int32, 1, "C")
_state_t = types.Array(types.int64, 1, "C")


@njit(inline="always")
def _copy(out, x):  # type: ignore[no-untyped-def]
    for i in range(out.size):  # a slice assignment would compile for three seconds, for its error messages
        out[i] = x[i]


@njit(inline="always")
def _arrive(counters, state, kind):  # type: ignore[no-untyped-def]
    # Beside its counter a rank says what it has come for. Two places in turn: whoever writes one again has waited for
    # everybody at the arrival between, so nobody reads it any more.
    state[SEQUENCE] += 1
    state[PHASE] += 1
    counters[state[ME] * STRIDE + 2 + (state[SEQUENCE] & 1)] = np.int32(kind)
    post(counters, state[ME], np.int32(state[SEQUENCE]))


@njit(inline="always")
def _all_arrived(counters, n, state, kind):  # type: ignore[no-untyped-def]
    if not wait_all(counters, n, np.int32(state[SEQUENCE]), state[SPINS], state[SLEEP_NS]):
        return NOT_YET
    for rank in range(n):
        if counters[rank * STRIDE + 2 + (state[SEQUENCE] & 1)] != np.int32(kind):
            state[POSITION] = 0
            state[PHASE] = 0
            return DIFFERENT
    return DONE


@njit(inline="always")
def _finish_chunk(state, position):  # type: ignore[no-untyped-def]
    state[POSITION] = position
    state[PHASE] = 0
    state[HALF] = 1 - state[HALF]


@kernel(types.int64(_counters_t, types.intp, _state_t, types.int64))
def meet(counters, n, state, kind):  # type: ignore[no-untyped-def]
    """A barrier of ``n`` ranks that have come for the same ``kind``; arguments as `sum_by_all`."""
    if state[PHASE] == 0:
        _arrive(counters, state, kind)
    met = _all_arrived(counters, n, state, kind)
    if met == DONE:
        state[PHASE] = 0
    return met


@kernel()
def sum_by_all(x, staging, counters, state, kind):  # type: ignore[no-untyped-def]
    """Every rank stages its array, waits for all, and sums what all have staged: one wait, ``n - 1`` sizes read.

    Args:
        x: shape ``(count,)``, contiguous, ``count <= chunk``; replaced by the sum.
        staging: shape ``(2, n, chunk)``, shared.
        counters: the ranks' arrival counters, shared (see `sync`).
        state: shape ``(STATE_LENGTH,)``, this rank's.
        kind: a number for dtype, reduction and count; its low 32 bits are compared over the ranks.

    Returns:
        `NOT_YET`, `DONE` or `DIFFERENT`.
    """
    half, n = staging[state[HALF]], staging.shape[1]
    if state[PHASE] == 0:
        _copy(half[state[ME], : x.size], x)
        _arrive(counters, state, kind)
    met = _all_arrived(counters, n, state, kind)
    if met != DONE:
        return met
    first, second = half[0, : x.size], half[1, : x.size]
    for i in range(x.size):
        x[i] = first[i] + second[i]
    for rank in range(2, n):
        row = half[rank, : x.size]
        for i in range(x.size):
            x[i] += row[i]
    _finish_chunk(state, 0)
    return DONE


@kernel()
def sum_by_owners(x, staging, counters, state, kind):  # type: ignore[no-untyped-def]
    """Every rank stages what others own, sums its own shard, and writes the sum back where it has read.

    Two waits a chunk, ``2 (n - 1) / n`` sizes read. The lines that the owner has read are those that it writes, so each
    changes hands between cores once; a result in lines of its own would be fetched twice. Arguments as `sum_by_all`,
    any ``count``.
    """
    n, chunk, me = staging.shape[1], staging.shape[2], state[ME]
    partial = np.empty(_BLOCK, x.dtype)
    while state[POSITION] < x.size:
        count = min(chunk, x.size - state[POSITION])
        piece = x[state[POSITION] : state[POSITION] + count]
        half = staging[state[HALF]]
        lo, hi = count * me // n, count * (me + 1) // n
        if state[PHASE] == 0:
            _copy(half[me, :lo], piece[:lo])
            _copy(half[me, hi:count], piece[hi:])
            _arrive(counters, state, kind)
        if state[PHASE] == 1:
            met = _all_arrived(counters, n, state, kind)
            if met != DONE:
                return met
            if n == 2:
                mine, others = piece[lo:hi], half[1 - me, lo:hi]
                for i in range(mine.size):
                    total = mine[i] + others[i]
                    mine[i] = total
                    others[i] = total
            else:
                for first in range(lo, hi, _BLOCK):
                    last = min(first + _BLOCK, hi)
                    _copy(partial[: last - first], piece[first:last] if me == 0 else half[0, first:last])
                    for rank in range(1, n):
                        row = piece[first:last] if me == rank else half[rank, first:last]
                        for i in range(row.size):
                            partial[i] += row[i]
                    for rank in range(n):
                        _copy(piece[first:last] if me == rank else half[rank, first:last], partial)
            _arrive(counters, state, kind)
        met = _all_arrived(counters, n, state, kind)
        if met != DONE:
            return met
        _copy(piece[:lo], half[me, :lo])
        _copy(piece[hi:], half[me, hi:count])
        _finish_chunk(state, state[POSITION] + count)
    state[POSITION] = 0
    return DONE


@kernel()
def share(x, first, last, staging, counters, n, state, kind):  # type: ignore[no-untyped-def]
    """Bring every rank's part of an array to all ranks: each stages its own part, waits for all and takes the others'.

    Args:
        x: shape ``(nbytes,)``, uint8, contiguous; this rank has written its elements ``first`` to ``last``, and the
            ranks' parts are all of it.
        first, last: see ``x``.
        staging: shape ``(2, chunk)``, uint8, shared.
        counters, n, state, kind: as for `meet`.

    Returns:
        `NOT_YET`, `DONE` or `DIFFERENT`.
    """
    chunk = staging.shape[1]
    while True:
        start = state[POSITION]
        count = min(chunk, x.size - start)
        lo, hi = min(max(first - start, 0), count), min(max(last - start, 0), count)
        piece, half = x[start : start + count], staging[state[HALF], :count]
        if state[PHASE] == 0:
            _copy(half[lo:hi], piece[lo:hi])
            _arrive(counters, state, kind)
        met = _all_arrived(counters, n, state, kind)
        if met != DONE:
            return met
        _copy(piece[:lo], half[:lo])
        _copy(piece[hi:], half[hi:])
        _finish_chunk(state, start + count)
        if state[POSITION] >= x.size:
            state[POSITION] = 0
            return DONE
