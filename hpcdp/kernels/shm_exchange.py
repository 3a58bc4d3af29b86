"""Allreduce, push and pull over memory shared by a node's ranks, and the counters with which they wait for each other.

Gradients in buckets are summed by `gradients`, and messages between two ranks go by `shm_messages`.

A counter is an ``int32`` that only grows (and wraps: comparisons are by difference). Waiting first spins, because a
peer on another core answers within a microsecond. Then it sleeps in the kernel on a futex (Drepper, "Futexes Are
Tricky", 2011), because a peer that shares this core cannot run while it spins. The word after each counter is the
number of sleepers, so posting makes a system call only if there are any. The intrinsics are needed because a plain loop
never sees another process's store (the load is hoisted).

An exchange of private arrays is one resumable call. The ranks use the two halves of a staging buffer in turn. A rank
that writes to a half again has waited for all ranks in the exchange between, so no rank still reads it. Sums run in the
order of the ranks.

A push and pull of one value by all ranks is several resumable calls. First the ranks meet. A rank that has pushed in
another way (a whole row at once) does not join, which all ranks detect before anything is written. Then a rank stages
the shards of the others, piece by piece, and stages the next piece while others sum one, so a value of ``p`` pieces
takes ``p + 2`` waits. Sums run in order of the ranks.

An owner writes a sum to its shard of the value, and back to the staging buffer, from which the others fetch it. As in
an allreduce, data moves between cores only through the staging buffer, which stays in the caches. A rank writes only
its own shard of the value, which no other core caches. After the meeting no rank reads the previous value.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .copies import CORES_KEEP_LINES, STREAMED_NBYTES, _address, _word, fence, stream_bytes
from .jit import kernel

STRIDE = 32
"""``int32`` words from one counter to the next: 128 bytes, two cache lines, because the prefetcher fetches pairs."""

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}.get(platform.machine(), -1)
_IS_X86 = platform.machine() == "x86_64"

READ_CALL = {"x86_64": 310, "aarch64": 270, "ppc64le": 351, "riscv64": 270}.get(platform.machine(), -2)
WRITE_CALL = READ_CALL + 1
"""Numbers of process_vm_readv(2) and process_vm_writev(2), with which a rank copies another one's private memory."""

_counters_t = types.Array(types.int32, 1, "C")
_syscall = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.voidptr, types.int64, types.int64, types.voidptr),
)
_copy_call = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.int64, types.voidptr, types.int64, types.voidptr, types.int64, types.int64),
)
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@intrinsic
def load(typingctx: Any, counters: Any, index: Any) -> Any:
    """Load a counter; data written before it was posted is visible afterwards."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(context, builder, signature.args[0], *args), "seq_cst", 4)

    return types.int32(counters, types.intp), generate


@intrinsic
def store(typingctx: Any, counters: Any, index: Any, value: Any) -> Any:
    """Set a counter; data written before is visible to readers of the new value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, "seq_cst", 4)
        return context.get_dummy_value()

    return types.none(counters, types.intp, types.int32), generate


