"""Kernels of CuPy arrays: of networks, reductions, optimizer updates and gradient encodings.

Functions have the names and arguments of `reference`. Computations of 16-bit floats are in float32, rounded
once. GELU, layer normalization, attention and LSTM are the reference's.

- Elementwise (`elementwise.cu`, `epilogue.cu`, `cast.cu`): the reference's bits where gradients are finite, except for
  a NaN in float16. Sums of gradients of a bias are in float64, equal up to rounding.
- Batch normalization and channel sums (`batch_norm.cu`, `channels.cuh`): sums are equal up to rounding in float64, and
  bits for the same sums. Values per channel are float32 if ``x`` has 16 bits. Forward and backward are three launches
  each; for a batch split over ranks (`nn.functional`) CuPy computes the values per channel.
- Cross-entropy and rows (`cross_entropy.cu`, `rows.cu`): cross-entropy is equal up to the rounding of ``exp`` and
  ``log``. Probabilities, losses and their gradients for logits of 16 bits are float32. A label out of range makes the
  loss and the probabilities of its row NaN. Additions to rows have the same bits, without atomic additions, whose order
  varies; rows outside the table are ignored. Nothing waits, except for an index with a mask, for which CuPy waits.
- Convolution by im2col and one product over all images, and pooling (`conv.cu`, `pool.cu`): the same product; all else
  has the same bits where gradients are finite, except the gradient of the bias, which is summed in float64.
- Reductions and norms (`reduce.cu`, `norms.cu`): rows are combined in one pass over memory, to the same bits; norms are
  equal up to rounding in float64. Functions that return numbers wait for the current stream.
- Updates (`update.cu`, `lars.cu`): one pass over memory, the same bits. For CUDA graphs, which freeze numbers,
  coefficients may be a float64 array on the GPU. So may ``scale``, shape ``(1,)``, which replaces the scale in the
  coefficients. LARS reads the norms on the GPU without a wait of the host.
- Encodings (`quantize.cu`, `compress.cu`, `top_k.cuh`): scales of blocks are equal up to rounding; all else has the
  same bits for the same scales. Nothing is copied to the host, and nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace, dtype_name, to_host
from ...core.arrays import words as bits_of
from ...errors import UnsupportedError
from .. import cuda, reference
from ..reference import (
    EVERY_ROW,
    Pair,
    Rows,
    num_blocks,
)
from ..reference import causal_shift as causal_shift
from ..reference import gelu as gelu
from ..reference import gelu_gradient as gelu_gradient
from ..reference import layer_norm as layer_norm
from ..reference import layer_norm_gradients as layer_norm_gradients
from ..reference import lstm_step as lstm_step
from ..reference import lstm_step_gradients as lstm_step_gradients
from ..reference import normalize_rows as normalize_rows
from ..reference import softmax_gradient as softmax_gradient
from . import matmul


def add(a: Array, b: Array, out: Array) -> None:
    """See `reference.add`."""
    if not _launched("add", a, b, out):
        reference.add(a, b, out)


def relu(x: Array, out: Array) -> None:
    """See `reference.relu`."""
    if not _launched("relu", x, out):
        reference.relu(x, out)


def _launched(name: str, *arrays: Array) -> bool:
    dtype, size = arrays[-1].dtype, arrays[-1].size
    if dtype_name(dtype) not in cuda.FLOATS:
        return False
    if any(x.dtype != dtype or x.size != size or not x.flags.c_contiguous for x in arrays):
        return False
    if any(x.device.id != arrays[-1].device.id for x in arrays):  # CuPy enables peer access between GPUs
        return False
    cuda.launch_elementwise("elementwise", f"{name}_{cuda.type_name(name, cuda.FLOATS, size, *arrays)}", arrays)
    return True


_COLUMNS = 16
"""Columns that a block sums; also defined in `epilogue.cu`."""


def add_bias(y: Array, bias: Array, relu: bool) -> None:
    """See `reference.add_bias`."""
    of_type = cuda.type_name("add_bias", cuda.FLOATS, y.size, y)
    cuda.check("add_bias", (dtype_name(y.dtype),), y.shape[1], bias)
    blocks = cuda.blocks(-(-y.nbytes // 16))
    scalars = (np.int64(y.size), np.int64(y.shape[1]), np.int64(math.prod(y.shape[2:])), np.bool_(relu))
    cuda.launch("epilogue", f"add_bias_{of_type}", blocks, y, bias, *scalars)


def relu_gradient(gy: Array, y: Array, dx: Array) -> None:
    """See `reference.relu_gradient`; the arrays must be C-contiguous."""
    of_type = cuda.type_name("relu_gradient", cuda.FLOATS, gy.size, gy, y, dx)
    cuda.launch_elementwise("epilogue", f"relu_gradient_{of_type}", (gy, y, dx))


def bias_gradient(gy: Array, y: Array | None, dx: Array | None, dbias: Array) -> None:
    """See `reference.bias_gradient`."""
    result, masked = (gy, gy) if y is None else (y, dx)
    of_type = cuda.type_name("bias_gradient", cuda.FLOATS, gy.size, gy, result, masked)
    channels = gy.shape[1]
    cuda.check("bias_gradient", (dtype_name(gy.dtype),), channels, dbias)
    of_channel = gy.size // max(channels, 1)
    kind, parts, size = "images", channels, of_channel
    if of_channel == gy.shape[0]:
        kind, parts, size = "rows", -(-channels // _COLUMNS), of_channel * _COLUMNS
    pieces = cuda.pieces_of(parts, size)
    partial = dbias if pieces == 1 else array_namespace(gy).empty((channels, pieces), dtype=np.float64)
    args = (gy, result, masked, cuda.shape_of_channels(gy), np.bool_(y is not None), partial, dbias)
    cuda.launch("epilogue", f"bias_gradient_of_{kind}_{of_type}", parts * pieces, *args)
    if pieces > 1:
        cuda.launch("norms", f"add_partials_{of_type}", channels, partial, np.int64(pieces), dbias)


def to_float16(x: Array, out: Array) -> None:
    """See `reference.to_float16`."""
    of_type = cuda.type_name("to_float16", ("float32", "float64"), x.size, x)
    _cast(f"to_float16_{of_type}", x, out, str(x.dtype), "uint16")


def from_float16(x: Array, out: Array) -> None:
    """See `reference.from_float16`."""
    _cast("from_float16", x, out, "uint16", "float32")


def to_bfloat16(x: Array, out: Array) -> None:
    """See `reference.to_bfloat16`."""
    _cast("to_bfloat16", x, out, "float32", "uint16")


def from_bfloat16(x: Array, out: Array) -> None:
    """See `reference.from_bfloat16`."""
    _cast("from_bfloat16", x, out, "uint16", "float32")


def _cast(name: str, x: Array, out: Array, from_dtype: str, to_dtype: str) -> None:
    cuda.check(name, (from_dtype,), x.size, x)
    cuda.check(name, (to_dtype,), x.size, out)
    cuda.launch_elementwise("cast", name, (x, out))


def follow(wide: Array, x: Array) -> None:
    """See `reference.follow`."""
    of_type = cuda.type_name("follow", ("uint16", "int16"), x.size, x)
    cuda.check("follow", ("float32",), x.size, wide)
    cuda.launch_elementwise("cast", f"follow_{of_type}", (wide, x))


def scale(x: Array, factor: float) -> None:
    """See `reference.scale`."""
    scale_into(x, factor, x)


def scale_into(x: Array, factor: float, out: Array) -> None:
    """See `reference.scale_into`."""
    of_type = cuda.type_name("scale", ("uint16", "int16", "float32", "float64"), x.size, x, out)
    by = np.float32(factor) if x.itemsize == 2 else x.dtype.type(factor)
    cuda.launch_elementwise("cast", f"scale_{of_type}", (x, out), by)


_FILE = "batch_norm"


def batch_norm(x: Array, scale: Array, shift: Array, out: Array, saved: tuple[Array, Array], eps: float) -> None:
    """See `reference.batch_norm`."""
    mean, variance = saved
    of_type = _checked("batch_norm", (x, out), (scale, shift, *saved))
    partial, factor = _partial_sums(f"channel_sums_{of_type}", x, np.bool_(True)), array_namespace(x).empty_like(mean)
    of_channels = (partial, scale, mean.dtype.type(eps), mean, variance, factor)
    sizes = cuda.shape_of_channels(x), np.int64(partial.shape[2])
    cuda.launch(_FILE, f"statistics_{of_type}", x.shape[1], x, *of_channels, *sizes)
    cuda.launch(_FILE, f"normalize_{of_type}", _blocks(x), x, mean, factor, shift, out, cuda.shape_of_channels(x))


def batch_norm_gradients(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], into: tuple[Array, Array, Array], eps: float
) -> None:
    """See `reference.batch_norm_gradients`."""
    (mean, variance), (dx, dscale, dshift) = saved, into
    of_type = _checked("batch_norm_gradients", (gy, x, dx), (scale, *saved, dscale, dshift))
    partial = _partial_sums(f"gradient_sums_{of_type}", gy, x, mean)
    of_channels = array_namespace(x).empty((4, x.shape[1]), dtype=mean.dtype)
    counts = np.int64(x.shape[0] * x.shape[2]), np.int64(partial.shape[2])
    arrays = (partial, scale, variance, mean.dtype.type(eps), dscale, dshift, of_channels)
    cuda.launch(_FILE, f"channel_gradients_{of_type}", x.shape[1], *arrays, *counts)
    cuda.launch(
        _FILE, f"gradient_of_input_{of_type}", _blocks(x), gy, x, mean, of_channels, dx, cuda.shape_of_channels(x)
    )


def channel_sums(x: Array, sums: Array) -> None:
    """See `reference.channel_sums`."""
    of_type = _checked("channel_sums", (x,))
    _add_partials(_partial_sums(f"channel_sums_{of_type}", x, np.bool_(False)), sums)


def normalize(x: Array, scale: Array, shift: Array, saved: tuple[Array, Array], out: Array, eps: float) -> None:
    """See `reference.normalize`."""
    mean, variance = saved
    of_type = _checked("normalize", (x, out), (scale, shift, *saved))
    factor = scale / array_namespace(x).sqrt(variance + eps)
    cuda.launch(_FILE, f"normalize_{of_type}", _blocks(x), x, mean, factor, shift, out, cuda.shape_of_channels(x))


def gradient_sums(gy: Array, x: Array, saved: tuple[Array, Array], sums: Array, eps: float) -> None:
    """See `reference.gradient_sums`."""
    mean, variance = saved
    of_type = _checked("gradient_sums", (gy, x), saved)
    _add_partials(_partial_sums(f"gradient_sums_{of_type}", gy, x, mean), sums)
    sums[1] = sums[1] / array_namespace(x).sqrt(variance + eps)


def gradient_of_input(
    gy: Array, x: Array, scale: Array, saved: tuple[Array, Array], means: Array, dx: Array, eps: float
) -> None:
    """See `reference.gradient_of_input`."""
    mean, variance = saved
    of_type = _checked("gradient_of_input", (gy, x, dx), (scale, *saved))
    xp = array_namespace(x)
    inverse = 1.0 / xp.sqrt(variance + eps)
    of_channels = xp.stack([inverse, *means.astype(mean.dtype), scale * inverse])
    cuda.launch(
        _FILE, f"gradient_of_input_{of_type}", _blocks(x), gy, x, mean, of_channels, dx, cuda.shape_of_channels(x)
    )


def _partial_sums(name: str, x: Array, *more: Array | np.generic) -> Array:
    """Return the kernel's sums over pieces of each channel, shape ``(2, channels, pieces)``, float64."""
    channels, pieces = x.shape[1], cuda.pieces_of(x.shape[1], x.shape[0] * x.shape[2])
    partial = array_namespace(x).empty((2, channels, pieces), dtype=np.float64)
    cuda.launch(_FILE, name, channels * pieces, x, *more, cuda.shape_of_channels(x), partial)
    return partial


