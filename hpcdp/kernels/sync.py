"""Counters in memory shared by the ranks of a node: atomic reads and writes, and a wait that neither burns nor dawdles.

A counter is an ``int32`` that only grows (and wraps: comparisons are by difference). Waiting spins for a while, since a
peer on another core answers within a microsecond, then sleeps in the kernel on a futex (Drepper, "Futexes Are Tricky",
2011), since a peer that shares our core cannot run while we spin. The word after each counter says how many sleep on
it, so that posting makes a system call only when somebody does.

A plain loop over an array never sees another process's store (the load is hoisted), hence the intrinsics.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .machine_code import kernel

STRIDE = 32
"""``int32`` words from one counter to the next: 128 bytes, two cache lines, because the prefetcher fetches pairs."""

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "riscv64": 98}.get(platform.machine(), -1)
_IS_X86 = platform.machine() == "x86_64"

_counters_t = types.Array(types.int32, 1, "C")
_syscall = types.ExternalFunction(
    "syscall",
    types.int64(types.int64, types.voidptr, types.int64, types.int64, types.voidptr),
)
_sched_yield = types.ExternalFunction("sched_yield", types.int32())


def _word(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def load(typingctx: Any, counters: Any, index: Any) -> Any:
    """The counter, so that what was written before it was posted is visible after."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(context, builder, signature.args[0], *args), "seq_cst", 4)

    return types.int32(counters, types.intp), generate


@intrinsic
def store(typingctx: Any, counters: Any, index: Any, value: Any) -> Any:
    """Set the counter; what was written before is visible to whoever reads the new value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, "seq_cst", 4)
        return context.get_dummy_value()

    return types.none(counters, types.intp, types.int32), generate


@intrinsic
def add(typingctx: Any, counters: Any, index: Any, value: Any) -> Any:
    """Add to the counter in one step and return what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int32(counters, types.intp, types.int32), generate


@intrinsic
def _address(typingctx: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], *args)
        return builder.bitcast(pointer, ir.IntType(8).as_pointer())

    return types.voidptr(array, types.intp), generate


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
    """Set counter ``index`` (shape ``(n * STRIDE,)``, int32) and wake whoever sleeps on it."""
    at = index * STRIDE
    store(counters, at, value)
    if _FUTEX_CALL >= 0 and load(counters, at + 1) > 0:
        _syscall(_FUTEX_CALL, _address(counters, at), _FUTEX_WAKE, 2**31 - 1, _address(counters, at))


@kernel(types.boolean(_counters_t, types.intp, types.int32, types.int64, types.int64))
def wait(counters: np.ndarray, index: int, target: int, spins: int, timeout_ns: int) -> bool:
    """Wait until counter ``index`` has reached ``target``; false when ``timeout_ns`` of sleep did not bring it.

    ``spins`` is how often to look before sleeping; one look takes 15 to 50 ns.
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
    seen = load(counters, at)
    timed_out = False
    while np.int32(seen - target) < 0 and not timed_out:
        timed_out = _syscall(_FUTEX_CALL, _address(counters, at), _FUTEX_WAIT, seen, _address(limit, 0)) != 0
        now = load(counters, at)
        # Any return but a wake-up: EAGAIN (the value moved: look again), ETIMEDOUT or EINTR (give Python a turn).
        timed_out = timed_out and now == seen
        seen = now
    add(counters, at + 1, -1)
    return bool(np.int32(seen - target) >= 0)


@kernel(types.boolean(_counters_t, types.intp, types.int32, types.int64, types.int64))
def wait_all(counters: np.ndarray, n: int, target: int, spins: int, timeout_ns: int) -> bool:
    """Wait until the counters 0 to ``n - 1`` have all reached ``target``; false as `wait`."""
    for index in range(n):  # noqa: SIM110, Numba has no all()
        if not wait(counters, index, target, spins, timeout_ns):
            return False
    return True