@intrinsic
def add(typingctx: Any, counters: Any, index: Any, value: Any) -> Any:
    """Add to a counter atomically and return its previous value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int32(counters, types.intp, types.int32), generate


@intrinsic
def _pause(typingctx: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.none(), generate


@kernel(types.void(_counters_t, types.intp, types.int32))
def post(counters: np.ndarray, index: int, value: int) -> None:
    """Set counter ``index`` (shape ``(n * STRIDE,)``, int32) and wake its sleepers."""
    at = index * STRIDE
    store(counters, at, value)
    if _FUTEX_CALL >= 0 and load(counters, at + 1) > 0:
        _syscall(_FUTEX_CALL, _address(counters, at), _FUTEX_WAKE, 2**31 - 1, _address(counters, at))


@kernel(types.boolean(_counters_t, types.intp, types.int32, types.int64, types.int64))
def wait(counters: np.ndarray, index: int, target: int, spins: int, timeout_ns: int) -> bool:
    """Wait until counter ``index`` has reached ``target``; return False after ``timeout_ns`` of sleep without that.

    ``spins`` is the number of polls before sleeping; one poll takes 15 to 50 ns.
    """
    at = index * STRIDE
    if np.int32(load(counters, at) - target) >= 0:
        return True
    for _ in range(spins):
        _pause()
        if np.int32(load(counters, at) - target) >= 0:
            return True
    if timeout_ns <= 0:
        return False
    if _FUTEX_CALL < 0:
        for _ in range(timeout_ns // 1000):
            _sched_yield()
            if np.int32(load(counters, at) - target) >= 0:
                return True
        return False
    limit = np.empty(2, np.int64)
    limit[0] = timeout_ns // 1_000_000_000
    limit[1] = timeout_ns % 1_000_000_000
    add(counters, at + 1, 1)
    value = load(counters, at)
    timed_out = False
    while np.int32(value - target) < 0 and not timed_out:
        timed_out = _syscall(_FUTEX_CALL, _address(counters, at), _FUTEX_WAIT, value, _address(limit, 0)) != 0
        now = load(counters, at)
        # Not a wake-up: EAGAIN (the value changed: check again), ETIMEDOUT or EINTR (return to Python).
        timed_out = timed_out and now == value
        value = now
    add(counters, at + 1, -1)
    return bool(np.int32(value - target) >= 0)


@kernel(types.boolean(_counters_t, types.intp, types.int32, types.int64, types.int64))
def wait_all(counters: np.ndarray, n: int, target: int, spins: int, timeout_ns: int) -> bool:
    """Wait until the counters 0 to ``n - 1`` have all reached ``target``; returns False as `wait`."""
    for index in range(n):  # noqa: SIM110, Numba has no all()
        if not wait(counters, index, target, spins, timeout_ns):
            return False
    return True


NOT_YET, DONE, DIFFERENT, CHANGED, UNREADABLE = range(5)
"""Return values of an exchange: a peer was late (repeat the call to resume), done, mismatched calls, other counts than
expected, or memory of another rank that cannot be read.
"""

ME, SPINS, SLEEP_NS, PHASE, SEQUENCE, HALF, POSITION = range(7)
STATE_LENGTH = 8
"""Length of a state, int64; the first four numbers are also those of a push and pull.

Kept from call to call: the number of the last post, and the half to use. Zero between calls: the first element of the
current chunk, and the phase in it. Constant: this rank's number in the node, polls before sleeping, and nanoseconds of
sleep before giving up.
"""

DTYPES = (np.dtype("float32"), np.dtype("float64"), np.dtype("int64"))
"""Dtypes for which the sums are called."""

_BLOCK = 2048
_PIECE_NBYTES = 64 << 10
"""What one rank stages at a time for another that sums it alone, and meanwhile sums the piece before."""
_ALONE_NBYTES = 4 << 10
"""Up to this many bytes of all other ranks, summing them alone costs less than a second wait."""
_LINE_NBYTES = 64
"""A cache line."""


def state_of(rank: int, patience: np.ndarray) -> np.ndarray:
    """Return this rank's state before its first exchange; see `shared_memory.NodeMemory` for ``patience``."""
    state = np.zeros(STATE_LENGTH, np.int64)
    state[ME], state[[SPINS, SLEEP_NS]] = rank, patience
    return state


_state_t = types.Array(types.int64, 1, "C")


@kernel()
def _copy(out, x):  # type: ignore[no-untyped-def]
    for i in range(out.size):  # the error messages of a slice assignment would compile for three seconds
        out[i] = x[i]


@kernel()
def _scaled_copy(out, x, factor):  # type: ignore[no-untyped-def]
    if factor == 1:  # no multiplication: it is slow for subnormal numbers
        _copy(out, x)
    else:
        for i in range(out.size):
            out[i] = x[i] * factor


@kernel()
def _add(total, x, factor):  # type: ignore[no-untyped-def]
    if factor == 1:
        for i in range(total.size):
            total[i] += x[i]
    else:
        for i in range(total.size):
            total[i] += x[i] * factor


@kernel()
def _finish(total, divisor, factor):  # type: ignore[no-untyped-def]
    if divisor != 1:
        for i in range(total.size):
            total[i] = total[i] / divisor
    if factor != 1:
        for i in range(total.size):
            total[i] = total[i] * factor


