"""What all ranks of a node push to one value, merged into it and read back, each in one call that can stop and go on.

A rank stages what others own, piece by piece of everybody's part: of long values in two halves of a buffer that stays
in the cache, in turn. While others sum a piece it stages the next one, so a value of ``p`` pieces takes ``p + 1``
waits. Sums run in the order of the ranks. A rank that has pushed in another way, a whole row at once, takes part in no
such exchange: all see that when they meet, before anything is summed.

An owner writes a sum back where it has read, too, for the others to fetch: those lines are in its cache and will be in
theirs, and the lines of the value stay with their owner.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from .sync import STRIDE, post, wait_all

NOT_YET, DONE, MIXED, SUMMED = 0, 1, 2, 3
"""What is returned: a peer was not there in time (the same call again goes on from there), done, some rank has pushed
in another way, or this rank's part is summed and nobody told yet."""

ME, SPINS, SLEEP_NS, PIECES, PHASES, ROUND, PIECE, PHASE = range(8)
STATE_LENGTH = 8
"""What an exchange knows, int64. What never changes: this rank's number in the node, how often to look before sleeping,
nanoseconds of sleep before giving up, pieces of a part, numbers that a round may post (more than pieces). To be set
before: the number of the round; its first post is that times the numbers of a round, and one, the last one is that of
the next round less one. Zero between calls: the phase; and the piece that comes next."""

DTYPES = (np.dtype("float32"), np.dtype("float64"), np.dtype("int64"))
"""What these are compiled for."""

_ROUND_OF = 2
_BLOCK = 2048
_ARRIVING, _MEETING, _WAITING = 0, 1, 2

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}


def state_of(rank: int, patience: np.ndarray, pieces: int, phases: int) -> np.ndarray:
    """The state of this rank before its first exchange; ``patience`` as `hpcdp.comm.shared.NodeMemory` has it."""
    state = np.zeros(STATE_LENGTH, np.int64)
    state[ME], state[PIECES], state[PHASES], state[[SPINS, SLEEP_NS]] = rank, pieces, phases, patience
    return state


@njit(inline="always")
def _copy(out, x):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = x[i]


@njit(inline="always")
def _span(ends, rank, piece, width):  # type: ignore[no-untyped-def]
    first = min(ends[rank] + piece * width, ends[rank + 1])
    return first, min(first + width, ends[rank + 1])


@njit(inline="always")
def _stage(x, staging, ends, me, piece):  # type: ignore[no-untyped-def]
    n = staging.shape[1]
    width = staging.shape[2] // n
    for rank in range(n):
        if rank != me:
            first, last = _span(ends, rank, piece, width)
            _copy(staging[piece & 1, me, rank * width : rank * width + last - first], x[first:last])


@njit(inline="always")
def _sum(x, out, staging, ends, me, piece, total, in_place):  # type: ignore[no-untyped-def]
    # A block is summed where it stays in the first-level cache: one array that is read and written by two names would
    # keep the loop from being vectorised.
    n = staging.shape[1]
    width = staging.shape[2] // n
    begin, end = _span(ends, me, piece, width)
    half = staging[piece & 1]
    if n == 2 and in_place:
        at = me * width
        mine, others, sums = x[begin:end], half[1 - me, at : at + end - begin], total[begin:end]
        for i in range(end - begin):
            of_both = mine[i] + others[i]
            mine[i] = of_both
            others[i] = of_both
            sums[i] = of_both
        return
    partial = np.empty(_BLOCK, x.dtype)
    for first in range(begin, end, _BLOCK):
        last = min(first + _BLOCK, end)
        at = me * width + first - begin
        count = last - first
        if n == 2:
            mine, others = x[first:last], half[1 - me, at : at + count]
            for i in range(count):
                partial[i] = mine[i] + others[i]
        else:
            _copy(partial[:count], x[first:last] if me == 0 else half[0, at : at + count])
            for rank in range(1, n):
                row = x[first:last] if me == rank else half[rank, at : at + count]
                for i in range(count):
                    partial[i] += row[i]
        _copy(total[first:last], partial)
        if out.size:
            _copy(out[first:last], partial)
            for rank in range(n):
                if rank != me:
                    _copy(half[rank, at : at + count], partial)


@njit(inline="always")
def _fetch(out, staging, ends, me, piece):  # type: ignore[no-untyped-def]
    n = staging.shape[1]
    width = staging.shape[2] // n
    for rank in range(n):
        if rank != me:
            first, last = _span(ends, rank, piece, width)
            _copy(out[first:last], staging[piece & 1, me, rank * width : rank * width + last - first])