def _add_partials(partial: Array, sums: Array) -> None:
    cuda.check("add_partials", ("float64",), 2 * partial.shape[1], sums)
    cuda.launch("norms", "add_partials_f64", sums.size, partial, np.int64(partial.shape[2]), sums)


def _checked(operation: str, like_x: tuple[Array, ...], of_channels: tuple[Array, ...] = ()) -> str:
    """Return the suffix of the kernels' names."""
    x = like_x[0]
    of_type = cuda.type_name(operation, cuda.FLOATS, x.size, *like_x)
    if of_channels:
        cuda.check(operation, (cuda.wide_type(x),), x.shape[1], *of_channels)
    return of_type


def _blocks(x: Array) -> int:
    return cuda.blocks(-(-x.nbytes // 16))


_KEPT = 8
"""Packs of 16 bytes of a row that a thread keeps; also defined in `cross_entropy.cu`."""


def softmax_cross_entropy(logits: Array, labels: Array, chances: Array, losses: Array) -> None:
    """See `reference.softmax_cross_entropy`."""
    of_type, (rows, classes) = _check_logits("softmax_cross_entropy", logits, labels, chances, losses), logits.shape
    packs = -(-classes * chances.itemsize // 16)
    lanes = min(cuda.THREADS, _power_of_two(max(min(packs, 8), -(-packs // _KEPT))))
    blocks = cuda.blocks(rows * lanes)
    scalars = (np.int64(rows), np.int64(classes), np.int32(lanes))
    cuda.launch("cross_entropy", f"softmax_cross_entropy_{of_type}", blocks, logits, labels, chances, losses, *scalars)


def softmax_cross_entropy_gradient(gy: Array, labels: Array, chances: Array, dx: Array) -> None:
    """See `reference.softmax_cross_entropy_gradient`."""
    of_type = _check_logits("softmax_cross_entropy_gradient", dx, labels, chances, gy)
    blocks, scalars = cuda.blocks(-(-dx.nbytes // 16)), (np.int64(dx.size), np.int64(dx.shape[1]))
    cuda.launch("cross_entropy", f"softmax_cross_entropy_gradient_{of_type}", blocks, gy, labels, chances, dx, *scalars)


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def _check_logits(operation: str, x: Array, labels: Array, chances: Array, of_rows: Array) -> str:
    """Return the suffix of a kernel's name for logits ``x``, or their gradient; ``of_rows`` has one number a row."""
    of_type = cuda.type_name(operation, cuda.FLOATS, x.size, x)
    cuda.check(operation, (cuda.wide_type(x),), x.size, chances)
    cuda.check(operation, (cuda.wide_type(x),), x.shape[0], of_rows)
    cuda.check(operation, ("int64",), x.shape[0], labels)
    return of_type


_DTYPES = ("uint16", "int16", "float32", "float64")
_NUMBER_BITS = 8
_CHUNK = 1024
"""Places that a block sorts, unless that needs too many blocks."""


def add_rows(table: Array, rows: Array, values: Array) -> None:
    """See `reference.add_rows`."""
    table, values = bits_of(table), bits_of(values)
    (number, features), count = table.shape, rows.size
    of_type = cuda.type_name("add_rows", _DTYPES, count * features, values)
    cuda.check("add_rows", (str(values.dtype),), number * features, table)
    cuda.check("add_rows", ("int64",), count, rows)
    if number == 0:  # there would be no digit to sort by, and `order` would stay uninitialized
        return
    xp, chunk = array_namespace(table), max(_CHUNK, -(-count // cuda.MAX_BLOCKS))
    blocks = -(-count // chunk)
    counts, starts = xp.empty((blocks, cuda.THREADS), dtype=np.uint32), xp.empty((blocks, cuda.THREADS), dtype=np.int64)
    order, other = xp.empty(count, dtype=np.int64), xp.empty(count, dtype=np.int64)
    for shift in range(0, int(number).bit_length(), _NUMBER_BITS):
        args = rows, np.int64(count), np.int64(number), order, np.int64(chunk), np.int32(shift), np.bool_(shift == 0)
        cuda.launch("rows", "count_digits", blocks, *args, counts)
        cuda.launch("rows", "find_starts", min(blocks, 1), counts, np.int64(blocks), starts)
        cuda.launch("rows", "sort_by_digit", blocks, *args, starts, other)
        order, other = other, order
    sizes = np.int64(count), np.int64(number)
    threads = cuda.blocks(count * features)
    cuda.launch("rows", f"add_sorted_{of_type}", threads, rows, *sizes, order, values, np.int64(features), table)


def add_at(table: Array, key: Any, values: Array) -> None:
    """See `reference.add_at`; ``table`` is contiguous."""
    xp, axes = array_namespace(table, values), _axes(key, table.ndim)
    number, features = math.prod(table.shape[:axes]), math.prod(table.shape[axes:])
    rows = xp.arange(number).reshape(table.shape[:axes])[key]
    flat = xp.ascontiguousarray(values).reshape(rows.size, features)
    add_rows(table.reshape(number, features), xp.ascontiguousarray(rows).reshape(-1), flat)


def _axes(key: Any, ndim: int) -> int:
    """Return how many leading axes ``key`` indexes; the axes after them are copied as a whole."""
    parts, axes = key if isinstance(key, tuple) else (key,), 0
    for part in parts:
        if part is Ellipsis or isinstance(part, (bool, list)):
            return ndim
        if part is not None:
            axes += part.ndim if str(getattr(part, "dtype", "")) == "bool" else 1
    return axes


_WINDOWS = np.dtype([("planes", np.int64), ("at", np.int32, 10)])


def _windows(x: Array, size: Pair, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    """Return the structure ``Windows`` of `windows.cuh`: planes like those of ``x``, and ``size`` window positions."""
    return cuda.structure(_WINDOWS, x.shape[0] * x.shape[1], (*x.shape[2:], *size, *kernel, *stride, *padding))


def conv2d(x: Array, weight: Array, bias: Array | None, out: Array, stride: Pair, padding: Pair, relu: bool) -> None:
    """See `reference.conv2d`."""
    channels = out.shape[1]
    product = _product(weight.reshape(channels, -1), _unfolded(x, weight, out, stride, padding))
    of_type = cuda.type_name("conv2d", cuda.FLOATS, out.size, product, out)
    if bias is not None:
        cuda.check("conv2d", (dtype_name(out.dtype),), channels, bias)
    scalars = (*_sizes(out), np.bool_(bias is not None), np.bool_(relu))
    arrays = (product, product if bias is None else bias, out)
    cuda.launch("conv", f"to_images_{of_type}", cuda.blocks(-(-out.nbytes // 16)), *arrays, *scalars)


def conv2d_gradients(
    x: Array,
    weight: Array,
    gy: Array,
    out: Array | None,
    into: tuple[Array | None, Array | None, Array | None],
    stride: Pair,
    padding: Pair,
) -> None:
    """See `reference.conv2d_gradients`."""
    xp, channels = array_namespace(x, weight), gy.shape[1]
    dx, dweight, dbias = into
    flat = xp.empty((channels, gy.size // channels), dtype=gy.dtype)
    through = gy if out is None else out
    of_type = cuda.type_name("conv2d_gradients", cuda.FLOATS, gy.size, gy, through, flat)
    scalars = (*_sizes(gy), np.bool_(out is not None))
    cuda.launch("conv", f"from_images_{of_type}", cuda.blocks(-(-gy.nbytes // 16)), gy, through, flat, *scalars)
    if dbias is not None:
        bias_gradient(flat[None], None, None, dbias)
    if dweight is not None:
        columns = _unfolded(x, weight, gy, stride, padding)
        dweight[...] = matmul(flat, columns.T).reshape(weight.shape)
    if dx is not None:
        columns = _product(weight.reshape(channels, -1).T, flat)
        cuda.check("conv2d_gradients", (dtype_name(columns.dtype),), columns.size, columns)
        cuda.check("conv2d_gradients", (dtype_name(columns.dtype),), x.size, dx)
        of_windows = _windows(dx, gy.shape[2:], weight.shape[2:], stride, padding)
        cuda.launch("conv", f"fold_{of_type}", cuda.blocks(dx.size), columns, dx, of_windows, np.int64(x.shape[1]))


def _product(a: Array, b: Array) -> Array:
    """Return ``a @ b`` in their dtype, even if the namespace would return a wider one."""
    return matmul(a, b, array_namespace(a, b).empty((a.shape[0], b.shape[1]), dtype=a.dtype))


def _unfolded(x: Array, weight: Array, out: Array, stride: Pair, padding: Pair) -> Array:
    """Return the patches: shape ``(in channels * kernel positions, batch * output positions)``."""
    of_type = cuda.type_name("conv2d", cuda.FLOATS, x.size, x)
    rows, width = math.prod(weight.shape[1:]), out.shape[0] * math.prod(out.shape[2:])
    columns = array_namespace(x).empty((rows, width), dtype=x.dtype)
    of_windows = _windows(x, out.shape[2:], weight.shape[2:], stride, padding)
    positions = width * x.shape[1]
    cuda.launch("conv", f"unfold_{of_type}", cuda.blocks(positions), x, columns, of_windows, np.int64(x.shape[1]))
    return columns


def _sizes(images: Array) -> tuple[np.int64, np.int64, np.int64]:
    """Return the numbers of elements, channels and positions."""
    return np.int64(images.size), np.int64(images.shape[1]), np.int64(math.prod(images.shape[2:]))


def average_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.average_pool`."""
    windows = _windows_of_pool(x, out, kernel, stride, padding)
    _launch_pool("average_pool", (x, out), out.size, windows, _share(kernel, x))


def average_pool_gradient(gy: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.average_pool_gradient`."""
    windows = _windows_of_pool(dx, gy, kernel, stride, padding)
    _launch_pool("average_pool_gradient", (gy, dx), dx.size, windows, _share(kernel, dx))


def max_pool(x: Array, out: Array, chosen: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.max_pool`."""
    cuda.check("max_pool", ("int32",), out.size, chosen)
    _launch_pool("max_pool", (x, out, chosen), out.size, _windows_of_pool(x, out, kernel, stride, padding))


def max_pool_gradient(gy: Array, chosen: Array, dx: Array, kernel: Pair, stride: Pair, padding: Pair) -> None:
    """See `reference.max_pool_gradient`."""
    cuda.check("max_pool_gradient", ("int32",), gy.size, chosen)
    _launch_pool("max_pool_gradient", (gy, chosen, dx), dx.size, _windows_of_pool(dx, gy, kernel, stride, padding))


def _windows_of_pool(x: Array, out: Array, kernel: Pair, stride: Pair, padding: Pair) -> np.ndarray:
    cuda.check("pool", cuda.FLOATS, x.size, x)
    cuda.check("pool", (dtype_name(x.dtype),), out.size, out)
    return _windows(x, out.shape[2:], kernel, stride, padding)


def _share(kernel: Pair, x: Array) -> np.generic:
    """Return the weight of an element in a mean, in the type of the computation."""
    return (np.float64 if x.itemsize == 8 else np.float32)(1.0 / (kernel[0] * kernel[1]))


def _launch_pool(name: str, arrays: tuple[Array, ...], threads: int, *args: np.generic | np.ndarray) -> None:
    of_type = cuda.type_name(name, cuda.FLOATS, arrays[0].size, arrays[0])
    cuda.launch("pool", f"{name}_{of_type}", cuda.blocks(threads), *arrays, *args)


_ROW_DTYPES = ("uint16", "int16", "float32", "float64", "int32", "int64")
MAX_ROWS = 32
"""Most rows that `combine` takes; also defined in `reduce.cu`."""

_POINTERS = np.dtype([("at", np.uint64, MAX_ROWS)])


def combine(rows: Rows, lo: int, hi: int, out: Array, op: int) -> None:
    """See `reference.combine`; at most 32 rows."""
    _launch_combine([rows[k][lo:hi] for k in range(len(rows))], [out], op)


def combine_into(rows: Rows, lo: int, hi: int, row: int, op: int) -> None:
    """See `reference.combine_into`; at most 32 rows."""
    columns = [rows[k][lo:hi] for k in range(len(rows))]
    _launch_combine(columns, columns if row == EVERY_ROW else [columns[row]], op)


def _launch_combine(rows: list[Array], targets: list[Array], op: int) -> None:
    of_type = cuda.type_name("combine", _ROW_DTYPES, rows[0].size, *rows, *targets)
    if len(rows) > MAX_ROWS:
        raise UnsupportedError("combine", expected=f"at most {MAX_ROWS} rows", got=len(rows))
    pointers = (_pointers(rows), np.int32(len(rows)), _pointers(targets), np.int32(len(targets)))
    blocks = cuda.blocks(-(-rows[0].nbytes // 16))
    cuda.launch("reduce", f"combine_{of_type}", blocks, *pointers, np.int64(rows[0].size), np.int32(op))


def _pointers(rows: list[Array]) -> np.ndarray:
    made = np.zeros(1, _POINTERS)
    made["at"][0, : len(rows)] = [row.data.ptr for row in rows]
    return made


_PIECES = 128
"""Blocks that sum one layer; also defined in `norms.cu`."""


def sum_of_squares(x: Array) -> float:
    """See `reference.sum_of_squares`."""
    return sums_of_squares((x,))[0]


def sums_of_squares(xs: Iterable[Array]) -> list[float]:
    """See `reference.sums_of_squares`; waits once for all."""
    arrays = list(xs)
    return to_host(all_squares(arrays)).tolist() if arrays else []


def all_squares(xs: Sequence[Array]) -> Array:
    """Return `sums_of_squares` of one or more arrays, in float64 on their GPU, without waiting."""
    xp = array_namespace(*xs)
    out = xp.empty(len(xs), dtype=np.float64)
    for number, x in enumerate(xs):
        of_type = cuda.type_name("sum_of_squares", _DTYPES, x.size, x)
        blocks = min(cuda.blocks(-(-x.nbytes // 16)), cuda.MAX_PARTS)
        partial = xp.empty(blocks, dtype=np.float64)
        cuda.launch("norms", f"sum_of_squares_{of_type}", blocks, x, np.int64(x.size), partial)
        cuda.launch("norms", "add_partials_f64", 1, partial, np.int64(blocks), out[number : number + 1])
    return out


def clipped_scale(squares: Array, scale: float | Array, most: float) -> Array:
    """See `reference.clipped_scale`; returns float64, shape ``(1,)``, on the GPU of ``squares``, without waiting.

    ``scale`` may be on the GPU, too.
    """
    cuda.check("clipped_scale", ("float64",), squares.size, squares)
    number, place = (np.float64(scale), cuda.NOWHERE) if isinstance(scale, float) else (np.float64(1), scale)
    out = array_namespace(squares).empty(1, dtype=np.float64)
    cuda.launch("norms", "clipped_scale", 1, squares, np.int64(squares.size), number, place, np.float64(most), out)
    return out


def segment_squares(params: Array, grads: Array, bounds: Array, out: Array) -> None:
    """See `reference.segment_squares`; does not wait."""
    of_type = cuda.type_name("segment_squares", _DTYPES, params.size, params, grads)
    cuda.check("segment_squares", ("int64",), bounds.size, bounds)
    layers = bounds.size - 1
    cuda.check("segment_squares", ("float64",), 2 * layers, out)
    partial = array_namespace(params).empty((layers, 2, _PIECES), dtype=np.float64)
    cuda.launch("norms", f"segment_squares_{of_type}", layers * _PIECES, params, grads, bounds, partial)
    cuda.launch("norms", "add_partials_f64", 2 * layers, partial, np.int64(_PIECES), out)


Coefficients = tuple[float, ...] | Array


def sgd(param: Array, grad: Array, coefficients: Coefficients, scale: Array | None = None) -> None:
    """See `reference.sgd`."""
    _launch("sgd", (param, grad), coefficients, 3, scale)


def sgd_momentum(
    param: Array, grad: Array, velocity: Array, coefficients: Coefficients, scale: Array | None = None
) -> None:
    """See `reference.sgd_momentum`."""
    _launch("sgd_momentum", (param, grad, velocity), coefficients, 4, scale)


def sgd_nesterov(
    param: Array, grad: Array, velocity: Array, coefficients: Coefficients, scale: Array | None = None
) -> None:
    """See `reference.sgd_nesterov`."""
    _launch("sgd_nesterov", (param, grad, velocity), coefficients, 4, scale)


def adam(param: Array, grad: Array, m: Array, v: Array, coefficients: Coefficients, scale: Array | None = None) -> None:
    """See `reference.adam`."""
    _launch("adam", (param, grad, m, v), coefficients, 9, scale)


def _launch(name: str, arrays: tuple[Array, ...], coefficients: Coefficients, count: int, scale: Array | None) -> None:
    param = arrays[0]
    of_type = cuda.type_name(name, ("float32", "float64"), param.size, *arrays)
    numbers, place = coefficients, cuda.NOWHERE
    if not isinstance(coefficients, tuple):
        cuda.check(name, ("float64",), count, coefficients)
        numbers, place = (0.0,) * count, coefficients
    if scale is not None:
        cuda.check(name, ("float64",), 1, scale)
    scalars = map(param.dtype.type, numbers)
    scale_at = cuda.NOWHERE if scale is None else scale
    cuda.launch_elementwise("update", f"{name}_{of_type}", arrays, *scalars, place, scale_at)


def lars_sgd(param: Array, grad: Array, squares: Array, coefficients: tuple[float, float, float, float]) -> None:
    """See `reference.lars_sgd`."""
    _launch_lars("sgd", (param, grad), squares, coefficients)


def lars_sgd_momentum(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """See `reference.lars_sgd_momentum`."""
    _launch_lars("sgd_momentum", (param, grad, velocity), squares, coefficients)


def lars_sgd_nesterov(
    param: Array, grad: Array, velocity: Array, squares: Array, coefficients: tuple[float, float, float, float, float]
) -> None:
    """See `reference.lars_sgd_nesterov`."""
    _launch_lars("sgd_nesterov", (param, grad, velocity), squares, coefficients)


def _launch_lars(name: str, arrays: tuple[Array, ...], squares: Array, coefficients: tuple[float, ...]) -> None:
    param = arrays[0]
    of_type = cuda.type_name(name, ("float32", "float64"), param.size, *arrays)
    cuda.check(name, ("float64",), 2, squares)
    lr, weight_decay, scale, *momentum, trust = coefficients
    rounded, numbers = map(param.dtype.type, (lr, *momentum)), map(np.float64, (weight_decay, scale, trust))
    cuda.launch_elementwise("lars", f"lars_{name}_{of_type}", arrays, *rounded, squares, *numbers)


_PACKED_DTYPES = ("uint16", "float32", "float64")


def pack_two_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """See `reference.pack_two_bit`."""
    _pack("pack_two_bit", 16, (grad, residual), threshold, magnitude, words)


def unpack_two_bit(words: Array, magnitude: float, out: Array) -> None:
    """See `reference.unpack_two_bit`."""
    _unpack("unpack_two_bit", 16, words, magnitude, out)


def pack_one_bit(grad: Array, residual: Array, threshold: float, magnitude: float, words: Array) -> None:
    """See `reference.pack_one_bit`."""
    _pack("pack_one_bit", 32, (grad, residual), threshold, magnitude, words)


def unpack_one_bit(words: Array, magnitude: float, out: Array) -> None:
    """See `reference.unpack_one_bit`."""
    _unpack("unpack_one_bit", 32, words, magnitude, out)


def _pack(name: str, width: int, arrays: tuple[Array, Array], threshold: float, magnitude: float, words: Array) -> None:
    count = arrays[0].size
    of_type = cuda.type_name(name, _PACKED_DTYPES, count, *arrays)
    cuda.check(name, ("uint32",), -(-count // width), words)
    scalars = (_rounded(threshold, arrays[0]), _rounded(magnitude, arrays[0]))
    blocks = cuda.blocks(num_blocks(count) * cuda.WARP)
    cuda.launch("quantize", f"{name}_{of_type}", blocks, *arrays, np.int64(count), *scalars, words)


def _unpack(name: str, width: int, words: Array, magnitude: float, out: Array) -> None:
    of_type = cuda.type_name(name, _PACKED_DTYPES, out.size, out)
    cuda.check(name, ("uint32",), -(-out.size // width), words)
    blocks = cuda.blocks(-(-out.nbytes // 16))
    cuda.launch("quantize", f"{name}_{of_type}", blocks, words, out, np.int64(out.size), _rounded(magnitude, out))


def _rounded(value: float, like: Array) -> np.generic:
    """Return ``value`` rounded to an element of ``like``, in the type of its computations."""
    return np.float32(np.float16(value)) if like.dtype == np.uint16 else like.dtype.type(value)


_DIGIT_BITS = 11
"""Bits of a digit; also defined in `top_k.cuh`."""
_SAMPLED_PACKS = 1 << 15


def encode_two_bit(grad: Array, residual: Array, threshold: float, scales: Array, words: Array) -> None:
    """See `reference.encode_two_bit`."""
    _encode_blocks("encode_two_bit", 16, (grad, residual), (threshold,), scales, words)


def decode_two_bit(scales: Array, words: Array, out: Array) -> None:
    """See `reference.decode_two_bit`."""
    _decode_blocks("decode_two_bit", 16, scales, words, out)


def encode_one_bit(
    grad: Array, residual: Array, threshold: float, magnitude: float, scales: Array, words: Array
) -> None:
    """See `reference.encode_one_bit`."""
    _encode_blocks("encode_one_bit", 32, (grad, residual), (threshold, magnitude), scales, words)


def decode_one_bit(scales: Array, words: Array, out: Array) -> None:
    """See `reference.decode_one_bit`."""
    _decode_blocks("decode_one_bit", 32, scales, words, out)


def encode_float16(grad: Array, residual: Array, halves: Array) -> None:
    """See `reference.encode_float16`."""
    _encode_halves("encode_float16", grad, residual, halves)


def encode_bfloat16(grad: Array, residual: Array, halves: Array) -> None:
    """See `reference.encode_bfloat16`."""
    _encode_halves("encode_bfloat16", grad, residual, halves)


def encode_top_k(grad: Array, residual: Array, indices: Array, values: Array) -> None:
    """See `reference.encode_top_k`."""
    grad, residual, values = (bits_of(x) for x in (grad, residual, values))
    of_type, xp = cuda.type_name("encode_top_k", _DTYPES, grad.size, grad, residual), array_namespace(grad)
    cuda.check("encode_top_k", (str(grad.dtype),), indices.size, values)
    cuda.check("encode_top_k", ("uint32",), indices.size, indices)
    if not grad.size:
        return
    count, k = np.int64(grad.size), np.int64(indices.size)
    length, blocks, warps = _stretches(grad)
    digits = [(np.int32(shift), np.int32(bits)) for shift, bits in _digits(8 * grad.itemsize - 1)]
    search, *rows = xp.zeros((4 + len(digits), 1 << _DIGIT_BITS), xp.uint32)
    of_sample, of_all, of_digits = rows[:2], rows[2:4], rows[4:]
    elements = 16 // grad.itemsize  # of a pack
    stride, num_candidates = _sample(grad.size // elements, indices.size / grad.size * elements)
    blocks_of_sample = cuda.blocks(-(-grad.size // (elements * stride)))
    for number, counts in enumerate(of_sample):
        sampled = (
            grad,
            residual,
            count,
            np.int64(stride),
            np.int64(num_candidates),
            np.bool_(number == 0),
            *digits[number],
        )
        cuda.launch("compress", f"sample_floor_{of_type}", blocks_of_sample, *sampled, search, counts)
    numbers = xp.empty((3, warps), xp.uint32)
    candidates = (numbers[0], xp.empty(grad.size, xp.uint32), xp.empty_like(grad))
    for again, counts in zip((False, True), of_all, strict=True):
        passed = (grad, residual, count, np.int64(length), k, np.bool_(again), search, counts, *candidates)
        cuda.launch("compress", f"collect_{of_type}", blocks, *passed)
    among = (count, np.int64(length), *candidates)
    for digit, counts in zip(digits[1:], of_digits, strict=True):
        cuda.launch("compress", f"find_digit_{of_type}", blocks, *among, *digit, search, counts)
    chosen = (search, numbers[1:], xp.empty((2, blocks), xp.uint32))
    cuda.launch("compress", f"count_chosen_{of_type}", blocks, *among, *chosen)
    cuda.launch("compress", f"write_chosen_{of_type}", blocks, *among, *chosen, residual, indices, values)


def _stretches(x: Array) -> tuple[int, int, int]:
    """Return the elements of each warp, and the number of blocks and warps."""
    warps_of_block, at_once = cuda.THREADS // cuda.WARP, cuda.WARP * 16 // x.itemsize
    length = -(-x.size // (cuda.MAX_PARTS * warps_of_block * at_once)) * at_once
    blocks = -(-x.size // (length * warps_of_block))
    return length, blocks, blocks * warps_of_block


def _digits(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the shift and the bits of each digit of a magnitude of ``bits``, from the highest on."""
    while bits > 0:
        of_digit = min(bits, _DIGIT_BITS)
        bits -= of_digit
        yield bits, of_digit


def _sample(packs: int, chosen_of_pack: float) -> tuple[int, int]:
    """Return the sampling stride in packs, and the number of sampled elements that should become candidates.

    That is the expected number of sent elements in the sample, plus eight deviations. If adjacent elements are alike,
    as many as a pack has, it is still three deviations.
    """
    stride = max(1, packs // _SAMPLED_PACKS)
    expected = -(-packs // stride) * chosen_of_pack
    return stride, math.ceil(expected + 8 * math.sqrt(expected) + 16)


def decode_top_k(indices: Array, values: Array, out: Array) -> None:
    """See `reference.decode_top_k`."""
    values, out = bits_of(values), bits_of(out)
    of_type = cuda.type_name("decode_top_k", _DTYPES, out.size, out)
    cuda.check("decode_top_k", (str(out.dtype),), indices.size, values)
    cuda.check("decode_top_k", ("uint32",), indices.size, indices)
    out[...] = 0
    passed = (indices, values, np.int64(indices.size), out, np.int64(out.size))
    cuda.launch("compress", f"decode_top_k_{of_type}", cuda.blocks(indices.size), *passed)


def _encode_blocks(
    name: str, width: int, arrays: tuple[Array, Array], numbers: tuple[float, ...], scales: Array, words: Array
) -> None:
    grad, residual = map(bits_of, arrays)
    of_type = _checked_blocks(name, width, scales, words, grad, residual)
    blocks = cuda.blocks(num_blocks(grad.size) * cuda.WARP)
    passed = (grad, residual, np.int64(grad.size), *map(np.float64, numbers), scales, words)
    cuda.launch("compress", f"{name}_{of_type}", blocks, *passed)


def _decode_blocks(name: str, width: int, scales: Array, words: Array, out: Array) -> None:
    out = bits_of(out)
    of_type = _checked_blocks(name, width, scales, words, out)
    blocks = cuda.blocks(-(-out.nbytes // 16))
    cuda.launch("compress", f"{name}_{of_type}", blocks, scales, words, out, np.int64(out.size))


def _checked_blocks(name: str, width: int, scales: Array, words: Array, *arrays: Array) -> str:
    """Return the suffix of the kernel's name for ``arrays``, whose scales and words of ``width`` elements are given."""
    count = arrays[0].size
    of_type = cuda.type_name(name, _DTYPES, count, *arrays)
    cuda.check(name, ("float32",), num_blocks(count), scales)
    cuda.check(name, ("uint32",), -(-count // width), words)
    return of_type


def _encode_halves(name: str, grad: Array, residual: Array, halves: Array) -> None:
    grad, residual = bits_of(grad), bits_of(residual)
    of_type = cuda.type_name(name, _DTYPES, grad.size, grad, residual)
    cuda.check(name, ("uint16",), grad.size, halves)
    cuda.launch_elementwise("compress", f"{name}_{of_type}", (grad, residual, halves))
