"""Movement of blocks of bytes between the ranks of a node: allgather, alltoall, gather, scatter and broadcast.

First the ranks meet, in `announce`: each posts its counts and the address of its data, and stages short data. Then the
blocks move in one of three ways:

- Staged data are copied from the staging buffer, a chunk at a time.
- Longer data are read in the memory of their rank's process by process_vm_readv(2): one copy instead of two, for a
  system call. Where one rank would read everything, the others write to its memory instead (process_vm_writev(2)).
- Two ranks may also stage the blocks for each other in turns, a chunk at a time, and write what they receive past the
  caches. The system call cannot do that, so this is the fastest way for the longest blocks.

A call is resumable and uses the halves of the staging buffer in turn, as those of `shm_exchange`, which has the
counters and states, too.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from .copies import CORES_KEEP_LINES, STREAMED_NBYTES, copy_bytes, fence, stream_and_keep_bytes, stream_bytes
from .jit import kernel
from .shm_exchange import (
    CHANGED,
    DONE,
    HALF,
    ME,
    PHASE,
    POSITION,
    STATE_LENGTH,
    STRIDE,
    UNREADABLE,
    _all_arrived,
    _arrive,
    _copy,
    _finish_chunk,
    _take_lines,
    read_memory,
    write_memory,
)

FIRSTS, ENDS, BEGINS, STOPS, PLACES, WRITES, WRITTEN = range(7)
ROWS = 7
"""Rows of a plan, int64, shape ``(ROWS, n + 1)``, with a number for every rank and one more.

