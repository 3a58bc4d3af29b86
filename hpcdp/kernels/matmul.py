"""Matrix products: of NumPy arrays by BLAS, in the tiles in which it is fastest; of others by their namespace.

OpenBLAS copies ("packs") both matrices of a product before it multiplies, which is slow if one of them has few rows.
For processors with AVX-512 it also has kernels without packing, but only for products of up to a million
multiplications (``sgemm_small_kernel_permit_skylakex.c``). Larger products are therefore split into tiles of that size
on one thread; with several threads OpenBLAS distributes the whole product.

Measured on one core of an AMD EPYC, whole and in tiles, in us: 32 x 320 by 320 x 1024, 261 and 206; 128 x 256 by the
transpose of 576 x 256, 441 and 407; and with matrices that come from memory, 16 x 2048 by 2048 x 2048, 3760 and 3220;
by its transpose, 4130 and 2100 (turned round, 3050); the transpose of 16 x 2048 by 16 x 2048, 3830 and 2740. A core
that multiplies whole vectors of AVX-512 twice a cycle, as Intel's do, benefits more from packing: there only products
of few rows gain (`_gains_on_fast_cores`). More is in benchmarks/notes/targets.md.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, array_namespace, is_half, is_host
from . import empty
from .cuda import matmul_of

MOST = 1_000_000
"""Multiplications up to which OpenBLAS takes float32 matrices without packing."""
_CORES = frozenset({"SkylakeX", "Cooperlake", "SapphireRapids"})
"""OpenBLAS's names of the processors with these kernels."""
_MOST_RESULTS = 1200
"""Results of a tile with a transposed right matrix, above which OpenBLAS packs it."""
_FEWEST, _FEW_ROWS = 8, 64
_COLUMNS = 64
"""Columns of a tile: four vectors."""
_USUAL = 1 << 19
"""Multiplications of a tile without a size limit."""
_WORTH = 4_000_000
"""Multiplications from which tiles save more than their views cost."""
_IN_CACHE_NBYTES = 5 << 18
"""Bytes of a right matrix that all rows of tiles read one after another."""
_DEEPEST_TURNED = 128
"""Greatest depth of tiles with a transposed left matrix: beyond it the whole product is as fast."""


_SHALLOW, _THIN, _DEEP, _MANY_ROWS = 32, 16, 768, 128
"""Bounds on fast cores; see `_gains_on_fast_cores`."""


class _Tile(NamedTuple):
    """``rows`` and ``columns`` of the result, each the sum of ``parts`` products of depth ``depth / parts``."""

    rows: int
    columns: int
    parts: int


@functools.cache
def _openblas() -> list[Any]:
    """Return NumPy's OpenBLAS libraries if they have kernels for small products, else none."""
    from threadpoolctl import ThreadpoolController

    name = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {}).get("name", "")
    libraries = [library for library in ThreadpoolController().lib_controllers if library.internal_api == "openblas"]
    return libraries if "openblas" in name and all(library.architecture in _CORES for library in libraries) else []


@functools.cache
def _cores_are_fast() -> bool:
    """Return False for AMD's Zen 4, on which all bounds but those of `_gains_on_fast_cores` were measured."""
    from llvmlite import binding

    return str(binding.get_host_cpu_name()) != "znver4"


def _gains_on_fast_cores(m: int, k: int, right_turned: bool) -> bool:
    """Return whether tiles of an untransposed ``(m, k)`` matrix beat the whole product on an Intel core.

    This holds within training steps, where packing also evicts other data from the cache, unlike in repeated products.
    Many rows are faster as a whole, and so are few rows with a deep matrix from memory.
    """
    if right_turned:
        return m <= _FEW_ROWS
    return k <= _SHALLOW or (m < _MANY_ROWS and not (m <= _THIN and k > _DEEP))


def _has_small_kernels() -> bool:
    libraries = _openblas()
    return [library.get_num_threads() for library in libraries] == [1] * len(libraries) != []


def _is_turned(x: np.ndarray) -> bool:
    """Return whether the transpose of ``x`` has its rows contiguous in memory."""
    return x.strides[-1] != x.itemsize and x.strides[-2] == x.itemsize


