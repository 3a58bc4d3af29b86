"""Direct convolution of NumPy arrays without unfolding (AVX2).

The samples of a patch have the same offsets from its first sample in every patch of an image. One table therefore holds
the positions of patches, another the offsets of samples, and no patch is ever written (Dukhan, "The indirect
convolution algorithm", 2019). The innermost loop keeps `ROWS` sums of two vectors in registers. Each step multiplies
two vectors of a panel by `ROWS` samples that it finds with the tables. Forward, sums are of patches, and steps the
samples of a patch. For the gradient of the weights the tables are exchanged. The gradient of the input is a convolution
of ``gy`` for each phase of the stride, with the weights that affect the phase.

On such processors BLAS would pack the unfolded patches once more, so both copies are saved.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .. import empty
from ..jit import WORD, Lanes, copy_run, kernel, weave_run

LANES = 8
ROWS = 6
"""Rows of a tile: their sums, two vectors and a sample occupy 15 of 16 registers."""


def _tile(vectors: int) -> Any:
    """Make an intrinsic that adds products to `ROWS` sums of ``vectors``.

    Sum ``r`` adds, over the steps ``k``, ``x[places[first + r] + steps[k]]`` times the vectors from ``panel[start]``
    on, ``vectors * LANES`` for each step. It starts from ``initial[origin + r * leap]`` and is stored from ``sums[at]``
    on.
    """

    @intrinsic
    def add(
        context: Any, x: Any, places: Any, first: Any, steps: Any, panel: Any, start: Any, sums: Any, at: Any,
        initial: Any, origin: Any, leap: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            fuse = ("contract",)
            word = args[2].type
            keys = [(row, vector) for row in range(ROWS) for vector in range(vectors)]

            def array(number: int) -> Any:
                return context.make_array(signature.args[number])(context, builder, args[number])

            def lanes(number: int, index: Any) -> Lanes:
                return Lanes(context, builder, (signature.args[number], args[number]), index, LANES)

            samples, at_row, step = array(0).data, array(1).data, array(3)
            count = builder.extract_value(step.shape, 0)
            patches = [
                builder.gep(samples, [builder.load(builder.gep(at_row, [builder.add(args[2], word(row))]))])
                for row in range(ROWS)
            ]
            begin = {
                (row, v): lanes(
                    8, builder.add(args[9], builder.add(builder.mul(args[10], word(row)), word(v * LANES)))
                ).load()
                for row, v in keys
            }  # fmt: skip
            kind = begin[0, 0].type
            before = builder.block
            loop, after = builder.append_basic_block("steps"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed(">", count, word(0)), loop, after)

            builder.position_at_end(loop)
            k = builder.phi(word)
            totals = {key: builder.phi(kind) for key in keys}
            offset = builder.load(builder.gep(step.data, [k]))
            line = builder.add(args[5], builder.mul(k, word(vectors * LANES)))
            factors = [lanes(4, builder.add(line, word(v * LANES))).load() for v in range(vectors)]
            ends = {}
            for row in range(ROWS):
                sample = builder.load(builder.gep(patches[row], [offset]))
                one = builder.insert_element(ir.Constant(kind, ir.Undefined), sample, WORD(0))
                spread = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(WORD, LANES), None))
                for v in range(vectors):
                    product = builder.fmul(spread, factors[v], flags=fuse)
                    ends[row, v] = builder.fadd(totals[row, v], product, flags=fuse)
            following = builder.add(k, word(1))
            k.add_incoming(word(0), before)
            k.add_incoming(following, loop)
            for key in keys:
                totals[key].add_incoming(begin[key], before)
                totals[key].add_incoming(ends[key], loop)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

            builder.position_at_end(after)
            results = {key: builder.phi(kind) for key in keys}
            for key in keys:
                results[key].add_incoming(begin[key], before)
                results[key].add_incoming(ends[key], loop)
            for row, v in keys:
                lanes(6, builder.add(args[7], word((row * vectors + v) * LANES))).store(results[row, v])
            return context.get_dummy_value()

        return types.none(
            x, places, types.intp, steps, panel, types.intp, sums, types.intp, initial, types.intp, types.intp
        ), generate  # fmt: skip

    return add


_narrow_tile, _wide_tile = _tile(1), _tile(2)


@intrinsic
def _turn_eight(context: Any, source: Any, first: Any, down: Any, target: Any, start: Any, across: Any) -> Any:
    """Transpose eight rows of eight; ``down`` and ``across`` are the elements from one row to the next."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def lanes(number: int, row: int) -> Lanes:
            index = builder.add(args[number + 1], builder.mul(args[number + 2], args[number + 2].type(row)))
            return Lanes(context, builder, (signature.args[number], args[number]), index, LANES)

        def exchanged(distance: int, is_second: bool) -> Any:
            """Return the lanes of two rows that one of them has after an exchange of blocks of ``distance``."""
            chosen = [
                lane + distance * is_second if not lane & distance else 8 + lane - distance * (not is_second)
                for lane in range(8)
            ]
            return ir.Constant(ir.VectorType(WORD, 8), chosen)

        rows = [lanes(0, row).load() for row in range(8)]
        for distance in (4, 2, 1):
            for row in (row for row in range(8) if not row & distance):
                pair = rows[row], rows[row + distance]
                rows[row] = builder.shuffle_vector(*pair, exchanged(distance, False))
                rows[row + distance] = builder.shuffle_vector(*pair, exchanged(distance, True))
        for row in range(8):
            lanes(3, row).store(rows[row])
        return context.get_dummy_value()

    return types.none(source, types.intp, types.intp, target, types.intp, types.intp), generate


