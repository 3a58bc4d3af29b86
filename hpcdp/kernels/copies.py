"""Copies of bytes that request cache lines ahead, or write past the caches.

Arrays are contiguous, shape ``(nbytes,)``, uint8, if not said otherwise. After the last copy past the caches `fence`
must follow. libc copies long data by instructions that are slow for lines in the cache of another core (AMD), and only
data longer than the third-level cache past it.

AMD processors copy without requests up to `_REQUESTED_NBYTES`: those beyond the end of a piece take lines from the core
that writes them next. There 64 KB from each of two cores to the other one take 12 instead of 16 us (Zen 1).
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .jit import kernel

CORES_KEEP_LINES = binding.get_host_cpu_name().startswith("znver")
"""True if the only rank that reads another's staged lines should also write to each of them.

On AMD EPYC their rank then writes its next data 1.7 to 4 times as fast as if both cores still shared the lines, the
second figure for cores of different L3 caches. On Intel Xeon (Emerald Rapids) an exchange of 64 KB takes a fifth
longer.
"""
STREAMED_NBYTES = 2 << 20
"""Results of at least this size are written past the caches: lines need not be read before they are written. A program
that reads them next was faster in one of two runs, and slower in the other (Intel Xeon, 2 MB of second-level cache).
"""

_LINE, _LINES = 64, 256
"""Bytes of a cache line, and of the lines that are copied at once."""
_AHEAD = 2048
"""Bytes between the lines that are copied and those that are requested."""
_REQUESTED_NBYTES = 512 << 10 if CORES_KEEP_LINES else 0
"""Lines ahead are requested in copies of at least this size: the second-level cache of a core (Zen 1)."""
_VECTOR = ir.VectorType(ir.IntType(64), 8)

_memcpy = types.ExternalFunction("memcpy", types.voidptr(types.voidptr, types.voidptr, types.intp))


def _word(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def _address(typingctx: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _word(context, builder, signature.args[0], *args)
        return builder.bitcast(pointer, ir.IntType(8).as_pointer())

    return types.voidptr(array, types.intp), generate


def _copies_lines(twice: bool, streams: bool, requests: bool) -> Any:
    """Return an intrinsic that copies `_LINES` bytes of an array to another, which is aligned if it ``streams``.

    If it ``requests`` lines ahead, these are lines to read and, of an array that is kept in the cache, to write. With
    ``twice`` the intrinsic also copies them to a third array, kept in the cache.
    """

    @intrinsic
    def copy_lines(typingctx: Any, x: Any, first: Any, out: Any, start: Any, kept: Any, begin: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def lines(place: int) -> list[Any]:
                array_type, (array, index) = signature.args[place], args[place : place + 2]
                data = cgutils.create_struct_proxy(array_type)(context, builder, array).data
                offsets = [builder.add(index, index.type(line)) for line in range(0, _LINES, _LINE)]
                return [builder.gep(data, [offset]) for offset in offsets]

            def request(pointers: list[Any], writing: int) -> None:
                byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
                kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
                prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
                for pointer in pointers:
                    ahead = builder.gep(builder.bitcast(pointer, byte), [ir.IntType(64)(_AHEAD)])
                    builder.call(prefetch, [ahead, word(writing), word(3), word(1)])

            def store(values: list[Any], pointers: list[Any], past_caches: bool) -> None:
                for value, pointer in zip(values, pointers, strict=True):
                    place = builder.bitcast(pointer, _VECTOR.as_pointer())
                    stored = builder.store(value, place, align=_LINE if past_caches else 1)
                    if past_caches:
                        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))

            sources, targets = lines(0), lines(2)
            if requests:
                request(sources, 0)
                if not streams:
                    request(targets, 1)
                if twice:
                    request(lines(4), 1)
            values = [builder.load(builder.bitcast(p, _VECTOR.as_pointer()), align=1) for p in sources]
            if twice:
                store(values, lines(4), False)
            store(values, targets, streams)
            return context.get_dummy_value()

        return types.none(x, types.intp, out, types.intp, kept, types.intp), generate

    return copy_lines


_copy_lines, _copy_lines_with_requests, _stream_lines, _stream_and_keep_lines = (
    _copies_lines(False, False, False),
    _copies_lines(False, False, True),
    _copies_lines(False, True, not CORES_KEEP_LINES),
    _copies_lines(True, True, not CORES_KEEP_LINES),
)


@intrinsic
def fence(typingctx: Any) -> Any:
    """Order writes past the caches before later ones."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.none(), generate