def _rows_of(count: int, most: int) -> int:
    """Return a multiple of 8 up to ``most`` that divides ``count`` rows evenly; 0 if there is none."""
    if count <= most or most < 8:
        return count if count <= most else 0
    parts = -(-count // most)
    while (rows := -(-count // (8 * parts)) * 8) > most:
        parts += 1
    return rows


@functools.lru_cache
def _tile_of(m: int, k: int, n: int, left_turned: bool, right_turned: bool) -> _Tile | None:
    """Return the tile for an ``(m, k)`` times a ``(k, n)`` matrix, or None if the whole product is as fast."""
    if left_turned:
        rows = min(m, max(k, 16), _COLUMNS)
        return None if right_turned or k > _DEEPEST_TURNED else _Tile(rows, min(n, _columns_of(rows, k)), 1)
    if _cores_are_fast() and not _gains_on_fast_cores(m, k, right_turned):
        return None
    if right_turned:
        rows = m if m <= _FEW_ROWS else 16
        columns = min(n, _COLUMNS, min(_MOST_RESULTS, MOST // k) // rows // 8 * 8)
        if columns >= 16:
            return _Tile(rows, columns, 1)
        columns = min(n, _MOST_RESULTS // rows // 8 * 8)
        return _in_parts(rows, columns, k) if m <= _FEW_ROWS and columns else None
    rows = _rows_of(m, MOST // (min(n, _COLUMNS) * k))
    if rows == m or (rows >= 16 and 4 * k * n <= _IN_CACHE_NBYTES):
        return _Tile(rows, min(n, _columns_of(rows, k)), 1)
    return _in_parts(m, min(n, _COLUMNS), k) if m <= _FEW_ROWS // 2 else None


def _columns_of(rows: int, depth: int) -> int:
    """Return a multiple of the vector length that gives a tile of the usual size, or slightly more for deep tiles."""
    return max(_COLUMNS, _USUAL // (rows * depth) // 16 * 16)


def _in_parts(rows: int, columns: int, depth: int) -> _Tile | None:
    least = -(-rows * columns * depth // _USUAL)
    parts = next((parts for parts in range(least, 2 * least + 1) if depth % parts == 0), None)
    return None if parts is None else _Tile(rows, columns, parts)


def _by_tiles(a: np.ndarray, b: np.ndarray, out: np.ndarray, rows: int, columns: int) -> None:
    """Compute ``out = a @ b`` in tiles of ``rows`` and ``columns``, and the remainder at its edges."""
    high, wide = out.shape[-2:]
    down, across = high - high % rows, wide - wide % columns
    if down < high:
        if down:
            _by_tiles(a[..., :down, :], b, out[..., :down, :], rows, columns)
        _by_tiles(a[..., down:, :], b, out[..., down:, :], high - down, columns)
    elif across < wide:
        if across:
            _by_tiles(a, b[..., :across], out[..., :across], rows, columns)
        _by_tiles(a, b[..., across:], out[..., across:], rows, wide - across)
    else:
        depth, stack = a.shape[-1], out.shape[:-2]
        left = a.reshape(*a.shape[:-2], high // rows, 1, rows, depth)
        right = b.reshape(*b.shape[:-2], 1, depth, wide // columns, columns).swapaxes(-3, -2)
        np.matmul(left, right, out=out.reshape(*stack, high // rows, rows, wide // columns, columns).swapaxes(-3, -2))


@np.errstate(over="ignore", invalid="ignore")  # as in numpy.dot; callers check for overflows
def multiply(a: Array, b: Array, out: Array) -> None:
    """Compute ``out = a @ b``, where ``out`` shares no memory with the operands.

    Args:
        a: shape ``(..., m, k)``; leading axes broadcast against those of ``b``.
        b: shape ``(..., k, n)``.
        out: shape ``(..., m, n)``; all of one floating dtype, in any memory order.
    """
    if not is_host(out) or is_half(out):
        matmul_of(array_namespace(a, b))(a, b, out=out)
        return
    m, k = a.shape[-2:]
    n = b.shape[-1]
    is_large = m * k * n > MOST and out.size * k >= _WORTH and min(m, n) >= _FEWEST
    if not is_large or out.dtype != np.float32 or not _has_small_kernels():
        _one_product(a, b, out)
        return
    if _is_turned(out):
        a, b, out, m, n = b.swapaxes(-1, -2), a.swapaxes(-1, -2), out.swapaxes(-1, -2), n, m
    tile = _tile_of(m, k, n, _is_turned(a), _is_turned(b))
    if tile is None or (tile.parts > 1 and out.ndim > 2):
        _one_product(a, b, out)
    elif tile.parts == 1:
        _by_tiles(a, b, out, tile.rows, tile.columns)
    else:
        sums = empty((tile.parts, m, n), out.dtype)
        left = a.reshape(m, tile.parts, -1).swapaxes(0, 1)
        _by_tiles(left, b.reshape(tile.parts, -1, n), sums, tile.rows, tile.columns)
        np.add.reduce(sums, axis=0, out=out)


def _one_product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Compute one product.

    With few rows most of the time is spent packing ``b``, which BLAS does faster for an untransposed left operand. In
    this form the product of 16 x 2048 and 2048 x 2048 takes 0.6 of the time, with 64 rows 0.85, including the copy of
    the transposed result. For a single row BLAS only reads ``b`` once.
    """
    if out.ndim == 2 and 1 < a.shape[0] <= _FEW_ROWS and b.shape[0] >= 128 and b.shape[1] > 1 and _is_turned(b):
        out[...] = np.matmul(b.T, a.T, out=empty(out.shape[::-1], out.dtype)).T
    else:
        np.matmul(a, b, out=out)
