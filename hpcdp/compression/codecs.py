"""Codecs of gradients, error feedback, and when compression is worth its time.

Codecs: from an array of gradients to fewer bytes, and back. They keep nothing; see `feedback`.

All take 1-D, contiguous arrays of float16, bfloat16, float32 or float64, of any number of elements, of NumPy or CuPy;
compiled kernels encode and decode those of CuPy, and NumPy's of float32. What has been encoded depends on nothing but
its input, so all ranks decode the same.

Error feedback: what a codec has not sent is added to what it sends next, so that nothing is lost, only late.

Which codec compresses the gradients, and where.

When a codec pays: on links so slow that what it saves there is more than what coding takes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from .. import kernels
from ..core.arrays import Array, array_namespace, is_host
from ..core.checks import boolean, instance, number, one_of
from ..errors import ConfigError
from ..kernels.reference.gradients import num_blocks

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
    return kernels.kernels_for("elementwise", x)


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
        if self.threshold is not None:
            _float32("2bit", "threshold", self.threshold, _SMALLEST, "a number > 0")

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
        if self.threshold is not None:
            _float32("1bit", "threshold", self.threshold, -_LARGEST, "a finite number")
        _float32("1bit", "magnitude", self.magnitude, _SMALLEST, "a number > 0")
        if self.threshold is None and self.magnitude != 1:
            raise ConfigError(
                "compression 1bit", where="magnitude", expected="1 without a threshold", got=self.magnitude
            )

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
        number("compression topk", "ratio", self.ratio, above=0, most=1)

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


def _float32(codec: str, name: str, value: object, least: float, expected: str) -> None:
    number(f"compression {codec}", name, value, least=least, most=_LARGEST, expected=expected)


Zeros = Callable[[int, np.dtype], Array]
"""``zeros(count, dtype)``: a new array, where arrays to be encoded are."""


class ErrorFeedback:
    """A codec that remembers, for one flat array whose parts are encoded again and again.

    Args:
        codec: any; see `codecs`.
        count, dtype: elements of the array.
        share: how much of what was not sent is added to what is sent next, 0 to 1; default what the codec needs.
        zeros: makes the `residual`.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014, section 3; Stich et al., "Sparsified SGD with
    memory", 2018; Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", 2019; the
    share as in Wu et al., "Error compensated quantized SGD", 2018, section 3.
    """

    def __init__(
        self, codec: Codec, count: int, dtype: np.dtype, share: float | None = None, zeros: Zeros = np.zeros
    ) -> None:
        self.codec = codec
        self.share = codec.feedback if share is None else share
        self.residual = zeros(count, dtype)
        """What was not sent yet, shape ``(count,)``, in the gradients' dtype."""

    @np.errstate(over="ignore", invalid="ignore")  # what cannot be kept, or sent, is found when it has come
    def encode(self, x: Array, part: slice, wire: Array, codec: Codec | None = None) -> None:
        """Encode ``x``, elements ``part`` of the array, and what was not sent of them before; changes ``wire``.

        Args:
            codec: default that of construction.
        """
        residual = self.residual[part]
        if self.share != 1:
            residual *= residual.dtype.type(self.share)
        (self.codec if codec is None else codec).encode(x, residual, wire)

    def rescale(self, factor: float) -> None:
        """From now on what is encoded is so many times what it was, and so is what was not sent yet."""
        with np.errstate(over="ignore"):  # what cannot be kept is found when it is sent
            self.residual *= self.residual.dtype.type(factor)

    def nbytes(self, count: int) -> int:
        """Of what ``count`` elements are encoded to."""
        return self.codec.nbytes(count, self.residual.dtype)


_MXNET_THRESHOLD = {"2bit": 0.5, "1bit": 0.5}
"""Where a dict gives none."""

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Float16, BFloat16, TwoBit, OneBit, TopK)}
"""By name."""