@numba.njit(inline="always")
def turn(source, first, down, size, target, start, across):  # type: ignore[no-untyped-def]
    """Set ``target[start + c * across + r]`` to ``source[first + r * down + c]`` for all of ``size`` (r, c)."""
    high, wide = size[0] - size[0] % 8, size[1] - size[1] % 8
    for c in range(0, wide, 8):
        for r in range(0, high, 8):
            _turn_eight(source, first + r * down + c, down, target, start + c * across + r, across)
        for r in range(high, size[0]):
            for k in range(c, c + 8):
                target[start + k * across + r] = source[first + r * down + k]
    for c in range(wide, size[1]):
        for r in range(size[0]):
            target[start + c * across + r] = source[first + r * down + c]


@numba.njit(inline="always")
def add_products(x, places, steps, panel, start, width, sums, at, initial, origin, leap):  # type: ignore[no-untyped-def]
    """Run `_tile` for all ``places``, a multiple of `ROWS` in number, and a panel of ``width``."""
    for row in range(0, places.size, ROWS):
        to, begin = at + row * width, origin + row * leap
        if width == 2 * LANES:
            _wide_tile(x, places, row, steps, panel, start, sums, to, initial, begin, leap)
        else:
            _narrow_tile(x, places, row, steps, panel, start, sums, to, initial, begin, leap)


_PLACES_AT_ONCE, _TAPS_AT_ONCE = 96, 192
"""Patches, and samples of each, that stay in the caches with their panel of 12 KiB.

From 48 patches to all, and from 96 samples to 256, the time was the same within 4%.
"""
_POSITIONS_AT_ONCE = 512
"""Results whose gradients fill one panel of 32 KiB, which is read for all samples of a patch."""
_FLOAT = numba.float32
_FLAT, _TABLE, _IMAGES = _FLOAT[::1], numba.int64[::1], _FLOAT[:, :, :, ::1]
_PAIR = numba.types.UniTuple(numba.int64, 2)

Pair = tuple[int, int]


@numba.njit(inline="always")
def _panel(channels, first):  # type: ignore[no-untyped-def]
    """Return how many of the ``channels`` are in the panel from ``first`` on, and its capacity."""
    used = min(2 * LANES, channels - first)
    return used, 2 * LANES if used > LANES else LANES


@numba.njit(inline="always")
def _lay_out(image, planes, layout):  # type: ignore[no-untyped-def]
    """Copy the ``image`` into ``planes``.

    ``layout`` is their size, the used lines (first) of each period of lines (second), and the padding.
    """
    size, used_lines, padding = layout
    source, target, width = image.reshape(-1), planes.reshape(-1), image.shape[2]
    high, wide = min(image.shape[1], size[0] - padding[0]), min(width, size[1] - padding[1])
    for c in range(image.shape[0]):
        for y in range(high):
            if (y + padding[0]) % used_lines[1] < used_lines[0]:
                to = c * planes.shape[1] + (y + padding[0]) * size[1] + padding[1]
                copy_run(source, (c * image.shape[1] + y) * width, target, to, wide)


