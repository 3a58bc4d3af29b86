"""CUDA kernels for CuPy arrays: how they are compiled, and how one is launched.

`networks` and `gradients` have the functions that launch kernels, named as those of `reference`. The kernels are in
sources ``*.cu`` in the folder ``kernels`` of `hpcdp.core.files`. Beside them are `capture`, for CUDA graphs, `cublas`
and `cudnn_conv`. CuPy is imported when the first of its arrays arrives, and compiles a file for the
GPU that is there (NVRTC), once for each user: it keeps what it has compiled in ``~/.cupy/kernel_cache``.

A launch goes to the current stream and waits for nothing.
"""

from __future__ import annotations

import math
import re
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ...core.arrays import Array, dtype_name
from ...core.files import data_folder
from ...errors import UnsupportedError

OPTIONS = ("-std=c++17", "--fmad=false")
"""Of NVRTC and nvcc. The specification rounds each product before it is added, so they must not be contracted."""

THREADS, WARP = 256, 32
"""Of a block, and of those that vote together; `common.cuh` says so, too."""

MAX_BLOCKS = 8448
"""Of a launch; threads stride over what is more. So an H100 has 64 for each of its 132 multiprocessors, which run four
to eight at once, by the kernel's registers: with several turns it counts little that the last one does not fill all."""

MAX_PARTS = 1056
"""Of what blocks sum or count each for itself, to be put together: so few that this is soon done, and on any GPU alike,
since the order of additions must not depend on it."""

NOWHERE = np.uintp(0)
"""The address that a kernel is given for an array that there is not."""

_CHANNEL_BLOCKS, _PER_BLOCK = 2112, 16 * THREADS
"""About so many blocks sum all channels where there is enough to sum, each at least so many elements."""

_CHANNELS = np.dtype([("at", np.int64, 3)])

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""What kernels of networks take."""

_TYPES = {
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "uint16": "f16", "int16": "bf16",
    "int32": "i32", "int64": "i64",
}  # fmt: skip
"""The last part of a kernel's name by the dtype that it is for: of 16 bits itself, or what `hpcdp.core.arrays.words`
has."""


def source(file: str) -> str:
    """``kernels/<file>.cu`` with its headers in it: CuPy knows by the text alone whether it has compiled a source."""
    folder = data_folder("kernels")
    text = (folder / f"{file}.cu").read_text()
    return re.sub(r'#include "(\w+\.cuh)"', lambda header: (folder / header[1]).read_text(), text)


@cache
def _kernel(file: str, name: str) -> Any:
    return _module(file).get_function(name)


@cache
def _module(file: str) -> Any:
    import cupy

    return cupy.RawModule(code=source(file), options=OPTIONS)


def check(operation: str, dtypes: tuple[str, ...], count: int, *arrays: Array) -> None:
    """Whether a kernel may be given ``arrays``: it knows neither their strides nor their sizes.

    Raises:
        UnsupportedError: they are not contiguous, not all of one of ``dtypes``, or not all of ``count`` elements, or
            one begins where no element of its dtype may, as a view of bytes can.
    """
    dtype = arrays[0].dtype
    found = dtype_name(dtype)
    if found not in dtypes:
        raise UnsupportedError(operation, where="dtype", expected=" or ".join(dtypes), got=found)
    for x in arrays:
        if x.dtype != dtype or x.size != count or not x.flags.c_contiguous:
            layout = "contiguous" if x.flags.c_contiguous else f"strides {x.strides}"
            raise UnsupportedError(
                operation, expected=f"contiguous arrays of {count} {found}", got=f"{x.size} {x.dtype}, {layout}"
            )
        if x.data.ptr % x.itemsize:
            raise UnsupportedError(
                operation, where="alignment", expected=f"an address that {x.itemsize} divides", got=hex(x.data.ptr)
            )


def type_name(operation: str, dtypes: tuple[str, ...], count: int, *arrays: Array) -> str:
    """The last part of the name of a kernel for ``arrays``, which pass `check`."""
    check(operation, dtypes, count, *arrays)
    return _TYPES[dtype_name(arrays[0].dtype)]


def wide_type(x: Array) -> str:
    """The dtype in which ``x`` is computed with: float32 for 16 bits, else its own."""
    return "float32" if x.itemsize == 2 else dtype_name(x.dtype)


def blocks(threads: int) -> int:
    """How many blocks are launched where ``threads`` have something to do."""
    return min(-(-threads // THREADS), MAX_BLOCKS)


@lru_cache(maxsize=2048)
def structure(dtype: np.dtype, *fields: Any) -> np.ndarray:
    """A structure that `launch` takes, of ``dtype``, whose ``fields`` are numbers or tuples of them.

    Made once, since that takes as long as the launch; and without fields, which CuPy has NumPy describe, for 6 us.
    """
    made = np.array([fields], dtype)
    made.flags.writeable = False
    return made.view(f"V{made.nbytes}")


def pieces_of(parts: int, size: int) -> int:
    """How many blocks sum each of ``parts`` of ``size`` elements; the order of additions depends on it."""
    return max(1, min(-(-_CHANNEL_BLOCKS // max(parts, 1)), size // _PER_BLOCK))


def shape_of_channels(x: Array) -> np.ndarray:
    """The structure ``Shape`` of `channels.cuh`: batch, channels and positions."""
    return structure(_CHANNELS, (*x.shape[:2], math.prod(x.shape[2:])))


def launch(file: str, name: str, grid: int, *args: Array | np.generic | np.ndarray) -> None:
    """Launch a kernel of ``kernels/<file>.cu`` on the current stream, with ``grid`` blocks; with 0, none.

    Args:
        args: CuPy arrays or `NOWHERE`, NumPy scalars of the size that the kernel expects, and structures as arrays of
            one element.
    """
    if grid:
        _kernel(file, name)((grid,), (THREADS,), args)


def launch_elementwise(file: str, name: str, arrays: tuple[Array, ...], *others: np.generic | Array) -> None:
    """Launch a kernel of ``(*arrays, count, *others)`` whose threads have 16 bytes each of the largest elements."""
    nbytes = max(x.nbytes for x in arrays)
    launch(file, name, blocks(-(-nbytes // 16)), *arrays, np.int64(arrays[0].size), *others)
