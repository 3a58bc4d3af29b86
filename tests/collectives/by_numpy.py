"""Data that differ on every rank, what collectives must make of them by NumPy alone, and what ranks really send."""

import functools

import ml_dtypes
import numpy as np

from hpcdp.core.arrays import dtype_of, is_float, is_half

OPS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}
DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8", "uint32", "uint64"]
CASES = [(dtype, op) for dtype in DTYPES for op in OPS if op != "mean" or is_float(dtype_of(dtype))]

DEVIATION = 2.0
"""Of data of floating dtypes."""


@functools.cache
def _data(rank, count, dtype):
    rng = np.random.default_rng([rank, count])
    if is_float(dtype_of(dtype)):
        return (rng.standard_normal(count) * DEVIATION + 0.3).astype(dtype_of(dtype))
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, count, dtype, endpoint=True)  # sums wrap around


def data(rank, count, dtype="float32"):
    """An array of this rank's own, to be changed."""
    return _data(rank, count, dtype).copy()


@functools.cache
def reduced(n, count, dtype="float32", op="sum"):
    """The reduction over ``n`` ranks in their order; of 16 bits in single precision, rounded once."""
    wide = np.float32 if is_half(data(0, 0, dtype)) else np.dtype(dtype)
    total = data(0, count, dtype).astype(wide)
    for rank in range(1, n):
        total = OPS[op](total, data(rank, count, dtype).astype(wide))
    if op == "mean":
        total = total / total.dtype.type(n)
    return total.astype(dtype_of(dtype))


def counts(n):
    return sorted({0, 1, max(n - 1, 0), n, n + 1, 31, 1009})


def part(x, rank, n):
    """What of ``x`` is rank's."""
    return x[x.size * rank // n : x.size * (rank + 1) // n]


def tolerance(n, dtype, op):
    exact = op in ("min", "max") or not is_float(dtype_of(dtype))
    return 0 if exact else 4 * n * float(ml_dtypes.finfo(dtype_of(dtype)).eps)


def assert_close(result, wanted, n, op, message=""):
    """Within rounding; ``wanted`` is in the order of the ranks, algorithms have orders of their own."""
    assert result.dtype == wanted.dtype
    eps = tolerance(n, wanted.dtype, op)
    what = f"{op} {wanted.dtype} {message}"
    if is_half(wanted):
        result, wanted = result.astype("f4"), wanted.astype("f4")
    largest = np.abs(wanted).max(initial=DEVIATION if op in ("sum", "mean") else 0)  # what a small sum is a rest of
    np.testing.assert_allclose(result, wanted, rtol=eps, atol=eps * largest, err_msg=what)


def assert_same_bits(results, message=""):
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes(), message


class Recorded:
    """A communicator that remembers what was sent: ``(dest, tag, a copy of the array)``."""

    def __init__(self, comm):
        self._comm, self.sent = comm, []

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def isend(self, x, dest, tag=0):
        self.sent.append((dest, tag, x.copy()))
        return self._comm.isend(x, dest, tag)

    def nbytes(self, dest=None):
        return sum(x.nbytes for to, _, x in self.sent if dest in (None, to))
