"""Allreduce of private arrays through memory shared by a node's ranks, as two machines that can stop and go on.

Both take the array in chunks that stay in a core's cache, and use the two halves of the staging buffer in turn: whoever
writes a half again has waited for everybody at the chunk between, so nobody reads it any more.

`state`, shape ``(4,)`` int64, is what a machine remembers: the sequence number of the last post and the half in use
(kept from call to call), the first element of the current chunk, and the phase within it. A call returns false when a
peer was not there in time; the same call again goes on where it stopped.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from .reduce import combine, combine_into
from .sync import post, wait_all

SEQUENCE, HALF, POSITION, PHASE = 0, 1, 2, 3

_options: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
_counters_t = types.Array(types.int32, 1, "C")
_state_t = types.Array(types.int64, 1, "C")


@njit(**_options)
def read_all(x, staging, counters, me, state, patience, op):  # type: ignore[no-untyped-def]
    """Every rank reads what all have staged and reduces all of it: one wait a chunk, ``n - 1`` sizes read.

    Args:
        x: shape ``(count,)``, contiguous; replaced by the reduction.
        staging: shape ``(2, n, chunk)``, shared.
        counters: the ranks' arrival counters, shared (see `sync`).
        me: this rank's number in the node.
        state: see the module.
        patience: shape ``(2,)`` int64: looks before sleeping, nanoseconds of sleep before giving up.
        op: a number of `reduce`.
    """
    n, chunk = staging.shape[1], staging.shape[2]
    while state[POSITION] < x.size:
        lo = state[POSITION]
        hi = min(lo + chunk, x.size)
        half = staging[state[HALF]]
        if state[PHASE] == 0:
            half[me, : hi - lo] = x[lo:hi]
            state[SEQUENCE] += 1
            state[PHASE] = 1
            post(counters, me, np.int32(state[SEQUENCE]))
        if not wait_all(counters, n, np.int32(state[SEQUENCE]), patience[0], patience[1]):
            return False
        combine(half, 0, hi - lo, x[lo:hi], op)
        state[POSITION] = hi
        state[PHASE] = 0
        state[HALF] = 1 - state[HALF]
    return True


@njit(**_options)
def read_shards(x, staging, counters, me, state, patience, op):  # type: ignore[no-untyped-def]
    """Every rank reduces its shard of what all have staged, then collects the shards: ``2 (n - 1) / n`` sizes read.

    The reduce-scatter and allgather of Rabenseifner ("Optimization of Collective Reduction Operations", 2004) by
    reading neighbours' memory. Arguments as `read_all`.
    """
    n, chunk = staging.shape[1], staging.shape[2]
    while state[POSITION] < x.size:
        lo = state[POSITION]
        count = min(chunk, x.size - lo)
        half = staging[state[HALF]]
        if state[PHASE] == 0:
            half[me, :count] = x[lo : lo + count]
            state[SEQUENCE] += 1
            state[PHASE] = 1
            post(counters, me, np.int32(state[SEQUENCE]))
        if state[PHASE] == 1:
            if not wait_all(counters, n, np.int32(state[SEQUENCE]), patience[0], patience[1]):
                return False
            combine_into(half, count * me // n, count * (me + 1) // n, me, op)
            state[SEQUENCE] += 1
            state[PHASE] = 2
            post(counters, me, np.int32(state[SEQUENCE]))
        if not wait_all(counters, n, np.int32(state[SEQUENCE]), patience[0], patience[1]):
            return False
        for owner in range(n):
            begin, end = count * owner // n, count * (owner + 1) // n
            x[lo + begin : lo + end] = half[owner, begin:end]
        state[POSITION] = lo + count
        state[PHASE] = 0
        state[HALF] = 1 - state[HALF]
    return True


for _t in (types.float32, types.float64, types.int64):
    _signature = types.boolean(
        types.Array(_t, 1, "C"), types.Array(_t, 3, "C"), _counters_t, types.intp, _state_t, _state_t, types.intp
    )
    read_all.compile(_signature)
    read_shards.compile(_signature)