@numba.njit(inline="always")
def _weave(phases, out, stride):  # type: ignore[no-untyped-def]
    """Interleave ``phases``, shape (phases, channels, positions), into ``out``, shape (channels, height, width)."""
    wide = (out.shape[2] + stride[1] - 1) // stride[1]
    flat, source, step = out.reshape(-1), phases.reshape(-1), phases.shape[1] * phases.shape[2]
    for c in range(out.shape[0]):
        for y in range(out.shape[1]):
            first = y % stride[0] * stride[1] * step + c * phases.shape[2] + y // stride[0] * wide
            line = (c * out.shape[1] + y) * out.shape[2]
            if stride[1] == 2:
                weave_run(source, first, first + step, flat, line, out.shape[2])
            else:
                for z in range(out.shape[2]):
                    flat[line + z] = source[first + z % stride[1] * step + z // stride[1]]


@kernel(
    numba.void(
        _IMAGES, numba.types.UniTuple(_PAIR, 3), _FLOAT[:, ::1], numba.types.UniTuple(_TABLE, 3), _FLAT, _FLAT, _IMAGES,
        _PAIR, numba.boolean,
    ),
)  # fmt: skip
def _convolve(x, layout, planes, tables, panels, bias, out, stride, relu):  # type: ignore[no-untyped-def]
    """Convolve for each phase of results, ``stride`` apart in ``out``.

    ``layout`` is that of `_lay_out`. ``tables`` are the positions of patches, the offsets of their samples for all
    phases, and the bounds of each phase. ``panels`` are the weights, the panels of a phase side by side.
    """
    places, taps, begins = tables
    channels, phases = out.shape[1], stride[0] * stride[1]
    count = ((out.shape[2] + stride[0] - 1) // stride[0]) * ((out.shape[3] + stride[1] - 1) // stride[1])
    room = (channels + LANES - 1) // LANES * LANES
    zero = np.float32(0)
    sums = np.empty(_PLACES_AT_ONCE * 2 * LANES, x.dtype)
    apart = np.zeros((phases if phases > 1 else 0, channels, count), x.dtype)
    flat, flat_apart = planes.reshape(-1), apart.reshape(-1)
    for n in range(x.shape[0]):
        _lay_out(x[n], planes, layout)
        flat_out = out[n].reshape(-1)
        for place in range(0, places.size, _PLACES_AT_ONCE):
            at = places[place : place + _PLACES_AT_ONCE]
            num_places = min(at.size, count - place)
            for c in range(0, channels, 2 * LANES):
                used, width = _panel(channels, c)
                for phase in range(phases):
                    first, end = begins[phase], begins[phase + 1]
                    if phases > 1 and first == end:
                        continue
                    start, following = room * first + c * (end - first), min(end, first + _TAPS_AT_ONCE)
                    add_products(flat, at, taps[first:following], panels, start, width, sums, 0, bias, c, 0)
                    for k in range(following, end, _TAPS_AT_ONCE):
                        more = taps[k : min(end, k + _TAPS_AT_ONCE)]
                        add_products(
                            flat, at, more, panels, start + (k - first) * width, width, sums, 0, sums, 0, width
                        )
                    if relu:
                        for k in range(at.size * width):
                            value = sums[k]
                            sums[k] = value if value > zero or np.isnan(value) else zero
                    if phases == 1:
                        turn(sums, 0, width, (num_places, used), flat_out, c * count + place, count)
                    else:
                        to = (phase * channels + c) * count + place
                        turn(sums, 0, width, (num_places, used), flat_apart, to, count)
        if phases > 1:
            _weave(apart, out[n], stride)


@kernel(
    numba.void(
        _IMAGES, numba.types.UniTuple(_PAIR, 3), _FLOAT[:, ::1], numba.types.UniTuple(_TABLE, 3), _FLOAT[:, :, ::1],
        _FLOAT[:, ::1],
    ),
)  # fmt: skip
def _to_weights(x, layout, planes, tables, gy, dweight):  # type: ignore[no-untyped-def]
    """Compute the gradient of the weights, shape (out, depth), from ``gy``, shape (images, out, positions)."""
    places, taps, _ = tables
    channels, count, depth = gy.shape[1], gy.shape[2], dweight.shape[1]
    sums = np.zeros(taps.size * ((channels + LANES - 1) // LANES * LANES), x.dtype)
    panel = np.zeros(min(count, _POSITIONS_AT_ONCE) * 2 * LANES, x.dtype)
    flat, images, into = planes.reshape(-1), gy.reshape(-1), dweight.reshape(-1)
    for n in range(x.shape[0]):
        _lay_out(x[n], planes, layout)
        for place in range(0, count, _POSITIONS_AT_ONCE):
            at = places[place : min(count, place + _POSITIONS_AT_ONCE)]
            for c in range(0, channels, 2 * LANES):
                used, width = _panel(channels, c)
                if used < width:
                    panel[:] = 0
                turn(images, (n * channels + c) * count + place, count, (used, at.size), panel, 0, width)
                add_products(flat, taps, at, panel, 0, width, sums, taps.size * c, sums, taps.size * c, width)
    for c in range(0, channels, 2 * LANES):
        used, width = _panel(channels, c)
        turn(sums, taps.size * c, width, (depth, used), into, c * depth, depth)


@kernel(numba.void(_FLOAT[:, ::1], _FLAT))
def _pack(weight, panels):  # type: ignore[no-untyped-def]
    """Pack ``weight``, shape (out, depth), into panels for `_convolve` with one phase."""
    channels, depth = weight.shape
    for c in range(0, channels, 2 * LANES):
        used, width = _panel(channels, c)
        if used < width:
            panels[c * depth : (c + width) * depth] = 0
        turn(weight.reshape(-1), c * depth, depth, (used, depth), panels, c * depth, width)


@kernel(numba.void(_FLOAT[:, :, ::1], _TABLE, _TABLE, _FLAT))
def _pack_phases(weight, chosen, begins, panels):  # type: ignore[no-untyped-def]
    """Pack ``weight``, shape (out, in, kernel), for the input's gradient: the ``chosen`` places of each phase."""
    outputs, inputs, kernel = weight.shape
    room = (inputs + LANES - 1) // LANES * LANES
    flat, lines = weight.reshape(-1), np.zeros(kernel * 2 * LANES, weight.dtype)
    for c in range(0, inputs, 2 * LANES):
        used, width = _panel(inputs, c)
        lines[:] = 0
        for o in range(outputs):
            turn(flat, (o * inputs + c) * kernel, kernel, (used, kernel), lines, 0, width)
            for phase in range(begins.size - 1):
                first, count = begins[phase] // outputs, (begins[phase + 1] - begins[phase]) // outputs
                start = room * begins[phase] + (c * outputs + o * width) * count
                for k in range(count):
                    copy_run(lines, chosen[first + k] * width, panels, start + k * width, width)


class _Layout(NamedTuple):
    """The layout of an image for `_lay_out`, and the tables of its patches and samples."""

    channels: int
    step: int
    """Elements from one plane to the next: an odd number of cache lines, so that channels map to different sets."""
    how: tuple[Pair, Pair, Pair]
    tables: tuple[np.ndarray, np.ndarray, np.ndarray]
    is_padded: bool
    """True if patches read beyond the image."""

    def planes(self) -> np.ndarray:
        """Return memory for one image, zeroed if patches read beyond it."""
        planes = _aligned(self.channels * self.step).reshape(self.channels, self.step)
        if self.is_padded:
            planes[...] = 0
        return planes


def _aligned(size: int) -> np.ndarray:
    """Return memory that starts at a cache line, as large arrays do."""
    return empty((max(size, 1 << 14),), np.float32)[:size]


def _step(size: Pair) -> int:
    lines = -(-size[0] * size[1] // 16)
    return (lines + 1 - lines % 2) * 16


def _sums_of(*axes: Any) -> np.ndarray:
    """Return all sums of one number of each axis, the last axis varying fastest."""
    return functools.reduce(np.add.outer, (np.asarray(axis, np.int64) for axis in axes)).reshape(-1)


def _filled(table: np.ndarray) -> np.ndarray:
    """Repeat the last entry up to a multiple of `ROWS`; results there are unused."""
    return np.concatenate([table, np.full(-table.size % ROWS, table[-1])])


@functools.lru_cache
def _of_input(shape: tuple[int, ...], kernel: Pair, results: Pair, stride: Pair, padding: Pair) -> _Layout:
    """Return the layout of an input of ``shape``."""
    size = (shape[2] + 2 * padding[0], shape[3] + 2 * padding[1])
    step, wide = _step(size), size[1]
    places = _sums_of(np.arange(results[0]) * (stride[0] * wide), np.arange(results[1]) * stride[1])
    taps = _sums_of(np.arange(shape[1]) * step, np.arange(kernel[0]) * wide, np.arange(kernel[1]))
    tables = _filled(places), _filled(taps), np.array([0, taps.size])
    return _Layout(shape[1], step, (size, (kernel[0], stride[0]), padding), tables, any(padding))


@functools.lru_cache
def _of_gradient(
    channels: int, kernel: Pair, size: Pair, stride: Pair, padding: Pair
) -> tuple[_Layout, np.ndarray]:  # fmt: skip
    """Return the layout of ``gy`` for the gradient of an input of ``size``, and the kernel places of each phase."""
    of_phases = [
        [[i for i in range(kernel[k]) if (phase + padding[k] - i) % stride[k] == 0] for phase in range(stride[k])]
        for k in (0, 1)
    ]
    shifts = [
        [[(phase + padding[k] - i) // stride[k] for i in places] for phase, places in enumerate(of_phases[k])]
        for k in (0, 1)
    ]
    before = [max([0, *(-shift for phase in axis for shift in phase)]) for axis in shifts]
    after = [max([0, *(shift for phase in axis for shift in phase)]) for axis in shifts]
    extent = [-(-size[k] // stride[k]) for k in (0, 1)]
    results = [(size[k] + 2 * padding[k] - kernel[k]) // stride[k] + 1 for k in (0, 1)]
    high, wide = (before[k] + extent[k] + after[k] for k in (0, 1))
    step = _step((high, wide))
    places = _sums_of((np.arange(extent[0]) + before[0]) * wide, np.arange(extent[1]) + before[1])
    planes = np.arange(channels) * step
    taps = [_sums_of(planes, np.array(down, np.int64) * wide, right) for down in shifts[0] for right in shifts[1]]
    chosen = [
        _sums_of(np.array(rows, np.int64) * kernel[1], columns) for rows in of_phases[0] for columns in of_phases[1]
    ]
    tables = _filled(places), np.concatenate(taps), np.cumsum([0, *(table.size for table in taps)])
    how = (high, wide), (1, 1), (before[0], before[1])
    is_padded = any(before + after) or extent != results  # patches may end before the input does
    return _Layout(channels, step, how, tables, is_padded), np.concatenate(chosen)


def _room(channels: int, depth: int) -> np.ndarray:
    """Return memory for panels of ``channels``."""
    return _aligned(-(-channels // LANES) * LANES * depth)


def conv2d(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, out: np.ndarray, stride: Pair, padding: Pair, relu: bool
) -> None:  # fmt: skip
    """See `reference.conv2d`; float32, at least one result."""
    layout = _of_input(x.shape, weight.shape[2:], out.shape[2:], stride, padding)
    outputs, depth = len(weight), weight[0].size
    panels, padded = _room(outputs, depth), np.zeros(outputs + 2 * LANES, np.float32)
    _pack(weight.reshape(outputs, depth), panels)
    if bias is not None:
        padded[:outputs] = bias
    places, taps, begins = layout.tables
    tables = places, taps[:depth], begins
    _convolve(x, layout.how, layout.planes(), tables, panels, padded, out, (1, 1), relu)


def gradient_of_input(gy: np.ndarray, weight: np.ndarray, dx: np.ndarray, stride: Pair, padding: Pair) -> None:
    """Set ``dx`` to the gradient of the input of `conv2d` without ReLU."""
    outputs, inputs = weight.shape[:2]
    layout, chosen = _of_gradient(outputs, weight.shape[2:], dx.shape[2:], stride, padding)
    panels = _room(inputs, layout.tables[1].size)
    _pack_phases(weight.reshape(outputs, inputs, -1), chosen, layout.tables[2], panels)
    nothing = np.zeros(inputs + 2 * LANES, np.float32)
    _convolve(gy, layout.how, layout.planes(), layout.tables, panels, nothing, dx, stride, False)


def gradient_of_weight(x: np.ndarray, gy: np.ndarray, dweight: np.ndarray, stride: Pair, padding: Pair) -> None:
    """Set ``dweight`` to the gradient of the weights of `conv2d` without ReLU."""
    layout = _of_input(x.shape, dweight.shape[2:], gy.shape[2:], stride, padding)
    outputs = len(dweight)
    flat = gy.reshape(*gy.shape[:2], -1), dweight.reshape(outputs, -1)
    _to_weights(x, layout.how, layout.planes(), layout.tables, *flat)
