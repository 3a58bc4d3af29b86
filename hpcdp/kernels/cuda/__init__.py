"""Compilation and launch of CUDA kernels for CuPy arrays.

`kernels` has the functions that launch kernels, named as those of `reference`. The kernels are in sources ``*.cu`` in
the folder ``kernels`` of `hpcdp.core.files`. Beside them are `capture`, for CUDA graphs and cuBLAS, and `cudnn_conv`.
CuPy is imported with its first array. It compiles a file for the present GPU (NVRTC) once per user, and caches it in
``~/.cupy/kernel_cache``.

A launch uses the current stream and does not wait.
"""

from __future__ import annotations

import math
import re
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ...core.arrays import Array, dtype_name
from ...core.checks import choices
from ...core.files import data_folder
from ...errors import UnsupportedError

OPTIONS = ("-std=c++17", "--fmad=false")
"""Options of NVRTC and nvcc; the specification rounds each product before adding, so no contraction."""

THREADS, WARP = 256, 32
"""Threads of a block, and of a warp; also defined in `common.cuh`."""

MAX_BLOCKS = 8448
"""Largest number of blocks of a launch; threads stride over the rest.

An H100 then has 64 blocks for each of its 132 multiprocessors, which run four to eight at once, depending on the
kernel's registers. With several waves a partial last wave costs little.
"""

MAX_PARTS = 1056
"""Largest number of partial sums or counts of blocks.

Few enough to combine quickly, and independent of the GPU, because the order of additions depends on it.
"""

NOWHERE = np.uintp(0)
"""Address passed to a kernel for a missing array."""

_CHANNEL_BLOCKS, _PER_BLOCK = 2112, 16 * THREADS
"""Approximate number of blocks that sum all channels, and least elements of each."""

_CHANNELS = np.dtype([("at", np.int64, 3)])

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Dtypes of the network kernels."""

_TYPES = {
    "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64", "uint16": "f16", "int16": "bf16",
    "int32": "i32", "int64": "i64",
}  # fmt: skip
"""Suffix of a kernel's name for each dtype, also those of `hpcdp.core.arrays.words`."""


def source(file: str) -> str:
    """Return ``kernels/<file>.cu`` with its headers included, because CuPy's cache is keyed by the text alone."""
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
    """Check that a kernel, which knows neither strides nor sizes, can be given ``arrays``.

    Raises:
        UnsupportedError: they are not contiguous or aligned, not all of one of ``dtypes``, or not all of ``count``
            elements.
    """
    dtype = arrays[0].dtype
    name = dtype_name(dtype)
    if name not in dtypes:
        raise UnsupportedError(operation, where="dtype", expected=choices(dtypes), got=name)
    for x in arrays:
        if x.dtype != dtype or x.size != count or not x.flags.c_contiguous:
            layout = "contiguous" if x.flags.c_contiguous else f"strides {x.strides}"
            expected = f"contiguous arrays of {count} {name}"
            raise UnsupportedError(operation, expected=expected, got=f"{x.size} {x.dtype}, {layout}")
        if x.data.ptr % x.itemsize:
            expected = f"an address divisible by {x.itemsize}"
            raise UnsupportedError(operation, where="alignment", expected=expected, got=hex(x.data.ptr))


def type_name(operation: str, dtypes: tuple[str, ...], count: int, *arrays: Array) -> str:
    """Return the suffix of the name of a kernel for ``arrays``, after `check`."""
    check(operation, dtypes, count, *arrays)
    return _TYPES[dtype_name(arrays[0].dtype)]


def wide_type(x: Array) -> str:
    """Return the dtype of computations with ``x``: float32 for 16 bits, else its own."""
    return "float32" if x.itemsize == 2 else dtype_name(x.dtype)


def blocks(threads: int) -> int:
    """Return the number of blocks to launch for ``threads`` threads."""
    return min(-(-threads // THREADS), MAX_BLOCKS)


@lru_cache(maxsize=2048)
def structure(dtype: np.dtype, *fields: Any) -> np.ndarray:
    """Return a structure for `launch`, of ``dtype``, with numbers or tuples of them as ``fields``.

    It is cached, because making it takes as long as the launch. It has no named fields, which CuPy would describe
    through NumPy for 6 us.
    """
    made = np.array([fields], dtype)
    made.flags.writeable = False
    return made.view(f"V{made.nbytes}")


def pieces_of(parts: int, size: int) -> int:
    """Return the number of blocks that sum each of ``parts`` of ``size`` elements; fixes the order of additions."""
    return max(1, min(-(-_CHANNEL_BLOCKS // max(parts, 1)), size // _PER_BLOCK))


def shape_of_channels(x: Array) -> np.ndarray:
    """Return the structure ``Shape`` of `channels.cuh`: batch, channels and positions."""
    return structure(_CHANNELS, (*x.shape[:2], math.prod(x.shape[2:])))


def launch(file: str, name: str, grid: int, *args: Array | np.generic | np.ndarray) -> None:
    """Launch a kernel of ``kernels/<file>.cu`` on the current stream, with ``grid`` blocks; with 0, none.

    Args:
        file: the source.
        name: the kernel.
        grid: number of blocks.
        *args: CuPy arrays or `NOWHERE`, NumPy scalars of the size that the kernel expects, and structures as arrays of
            one element.
    """
    if grid:
        _kernel(file, name)((grid,), (THREADS,), args)


def launch_elementwise(file: str, name: str, arrays: tuple[Array, ...], *others: np.generic | Array) -> None:
    """Launch a kernel of ``(*arrays, count, *others)`` with a thread for each 16 bytes of the largest array."""
    nbytes = max(x.nbytes for x in arrays)
    launch(file, name, blocks(-(-nbytes // 16)), *arrays, np.int64(arrays[0].size), *others)
