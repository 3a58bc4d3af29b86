"""Repeated exchanges of arrays through shared memory: each is one call with little work before the kernel.

The kernels take arrays of NumPy by the addresses of their objects, as ``id`` returns them, and compare the arrays with
those of the first call themselves. In Python such a check takes 0.5 us for each array, and a view of its bytes 0.2 to
0.8 us. Everything else that an exchange needs is in a table, because Numba takes 0.1 us for each array that it is
called with. The kernels hold no reference to an array, so the caller does until they return.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import carray, njit

from .jit import kernel
from .shm_blocks import _pointer, exchange_again
from .shm_exchange import STATE_LENGTH, STRIDE, sum_by_all, sum_by_owners, sum_to_owners, sum_to_root

OTHER = 5
"""Return value besides those of `shm_exchange`: the arrays are not like those of the first call; nothing is changed."""

_TYPE, _DATA, _AXES, _SHAPE, _DTYPE, _FLAGS = 1, 2, 3, 4, 7, 8
_FIELDS = 9
"""Words of an array's object, the same since NumPy 1.7 (``PyArrayObject_fields``); the axes and flags are ``int``. With
another layout, such as that of Python without a GIL, no object has its type and dtype there.
"""
_FLAGS_NEEDED = 0x1 | 0x100 | 0x400
"""NumPy's flags of a contiguous, aligned and writeable array."""
_INT = 0xFFFFFFFF
_NO_AXES = -1

ANY, APART, APART_OR_SAME = range(3)
"""Rules for the memory of the two arrays."""

Like = tuple[np.dtype, int, tuple[int, ...] | None]
"""The dtype, the size, and the shape of an array; None for any shape."""


def _pattern(like: Like | None) -> list[int]:
    if like is None:
        return [0]
    dtype, size, shape = like
    axes = [_NO_AXES] if shape is None else [len(shape), *shape]
    lasting = np.dtype(dtype.type)  # one with metadata may be freed, and its address reused
    return [1, id(lasting), size, size * dtype.itemsize, *axes]


def arrays_like(x: Like | None, out: Like | None, rule: int) -> list[int]:
    """Return the first words of a table: what the arrays of a repeated exchange are like."""
    patterns = [id(np.ndarray), rule, *_pattern(x), *_pattern(out)]
    return [len(patterns) + 1, *patterns]


@njit(inline="always")
def _array_at(address, table, at):  # type: ignore[no-untyped-def]
    """Return the address of an array's data, -1 if it is not as the table says, and where the next array is there."""
    if table[at] == 0:
        return np.int64(0), at + 1
    axes = max(table[at + 4], 0)
    end = at + 5 + axes
    fields = carray(_pointer(address), (_FIELDS,), np.int64)
    if fields[_TYPE] != table[1] or fields[_DTYPE] != table[at + 1]:
        return np.int64(-1), end
    if fields[_FLAGS] & _FLAGS_NEEDED != _FLAGS_NEEDED:
        return np.int64(-1), end
    num_axes = fields[_AXES] & _INT
    shape = carray(_pointer(fields[_SHAPE]), (num_axes,), np.int64)
    size = np.int64(1)
    for axis in range(num_axes):
        size *= shape[axis]
    is_alike = size == table[at + 2]
    if table[at + 4] != _NO_AXES:
        is_alike &= num_axes == axes
        for axis in range(min(num_axes, axes)):
            is_alike &= shape[axis] == table[at + 5 + axis]
    return fields[_DATA] if is_alike else np.int64(-1), end


@njit(inline="always")
def _arrays_at(table, x, out):  # type: ignore[no-untyped-def]
    """Return the addresses of both arrays' data and their numbers of elements and bytes; -1 if they are others."""
    x_at, after = _array_at(x, table, 3)
    out_at, _ = _array_at(out, table, after)
    sizes = table[5] * table[3], table[after + 2] * table[after]
    nbytes = table[6] * table[3], table[after + 3] * table[after]
    is_apart = x_at + nbytes[0] <= out_at or out_at + nbytes[1] <= x_at
    if x_at >= 0 and out_at >= 0 and not is_apart and table[2] != ANY and (table[2] == APART or x_at != out_at):
        return np.int64(-1), out_at, sizes, nbytes
    return x_at, out_at, sizes, nbytes