The position in each rank's data at which its block for this rank begins, and 1 if no other rank needs the block of this
rank for itself. The limits of the blocks in the received data. The positions at which the blocks for all ranks begin in
this rank's data, and the longest data of any rank; where they end, and the largest block. Of these blocks, the position
in the received data of each rank at which the end begins that this rank writes there, and its bytes. The bytes at the
end of each rank's block for this one that the rank writes, and 1 if any rank writes.
"""

PROCESS, STAGED, READ = range(3)
"""Columns of how each rank's data are read, int64, shape ``(n, 3)``: the number of its process, the longest data that
are staged, and the size from which two ranks take turns with blocks; 0 if memory cannot be read.
"""

_TURNS = 4
"""The phase of two ranks that take turns, before they stage a piece."""


@kernel()
def _receive(out, x, streams):  # type: ignore[no-untyped-def]
    if out.ctypes.data != x.ctypes.data:
        if streams:
            stream_bytes(out, x)
        else:
            copy_bytes(out, x)


@kernel(forceinline=True)
def _own_block(plan, me):  # type: ignore[no-untyped-def]
    # The part of this rank's data that no other rank reads.
    if plan[FIRSTS, plan.shape[1] - 1] == 0:
        return 0, 0
    return plan[FIRSTS, me], plan[FIRSTS, me] + plan[ENDS, me + 1] - plan[ENDS, me]


@kernel()
def _keep_own(plan, me, start, stop, sent, received, streams):  # type: ignore[no-untyped-def]
    # Copy what lies between two positions of this rank's data, and is for itself.
    first, begin = plan[FIRSTS, me], plan[ENDS, me]
    lo, hi = max(first, start), min(first + plan[ENDS, me + 1] - begin, stop)
    if lo < hi:
        _receive(received[begin + lo - first : begin + hi - first], sent[lo:hi], streams)


@kernel()
def _stage_others(row, sent, start, lo, hi):  # type: ignore[no-untyped-def]
    stop = min(start + row.size, sent.size)
    before, after = min(lo, stop), max(hi, start)
    if start < before:
        copy_bytes(row[: before - start], sent[start:before])
    if after < stop:
        copy_bytes(row[after - start : stop - start], sent[after:stop])


@kernel(forceinline=True)
def _announce(counts, board, direct, staging, counters, state, kind, sent, lo, hi):  # type: ignore[no-untyped-def]
    if state[PHASE] == 0:
        me = state[ME]
        posted, is_direct = board[state[HALF], me], sent.size > direct[me, STAGED]
        _copy(posted[: counts.size], counts)
        posted[posted.size - 1] = sent.ctypes.data if is_direct else -sent.ctypes.data
        if not is_direct:
            _stage_others(staging[state[HALF], me], sent, 0, lo, hi)
        _arrive(counters, state, kind)
    return _all_arrived(counters, staging.shape[1], state, kind)


@kernel(forceinline=True)
def _takes_turns(plan, direct, staging):  # type: ignore[no-untyped-def]
    n, is_readable = staging.shape[1], direct[0, READ] > 0
    if n != 2 or plan[BEGINS, n] <= staging.shape[2]:
        return False
    return not is_readable or (plan[WRITTEN, n] == 0 and plan[STOPS, n] >= direct[0, READ])


@njit
def _take_turns(plan, staging, counters, state, kind, sent, received, streams):  # type: ignore[no-untyped-def]
    me, chunk = state[ME], staging.shape[2]
    other = 1 - me
    block, own = sent[plan[BEGINS, other] : plan[STOPS, other]], sent[plan[BEGINS, me] : plan[STOPS, me]]
    place, theirs = received[plan[ENDS, me] : plan[ENDS, me + 1]], received[plan[ENDS, other] : plan[ENDS, other + 1]]
    own = own[: place.size]
    fuses = streams and own.size == block.size and own.ctypes.data == block.ctypes.data != place.ctypes.data
    while state[POSITION] < plan[STOPS, 2]:
        start, half = state[POSITION], staging[state[HALF]]
        if state[PHASE] == _TURNS:
            piece = block[start : start + chunk]
            if fuses:
                stream_and_keep_bytes(place[start : start + chunk], half[me], piece)
            else:
                copy_bytes(half[me], piece)
            _arrive(counters, state, kind)
            if not fuses:
                _receive(place[start : start + chunk], own[start : start + chunk], streams)
        met = _all_arrived(counters, 2, state, kind)
        if met != DONE:
            return met
        piece = theirs[start : start + chunk]
        _receive(piece, half[other, : piece.size], streams)
        if CORES_KEEP_LINES:
            _take_lines(half[other, : piece.size], piece)
        _finish_chunk(state, start + chunk)
        state[PHASE] = _TURNS
    if streams:
        fence()
    state[PHASE] = state[POSITION] = 0
    return DONE


@kernel(forceinline=True)
def _move(plan, board, direct, staging, counters, state, kind, sent, received):  # type: ignore[no-untyped-def]
    n, chunk, me = staging.shape[1], staging.shape[2], state[ME]
    longest, streams = plan[BEGINS, n], received.size >= STREAMED_NBYTES
    own_first, own_last = _own_block(plan, me)
    while True:
        if state[PHASE] >= _TURNS:
            return _take_turns(plan, staging, counters, state, kind, sent, received, streams)
        start = state[POSITION]
        half, posted = staging[state[HALF]], board[state[HALF]]
        addresses, places = posted[:, posted.shape[1] - 1], posted[:, posted.shape[1] - 2]
        if state[PHASE] == 0:
            _stage_others(half[me], sent, start, own_first, own_last)
            _arrive(counters, state, kind)
        met = _all_arrived(counters, n, state, kind)
        if met != DONE:
            return met
        if start == 0 and state[PHASE] == 1 and _takes_turns(plan, direct, staging):
            _finish_chunk(state, 0)
            state[PHASE] = _TURNS
            continue
        any_direct = False
        if start == 0:
            for rank in range(n):
                any_direct |= addresses[rank] > 0
        writes = any_direct and plan[WRITTEN, n] > 0
        if writes and state[PHASE] == 1:
            places[me] = received.ctypes.data
            _arrive(counters, state, kind)
            met = _all_arrived(counters, n, state, kind)
            if met != DONE:
                return met
        moving = 2 if writes else 1
        if state[PHASE] == moving:
            if CORES_KEEP_LINES:  # before others read them
                _keep_own(plan, me, start, longest if any_direct else start + chunk, sent, received, streams)
            for distance in range(1, n):
                rank = (me + distance) % n  # ranks read from different neighbors at a time
                if writes and addresses[me] > 0 and plan[WRITES, rank] > 0:
                    block = sent[plan[STOPS, rank] - plan[WRITES, rank] : plan[STOPS, rank]]
                    if not write_memory(direct[rank, PROCESS], places[rank] + plan[PLACES, rank], block):
                        return UNREADABLE
                first, begin = plan[FIRSTS, rank], plan[ENDS, rank]
                size = plan[ENDS, rank + 1] - begin
                if any_direct and (addresses[rank] > 0 or first + size > chunk):
                    # No further chunk follows: also what a rank has staged is read where it is beyond the first one.
                    at = abs(addresses[rank]) + first
                    if addresses[rank] > 0:
                        size -= plan[WRITTEN, rank]
                    if size > 0 and not read_memory(direct[rank, PROCESS], at, received[begin : begin + size]):
                        return UNREADABLE
                    continue
                lo, hi = max(first, start), min(first + size, start + chunk)
                if lo < hi:
                    block, place = (
                        half[rank, lo - start : hi - start],
                        received[begin + lo - first : begin + hi - first],
                    )
                    _receive(place, block, streams)
                    if CORES_KEEP_LINES and n == 2:
                        _take_lines(block, place)
            if any_direct:  # ranks may change their data when all have read them
                _arrive(counters, state, kind)
            if not CORES_KEEP_LINES:
                _keep_own(plan, me, start, longest if any_direct else start + chunk, sent, received, streams)
        if state[PHASE] == moving + 1:
            met = _all_arrived(counters, n, state, kind)
            if met != DONE:
                return met
        _finish_chunk(state, start + chunk)
        if state[POSITION] >= longest or any_direct:
            if streams:
                fence()
            state[POSITION] = 0
            return DONE


@kernel()
def announce(counts, board, direct, staging, counters, state, kind, sent):  # type: ignore[no-untyped-def]
    """Begin an `exchange`: gather the counts of all ranks, and stage the first data, or tell where longer ones are.

    Args:
        counts: shape ``(k,)``, int64; this rank's.
        board: shape ``(2, n, most)``, int64, shared; gets the counts of all ranks, and last the addresses of what they
            receive, if others write there, and of their data, with a minus if these are staged.
        direct: shape ``(n, 3)``, int64; see `PROCESS`.
        staging: shape ``(2, n, chunk)``, uint8, shared.
        counters: as for `shm_exchange.meet`.
        state: as for `shm_exchange.meet`.
        kind: as for `shm_exchange.meet`.
        sent: shape ``(nbytes,)``, uint8, contiguous; this rank's data.

    Returns:
        `NOT_YET`, `DONE` or `DIFFERENT`; if done, the ranks call `exchange` next, or `leave` if any cannot.
    """
    return _announce(counts, board, direct, staging, counters, state, kind, sent, 0, 0)


@kernel()
def leave(state):  # type: ignore[no-untyped-def]
    """End an exchange after its announcement, before anything was moved."""
    if state[PHASE] == 1 and state[POSITION] == 0:
        _finish_chunk(state, 0)


@kernel()
def exchange(plan, board, direct, staging, counters, state, kind, sent, received):  # type: ignore[no-untyped-def]
    """Move a block of bytes from every rank to every rank, after `announce`.

    Args:
        plan: shape ``(ROWS, n + 1)``, int64; see `ROWS`.
        board: as for `announce`.
        direct: as for `announce`.
        staging: as for `announce`.
        counters: as for `announce`.
        state: as for `announce`.
        kind: as for `announce`.
        sent: as for `announce`.
        received: shape ``(nbytes,)``, uint8, contiguous; gets the blocks for this rank in the order of the senders.

    Returns:
        `NOT_YET`, `DONE`, `DIFFERENT` or `UNREADABLE`.
    """
    return _move(plan, board, direct, staging, counters, state, kind, sent, received)


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def repetition(counts, known, plan, board, direct, staging, counters, state, kind):  # type: ignore[no-untyped-def]
    """Return the first argument of `exchange_again`, from the arguments of `announce` and `exchange`.

    It holds the addresses of shared arrays, which the caller keeps: a kernel takes 0.1 us for each array that it is
    called with. ``known``, shape ``(n, k)``, int64, has the counts of all ranks.
    """
    addresses = [x.ctypes.data for x in (board, staging, counters, state)]
    head = [known.shape[0], counts.size, board.shape[2], staging.shape[2], kind, *addresses]
    return np.concatenate([head, direct.ravel(), plan.ravel(), counts, known.ravel()], dtype=np.int64)


@kernel()
def exchange_again(repetition, sent, received):  # type: ignore[no-untyped-def]
    """Run `announce` and `exchange` if all ranks announce the counts of the `repetition`.

    Returns:
        `NOT_YET`, `DONE`, `DIFFERENT` or `UNREADABLE`; `CHANGED` if some rank has announced other counts: then
            `announce` has been run.
    """
    n, k, most, chunk, kind = repetition[0], repetition[1], repetition[2], repetition[3], repetition[4]
    board = carray(_pointer(repetition[5]), (2, n, most), np.int64)
    staging = carray(_pointer(repetition[6]), (2, n, chunk), np.uint8)
    counters = carray(_pointer(repetition[7]), (n * STRIDE,), np.int32)
    state = carray(_pointer(repetition[8]), (STATE_LENGTH,), np.int64)
    tables = repetition[9:]
    direct, tables = tables[: 3 * n].reshape((n, 3)), tables[3 * n :]
    plan, tables = tables[: ROWS * (n + 1)].reshape((ROWS, n + 1)), tables[ROWS * (n + 1) :]
    counts, known = tables[:k], tables[k:]
    if state[POSITION] == 0 and state[PHASE] < 2:
        lo, hi = _own_block(plan, state[ME])
        met = _announce(counts, board, direct, staging, counters, state, kind, sent, lo, hi)
        if met != DONE:
            return met
        announced = board[state[HALF]]
        for rank in range(n):
            for i in range(k):
                if announced[rank, i] != known[rank * k + i]:
                    return CHANGED
    return _move(plan, board, direct, staging, counters, state, kind, sent, received)