@kernel()
def _sum_of_rows(total, mine, rows, me, prescale, divisor, factor):  # type: ignore[no-untyped-def]
    # In the order of the ranks: `mine` in place of this rank's row, which is not staged.
    one = total.dtype.type(1)
    if me == 0:
        _scaled_copy(total, mine, prescale)
    else:
        _copy(total, rows[0])
    for rank in range(1, rows.shape[0]):
        if rank == me:
            _add(total, mine, prescale)
        else:
            _add(total, rows[rank], one)
    _finish(total, divisor, factor)


@kernel()
def _sum_in_both(mine, other, prescale, factor):  # type: ignore[no-untyped-def]
    if prescale == 1 and factor == 1:
        for i in range(mine.size):
            total = mine[i] + other[i]
            mine[i] = total
            other[i] = total
    else:
        for i in range(mine.size):
            total = (mine[i] * prescale + other[i]) * factor
            mine[i] = total
            other[i] = total


@kernel()
def _take_lines(staged, values):  # type: ignore[no-untyped-def]
    for i in range(0, staged.size, max(1, _LINE_NBYTES // staged.itemsize)):
        staged[i] = values[i]


@kernel()
def _sum_of_two(out, mine, other, prescale, factor):  # type: ignore[no-untyped-def]
    if prescale == 1 and factor == 1:
        for i in range(out.size):
            out[i] = mine[i] + other[i]
    else:
        for i in range(out.size):
            out[i] = (mine[i] * prescale + other[i]) * factor
    if CORES_KEEP_LINES:
        _take_lines(other, out)


@kernel(forceinline=True)
def _arrive(counters, state, kind):  # type: ignore[no-untyped-def]
    # Beside its counter a rank posts the kind of its call. It alternates between two words: before it writes one again
    # it has waited for all ranks at the arrival between, so no rank still reads it.
    state[SEQUENCE] += 1
    state[PHASE] += 1
    counters[state[ME] * STRIDE + 2 + (state[SEQUENCE] & 1)] = np.int32(kind)
    post(counters, state[ME], np.int32(state[SEQUENCE]))


@kernel(forceinline=True)
def _all_arrived(counters, n, state, kind):  # type: ignore[no-untyped-def]
    if not wait_all(counters, n, np.int32(state[SEQUENCE]), state[SPINS], state[SLEEP_NS]):
        return NOT_YET
    for rank in range(n):
        if counters[rank * STRIDE + 2 + (state[SEQUENCE] & 1)] != np.int32(kind):
            state[POSITION] = 0
            state[PHASE] = 0
            return DIFFERENT
    return DONE


@kernel(forceinline=True)
def _finish_chunk(state, position):  # type: ignore[no-untyped-def]
    state[POSITION] = position
    state[PHASE] = 0
    state[HALF] = 1 - state[HALF]


@kernel(types.int64(_counters_t, types.intp, _state_t, types.int64))
def meet(counters, n, state, kind):  # type: ignore[no-untyped-def]
    """Run a barrier of ``n`` ranks with the same ``kind`` of call; arguments as `sum_by_all`."""
    if state[PHASE] == 0:
        _arrive(counters, state, kind)
    met = _all_arrived(counters, n, state, kind)
    if met == DONE:
        state[PHASE] = 0
    return met


@kernel()
def sum_by_all(staging, counters, state, kind, prescale, divisor, factor, x):  # type: ignore[no-untyped-def]
    """Sum arrays that every rank stages and all ranks read: one wait, ``n - 1`` sizes read.

    Args:
        staging: shape ``(2, n, chunk)``, shared.
        counters: the ranks' arrival counters, shared (see `wait`).
        state: shape ``(STATE_LENGTH,)``, this rank's.
        kind: a number for dtype, reduction and count; its low 32 bits are compared over the ranks.
        prescale: factor of every rank's array, float64, as the next two rounded to the dtype; all 1 for integers.
        divisor: divisor of the sum; 1 for two ranks, see `communicator.Reduction.factors`.
        factor: factor of the sum, after the division.
        x: shape ``(count,)``, contiguous, ``count <= chunk``; replaced by the result.

    Returns:
        `NOT_YET`, `DONE` or `DIFFERENT`.
    """
    number = x.dtype.type
    half, n = staging[state[HALF]], staging.shape[1]
    if state[PHASE] == 0:
        _scaled_copy(half[state[ME], : x.size], x, number(prescale))
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
    _finish(x, number(divisor), number(factor))
    _finish_chunk(state, 0)
    return DONE


@kernel()
def sum_by_owners(staging, counters, state, kind, prescale, divisor, factor, x):  # type: ignore[no-untyped-def]
    """Sum arrays by shards: every rank stages the others' shards, sums its own and writes the sum back in place.

    Two waits a chunk, ``2 (n - 1) / n`` sizes read. An owner writes the cache lines that it has read, so each moves
    between cores once; separate lines for the result would move twice. Arguments as `sum_by_all`, for any ``count``.
    """
    n, chunk, me = staging.shape[1], staging.shape[2], state[ME]
    partial = np.empty(_BLOCK, x.dtype)
    before, over, after = x.dtype.type(prescale), x.dtype.type(divisor), x.dtype.type(factor)
    while state[POSITION] < x.size:
        count = min(chunk, x.size - state[POSITION])
        piece = x[state[POSITION] : state[POSITION] + count]
        half = staging[state[HALF]]
        lo, hi = count * me // n, count * (me + 1) // n
        if state[PHASE] == 0:
            _scaled_copy(half[me, :lo], piece[:lo], before)
            _scaled_copy(half[me, hi:count], piece[hi:], before)
            _arrive(counters, state, kind)
        if state[PHASE] == 1:
            met = _all_arrived(counters, n, state, kind)
            if met != DONE:
                return met
            if n == 2:
                _sum_in_both(piece[lo:hi], half[1 - me, lo:hi], before, after)
            else:
                for first in range(lo, hi, _BLOCK):
                    last = min(first + _BLOCK, hi)
                    block = partial[: last - first]
                    _sum_of_rows(block, piece[first:last], half[:, first:last], me, before, over, after)
                    for rank in range(n):
                        _copy(piece[first:last] if me == rank else half[rank, first:last], block)
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
def _give(out, x, streams):  # type: ignore[no-untyped-def]
    if streams:
        stream_bytes(out.view(np.uint8), x.view(np.uint8))
    else:
        _copy(out, x)


@kernel()
def sum_to_root(staging, counters, state, kind, prescale, divisor, factor, root, x, out):  # type: ignore[no-untyped-def]
    """Sum arrays for one rank: only ``out`` of ``root`` changes.

    Ranks sum by shards, as in `sum_by_owners`; an owner writes its sum to what the root has staged, from where the root
    copies it: two waits a chunk. The root sums short arrays alone, and of two ranks several chunks, so that data move
    between cores once: one wait a chunk. Arguments as `sum_by_all`, for any ``count``; ``out`` is like ``x``, or ``x``
    itself, on ``root``, and not used elsewhere.
    """
    n, chunk, me = staging.shape[1], staging.shape[2], state[ME]
    is_alone = x.size * x.itemsize * (n - 1) <= _ALONE_NBYTES or (n == 2 and x.size > chunk)
    if is_alone:
        chunk = min(chunk, _PIECE_NBYTES // x.itemsize)
    partial, streams = np.empty(_BLOCK, x.dtype), x.size * x.itemsize >= STREAMED_NBYTES
    before, over, after = x.dtype.type(prescale), x.dtype.type(divisor), x.dtype.type(factor)
    while state[POSITION] < x.size:
        at = state[POSITION]
        count = min(chunk, x.size - at)
        piece, half = x[at : at + count], staging[state[HALF]]
        lo, hi = count * me // n, count * (me + 1) // n
        if is_alone:
            lo, hi = 0, count if me == root else 0
        if state[PHASE] == 0:
            _scaled_copy(half[me, :lo], piece[:lo], before)
            _scaled_copy(half[me, hi:count], piece[hi:], before)
            _arrive(counters, state, kind)
        if state[PHASE] == 1:
            met = _all_arrived(counters, n, state, kind)
            if met != DONE:
                return met
            for first in range(lo, hi, _BLOCK):
                last = min(first + _BLOCK, hi)
                block = partial[: last - first]
                if n == 2:
                    _sum_of_two(block, piece[first:last], half[1 - me, first:last], before, after)
                else:
                    _sum_of_rows(block, piece[first:last], half[:, first:last], me, before, over, after)
                if me == root:
                    _give(out[at + first : at + last], block, streams)
                else:
                    _copy(half[root, first:last], block)
            if not is_alone:
                _arrive(counters, state, kind)
        met = _all_arrived(counters, n, state, kind)
        if met != DONE:
            return met
        if me == root:
            _give(out[at : at + lo], half[me, :lo], streams)
            _give(out[at + hi : at + count], half[me, hi:count], streams)
        _finish_chunk(state, at + count)
    if streams:
        fence()
    state[POSITION] = 0
    return DONE


@kernel()
def copy_memory(call, pid, address, here, nbytes):  # type: ignore[no-untyped-def]
    """Copy memory from or to a process; ``call`` is `READ_CALL` or `WRITE_CALL`. Return success."""
    if call < 0:
        return False
    local, remote = np.empty(2, np.int64), np.empty(2, np.int64)
    done = np.int64(0)
    while done < nbytes:
        local[0], local[1] = here + done, nbytes - done
        remote[0], remote[1] = address + done, nbytes - done
        count = _copy_call(call, pid, _address(local, 0), 1, _address(remote, 0), 1, 0)
        if count <= 0:
            return False
        done += count
    return True


@kernel()
def read_memory(pid, address, out):  # type: ignore[no-untyped-def]
    """Read ``out.size`` bytes of the memory of a process into ``out``, shape ``(nbytes,)``, uint8; return success."""
    return copy_memory(READ_CALL, pid, address, np.int64(out.ctypes.data), out.size)


@kernel()
def write_memory(pid, address, x):  # type: ignore[no-untyped-def]
    """Write ``x``, shape ``(nbytes,)``, uint8, to the memory of a process; return success."""
    return copy_memory(WRITE_CALL, pid, address, np.int64(x.ctypes.data), x.size)


@kernel()
def sum_to_owners(staging, counters, state, kind, prescale, divisor, factor, x, out):  # type: ignore[no-untyped-def]
    """Sum arrays by shards, as `sum_by_owners`, and leave each rank its own: one wait a chunk, ``x`` is unchanged.

    A chunk has a piece of every shard, so that all ranks sum in each. Arguments as `sum_by_all`, for any ``count``;
    ``out`` gets this rank's shard of the result.
    """
    n, me = staging.shape[1], state[ME]
    width = staging.shape[2] // n
    partial = np.empty(_BLOCK, x.dtype)
    before, over, after = x.dtype.type(prescale), x.dtype.type(divisor), x.dtype.type(factor)
    longest = -(-x.size // n)
    own = x.size * me // n
    while state[POSITION] < longest:
        start = state[POSITION]
        half = staging[state[HALF]]
        if state[PHASE] == 0:
            for owner in range(n):
                lo = x.size * owner // n + start
                hi = min(lo + width, x.size * (owner + 1) // n)
                if owner != me and lo < hi:
                    _scaled_copy(half[me, owner * width : owner * width + hi - lo], x[lo:hi], before)
            _arrive(counters, state, kind)
        met = _all_arrived(counters, n, state, kind)
        if met != DONE:
            return met
        count = max(0, min(width, out.size - start))
        if n == 2:
            mine, place = x[own + start : own + start + count], me * width
            _sum_of_two(out[start : start + count], mine, half[1 - me, place : place + count], before, after)
        else:
            for first in range(0, count, _BLOCK):
                last = min(first + _BLOCK, count)
                block = partial[: last - first]
                place = me * width + first
                mine, rows = x[own + start + first : own + start + last], half[:, place : place + last - first]
                _sum_of_rows(block, mine, rows, me, before, over, after)
                _copy(out[start + first : start + last], block)
                for rank in range(n):
                    if rank != me:
                        _take_lines(half[rank, place : place + last - first], block)
        _finish_chunk(state, start + width)
    state[POSITION] = 0
    return DONE


MIXED, SUMMED = 2, 3
"""Further return values of a push and pull: a rank pushed in another way, shard summed."""

PIECES, PHASES, ROUND, PIECE = range(4, 8)
"""State of a push and pull besides the four numbers that it shares with an exchange's.

Constant: pieces of a shard, and numbers that a round may post (one more than twice as many). Set before a call: the
number of the round. Its first post, at the meeting, is that times the numbers of a round, plus one; its last post is
that of the next round less one. Zero between calls: the next piece.
"""

SLOTS = 3
"""Pieces in the staging buffer: while a rank stages one, two earlier ones may not yet be summed or fetched."""

_ROUND_OF = 2
_ARRIVING, _MEETING, _WAITING = 0, 1, 2


def pushpull_state(rank: int, patience: np.ndarray, pieces: int, phases: int) -> np.ndarray:
    """Return this rank's state before its first exchange; see `shared_memory.NodeMemory` for ``patience``."""
    state = np.zeros(STATE_LENGTH, np.int64)
    state[ME], state[PIECES], state[PHASES], state[[SPINS, SLEEP_NS]] = rank, pieces, phases, patience
    return state


@kernel()
def _span(ends, rank, piece, width):  # type: ignore[no-untyped-def]
    first = min(ends[rank] + piece * width, ends[rank + 1])
    return first, min(first + width, ends[rank + 1])


@kernel()
def _staged(staging, rank, owner, piece, first, last):  # type: ignore[no-untyped-def]
    at = owner * (staging.shape[2] // staging.shape[1])
    return staging[piece % SLOTS, rank, at : at + last - first]


@kernel()
def _stage(x, staging, ends, me, piece):  # type: ignore[no-untyped-def]
    n = staging.shape[1]
    for owner in range(n):
        if owner != me:
            first, last = _span(ends, owner, piece, staging.shape[2] // n)
            _copy(_staged(staging, me, owner, piece, first, last), x[first:last])


@kernel()
def _sum(x, out, in_place, total, staging, ends, me, piece):  # type: ignore[no-untyped-def]
    # A loop that reads and writes one array by two names is not vectorized: hence `in_place`, and blocks in the L1
    # cache.
    n = staging.shape[1]
    begin, end = _span(ends, me, piece, staging.shape[2] // n)
    if n == 2:
        mine, own_total, other = x[begin:end], total[begin:end], _staged(staging, 1 - me, me, piece, begin, end)
        if in_place:
            for i in range(own_total.size):
                of_both = mine[i] + other[i]
                mine[i] = of_both
                other[i] = of_both
                own_total[i] = of_both
        elif out.size:
            result = out[begin:end]
            for i in range(own_total.size):
                of_both = mine[i] + other[i]
                result[i] = of_both
                other[i] = of_both
                own_total[i] = of_both
        else:
            for i in range(own_total.size):
                of_both = mine[i] + other[i]
                other[i] = of_both
                own_total[i] = of_both
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


@kernel()
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


@kernel()
def _arrived(counters, n, number, state):  # type: ignore[no-untyped-def]
    return wait_all(counters, n, np.int32(number), state[SPINS], state[SLEEP_NS])


@kernel()
def _first(state):  # type: ignore[no-untyped-def]
    return state[ROUND] * state[PHASES] + 1


@kernel()
def _staged_number(state, piece):  # type: ignore[no-untyped-def]
    return _first(state) + 1 + piece


@kernel()
def _spread_number(state, piece):  # type: ignore[no-untyped-def]
    pieces = state[PIECES]
    return _first(state) + (state[PHASES] - 1 if piece + 1 == pieces else 1 + pieces + piece)


@kernel()
def _put(total, staging, ends, me, piece):  # type: ignore[no-untyped-def]
    n = staging.shape[1]
    first, last = _span(ends, me, piece, staging.shape[2] // n)
    for rank in range(n):
        if rank != me:
            _copy(_staged(staging, rank, me, piece, first, last), total[first:last])


@kernel()
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
        counters: progress of the ranks with this value, shared (see `shm_exchange`).
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
