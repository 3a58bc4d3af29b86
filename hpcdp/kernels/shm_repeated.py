"""Repeated exchanges of arrays through shared memory: each is one call with little work before the kernel.

The kernels take arrays of NumPy by the addresses of their objects, as ``id`` returns them, and compare the arrays with
those of the first call themselves. In Python such a check takes 0.5 us for each array, and a view of its bytes 0.2 to
0.8 us. Everything else that an exchange needs is in a table, which a kernel takes by its address: Numba takes 0.1 us
for each array that a kernel is called with. The kernels hold no reference to an array, so the caller does until they
return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numba import carray, from_dtype, njit, types

from .jit import Kernel, kernel
from .shm_blocks import _pointer, exchange_again
from .shm_exchange import STATE_LENGTH, STRIDE, meet, sum_by_all, sum_by_owners, sum_to_owners, sum_to_root

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

ANY, APART = -2, -1
"""Rules for the memory of the two arrays. Any other is the one place in bytes, from the beginning of the second array,
where the first one may begin if they overlap.
"""

Like = tuple[np.dtype, int, tuple[int, ...] | None]
"""The dtype, the size, and the shape of an array; None for any shape."""

_LENGTH, _FURTHER, _ARRAY_TYPE, _RULE, _PATTERNS = range(5)
"""Words of a table: how many there are, where the words begin that are not about the arrays, the address of the type of
NumPy's arrays, the rule for the memory of both, and then what each is like.
"""


def _pattern(like: Like | None) -> list[int]:
    if like is None:
        return [0]
    dtype, size, shape = like
    axes = [_NO_AXES] if shape is None else [len(shape), *shape]
    lasting = np.dtype(dtype.type)  # one with metadata may be freed, and its address reused
    return [1, id(lasting), size, size * dtype.itemsize, *axes]


def table_of(x: Like | None, out: Like | None, rule: int, further: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the table of a repeated exchange, which may hold addresses of shared arrays that the caller keeps.

    Args:
        x: what the array that is sent is like; None if there is none.
        out: what the array that receives is like.
        rule: `ANY`, `APART` or a place in bytes.
        further: what else the kernel needs.
    """
    patterns = [*_pattern(x), *_pattern(out)]
    begin = _PATTERNS + len(patterns)
    return np.concatenate([[begin + len(further), begin, id(np.ndarray), rule, *patterns], further], dtype=np.int64)


def bound(kernel: Kernel, *tables: np.ndarray, dtype: np.dtype | None = None) -> Callable[..., int]:
    """Return the compiled function of a kernel with its tables; it takes the kernel's other arguments, integers.

    A call of the kernel itself would look the function up by the types of all arguments. A kernel of sums has one for
    each ``dtype``.
    """
    kinds = [types.int64] * kernel.py_func.__code__.co_argcount
    one = []
    if dtype is not None:
        kinds[1], one = from_dtype(dtype), [dtype.type(1).item()]
    run = partial(kernel.compile(tuple(kinds)), *(table.ctypes.data for table in tables), *one)
    run.tables = tables  # type: ignore[attr-defined]  # which live as long as the function
    return run


@njit(inline="always")
def table_at(address):  # type: ignore[no-untyped-def]
    """Return the table at an address."""
    length = carray(_pointer(address), (1,), np.int64)[_LENGTH]
    return carray(_pointer(address), (length,), np.int64)


@njit(inline="always")
def words_of(table):  # type: ignore[no-untyped-def]
    """Return the words of a table that are not about its arrays."""
    return table[table[_FURTHER] :]


@njit(inline="always")
def _array_at(address, table, at):  # type: ignore[no-untyped-def]
    """Return the address of an array's data, -1 if it is not as the table says, and where the next array is there."""
    if table[at] == 0:
        return np.int64(0), at + 1
    axes = max(table[at + 4], 0)
    end = at + 5 + axes
    fields = carray(_pointer(address), (_FIELDS,), np.int64)
    if fields[_TYPE] != table[_ARRAY_TYPE] or fields[_DTYPE] != table[at + 1]:
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
def arrays_at(table, x, out):  # type: ignore[no-untyped-def]
    """Return the addresses of both arrays' data and their numbers of elements and bytes; -1 if they are others."""
    x_at, after = _array_at(x, table, _PATTERNS)
    out_at, _ = _array_at(out, table, after)
    sizes = table[_PATTERNS + 2] * table[_PATTERNS], table[after + 2] * table[after]
    nbytes = table[_PATTERNS + 3] * table[_PATTERNS], table[after + 3] * table[after]
    is_apart = x_at + nbytes[0] <= out_at or out_at + nbytes[1] <= x_at
    rule = table[_RULE]
    if x_at >= 0 and out_at >= 0 and not is_apart and rule != ANY and (rule == APART or x_at - out_at != rule):
        return np.int64(-1), out_at, sizes, nbytes
    return x_at, out_at, sizes, nbytes


