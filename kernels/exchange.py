"""Allreduce of a short private array through memory shared by a node's ranks: one call, one wait.

The ranks use the two halves of a staging buffer in turn: whoever writes a half again has waited for everybody in the
exchange between, so nobody reads it any more.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

from .reduce import combine
from .sync import post, wait_all

SEQUENCE, HALF, STAGED, ME, SPINS, SLEEP_NS = range(6)
STATE_LENGTH = 6
"""What an exchange knows, int64: the number of its last post and the half to use (kept from call to call), whether the
array is staged (zero between calls), and what never changes: this rank's number in the node, how often to look before
sleeping, nanoseconds of sleep before giving up."""


@njit(nogil=True, cache=True, error_model="numpy")
def read_all(x, staging, counters, state, op):  # type: ignore[no-untyped-def]
    """Every rank stages its array, waits for all, and reduces what all have staged, in the order of the ranks.

    Args:
        x: shape ``(count,)``, contiguous, ``count <= chunk``; replaced by the reduction.
        staging: shape ``(2, n, chunk)``, shared.
        counters: the ranks' arrival counters, shared (see `sync`).
        state: shape ``(STATE_LENGTH,)``, this rank's.
        op: a number of `reduce`.

    Returns:
        False when a peer was not there in time; the same call again goes on from there.
    """
    half = staging[state[HALF]]
    if state[STAGED] == 0:
        row = half[state[ME]]
        for i in range(x.size):  # a slice assignment would compile for three seconds, for its error messages
            row[i] = x[i]
        state[STAGED] = 1
        state[SEQUENCE] += 1
        post(counters, state[ME], np.int32(state[SEQUENCE]))
    if not wait_all(counters, staging.shape[1], np.int32(state[SEQUENCE]), state[SPINS], state[SLEEP_NS]):
        return False
    combine(half, np.intp(0), np.intp(x.size), x, op)
    state[STAGED] = 0
    state[HALF] = 1 - state[HALF]
    return True


for _t in (types.float32, types.float64, types.int64):
    _arrays = [types.Array(_t, 1, "C"), types.Array(_t, 3, "C"), types.Array(types.int32, 1, "C")]
    read_all.compile(types.boolean(*_arrays, types.Array(types.int64, 1, "C"), types.intp))
