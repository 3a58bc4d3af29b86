"""Push and pull of one value by all ranks of a node, in resumable calls.

First the ranks meet. A rank that has pushed in another way (a whole row at once) does not join, which all ranks detect
before anything is written. Then a rank stages the shards of the others, piece by piece, and stages the next piece while
others sum one, so a value of ``p`` pieces takes ``p + 2`` waits. Sums run in order of the ranks.

An owner writes a sum to its shard of the value, and back to the staging buffer, from which the others fetch it. As in
an allreduce, data moves between cores only through the staging buffer, which stays in the caches. A rank writes only
its own shard of the value, which no other core caches. After the meeting no rank reads the previous value.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .jit import kernel
from .shm_allreduce import DTYPES as DTYPES
from .shm_allreduce import STRIDE, _copy, post, wait_all

NOT_YET, DONE, MIXED, SUMMED = 0, 1, 2, 3
"""Return values: a peer was late (repeat the call to resume), done, a rank pushed in another way, shard summed."""

ME, SPINS, SLEEP_NS, PIECES, PHASES, ROUND, PIECE, PHASE = range(8)
STATE_LENGTH = 8
"""Length of an exchange's state, int64.

Constant: this rank's number in the node, spins before sleeping, nanoseconds of sleep before giving up, pieces of a
shard, and numbers that a round may post (one more than twice as many). Set before a call: the number of the round. Its
first post, at the meeting, is that times the numbers of a round, plus one; its last post is that of the next round less
one. Zero between calls: the phase, and the next piece.
"""


SLOTS = 3
"""Pieces in the staging buffer: while a rank stages one, two earlier ones may not yet be summed or fetched."""

_ROUND_OF = 2
_BLOCK = 2048
_ARRIVING, _MEETING, _WAITING = 0, 1, 2


def state_of(rank: int, patience: np.ndarray, pieces: int, phases: int) -> np.ndarray:
    """Return this rank's state before its first exchange; see `shared_memory.NodeMemory` for ``patience``."""
    state = np.zeros(STATE_LENGTH, np.int64)
    state[ME], state[PIECES], state[PHASES], state[[SPINS, SLEEP_NS]] = rank, pieces, phases, patience
    return state


@njit(inline="always")
def _span(ends, rank, piece, width):  # type: ignore[no-untyped-def]
    first = min(ends[rank] + piece * width, ends[rank + 1])
    return first, min(first + width, ends[rank + 1])


