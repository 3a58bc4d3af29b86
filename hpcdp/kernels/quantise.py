"""Gradients in 2 bits or 1 bit an element, the rest being kept, for NumPy arrays. Imports: lanes, numba.

`reference.quantise` is the specification: same names, same arguments, same bits. Comparing a vector of elements gives a
vector of bits, which is (a part of) a packed word as it stands. LLVM does not find that in a loop over elements (0.04
of the copy rate), so the words are written as vector operations here, which LLVM turns into what the processor has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float64, intp, types, uint32
from numba.extending import intrinsic

from .lanes import WORD, Lanes
from .machine_code import kernel


@intrinsic
def _pack_16(typingctx: Any, grad: Any, residual: Any, index: Any, threshold: Any, magnitude: Any) -> Any:
    """The word of 16 elements from ``index`` on; changes ``residual``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        added = Lanes(context, builder, (signature.args[0], args[0]), args[2], 16).load()
        kept = Lanes(context, builder, (signature.args[1], args[1]), args[2], 16)
        total = kept.rounded(builder.fadd(kept.load(), added))
        up = kept.repeat(args[3])
        down = builder.fneg(up)
        plus, minus = builder.fcmp_ordered(">=", total, up), builder.fcmp_ordered("<=", total, down)
        size = kept.repeat(args[4])
        sent = builder.select(plus, size, builder.select(minus, builder.fneg(size), kept.constant(0.0)))
        kept.store(builder.fsub(total, sent))
        return builder.or_(kept.bits(plus), builder.shl(kept.bits(minus), WORD(16)))

    return uint32(grad, residual, intp, float64, float64), generate


@intrinsic
def _unpack_16(typingctx: Any, word: Any, magnitude: Any, out: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = Lanes(context, builder, (signature.args[2], args[2]), args[3], 16)
        up = into.repeat(args[1])
        negative = builder.select(into.flags(args[0], 16), builder.fneg(up), into.constant(0.0))
        into.store(builder.select(into.flags(args[0], 0), up, negative))
        return context.get_dummy_value()

    return types.none(uint32, float64, out, intp), generate


@intrinsic
def _pack_32(typingctx: Any, grad: Any, residual: Any, index: Any, threshold: Any, magnitude: Any) -> Any:
    """The word of 32 elements from ``index`` on; changes ``residual``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        added = Lanes(context, builder, (signature.args[0], args[0]), args[2], 32).load()
        kept = Lanes(context, builder, (signature.args[1], args[1]), args[2], 32)
        total = kept.rounded(builder.fadd(kept.load(), added))
        plus = builder.fcmp_ordered(">", total, kept.repeat(args[3]))
        sent = kept.repeat(args[4])
        kept.store(builder.fsub(total, builder.select(plus, sent, builder.fneg(sent))))
        return kept.bits(plus)

    return uint32(grad, residual, intp, float64, float64), generate


@intrinsic
def _unpack_32(typingctx: Any, word: Any, magnitude: Any, out: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        into = Lanes(context, builder, (signature.args[2], args[2]), args[3], 32)
        sent = into.repeat(args[1])
        into.store(builder.select(into.flags(args[0], 0), sent, builder.fneg(sent)))
        return context.get_dummy_value()

    return types.none(uint32, float64, out, intp), generate


# A factory would close over an intrinsic, and then Numba's cache finds nothing in the next process; the tails as
# functions of their own took 0.3 s more to compile, of 1.0.
@kernel()
def pack_two_bit(grad, residual, threshold, magnitude, words):  # type: ignore[no-untyped-def]
    """See `reference.quantise.pack_two_bit`."""
    if residual.size != grad.size or words.size * 16 < grad.size:
        raise ValueError("residual must have as many elements as grad, and words a bit field for each")
    whole = grad.size // 16
    for k in range(whole):
        words[k] = _pack_16(grad, residual, 16 * k, threshold, magnitude)
    rest = grad.size - 16 * whole
    if rest:
        last_grad, last_residual = np.zeros(16, grad.dtype), np.zeros(16, residual.dtype)
        for i in range(rest):
            last_grad[i], last_residual[i] = grad[16 * whole + i], residual[16 * whole + i]
        used = (1 << rest) - 1  # the padding's zeros may reach the threshold
        words[whole] = _pack_16(last_grad, last_residual, 0, threshold, magnitude) & (used << 16 | used)
        for i in range(rest):
            residual[16 * whole + i] = last_residual[i]


@kernel()
def unpack_two_bit(words, magnitude, out):  # type: ignore[no-untyped-def]
    """See `reference.quantise.unpack_two_bit`."""
    if words.size * 16 < out.size:
        raise ValueError("words must have a bit field for each element of out")
    whole = out.size // 16
    for k in range(whole):
        _unpack_16(words[k], magnitude, out, 16 * k)
    rest = out.size - 16 * whole
    if rest:
        last = np.empty(16, out.dtype)
        _unpack_16(words[whole], magnitude, last, 0)
        for i in range(rest):
            out[16 * whole + i] = last[i]


@kernel()
def pack_one_bit(grad, residual, threshold, magnitude, words):  # type: ignore[no-untyped-def]
    """See `reference.quantise.pack_one_bit`."""
    if residual.size != grad.size or words.size * 32 < grad.size:
        raise ValueError("residual must have as many elements as grad, and words a bit field for each")
    whole = grad.size // 32
    for k in range(whole):
        words[k] = _pack_32(grad, residual, 32 * k, threshold, magnitude)
    rest = grad.size - 32 * whole
    if rest:
        last_grad, last_residual = np.zeros(32, grad.dtype), np.zeros(32, residual.dtype)
        for i in range(rest):
            last_grad[i], last_residual[i] = grad[32 * whole + i], residual[32 * whole + i]
        used = (1 << rest) - 1  # the padding's zeros may be above the threshold
        words[whole] = _pack_32(last_grad, last_residual, 0, threshold, magnitude) & used
        for i in range(rest):
            residual[32 * whole + i] = last_residual[i]


@kernel()
def unpack_one_bit(words, magnitude, out):  # type: ignore[no-untyped-def]
    """See `reference.quantise.unpack_one_bit`."""
    if words.size * 32 < out.size:
        raise ValueError("words must have a bit field for each element of out")
    whole = out.size // 32
    for k in range(whole):
        _unpack_32(words[k], magnitude, out, 32 * k)
    rest = out.size - 32 * whole
    if rest:
        last = np.empty(32, out.dtype)
        _unpack_32(words[whole], magnitude, last, 0)
        for i in range(rest):
            out[32 * whole + i] = last[i]
