"""The public operations, and which algorithm runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import Array, from_host, to_host
from ..comm import World, init
from ..comm.communicator import check_op
from ..errors import UnsupportedError
from . import native, reference, shared

Algorithm = Callable[[np.ndarray, str, World], None]
"""Takes a contiguous host array, the name of a reduction and the world; works in place."""

ALGORITHMS: dict[str, Algorithm] = {
    "reference": reference.allreduce,
    "native": native.allreduce,
    "shared": shared.allreduce,
}


def allreduce(
    x: Array, op: str = "sum", world: World | None = None, algorithm: str = "auto", out: Array | None = None
) -> Array:
    """Reduce ``x`` element by element over all ranks; every rank gets the same bits.

    Every rank must call, with the same shape, dtype, op and algorithm and in the same order: from one thread at a time.

    Args:
        x: any shape, also zero length or not contiguous; a NumPy or CuPy array, or any that has a copy in host memory.
            dtype: float16 (accumulated in float32), float32, float64, or an integer (sums wrap around).
        op: ``"sum"``, ``"mean"`` (floats only), ``"min"``, ``"max"`` or ``"prod"``. A NaN wins min and max.
        world: the ranks; default `hpcdp.init()`.
        algorithm: ``"auto"``, or a name in `ALGORITHMS`.
        out: where the result goes, of x's shape and dtype; default ``x`` itself, in place.

    Returns:
        ``out``, or ``x`` where it is None.

    Raises:
        UnsupportedError: an unknown op or algorithm, or one that cannot do this dtype or world.
        MismatchError: the ranks called with different sizes, dtypes or ops; on every rank, by algorithm "shared" only.

    Source: Chan et al., "Collective communication: theory, practice, and experience", 2007, section 2.
    """
    world = init() if world is None else world
    try:
        key = ("allreduce", x.dtype, op, algorithm)
    except AttributeError:
        raise UnsupportedError("allreduce", where="x", expected="an array", got=type(x).__name__) from None
    reduce = world.kept.get(key) or world.keep(key, lambda: _validated(x.dtype, op, algorithm, world))
    target = x if out is None else _receiver(x, out)
    if type(target) is np.ndarray and (flags := target.flags).c_contiguous and flags.writeable:
        if world.size > 1:
            reduce(target, op, world)
        return target
    staged = np.ascontiguousarray(to_host(target))
    if staged is target or not getattr(getattr(target, "flags", None), "writeable", True):
        raise UnsupportedError("allreduce", where="x", expected="a writeable array", got="a read-only one")
    if world.size > 1:
        reduce(staged, op, world)
    target[...] = from_host(staged, target)
    return target


def _receiver(x: Array, out: Array) -> Array:
    if tuple(out.shape) != tuple(x.shape) or out.dtype != x.dtype:
        raise UnsupportedError(
            "allreduce", where="out", expected=f"{x.shape} {x.dtype} as x", got=f"{out.shape} {out.dtype}"
        )
    out[...] = x
    return out


def _validated(x_dtype: Any, op: str, algorithm: str, world: World) -> Algorithm:
    """What to call for such arrays, once checked: found in ``world.kept`` at every later call."""
    dtype = np.dtype(str(x_dtype))
    check_op("allreduce", op, dtype)
    if algorithm != "auto" and algorithm not in ALGORITHMS:
        valid = " or ".join(["auto", *ALGORITHMS])
        raise UnsupportedError("allreduce", where="algorithm", expected=valid, got=repr(algorithm))
    if dtype.kind not in "iuf" or not dtype.isnative:
        raise UnsupportedError("allreduce", where="dtype", expected="a native integer or float", got=dtype.str)
    return ALGORITHMS[choose(dtype, world) if algorithm == "auto" else algorithm]


def choose(dtype: np.dtype, world: World) -> str:
    """What ``algorithm="auto"`` runs: ``shared`` where all ranks share memory and it knows the dtype, or ``native``."""
    if world.node_memory.size == world.size and dtype.char in shared.DTYPE_CHARS:
        return "shared"
    return "native"