def sum_table(
    alike: Sequence[int], staging: np.ndarray, counters: np.ndarray, state: np.ndarray, kind: int, root: int = 0
) -> np.ndarray:
    """Return the table of a repeated sum, from `arrays_like` and the arguments of the kernels in `shm_exchange`.

    It holds the addresses of the shared arrays, which the caller keeps.
    """
    n, chunk = staging.shape[1:]
    return np.array([*alike, n, chunk, kind, root, *(x.ctypes.data for x in (staging, counters, state))], np.int64)


@njit(inline="always")
def _shared(table, factors):  # type: ignore[no-untyped-def]
    words = table[table[0] :]
    n = words[0]
    staging = carray(_pointer(words[4]), (2, n, words[1]), factors.dtype)
    counters = carray(_pointer(words[5]), (n * STRIDE,), np.int32)
    state = carray(_pointer(words[6]), (STATE_LENGTH,), np.int64)
    return staging, counters, state, words[2]


@kernel()
def sum_by_all_at(table, factors, x, out):  # type: ignore[no-untyped-def]
    """Run `sum_by_all` of the array at ``x``; ``factors``, shape ``(3,)``, are its factors, in the array's dtype."""
    x_at, _, sizes, _ = _arrays_at(table, x, out)
    if x_at < 0:
        return OTHER
    total = carray(_pointer(x_at), (sizes[0],), factors.dtype)
    return sum_by_all(*_shared(table, factors), factors[0], factors[1], factors[2], total)


@kernel()
def sum_by_owners_at(table, factors, x, out):  # type: ignore[no-untyped-def]
    """Run `sum_by_owners`; arguments as `sum_by_all_at`."""
    x_at, _, sizes, _ = _arrays_at(table, x, out)
    if x_at < 0:
        return OTHER
    total = carray(_pointer(x_at), (sizes[0],), factors.dtype)
    return sum_by_owners(*_shared(table, factors), factors[0], factors[1], factors[2], total)


@kernel()
def sum_to_owners_at(table, factors, x, out):  # type: ignore[no-untyped-def]
    """Run `sum_to_owners` of the array at ``x`` into that at ``out``; other arguments as `sum_by_all_at`."""
    x_at, out_at, sizes, _ = _arrays_at(table, x, out)
    if x_at < 0 or out_at < 0:
        return OTHER
    values = carray(_pointer(x_at), (sizes[0],), factors.dtype)
    shard = carray(_pointer(out_at), (sizes[1],), factors.dtype)
    return sum_to_owners(*_shared(table, factors), factors[0], factors[1], factors[2], values, shard)


@kernel()
def sum_to_root_at(table, factors, x, out):  # type: ignore[no-untyped-def]
    """Run `sum_to_root` of the array at ``x`` into that at ``out``; other arguments as `sum_by_all_at`."""
    x_at, out_at, sizes, _ = _arrays_at(table, x, out)
    if x_at < 0 or out_at < 0:
        return OTHER
    values = carray(_pointer(x_at), (sizes[0],), factors.dtype)
    total = carray(_pointer(out_at), (sizes[1],), factors.dtype)
    root = table[table[0] + 3]
    return sum_to_root(*_shared(table, factors), factors[0], factors[1], factors[2], root, values, total)


@kernel()
def exchange_at(table, x, out):  # type: ignore[no-untyped-def]
    """Run `shm_blocks.exchange_again` from the array at ``x`` to that at ``out``.

    Args:
        table: `arrays_like`, followed by the repetition.
        x: the address of an array's object.
        out: likewise.
    """
    x_at, out_at, _, nbytes = _arrays_at(table, x, out)
    if x_at < 0 or out_at < 0:
        return OTHER
    sent, received = carray(_pointer(x_at), (nbytes[0],), np.uint8), carray(_pointer(out_at), (nbytes[1],), np.uint8)
    return exchange_again(table[table[0] :], sent, received)
