"""What `gpu` times of CUDA kernels: each on its arrays, and what says whether it is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from hpcdp import kernels
from hpcdp.arrays import Array, to_host
from hpcdp.kernels.reference.compress import num_blocks
from hpcdp.kernels.reference.reduce import SUM

from ..kernels import UPDATES

_CHANNELS, _SIDE, _CLASSES, _FEATURES = 64, 32, 1000, 256
_LAYERS, _PER_ROW = 16, 8
"""That LARS has norms of, and values that are added to each row of a table."""
_DRAWN = 1 << 22
"""So many numbers are drawn; more are those again, since a GPU would wait a minute for all of them."""
_ROUNDED = 1e-5
"""Of the largest element: sums in another order, and exp and log."""


@dataclass
class Case:
    """One kernel.

    Args:
        name: as printed.
        room: as `kernels.kernels_for` takes it.
        call: takes the module and the arrays, of which it changes some; returns None or a number, perhaps on a GPU.
        arrays: NumPy's.
        moved: bytes that must be read or written.
        error: how far from the specification's they may be, of the largest element; 0: not at all.
    """

    name: str
    room: str
    call: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    moved: int
    error: float = 0.0

    def on(self, asarray: Callable[[np.ndarray], Array]) -> tuple[Callable[[], Any], tuple[Array, ...]]:
        """The call on copies of its arrays that ``asarray`` makes, and those."""
        found = tuple(map(asarray, self.arrays))
        return partial(self.call, kernels.kernels_for(self.room, found[0]), *found), found

    def wrong(self, asarray: Callable[[np.ndarray], Array]) -> int:
        """How many elements of one call's arrays are not the specification's."""
        call, ours = self.on(asarray)
        theirs = tuple(x.copy() for x in self.arrays)
        answer, expected = call(), self.call(kernels.specification(self.room), *theirs)
        differ = 0 if expected is None else int(abs(float(answer) - expected) > 1e-12 * abs(expected))
        for x, y in zip(map(to_host, ours), theirs, strict=True):
            apart = abs(x.astype(np.float64) - y)  # unsigned integers would wrap around
            differ += int(np.count_nonzero(~(apart <= self.error * abs(y).max(initial=0))))
        return differ


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Of a normal distribution, float32."""
    return np.resize(rng.standard_normal(min(_DRAWN, math.prod(shape)), np.float32), shape)


def _named(name: str, *numbers: Any, behind: int | None = None) -> Callable[..., Any]:
    """The call of the function ``name`` of a module with arrays, and ``numbers`` behind so many of them, or all."""

    def call(module: ModuleType, *arrays: Array) -> Any:
        first = len(arrays) if behind is None else behind
        return getattr(module, name)(*arrays[:first], *numbers, *arrays[first:])

    return call


