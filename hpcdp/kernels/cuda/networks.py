"""Elementwise operations, normalisation, cross-entropy, rows of a table, and convolution of CuPy arrays.

Functions have the names and arguments of `reference.networks`. Computations of 16-bit floats are in float32, rounded
once. GELU, layer normalisation, attention and LSTM are the reference's.

- Elementwise (`elementwise.cu`, `epilogue.cu`, `cast.cu`): the reference's bits where gradients are finite, except for
  a NaN in float16. Sums of gradients of a bias are in float64, equal up to rounding.
- Batch normalisation and channel sums (`batch_norm.cu`, `channels.cuh`): sums are equal up to rounding in float64, and
  bits for the same sums. Values per channel are float32 if ``x`` has 16 bits. Forward and backward are three launches
  each; for a batch split over ranks (`nn.functional`) CuPy computes the values per channel.
- Cross-entropy and rows (`cross_entropy.cu`, `rows.cu`): cross-entropy is equal up to the rounding of ``exp`` and
  ``log``. Probabilities, losses and their gradients for logits of 16 bits are float32. A label out of range makes the
  loss and the probabilities of its row NaN. Additions to rows have the same bits, without atomic additions, whose order
  varies; rows outside the table are ignored. Nothing waits, except for an index with a mask, for which CuPy waits.
- Convolution by im2col and one product over all images, and pooling (`conv.cu`, `pool.cu`): the same product; all else
  has the same bits where gradients are finite, except the gradient of the bias, which is summed in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...core.arrays import Array, array_namespace, dtype_name, words
from .. import cuda
from ..reference import networks
from ..reference.networks import Pair
from ..reference.networks import causal_shift as causal_shift
from ..reference.networks import gelu as gelu
from ..reference.networks import gelu_gradient as gelu_gradient
from ..reference.networks import layer_norm as layer_norm
from ..reference.networks import layer_norm_gradients as layer_norm_gradients
from ..reference.networks import lstm_step as lstm_step
from ..reference.networks import lstm_step_gradients as lstm_step_gradients
from ..reference.networks import normalise_rows as normalise_rows
from ..reference.networks import softmax_gradient as softmax_gradient
from .cublas import matmul


def add(a: Array, b: Array, out: Array) -> None:
    """See `reference.add`."""
    if not _launched("add", a, b, out):
        networks.add(a, b, out)


def relu(x: Array, out: Array) -> None:
    """See `reference.relu`."""
    if not _launched("relu", x, out):
        networks.relu(x, out)


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
    cuda.launch(_FILE, f"normalise_{of_type}", _blocks(x), x, mean, factor, shift, out, cuda.shape_of_channels(x))


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


def normalise(x: Array, scale: Array, shift: Array, saved: tuple[Array, Array], out: Array, eps: float) -> None:
    """See `reference.normalise`."""
    mean, variance = saved
    of_type = _checked("normalise", (x, out), (scale, shift, *saved))
    factor = scale / array_namespace(x).sqrt(variance + eps)
    cuda.launch(_FILE, f"normalise_{of_type}", _blocks(x), x, mean, factor, shift, out, cuda.shape_of_channels(x))


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
_DIGIT_BITS = 8
_CHUNK = 1024
"""Places that a block sorts, unless that needs too many blocks."""


def add_rows(table: Array, rows: Array, values: Array) -> None:
    """See `reference.add_rows`."""
    table, values = words(table), words(values)
    (number, features), count = table.shape, rows.size
    of_type = cuda.type_name("add_rows", _DTYPES, count * features, values)
    cuda.check("add_rows", (str(values.dtype),), number * features, table)
    cuda.check("add_rows", ("int64",), count, rows)
    if number == 0:  # there would be no digit to sort by, and `order` would stay uninitialised
        return
    xp, chunk = array_namespace(table), max(_CHUNK, -(-count // cuda.MAX_BLOCKS))
    blocks = -(-count // chunk)
    counts, starts = xp.empty((blocks, cuda.THREADS), dtype=np.uint32), xp.empty((blocks, cuda.THREADS), dtype=np.int64)
    order, other = xp.empty(count, dtype=np.int64), xp.empty(count, dtype=np.int64)
    for shift in range(0, int(number).bit_length(), _DIGIT_BITS):
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