@dataclass(frozen=True)
class Compression:
    """How gradients are compressed on their way between nodes.

    Args:
        codec: see `codecs`.
        feedback: how much of what was not sent is added to what is sent next, 0 to 1. None: what the codec needs, which
            is all of it but for 1 bit (0.7).
        inside_nodes: let the ranks of a node exchange compressed messages, too, instead of reading each other's memory.
            That costs time; it is for trying out a codec on one machine.
    """

    codec: Codec
    feedback: float | None = None
    inside_nodes: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.codec, type) or not hasattr(self.codec, "of_sum"):
            raise ConfigError(
                "compression", where="codec", expected="a codec, e.g. TwoBit()", got=repr(self.codec),
                remedy="Compression.of takes a name, e.g. '2bit'",
            )  # fmt: skip
        boolean("compression", "inside_nodes", self.inside_nodes)
        if self.feedback is not None:
            number("compression", "feedback", self.feedback, least=0, most=1)

    @classmethod
    def of(cls, given: Settings) -> Compression | None:
        """From what a program gives: a name such as ``"2bit"`` or ``"topk:ratio=0.05"``, a codec, all settings, or a
        dict as MXNet takes, ``{"type": "2bit", "threshold": 0.5}``.

        Behind the colon stand the codec's settings, ``feedback=0.5`` and ``inside_nodes=on``, between commas.

        Raises:
            ConfigError: there is no such codec or setting; says which there are.
        """
        if given is None or isinstance(given, Compression):
            return given
        if isinstance(given, str):
            return cls._parse(given)
        if isinstance(given, Mapping):
            return cls._of_dict(given)
        if isinstance(given, tuple(CODECS.values())):
            return cls(given)
        raise ConfigError("compression", expected=f"one of {', '.join(CODECS)}", got=repr(given))

    @classmethod
    def _of_dict(cls, given: Mapping[str, Any]) -> Compression:
        expected = "a dict such as {'type': '2bit', 'threshold': 0.5}"
        name = instance("compression", "type", given.get("type"), str, expected)
        settings = {"threshold": _MXNET_THRESHOLD[name]} if name in _MXNET_THRESHOLD else {}
        settings |= {key: value for key, value in given.items() if key != "type"}
        return cls._parse(f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}")

    @classmethod
    def _parse(cls, text: str) -> Compression:
        name, _, rest = text.partition(":")
        kind = CODECS[one_of("compression", None, name, CODECS)]
        numbers = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        settings: dict[str, float] = {}
        feedback, inside_nodes = None, False
        said: set[str] = set()
        for each in filter(None, rest.split(",")):
            key, _, value = each.partition("=")
            try:
                if key in said:
                    raise ValueError("twice")
                said.add(key)
                if each in ("inside_nodes=on", "inside_nodes=off"):
                    inside_nodes = value == "on"
                elif key == "feedback":
                    feedback = float(value)
                else:
                    settings[numbers[numbers.index(key)]] = float(value)
            except ValueError as error:
                valid = [f"{number}=NUMBER" for number in (*numbers, "feedback")] + ["inside_nodes=on|off"]
                raise ConfigError(
                    f"compression {name}", expected=f"{' or '.join(valid)}, each once", got=repr(each)
                ) from error
        return cls(kind(**settings), feedback, inside_nodes)

    def __str__(self) -> str:
        """What `of` makes the same of again."""
        numbers = {**dataclasses.asdict(self.codec), "feedback": self.feedback}  # type: ignore[call-overload]
        settings = [f"{key}={float(value)!r}" for key, value in numbers.items() if value is not None]  # NumPy's, too
        settings += ["inside_nodes=on"] if self.inside_nodes else []
        return self.codec.name + (f":{','.join(settings)}" if settings else "")

    def for_array(self, count: int, dtype: np.dtype, zeros: Zeros = np.zeros) -> ErrorFeedback:
        """What encodes an array of ``count`` elements; ``zeros`` is where that is, see `ErrorFeedback`."""
        return ErrorFeedback(self.codec, count, dtype, self.feedback, zeros)


Settings = Mapping[str, Any] | Compression | Codec | str | None
"""What `Compression.of` takes; None: nothing is compressed."""


_COUNT = 1 << 18
_REPEATS = 5


def coding_s(codec: Codec, count: int = _COUNT) -> tuple[float, float]:
    """Seconds to encode and to decode ``count`` elements of float32 on this core, the least of some times."""
    x = np.random.default_rng(0).standard_normal(count, np.float32)
    residual, out = np.zeros_like(x), np.empty_like(x)
    wire = np.empty(codec.nbytes(count, x.dtype), np.uint8)
    encoding, decoding = [], []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        codec.encode(x, residual, wire)
        middle = time.perf_counter()
        codec.decode(wire, out)
        encoding.append(middle - begin)
        decoding.append(time.perf_counter() - middle)
    return min(encoding), min(decoding)


def pays_below(codec: Codec | Compression | str, n: int = 2) -> float:
    """The rate of links between ``n`` nodes, in bytes a second, below which a sum takes less time with the codec.

    Without it 2 (n - 1) / n S bytes leave every node; with it that part w of them which the codec leaves, but S bytes
    are encoded and (2 n - 1) / n S decoded. Nothing is taken to be coded while messages are under way: with cores to
    spare it pays on faster links, too. Measures the codec on this core, which takes some milliseconds.
    """
    settings = Compression.of(codec)
    if settings is None or n < 2:
        raise ConfigError("pays_below", expected="a codec, and 2 nodes or more", got=f"{codec!r} and {n!r}")
    codec, nbytes = settings.codec, 4 * _COUNT
    encoding_s, decoding_s = coding_s(codec)
    saved = 2 * (n - 1) / n * (nbytes - codec.nbytes(_COUNT, np.dtype(np.float32)))
    return max(0.0, saved) / (encoding_s + (2 * n - 1) / n * decoding_s)