@kernel()
def copy_bytes(out, x):  # type: ignore[no-untyped-def]
    """Copy ``x`` to ``out``."""
    whole = x.size - x.size % _LINES
    if x.size < _REQUESTED_NBYTES:
        for i in range(0, whole, _LINES):
            _copy_lines(x, i, out, i, out, i)
    else:
        for i in range(0, whole, _LINES):
            _copy_lines_with_requests(x, i, out, i, out, i)
    _memcpy(_address(out, whole), _address(x, whole), x.size - whole)


@kernel()
def stream_bytes(out, x):  # type: ignore[no-untyped-def]
    """Copy ``x`` to ``out`` past the caches."""
    head = min(-out.ctypes.data % _LINE, x.size)
    last = x.size - (x.size - head) % _LINES
    _memcpy(_address(out, 0), _address(x, 0), head)
    for i in range(head, last, _LINES):
        _stream_lines(x, i, out, i, out, i)
    _memcpy(_address(out, last), _address(x, last), x.size - last)


@kernel()
def stream_and_keep_bytes(out, kept, x):  # type: ignore[no-untyped-def]
    """Copy ``x`` to ``out`` past the caches, and to ``kept`` through them."""
    head = min(-out.ctypes.data % _LINE, x.size)
    last = x.size - (x.size - head) % _LINES
    for first, end in ((0, head), (last, x.size)):
        _memcpy(_address(out, first), _address(x, first), end - first)
        _memcpy(_address(kept, first), _address(x, first), end - first)
    for i in range(head, last, _LINES):
        _stream_and_keep_lines(x, i, out, i, kept, i)


@intrinsic
def _stream_scaled_lines(typingctx: Any, x: Any, first: Any, out: Any, factor: Any) -> Any:
    """Write `_LINES` bytes of float32 of ``x`` from element ``first`` on, times ``factor``, past the caches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        floats = ir.VectorType(ir.FloatType(), _LINE // 4)
        (x_type, _, out_type, _), (array, index, target, scale) = signature.args, args
        single = builder.insert_element(ir.Constant(floats, ir.Undefined), scale, ir.IntType(32)(0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), _LINE // 4), [0] * (_LINE // 4))
        factors = builder.shuffle_vector(single, ir.Constant(floats, ir.Undefined), mask)
        for line in range(0, _LINES // 4, _LINE // 4):
            place = builder.add(index, index.type(line))
            source = builder.bitcast(_word(context, builder, x_type, array, place), floats.as_pointer())
            goal = builder.bitcast(_word(context, builder, out_type, target, place), floats.as_pointer())
            stored = builder.store(builder.fmul(builder.load(source, align=4), factors), goal, align=_LINE)
            stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.none(x, types.intp, out, types.float32), generate


@kernel()
def stream_scaled(out, x, factor):  # type: ignore[no-untyped-def]
    """Write ``x`` times ``factor`` to ``out`` past the caches; shape ``(count,)``, float32."""
    step = _LINES // 4
    head = min(-out.ctypes.data % _LINE // 4, x.size)
    last = x.size - (x.size - head) % step
    for i in range(head):
        out[i] = x[i] * factor
    for i in range(head, last, step):
        _stream_scaled_lines(x, i, out, factor)
    for i in range(last, x.size):
        out[i] = x[i] * factor
    fence()