def cases(count: int) -> Iterator[Case]:
    """Each kernel on arrays of about ``count`` elements, made when it is asked for."""
    yield from _flat(count)
    yield from _of_layers(count)
    yield from _codecs(count)
    yield from _bits(count)
    yield from _rows(max(1, count // _FEATURES))
    yield from _layers(max(1, count // (_CHANNELS * _SIDE * _SIDE)))


def _flat(count: int) -> Iterator[Case]:
    rng = np.random.default_rng(1)
    nbytes = 4 * count
    for name, rule, number, coefficients in UPDATES:
        arrays = tuple(abs(_random(rng, count)) for _ in range(number))
        call = _named(rule, coefficients)
        yield Case(name, "update", call, arrays, (2 * number - 1) * nbytes)
    x, wide, half = _random(rng, count), np.zeros(count, np.float32), np.zeros(count, np.uint16)
    for word in ("float16", "bfloat16"):
        for name, both in ((f"to_{word}", (x, half)), (f"from_{word}", (half, wide))):
            yield Case(name.replace("_", " "), "cast", _named(name), both, nbytes * 3 // 2)
    scaled = _named("scale", -1.0)
    yield Case("scale", "cast", scaled, (x,), 2 * nbytes)
    yield Case("sum of squares", "norms", _sum_of_squares, (x,), nbytes)
    yield Case("all finite", "norms", _named("all_finite"), (x,), nbytes)
    yield Case("add", "elementwise", _named("add"), (x, x[::-1].copy(), wide), 3 * nbytes)
    yield Case("ReLU", "elementwise", _named("relu"), (x, wide), 2 * nbytes)
    for n in (2, 4, 8):
        rows = _random(rng, n, count)
        call = partial(_sum_rows, count)
        yield Case(f"sum of {n} rows", "reduce", call, (rows, wide), (n + 1) * nbytes)


def _sum_of_squares(module: ModuleType, x: Array) -> Any:
    """Left on the GPU, as for a trainer's clipping."""
    return module.sum_of_squares(x) if module is kernels.specification("norms") else module.all_squares([x])[0]


def _sum_rows(count: int, module: ModuleType, rows: Array, out: Array) -> None:
    module.combine(rows, 0, count, out, SUM)


def _of_layers(count: int) -> Iterator[Case]:
    """What LARS does with its layers."""
    params, grads, velocity = _random(np.random.default_rng(4), 3, count)
    bounds, squares = np.arange(_LAYERS + 1) * count // _LAYERS, np.zeros((_LAYERS, 2))
    of_norms = (params, grads, bounds, squares)
    yield Case("LARS norms", "norms", _named("segment_squares"), of_norms, 2 * params.nbytes, _ROUNDED)
    into = (params, grads, velocity, np.array([4.0, 9.0]))
    update = _named("sgd_momentum", (0.1, 1e-4, 0.5, 0.9, 1e-3))
    yield Case("LARS", "lars", update, into, 5 * params.nbytes)


def _codecs(count: int) -> Iterator[Case]:
    grad, residual = _random(np.random.default_rng(2), 2, count)
    nbytes, scales = 4 * count, np.zeros(num_blocks(count), np.float32)
    for name, width, numbers in (("two_bit", 16, (0.5,)), ("one_bit", 32, (0.1, 0.5))):
        words = np.zeros(-(-count // width), np.uint32)
        codes = scales.nbytes + words.nbytes
        call = _named(f"encode_{name}", *numbers, behind=2)
        arrays = (grad, residual, scales, words)
        yield Case(f"encode {name.replace('_', ' ')}", "compress", call, arrays, 3 * nbytes + codes)
        decode = _named(f"decode_{name}")
        full = (abs(scales) + 0.5, words, np.zeros_like(grad))
        yield Case(f"decode {name.replace('_', ' ')}", "compress", decode, full, nbytes + codes)
    halves = np.zeros(count, np.uint16)
    for name in ("encode_float16", "encode_bfloat16"):
        moved = 3 * nbytes + halves.nbytes
        into = (grad, residual, halves)
        yield Case(name.replace("_", " "), "compress", _named(name), into, moved)
    k = max(1, count // 100)
    chosen = (grad, residual, np.zeros(k, np.uint32), np.zeros(k, np.float32))
    moved = 3 * nbytes + 8 * k  # of which the sum alone is most
    yield Case("top 1%", "compress", _named("encode_top_k"), chosen, moved)


def _bits(count: int) -> Iterator[Case]:
    """MXNet's codecs, of one threshold for all elements."""
    grad, residual = _random(np.random.default_rng(5), 2, count)
    for name, width in (("two bit", 16), ("one bit", 32)):
        words, of_name = np.zeros(-(-count // width), np.uint32), name.replace(" ", "_")
        pack = _named(f"pack_{of_name}", 0.5, 0.5, behind=2)
        unpack = _named(f"unpack_{of_name}", 0.5, behind=1)
        yield Case(f"pack {name}", "quantise", pack, (grad, residual, words), 3 * grad.nbytes + words.nbytes)
        yield Case(f"unpack {name}", "quantise", unpack, (words + 7, grad), grad.nbytes + words.nbytes)


def _rows(count: int) -> Iterator[Case]:
    """The gradient of an embedding."""
    rng = np.random.default_rng(6)
    values, table = _random(rng, count, _FEATURES), np.zeros((-(-count // _PER_ROW), _FEATURES), np.float32)
    rows = rng.integers(0, len(table), count)
    moved = values.nbytes + rows.nbytes + 2 * table.nbytes
    yield Case("add to rows", "rows", _named("add_rows"), (table, rows, values), moved)


def _layers(batch: int) -> Iterator[Case]:
    rng = np.random.default_rng(3)
    x, gy = _random(rng, 2, batch, _CHANNELS, _SIDE, _SIDE)
    half = (batch, _CHANNELS, _SIDE // 2, _SIDE // 2)
    small, chosen, twice = np.zeros(half, np.float32), np.zeros(half, np.int32), ((2, 2), (2, 2), (0, 0))
    for name, pooled in (
        ("average_pool", (x, small)), ("average_pool_gradient", (gy[:, :, ::2, ::2].copy(), np.zeros_like(x))),
        ("max_pool", (x, small, chosen)), ("max_pool_gradient", (gy[:, :, ::2, ::2].copy(), chosen, np.zeros_like(x))),
    ):  # fmt: skip
        moved = sum(each.nbytes for each in pooled)
        yield Case(name.replace("_", " "), "pool", _named(name, *twice), pooled, moved)
    planes = x.reshape(batch, _CHANNELS, -1)
    scale, shift, *saved = abs(rng.standard_normal((4, _CHANNELS), np.float32))
    for name, dtype, error in (("batch norm", np.float32, _ROUNDED), ("batch norm, float16", np.float16, 2.0**-10)):
        own = planes.astype(dtype)
        into = (own, scale, shift, np.zeros_like(own), *saved)
        yield Case(name, "batch_norm", _batch_norm, into, 3 * own.nbytes, error)
    grads, dx, of_channels = gy.reshape(planes.shape), np.zeros_like(planes), np.zeros((2, _CHANNELS), np.float32)
    into = (grads, planes, scale, planes.mean(axis=(0, 2)), planes.var(axis=(0, 2)), dx, *of_channels)
    yield Case("batch norm gradient", "batch_norm", _batch_norm_gradients, into, 5 * x.nbytes, _ROUNDED)
    into, of_bias = (grads, np.maximum(planes, 0), dx, of_channels[0]), _named("bias_gradient")
    yield Case("bias gradient, ReLU", "epilogue", of_bias, into, 3 * x.nbytes, _ROUNDED)
    rows = x.reshape(-1, _CHANNELS * _SIDE)
    yield Case("bias, ReLU", "epilogue", _named("add_bias", True), (rows, rows[0].copy()), 2 * x.nbytes)
    logits = x.reshape(-1)[: x.size // _CLASSES * _CLASSES].reshape(-1, _CLASSES)
    labels = rng.integers(0, _CLASSES, len(logits))
    losses = np.zeros(len(logits), np.float32)
    call, of_rows = _named("softmax_cross_entropy"), (logits, labels, np.zeros_like(logits), losses)
    yield Case("softmax, loss", "cross_entropy", call, of_rows, 2 * logits.nbytes, _ROUNDED)


def _batch_norm(module: ModuleType, *arrays: Array) -> None:
    x, scale, shift, out, mean, variance = arrays
    if module is kernels.specification("batch_norm"):
        x = x.astype(np.float32)  # in which the kernels compute with 16 bits
    module.batch_norm(x, scale, shift, out, (mean, variance), 1e-5)


def _batch_norm_gradients(module: ModuleType, *arrays: Array) -> None:
    gy, x, scale, mean, variance, dx, dscale, dshift = arrays
    module.batch_norm_gradients(gy, x, scale, (mean, variance), (dx, dscale, dshift), 1e-5)