def words_of_sum(
    staging: np.ndarray,
    counters: np.ndarray,
    state: np.ndarray,
    kind: int,
    root: int,
    factors: Sequence[float],
) -> np.ndarray:
    """Return the further words of a repeated sum, from the arguments of the kernels in `shm_exchange`."""
    n, chunk = staging.shape[1:]
    numbers = np.array(factors, np.float64).view(np.int64)
    return np.array([n, chunk, kind, root, *(x.ctypes.data for x in (staging, counters, state)), *numbers], np.int64)


@njit(inline="always")
def _sum_at(words, one):  # type: ignore[no-untyped-def]
    # The first arguments of a sum, in the type of ``one``.
    n = words[0]
    staging = carray(_pointer(words[4]), (2, n, words[1]), type(one))
    counters = carray(_pointer(words[5]), (n * STRIDE,), np.int32)
    state = carray(_pointer(words[6]), (STATE_LENGTH,), np.int64)
    factors = words[7:10].view(np.float64)
    return staging, counters, state, words[2], factors[0], factors[1], factors[2]


@kernel()
def sum_by_all_at(table, one, x, out):  # type: ignore[no-untyped-def]
    """Run `sum_by_all` of the array at ``x``.

    Args:
        table: the address of a table with `words_of_sum`.
        one: 1 in the type of the arrays' elements.
        x: the address of an array's object.
        out: likewise; not used here.
    """
    known = table_at(table)
    x_at, _, sizes, _ = arrays_at(known, x, out)
    if x_at < 0:
        return OTHER
    return sum_by_all(*_sum_at(words_of(known), one), carray(_pointer(x_at), (sizes[0],), type(one)))


@kernel()
def sum_by_owners_at(table, one, x, out):  # type: ignore[no-untyped-def]
    """Run `sum_by_owners`; arguments as `sum_by_all_at`."""
    known = table_at(table)
    x_at, _, sizes, _ = arrays_at(known, x, out)
    if x_at < 0:
        return OTHER
    return sum_by_owners(*_sum_at(words_of(known), one), carray(_pointer(x_at), (sizes[0],), type(one)))


@kernel()
def sum_to_owners_at(table, one, x, out):  # type: ignore[no-untyped-def]
    """Run `sum_to_owners` of the array at ``x`` into that at ``out``; other arguments as `sum_by_all_at`."""
    known = table_at(table)
    x_at, out_at, sizes, _ = arrays_at(known, x, out)
    if x_at < 0 or out_at < 0:
        return OTHER
    values, shard = carray(_pointer(x_at), (sizes[0],), type(one)), carray(_pointer(out_at), (sizes[1],), type(one))
    return sum_to_owners(*_sum_at(words_of(known), one), values, shard)


@kernel()
def sum_to_root_at(table, one, x, out):  # type: ignore[no-untyped-def]
    """Run `sum_to_root` of the array at ``x`` into that at ``out``; other arguments as `sum_by_all_at`."""
    known = table_at(table)
    x_at, out_at, sizes, _ = arrays_at(known, x, out)
    if x_at < 0 or out_at < 0:
        return OTHER
    words = words_of(known)
    values, total = carray(_pointer(x_at), (sizes[0],), type(one)), carray(_pointer(out_at), (sizes[1],), type(one))
    return sum_to_root(*_sum_at(words, one), words[3], values, total)


@kernel()
def exchange_at(table, x, out):  # type: ignore[no-untyped-def]
    """Run `shm_blocks.exchange_again` from the array at ``x`` to that at ``out``.

    Args:
        table: the address of a table with a repetition.
        x: the address of an array's object.
        out: likewise.
    """
    known = table_at(table)
    x_at, out_at, _, nbytes = arrays_at(known, x, out)
    if x_at < 0 or out_at < 0:
        return OTHER
    sent, received = carray(_pointer(x_at), (nbytes[0],), np.uint8), carray(_pointer(out_at), (nbytes[1],), np.uint8)
    return exchange_again(words_of(known), sent, received)


@kernel()
def meet_at(table, x, out):  # type: ignore[no-untyped-def]
    """Run `shm_exchange.meet`; ``x`` and ``out`` are not used.

    Args:
        table: the address of a table with the number of ranks, the kind of call, and the addresses of counters and
            state.
        x: any number.
        out: any number.
    """
    words = words_of(table_at(table))
    n = words[0]
    counters = carray(_pointer(words[2]), (n * STRIDE,), np.int32)
    return meet(counters, n, carray(_pointer(words[3]), (STATE_LENGTH,), np.int64), words[1])