@njit(inline="always")
def _staged(staging, rank, owner, piece, first, last):  # type: ignore[no-untyped-def]
    at = owner * (staging.shape[2] // staging.shape[1])
    return staging[piece % SLOTS, rank, at : at + last - first]


@njit(inline="always")
def _stage(x, staging, ends, me, piece):  # type: ignore[no-untyped-def]
    n = staging.shape[1]
    for owner in range(n):
        if owner != me:
            first, last = _span(ends, owner, piece, staging.shape[2] // n)
            _copy(_staged(staging, me, owner, piece, first, last), x[first:last])


@njit(inline="always")
def _sum(x, out, in_place, total, staging, ends, me, piece):  # type: ignore[no-untyped-def]
    # A loop that reads and writes one array by two names is not vectorised: hence `in_place`, and blocks in the L1
    # cache.
    n = staging.shape[1]
    begin, end = _span(ends, me, piece, staging.shape[2] // n)
    if n == 2:
        mine, kept, theirs = x[begin:end], total[begin:end], _staged(staging, 1 - me, me, piece, begin, end)
        if in_place:
            for i in range(kept.size):
                of_both = mine[i] + theirs[i]
                mine[i] = of_both
                theirs[i] = of_both
                kept[i] = of_both
        elif out.size:
            result = out[begin:end]
            for i in range(kept.size):
                of_both = mine[i] + theirs[i]
                result[i] = of_both
                theirs[i] = of_both
                kept[i] = of_both
        else:
            for i in range(kept.size):
                of_both = mine[i] + theirs[i]
                theirs[i] = of_both
                kept[i] = of_both
        return
    partial = np.empty(_BLOCK, x.dtype)
    for first in range(begin, end, _BLOCK):
        last = min(first + _BLOCK, end)
        block = partial[: last - first]
        for rank in range(n):
            if rank == me:
                row = x[first:last]
            else:
                row = _staged(staging, rank, me, piece, begin, end)[first - begin : last - begin]
            if rank == 0:
                _copy(block, row)
            else:
                for i in range(block.size):
                    block[i] += row[i]
        _copy(total[first:last], block)
        if out.size:
            _copy(out[first:last], block)
        for rank in range(n):
            if rank != me:
                _copy(_staged(staging, rank, me, piece, begin, end)[first - begin : last - begin], block)


@njit(inline="always")
def _fetch(out, staging, ends, me, piece, takes):  # type: ignore[no-untyped-def]
    # ``takes``: the owner writes there next. That is slow for cache lines that were only read here, but not for lines
    # that were written here.
    n = staging.shape[1]
    for owner in range(n):
        if owner != me:
            first, last = _span(ends, owner, piece, staging.shape[2] // n)
            fetched, staged = out[first:last], _staged(staging, me, owner, piece, first, last)
            if takes:
                for i in range(fetched.size):
                    fetched[i] = staged[i]
                    staged[i] = 0
            else:
                _copy(fetched, staged)


@njit(inline="always")
def _arrived(counters, n, number, state):  # type: ignore[no-untyped-def]
    return wait_all(counters, n, np.int32(number), state[SPINS], state[SLEEP_NS])


@njit(inline="always")
def _first(state):  # type: ignore[no-untyped-def]
    return state[ROUND] * state[PHASES] + 1


@njit(inline="always")
def _staged_number(state, piece):  # type: ignore[no-untyped-def]
    return _first(state) + 1 + piece


@njit(inline="always")
def _spread_number(state, piece):  # type: ignore[no-untyped-def]
    pieces = state[PIECES]
    return _first(state) + (state[PHASES] - 1 if piece + 1 == pieces else 1 + pieces + piece)


@njit(inline="always")
def _put(total, staging, ends, me, piece):  # type: ignore[no-untyped-def]
    n = staging.shape[1]
    first, last = _span(ends, me, piece, staging.shape[2] // n)
    for rank in range(n):
        if rank != me:
            _copy(_staged(staging, rank, me, piece, first, last), total[first:last])


@njit(inline="always")
def _met(x, staging, ends, counters, state):  # type: ignore[no-untyped-def]
    n, me = staging.shape[1], state[ME]
    if state[PHASE] == _ARRIVING:
        counters[me * STRIDE + _ROUND_OF] = np.int32(state[ROUND])
        post(counters, me, np.int32(_first(state)))
        state[PHASE] = _MEETING
    if not _arrived(counters, n, _first(state), state):
        return NOT_YET
    for rank in range(n):
        if counters[rank * STRIDE + _ROUND_OF] != np.int32(state[ROUND]):
            state[PHASE] = _ARRIVING
            return MIXED
    _stage(x, staging, ends, me, 0)
    post(counters, me, np.int32(_staged_number(state, 0)))
    state[PIECE] = 0
    state[PHASE] = _WAITING
    return DONE


@kernel()
def replace(x, out, in_place, total, staging, ends, counters, state):  # type: ignore[no-untyped-def]
    """Sum all ranks' ``x`` into ``total`` and this rank's ``out``.

    Args:
        x: shape ``(count,)``, contiguous.
        out: like ``x``; another array, or with ``in_place`` the same.
        in_place: whether ``out`` is ``x``.
        total: shape ``(count,)`` or longer, shared; no rank reads its previous value after the meeting.
        staging: shape ``(SLOTS, n, chunk)``, shared.
        ends: shape ``(n + 1,)``, int64: bounds of the ranks' shards.
        counters: progress of the ranks with this value, shared (see `shm_allreduce`).
        state: shape ``(STATE_LENGTH,)``, this rank's.

    Returns:
        `NOT_YET`, `DONE` or `MIXED`.
    """
    n, me, pieces = staging.shape[1], state[ME], state[PIECES]
    last = _first(state) + state[PHASES] - 1
    if state[PHASE] != _WAITING:
        met = _met(x, staging, ends, counters, state)
        if met != DONE:
            return met
    while True:
        piece = state[PIECE]
        posted = last if piece == pieces else _staged_number(state, piece)
        if not _arrived(counters, n, posted, state):
            return NOT_YET
        if piece < pieces:
            _sum(x, out, in_place, total, staging, ends, me, piece)
            if piece + 1 < pieces:
                _stage(x, staging, ends, me, piece + 1)
                post(counters, me, np.int32(_staged_number(state, piece + 1)))
            else:
                post(counters, me, np.int32(last))
            state[PIECE] = piece + 1
        if piece > 0:  # after the post, because no rank waits for it
            _fetch(out, staging, ends, me, piece - 1, False)
        if piece == pieces:
            state[PHASE] = _ARRIVING
            return DONE


@kernel()
def gather(x, total, staging, ends, counters, state):  # type: ignore[no-untyped-def]
    """Sum this rank's shard of all ranks' ``x`` into its shard of ``total``; arguments as `replace`.

    Returns:
        `NOT_YET`, `SUMMED` or `MIXED`. After `SUMMED` `spread` must follow, which announces the new value.
    """
    n, me, pieces = staging.shape[1], state[ME], state[PIECES]
    if state[PHASE] != _WAITING:
        met = _met(x, staging, ends, counters, state)
        if met != DONE:
            return met
    while True:
        piece = state[PIECE]
        if not _arrived(counters, n, _staged_number(state, piece), state):
            return NOT_YET
        _sum(x, x[:0], False, total, staging, ends, me, piece)
        if piece + 1 == pieces:
            state[PHASE] = _ARRIVING
            return SUMMED
        _stage(x, staging, ends, me, piece + 1)
        post(counters, me, np.int32(_staged_number(state, piece + 1)))
        state[PIECE] = piece + 1


@kernel()
def spread(out, total, staging, ends, counters, state):  # type: ignore[no-untyped-def]
    """Copy every rank's shard of ``total``, as updated after `gather`, to all ranks' ``out``.

    Returns:
        `NOT_YET` or `DONE`.
    """
    n, me, pieces = staging.shape[1], state[ME], state[PIECES]
    if state[PHASE] == _ARRIVING:
        state[PIECE] = 0
        _put(total, staging, ends, me, 0)
        post(counters, me, np.int32(_spread_number(state, 0)))
        state[PHASE] = _WAITING
        _copy(out[ends[me] : ends[me + 1]], total[ends[me] : ends[me + 1]])
    while True:
        piece = state[PIECE]
        if not _arrived(counters, n, _spread_number(state, piece), state):
            return NOT_YET
        if piece + 1 < pieces:
            _put(total, staging, ends, me, piece + 1)
            post(counters, me, np.int32(_spread_number(state, piece + 1)))
        _fetch(out, staging, ends, me, piece, True)
        state[PIECE] = piece + 1
        if piece + 1 == pieces:
            state[PHASE] = _ARRIVING
            return DONE