@njit(inline="always")
def _arrived(counters, n, number, state):  # type: ignore[no-untyped-def]
    return wait_all(counters, n, np.int32(number), state[SPINS], state[SLEEP_NS])


@njit(inline="always")
def _first(state):  # type: ignore[no-untyped-def]
    return state[ROUND] * state[PHASES] + 1


@njit(inline="always")
def _met(x, staging, ends, counters, state):  # type: ignore[no-untyped-def]
    n, me = staging.shape[1], state[ME]
    if state[PHASE] == _ARRIVING:
        _stage(x, staging, ends, me, 0)
        counters[me * STRIDE + _ROUND_OF] = np.int32(state[ROUND])
        post(counters, me, np.int32(_first(state)))
        state[PIECE] = 0
        state[PHASE] = _MEETING
    if not _arrived(counters, n, _first(state), state):
        return NOT_YET
    for rank in range(n):
        if counters[rank * STRIDE + _ROUND_OF] != np.int32(state[ROUND]):
            state[PHASE] = _ARRIVING
            return MIXED
    state[PHASE] = _WAITING
    return DONE


@njit(**_options)
def replace(x, out, in_place, flat, staging, ends, counters, state):  # type: ignore[no-untyped-def]
    """The sum of all ranks' ``x`` becomes the value ``flat`` and this rank's ``out``.

    Args:
        x, out: shape ``(count,)``, contiguous, apart, or, ``in_place``, the same array.
        flat: shape ``(count,)`` or longer, shared.
        staging: shape ``(2, n, chunk)``, shared.
        ends: shape ``(n + 1,)``, int64: where the ranks' parts begin and end.
        counters: how far the ranks are with this value, shared (see `sync`).
        state: shape ``(STATE_LENGTH,)``, this rank's.

    Returns:
        `NOT_YET`, `DONE` or `MIXED`.
    """
    n, me, pieces, first = staging.shape[1], state[ME], state[PIECES], _first(state)
    last = first + state[PHASES] - 1
    if state[PHASE] != _WAITING:
        met = _met(x, staging, ends, counters, state)
        if met != DONE:
            return met
    while True:
        piece = state[PIECE]
        posted = last if piece == pieces else first + piece
        if not _arrived(counters, n, posted, state):
            return NOT_YET
        if piece > 0:
            _fetch(out, staging, ends, me, piece - 1)
        if piece < pieces:
            _sum(x, out, staging, ends, me, piece, flat, in_place)
            if piece + 1 < pieces:
                _stage(x, staging, ends, me, piece + 1)
                post(counters, me, np.int32(first + piece + 1))
            else:
                post(counters, me, np.int32(last))
            state[PIECE] = piece + 1
        if piece == pieces:
            state[PHASE] = _ARRIVING
            return DONE


@njit(**_options)
def gather(x, total, staging, ends, counters, state):  # type: ignore[no-untyped-def]
    """This rank's part of the sum of all ranks' ``x``, in its columns of ``total``; arguments as `replace`.

    Returns:
        `NOT_YET`, `SUMMED` or `MIXED`. When it is summed the number of the last post is still to be posted, which says
        that the value is new.
    """
    n, me, pieces, first = staging.shape[1], state[ME], state[PIECES], _first(state)
    if state[PHASE] != _WAITING:
        met = _met(x, staging, ends, counters, state)
        if met != DONE:
            return met
    while True:
        piece = state[PIECE]
        if not _arrived(counters, n, first + piece, state):
            return NOT_YET
        _sum(x, x[:0], staging, ends, me, piece, total, False)
        if piece + 1 == pieces:
            state[PHASE] = _ARRIVING
            return SUMMED
        _stage(x, staging, ends, me, piece + 1)
        post(counters, me, np.int32(first + piece + 1))
        state[PIECE] = piece + 1


_counters_t, _state_t = types.Array(types.int32, 1, "C"), types.Array(types.int64, 1, "C")
for _dtype in DTYPES:
    _t = getattr(types, _dtype.name)
    _x, _s = types.Array(_t, 1, "C"), types.Array(_t, 3, "C")
    replace.compile(types.int64(_x, _x, types.boolean, _x, _s, _state_t, _counters_t, _state_t))
    gather.compile(types.int64(_x, _x, _s, _state_t, _counters_t, _state_t))
