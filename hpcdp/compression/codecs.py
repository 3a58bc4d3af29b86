"""Codecs: from an array of gradients to fewer bytes, and back. They keep nothing; see `feedback`.

All take 1-D, contiguous arrays of float16, bfloat16, float32 or float64, of any number of elements, of NumPy or CuPy;
compiled kernels encode and decode those of CuPy, and NumPy's of float32. What has been encoded depends on nothing but
its input, so all ranks decode the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar, Protocol

import numpy as np

from .. import kernels
from ..arrays import Array, array_namespace, is_host
from ..errors import ConfigError, is_number
from ..kernels.reference.compress import num_blocks

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
"""What a float32 can be."""


class Codec(Protocol):
    """What every codec does."""

    name: ClassVar[str]
    by_element: ClassVar[bool]
    """Whether what is sent of an element depends on no other, and so not on the segment that it lies in."""

    @property
    def feedback(self) -> float:
        """How much of what was not sent should be added to what is sent next, 0 to 1."""
        ...

    def of_sum(self, n: int) -> Codec:
        """What encodes a sum of what ``n`` of this kind have sent."""
        ...

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """Of what ``count`` elements of ``dtype`` are encoded to."""
        ...

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        """Encode ``residual + x``; what is not sent of it remains in ``residual``. Changes ``residual`` and ``wire``.

        Args:
            x, residual: shape ``(count,)``, of one dtype.
            wire: uint8, shape ``(nbytes(count, dtype),)``.
        """
        ...

    def decode(self, wire: Array, out: Array) -> None:
        """What `encode` has sent; changes ``out``, shape ``(count,)``."""
        ...


def _kernels(x: Array) -> ModuleType:
    if is_host(x) and x.dtype != np.float32:
        return kernels.specification("compress")
    return kernels.kernels_for("compress", x)


def _casts(x: Array) -> ModuleType:
    return kernels.kernels_for("cast", x)


def _scaled(wire: Array, count: int) -> tuple[Array, Array]:
    """The scales of blocks, and the words behind them."""
    words = wire.view(np.uint32)
    blocks = num_blocks(count)
    return words[:blocks].view(np.float32), words[blocks:]


@dataclass(frozen=True)
class TwoBit:
    """A number, its negative, or nothing: 2 bits an element, and 4 bytes for each block of 256 elements.

    Args:
        threshold: what an element must reach to be sent, and what is sent then. None: it must reach 0.6 of its block's
            root mean square, and the mean of those that do is sent; that fits gradients of any size.

    Source: Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015, and with a threshold
    the formula of MXNet's kvstore; the mean as in Li et al., "Ternary weight networks", 2016, section 2.2.
    """

    name: ClassVar[str] = "2bit"
    by_element: ClassVar[bool] = False
    feedback: ClassVar[float] = 1.0
    threshold: float | None = None

    def __post_init__(self) -> None:
        is_valid = self.threshold is None or _is_number(self.threshold, least=_SMALLEST)
        _require("2bit", "threshold", is_valid, self.threshold, "above 0")

    def of_sum(self, n: int) -> TwoBit:
        return self if self.threshold is None else TwoBit(n * self.threshold)

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        return 4 * (num_blocks(count) + -(-count // 16))

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        _kernels(x).encode_two_bit(x, residual, float(self.threshold or 0), *_scaled(wire, x.size))

    def decode(self, wire: Array, out: Array) -> None:
        _kernels(out).decode_two_bit(*_scaled(wire, out.size), out)


@dataclass(frozen=True)
class OneBit:
    """The sign alone: 1 bit an element, and 4 bytes for each block of 256 elements.

    Args:
        threshold: None: the sign, times the mean magnitude of the block. A number: ``magnitude`` above it, else
            ``-magnitude``.
        magnitude: what is sent where there is a threshold.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014; the magnitude as in Karimireddy et al., "Error
    feedback fixes SignSGD and other gradient compression schemes", 2019, algorithm 1; with a threshold the formula of
    MXNet's kvstore.
    """

    name: ClassVar[str] = "1bit"
    by_element: ClassVar[bool] = False
    threshold: float | None = None
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _require("1bit", "threshold", self.threshold is None or _is_number(self.threshold), self.threshold, "finite")
        _require("1bit", "magnitude", _is_number(self.magnitude, least=_SMALLEST), self.magnitude, "above 0")
        has_effect = self.threshold is not None or self.magnitude == 1
        _require("1bit", "magnitude", has_effect, self.magnitude, "that is 1 without a threshold")

    @property
    def feedback(self) -> float:
        """Momentum and all of what signs leave out would build each other up."""
        return 0.7 if self.threshold is None else 1.0

    def of_sum(self, n: int) -> OneBit:
        return self if self.threshold is None else OneBit(self.threshold, n * self.magnitude)

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        return 4 * (num_blocks(count) + -(-count // 32))

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        magnitude = 0.0 if self.threshold is None else float(self.magnitude)
        _kernels(x).encode_one_bit(x, residual, float(self.threshold or 0), magnitude, *_scaled(wire, x.size))

    def decode(self, wire: Array, out: Array) -> None:
        _kernels(out).decode_one_bit(*_scaled(wire, out.size), out)


@dataclass(frozen=True)
class Float16:
    """IEEE binary16, 2 bytes an element. What is 65520 and larger arrives as an infinity."""

    name: ClassVar[str] = "fp16"
    by_element: ClassVar[bool] = True
    feedback: ClassVar[float] = 1.0

    def of_sum(self, n: int) -> Float16:
        return self

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        return 2 * count

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        _kernels(x).encode_float16(x, residual, wire.view(np.uint16))

    def decode(self, wire: Array, out: Array) -> None:
        if out.dtype == np.float32:
            _casts(out).from_float16(wire.view(np.uint16), out)
        else:
            out[...] = wire.view(np.float16)


@dataclass(frozen=True)
class BFloat16:
    """The upper half of a float32, 2 bytes an element: its range, and 8 bits of precision."""

    name: ClassVar[str] = "bf16"
    by_element: ClassVar[bool] = True
    feedback: ClassVar[float] = 1.0

    def of_sum(self, n: int) -> BFloat16:
        return self

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        return 2 * count

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        _kernels(x).encode_bfloat16(x, residual, wire.view(np.uint16))

    def decode(self, wire: Array, out: Array) -> None:
        is_wide = out.dtype == np.float32
        wide = out if is_wide else array_namespace(out).empty(out.size, dtype=np.float32)
        _casts(out).from_bfloat16(wire.view(np.uint16), wide)
        if not is_wide:
            with np.errstate(over="ignore"):  # of float16, whose largest is rounded up
                out[...] = wide


@dataclass(frozen=True)
class TopK:
    """The elements of largest magnitude alone, each with its index: 4 bytes more than the element.

    Args:
        ratio: how many of all elements, above 0, at most 1; at least one of a piece that is sent at once.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017; Stich et al., "Sparsified
    SGD with memory", 2018.
    """

    name: ClassVar[str] = "topk"
    by_element: ClassVar[bool] = False
    feedback: ClassVar[float] = 1.0
    ratio: float = 0.01

    def __post_init__(self) -> None:
        is_share = _is_number(self.ratio) and 0 < self.ratio <= 1
        _require("topk", "ratio", is_share, self.ratio, "above 0, at most 1")

    def _sent(self, count: int) -> int:
        return min(count, max(1, round(self.ratio * count)))

    def of_sum(self, n: int) -> TopK:
        return self

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        return self._sent(count) * (4 + dtype.itemsize)

    def _parts(self, wire: Array, x: Array) -> tuple[Array, Array]:
        """Indices and values, first those of more bytes, so that neither lies where its dtype may not."""
        indices, values = (self._sent(x.size) * nbytes for nbytes in (4, x.dtype.itemsize))
        if values < indices:
            return wire[:indices].view(np.uint32), wire[indices:].view(x.dtype)
        return wire[values:].view(np.uint32), wire[:values].view(x.dtype)

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        _kernels(x).encode_top_k(x, residual, *self._parts(wire, x))

    def decode(self, wire: Array, out: Array) -> None:
        _kernels(out).decode_top_k(*self._parts(wire, out), out)


def _is_number(value: object, least: float = -_LARGEST) -> bool:
    return is_number(value) and least <= float(value) <= _LARGEST


def _require(codec: str, name: str, is_valid: bool, got: object, expected: str) -> None:
    if not is_valid:
        raise ConfigError(f"compression {codec}", where=name, expected=f"a number {expected}", got=repr(got))
