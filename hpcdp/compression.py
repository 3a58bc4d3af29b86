"""Gradient codecs (fp16, bf16, 2 bits, 1 bit, top-k), error feedback, compressed allreduce, break-even link rate.

A codec is stateless: it encodes a 1-D, contiguous array of float16, bfloat16, float32 or float64 into fewer bytes, and
decodes them. The arrays are NumPy's or CuPy's and may be empty. Compiled kernels encode and decode CuPy arrays and
NumPy arrays of float32. The bytes depend only on the input, so all ranks decode the same values.

Error feedback adds what a codec has not sent to the next array that it encodes: nothing is lost, only delayed.

In a compressed allreduce rank r owns the r-th shard of a segment. Every rank encodes the other shards and sends each to
its owner. The owner decodes them, adds them to its own, encodes the sum and sends it to all. The part that an encoder
omits is added to what it encodes next (`ErrorFeedback`). A rank keeps the residuals of the shards that it sends, the
owner of a shard that of its sum, so one array is enough for both::

    rank 0    own  e(b)  e(c)             residual:  of the sum of a, of its b, of its c
    rank 1    e(a)  own  e(c)      -->    residual:  of its a, of the sum of b, of its c
    rank 2    e(a)  e(b)  own             residual:  of its a, of its b, of the sum of c

The owner adds its own shard uncompressed. It, too, decodes the encoded sum, so all ranks end with the same bits.

Sent per rank: 2 (n - 1) messages and 2 (n - 1) w(S / n) bytes a segment, where w is the encoded size of a shard.

Source: Bernstein et al., "signSGD with majority vote", 2018, and Tang et al., "DoubleSqueeze", 2019 (compressing both
ways, with error feedback at both ends); the owners as parameter servers as in Li et al., "Scaling distributed machine
learning with the parameter server", 2014.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from . import kernels
from .comm import Communicator, Request
from .comm.communicator import Steps, bounds, resolve, split
from .comm.progress import MESSAGE_NBYTES, in_lanes, segments, together
from .core.arrays import Array, array_namespace, is_host
from .core.checks import boolean, choices, instance, number, one_of
from .errors import ConfigError
from .kernels.reference import num_blocks

__all__ = [
    "CODECS", "BFloat16", "Codec", "Compression", "ErrorFeedback", "Float16", "OneBit", "Settings", "TopK", "TwoBit",
    "pays_below",
]  # fmt: skip

_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
"""Largest and smallest normal positive float32."""


class Codec(Protocol):
    """The interface of every codec."""

    name: ClassVar[str]
    by_element: ClassVar[bool]
    """True if the bytes of an element depend on that element alone, and so not on the bounds of its segment."""

    @property
    def feedback(self) -> float:
        """Share of the residual that should be added to the next array, 0 to 1."""
        ...

    def of_sum(self, n: int) -> Codec:
        """Return the codec for the sum of ``n`` decoded arrays."""
        ...

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """Return the encoded size, in bytes, of ``count`` elements of ``dtype``."""
        ...

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        """Encode ``x + residual`` into ``wire``, and leave the part that was not sent in ``residual``.

        Args:
            x: shape ``(count,)``.
            residual: shape and dtype of ``x``; changed in place.
            wire: uint8, shape ``(nbytes(count, dtype),)``; changed in place.
        """
        ...

    def decode(self, wire: Array, out: Array) -> None:
        """Decode the bytes that `encode` wrote to ``wire`` into ``out``, shape ``(count,)``."""
        ...


def _kernels(x: Array) -> ModuleType:
    if is_host(x) and x.dtype != np.float32:
        return kernels.reference
    return kernels.kernels_for("gradients", x)


def _casts(x: Array) -> ModuleType:
    return kernels.kernels_for("networks", x)


def _scaled(wire: Array, count: int) -> tuple[Array, Array]:
    """Split ``wire`` into the scales of the blocks and the words of the elements."""
    words = wire.view(np.uint32)
    blocks = num_blocks(count)
    return words[:blocks].view(np.float32), words[blocks:]


class _Codec:
    by_element: ClassVar[bool] = False
    feedback: ClassVar[float] = 1.0

    def of_sum(self, n: int) -> Codec:
        """See `Codec.of_sum`."""
        return self  # type: ignore[return-value]


@dataclass(frozen=True)
class TwoBit(_Codec):
    """Ternary values: 2 bits per element, and a scale of 4 bytes per block of 256 elements.

    Args:
        threshold: magnitude from which an element is sent, and the magnitude that is sent. None: 0.6 times the root
            mean square of the block is the threshold, and the mean magnitude of the elements above it is sent, which
            suits gradients of any size.

    Source: Strom, "Scalable distributed DNN training using commodity GPU cloud computing", 2015; with a threshold the
    formula of MXNet's kvstore; the mean as in Li et al., "Ternary weight networks", 2016, section 2.2.
    """

    name: ClassVar[str] = "2bit"
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None:
            _float32("2bit", "threshold", self.threshold, _SMALLEST, "a number > 0")

    def of_sum(self, n: int) -> TwoBit:
        """See `Codec.of_sum`."""
        return self if self.threshold is None else TwoBit(n * self.threshold)

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """See `Codec.nbytes`."""
        return 4 * (num_blocks(count) + -(-count // 16))

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        """See `Codec.encode`."""
        _kernels(x).encode_two_bit(x, residual, float(self.threshold or 0), *_scaled(wire, x.size))

    def decode(self, wire: Array, out: Array) -> None:
        """See `Codec.decode`."""
        _kernels(out).decode_two_bit(*_scaled(wire, out.size), out)


@dataclass(frozen=True)
class OneBit(_Codec):
    """Signs: 1 bit per element, and a scale of 4 bytes per block of 256 elements.

    Args:
        threshold: None: send the sign times the mean magnitude of the block. A number: send ``magnitude`` for elements
            above it, else ``-magnitude``.
        magnitude: the magnitude that is sent with a threshold; must be 1 without one.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014; the magnitude as in Karimireddy et al., "Error
    feedback fixes SignSGD and other gradient compression schemes", 2019, algorithm 1; with a threshold the formula of
    MXNet's kvstore.
    """

    name: ClassVar[str] = "1bit"
    threshold: float | None = None
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        if self.threshold is not None:
            _float32("1bit", "threshold", self.threshold, -_LARGEST, "a finite number")
        _float32("1bit", "magnitude", self.magnitude, _SMALLEST, "a number > 0")
        if self.threshold is None and self.magnitude != 1:
            expected = "1 without a threshold"
            raise ConfigError("compression 1bit", where="magnitude", expected=expected, got=self.magnitude)

    @property
    def feedback(self) -> float:  # type: ignore[override]
        """Default share of the residual: 0.7 without a threshold, as momentum amplifies the full residual."""
        return 0.7 if self.threshold is None else 1.0

    def of_sum(self, n: int) -> OneBit:
        """See `Codec.of_sum`."""
        return self if self.threshold is None else OneBit(self.threshold, n * self.magnitude)

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """See `Codec.nbytes`."""
        return 4 * (num_blocks(count) + -(-count // 32))

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        """See `Codec.encode`."""
        magnitude = 0.0 if self.threshold is None else float(self.magnitude)
        _kernels(x).encode_one_bit(x, residual, float(self.threshold or 0), magnitude, *_scaled(wire, x.size))

    def decode(self, wire: Array, out: Array) -> None:
        """See `Codec.decode`."""
        _kernels(out).decode_one_bit(*_scaled(wire, out.size), out)


class _HalfPrecision(_Codec):
    by_element: ClassVar[bool] = True

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """See `Codec.nbytes`."""
        return 2 * count


@dataclass(frozen=True)
class Float16(_HalfPrecision):
    """IEEE binary16: 2 bytes per element. Values from 65520 on become infinite."""

    name: ClassVar[str] = "fp16"

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        """See `Codec.encode`."""
        _kernels(x).encode_float16(x, residual, wire.view(np.uint16))

    def decode(self, wire: Array, out: Array) -> None:
        """See `Codec.decode`."""
        if out.dtype == np.float32:
            _casts(out).from_float16(wire.view(np.uint16), out)
        else:
            out[...] = wire.view(np.float16)


@dataclass(frozen=True)
class BFloat16(_HalfPrecision):
    """bfloat16, the upper half of a float32: 2 bytes per element, with its range and 8 bits of precision."""

    name: ClassVar[str] = "bf16"

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        """See `Codec.encode`."""
        _kernels(x).encode_bfloat16(x, residual, wire.view(np.uint16))

    def decode(self, wire: Array, out: Array) -> None:
        """See `Codec.decode`."""
        is_wide = out.dtype == np.float32
        wide = out if is_wide else array_namespace(out).empty(out.size, dtype=np.float32)
        _casts(out).from_bfloat16(wire.view(np.uint16), wide)
        if not is_wide:
            with np.errstate(over="ignore"):  # rounding up the largest float16 gives an infinity
                out[...] = wide


@dataclass(frozen=True)
class TopK(_Codec):
    """The elements of largest magnitude, each with a 4-byte index.

    Args:
        ratio: share of the elements that is sent, in (0, 1]; at least one element of each array that is encoded.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017; Stich et al., "Sparsified
    SGD with memory", 2018.
    """

    name: ClassVar[str] = "topk"
    ratio: float = 0.01

    def __post_init__(self) -> None:
        number("compression topk", "ratio", self.ratio, above=0, most=1)

    def _sent(self, count: int) -> int:
        return min(count, max(1, round(self.ratio * count)))

    def nbytes(self, count: int, dtype: np.dtype) -> int:
        """See `Codec.nbytes`."""
        return self._sent(count) * (4 + dtype.itemsize)

    def _parts(self, wire: Array, x: Array) -> tuple[Array, Array]:
        """Return indices and values as views of ``wire``, the larger of the two first, so that both are aligned."""
        indices, values = (self._sent(x.size) * nbytes for nbytes in (4, x.dtype.itemsize))
        if values < indices:
            return wire[:indices].view(np.uint32), wire[indices:].view(x.dtype)
        return wire[values:].view(np.uint32), wire[:values].view(x.dtype)

    def encode(self, x: Array, residual: Array, wire: Array) -> None:
        """See `Codec.encode`."""
        _kernels(x).encode_top_k(x, residual, *self._parts(wire, x))

    def decode(self, wire: Array, out: Array) -> None:
        """See `Codec.decode`."""
        _kernels(out).decode_top_k(*self._parts(wire, out), out)


def _float32(codec: str, name: str, value: object, least: float, expected: str) -> None:
    number(f"compression {codec}", name, value, least=least, most=_LARGEST, expected=expected)


Zeros = Callable[[int, np.dtype], Array]
"""``zeros(count, dtype)``: returns a new array on the device of the arrays to be encoded."""


class ErrorFeedback:
    """A codec with the residual of one flat array, whose segments are encoded repeatedly.

    Args:
        codec: the codec, e.g. ``TwoBit()``.
        count: number of elements of the array.
        dtype: dtype of the array.
        share: share of the residual that is added to the next array, 0 to 1; default ``codec.feedback``.
        zeros: allocates `residual`.

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
        """The part that was not sent yet, shape ``(count,)``, in the gradients' dtype."""

    @np.errstate(over="ignore", invalid="ignore")  # the receiver detects non-finite values
    def encode(self, x: Array, part: slice, wire: Array, codec: Codec | None = None) -> None:
        """Encode ``x`` plus the residual of its elements into ``wire``, and update the residual.

        Args:
            x: elements ``part`` of the array.
            part: position of ``x`` in the array.
            wire: uint8, shape ``(nbytes(x.size),)``; changed in place.
            codec: replaces the codec given at construction.
        """
        residual = self.residual[part]
        if self.share != 1:
            residual *= residual.dtype.type(self.share)
        (self.codec if codec is None else codec).encode(x, residual, wire)

    def rescale(self, factor: float) -> None:
        """Multiply the residual by ``factor``; call it when later arrays are scaled by that factor."""
        with np.errstate(over="ignore"):  # the receiver detects non-finite values
            self.residual *= self.residual.dtype.type(factor)

    def nbytes(self, count: int) -> int:
        """Return the encoded size, in bytes, of ``count`` elements."""
        return self.codec.nbytes(count, self.residual.dtype)


_MXNET_THRESHOLD = {"2bit": 0.5, "1bit": 0.5}
"""Default thresholds of MXNet, used for a dict without one."""

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Float16, BFloat16, TwoBit, OneBit, TopK)}
"""Codec classes by name."""


@dataclass(frozen=True)
class Compression:
    """Settings of gradient compression between nodes.

    Args:
        codec: the codec, e.g. ``TwoBit()``.
        feedback: share of the residual that is added to the next gradients, 0 to 1. None: the codec's default, which is
            1, but 0.7 for 1 bit.
        inside_nodes: also exchange compressed messages between the ranks of a node, instead of reading each other's
            memory. This is slower; use it to try a codec on one machine.
    """

    codec: Codec
    feedback: float | None = None
    inside_nodes: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.codec, type) or not hasattr(self.codec, "of_sum"):
            raise ConfigError(
                "compression", where="codec", expected="a codec, e.g. TwoBit()", got=repr(self.codec),
                remedy="call Compression.of('2bit') to use a name",
            )  # fmt: skip
        boolean("compression", "inside_nodes", self.inside_nodes)
        if self.feedback is not None:
            number("compression", "feedback", self.feedback, least=0, most=1)

    @classmethod
    def of(cls, given: Settings) -> Compression | None:
        """Return the settings for a name, a codec, a dict or settings; None for None.

        Args:
            given: a name with optional settings, such as ``"2bit"`` or
                ``"topk:ratio=0.05,feedback=0.5,inside_nodes=on"``, a codec, a `Compression`, or a dict in MXNet's form,
                ``{"type": "2bit", "threshold": 0.5}``.

        Raises:
            ConfigError: unknown codec or setting; lists the valid ones.
        """
        if given is None or isinstance(given, Compression):
            return given
        if isinstance(given, str):
            return cls._parse(given)
        if isinstance(given, Mapping):
            return cls._of_dict(given)
        if isinstance(given, tuple(CODECS.values())):
            return cls(given)
        raise ConfigError("compression", expected=choices(CODECS), got=repr(given))

    @classmethod
    def _of_dict(cls, fields: Mapping[str, Any]) -> Compression:
        expected = "a dict such as {'type': '2bit', 'threshold': 0.5}"
        name = instance("compression", "type", fields.get("type"), str, expected)
        settings = {"threshold": _MXNET_THRESHOLD[name]} if name in _MXNET_THRESHOLD else {}
        settings |= {key: value for key, value in fields.items() if key != "type"}
        return cls._parse(f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}")

    @classmethod
    def _parse(cls, text: str) -> Compression:
        name, _, options = text.partition(":")
        kind = CODECS[one_of("compression", None, name, CODECS)]
        numbers = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        settings: dict[str, float] = {}
        feedback, inside_nodes = None, False
        keys: set[str] = set()
        for setting in filter(None, options.split(",")):
            key, _, value = setting.partition("=")
            try:
                if key in keys:
                    raise ValueError("twice")
                keys.add(key)
                if setting in ("inside_nodes=on", "inside_nodes=off"):
                    inside_nodes = value == "on"
                elif key == "feedback":
                    feedback = float(value)
                else:
                    settings[numbers[numbers.index(key)]] = float(value)
            except ValueError as error:
                valid = [f"{number}=NUMBER" for number in (*numbers, "feedback")] + ["inside_nodes=on|off"]
                expected = f"{' or '.join(valid)}, each once"
                raise ConfigError(f"compression {name}", expected=expected, got=repr(setting)) from error
        return cls(kind(**settings), feedback, inside_nodes)

    def __str__(self) -> str:
        """Return the text that `of` parses to the same settings."""
        numbers = {**dataclasses.asdict(self.codec), "feedback": self.feedback}  # type: ignore[call-overload]
        settings = [f"{key}={float(value)!r}" for key, value in numbers.items() if value is not None]
        settings += ["inside_nodes=on"] if self.inside_nodes else []
        return self.codec.name + (f":{','.join(settings)}" if settings else "")

    def for_array(self, count: int, dtype: np.dtype, zeros: Zeros = np.zeros) -> ErrorFeedback:
        """Return a new `ErrorFeedback` for an array of ``count`` elements; ``zeros`` allocates its residual."""
        return ErrorFeedback(self.codec, count, dtype, self.feedback, zeros)


Settings = Mapping[str, Any] | Compression | Codec | str | None
"""Type of what `Compression.of` accepts; None means no compression."""


_RATIO_SAMPLE = 1 << 16
"""Number of elements from which the compression ratio is computed."""


class Coding(Protocol):
    """One segment of a rank and its encoded shards, in host or device memory.

    Machines end when the codes are in host memory, from which messages are sent.
    """

    @property
    def sent(self) -> Sequence[np.ndarray]:
        """The code of each shard, uint8: first what this rank sends to the owner, finally what the owner has sent."""
        ...

    @property
    def received(self) -> Sequence[np.ndarray]:
        """Codes of this rank's own shard, one from each rank, uint8; its own entry is unused."""
        ...

    def encode(self, rank: int) -> Steps:
        """Encode another rank's shard; called for each rank in order."""
        ...

    def add_up(self) -> Steps:
        """Decode the received codes, add them to this rank's shard in the order of the ranks, and encode the sum."""
        ...

    def decode(self) -> None:
        """Decode the sums of all shards."""
        ...


MakeCoding = Callable[[Array, int, int], Coding]
"""``make(x, first, lane)``: the coding of the segment ``x``, which starts at element ``first`` of the array.

Segments of one lane are processed one after another.
"""


def compressed_allreduce(
    x: np.ndarray, feedback: ErrorFeedback, comm: Communicator, tag: int, turn: Request | None = None
) -> Steps:
    """Sum ``x``, shape ``(count,)``, in place over all ranks of ``comm``.

    Args:
        x: float array on the host; changed in place.
        feedback: made for ``count`` elements of this dtype; reused by later calls.
        comm: the communicator.
        tag: first of the tags of its messages.
        turn: a request for which the segments wait before they begin.
    """
    pieces = coded_segments(x, feedback.codec, comm.size)
    yield from compressed_allreduce_by(
        lambda x, first, lane: _HostCoding(x, first, feedback, comm), pieces, comm, tag, turn
    )


def compressed_allreduce_by(
    make: MakeCoding, pieces: Sequence[Array], comm: Communicator, tag: int, turn: Request | None
) -> Steps:
    """Run `compressed_allreduce` for an array on any device, with the coding ``make`` of each segment in ``pieces``."""
    items = list(zip(pieces, itertools.accumulate((piece.size for piece in pieces), initial=0), strict=False))
    machines = in_lanes(
        items, lambda item, lane_tag: _allreduce_segment(make(*item, lane_tag - tag), comm, lane_tag), tag, turn=turn
    )
    yield from together(machines)


def sent_and_plain_nbytes(feedback: Sequence[ErrorFeedback], n: int) -> tuple[int, int]:
    """Return the bytes that all ``n`` ranks send for the arrays of ``feedback``, compressed and uncompressed."""
    arrays = [(coder.residual, coder.codec) for coder in feedback]
    sent = sum(sent_nbytes(x.size, np.dtype(x.dtype), codec, n) for x, codec in arrays)
    return sent, sum(2 * (n - 1) * x.nbytes for x, _ in arrays)


def sent_nbytes(count: int, dtype: np.dtype, codec: Codec, n: int) -> int:
    """Return the bytes that all ``n`` ranks send for ``count`` elements: 2 (n - 1) times the encoded size."""
    pieces = coded_segments(np.empty(count, dtype), codec, n)
    return 2 * (n - 1) * sum(codec.nbytes(part.size, part.dtype) for piece in pieces for part in split(piece, n))


def coded_segments(x: Array, codec: Codec, n: int, nbytes: int | None = None) -> list[Array]:
    """Return segments whose encoded shards have about ``nbytes``, by default `MESSAGE_NBYTES`."""
    ratio = _RATIO_SAMPLE * x.dtype.itemsize / codec.nbytes(_RATIO_SAMPLE, x.dtype)
    return segments(x, int((nbytes or MESSAGE_NBYTES) * n * ratio))


def shard_slices(x: Array, first: int, n: int) -> list[slice]:
    """Return the positions in the array of the shards of a segment that starts at element ``first``."""
    ends = [first + end for end in bounds(x.size, n)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def _allreduce_segment(coding: Coding, comm: Communicator, tag: int) -> Steps:
    me, other_ranks = comm.rank, [rank for rank in range(comm.size) if rank != comm.rank]
    sends = []
    for rank in other_ranks:
        yield from coding.encode(rank)
        sends.append(comm.isend(coding.sent[rank], rank, tag))
    yield [*sends, *(comm.irecv(coding.received[rank], rank, tag) for rank in other_ranks)]
    yield from coding.add_up()
    sends = [comm.isend(coding.sent[me], rank, tag) for rank in other_ranks]
    yield [*sends, *(comm.irecv(coding.sent[rank], rank, tag) for rank in other_ranks)]
    coding.decode()


class _HostCoding:
    """`Coding` of a NumPy array."""

    def __init__(self, x: np.ndarray, first: int, feedback: ErrorFeedback, comm: Communicator) -> None:
        self._feedback, self._me, self._size = feedback, comm.rank, comm.size
        self._parts, self._places = split(x, comm.size), shard_slices(x, first, comm.size)
        self.sent = [np.empty(feedback.nbytes(part.size), np.uint8) for part in self._parts]
        self.received = [np.empty_like(self.sent[self._me]) for _ in self._parts]

    def encode(self, rank: int) -> Steps:
        """See `Coding.encode`."""
        self._feedback.encode(self._parts[rank], self._places[rank], self.sent[rank])
        yield from ()

    def add_up(self) -> Steps:
        """See `Coding.add_up`."""
        me, codec = self._me, self._feedback.codec
        total, added = self._parts[me], np.empty_like(self._parts[me])
        add = resolve("allreduce", "sum", total.dtype).into
        for rank in range(self._size):
            if rank != me:
                codec.decode(self.received[rank], added)
                add(total, added)
        self._feedback.encode(total, self._places[me], self.sent[me], codec.of_sum(self._size))
        yield from ()

    def decode(self) -> None:
        """See `Coding.decode`."""
        of_sum = self._feedback.codec.of_sum(self._size)
        for part, code in zip(self._parts, self.sent, strict=True):
            of_sum.decode(code, part)


_COUNT = 1 << 18
_REPEATS = 5


def coding_s(codec: Codec) -> tuple[float, float]:
    """Return the least seconds of several runs to encode and to decode `_COUNT` float32 elements on this core."""
    x = np.random.default_rng(0).standard_normal(_COUNT, np.float32)
    residual, out = np.zeros_like(x), np.empty_like(x)
    wire = np.empty(codec.nbytes(_COUNT, x.dtype), np.uint8)
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
    """Return the link rate, in bytes per second, below which the codec makes an allreduce of ``n`` nodes faster.

    Without a codec each node sends 2 (n - 1) / n S bytes. With one it sends the encoded share of these, but encodes S
    bytes and decodes (2 n - 1) / n S. The model has no overlap of coding and messages: with idle cores a codec pays on
    faster links, too. The coding times are measured on this core, which takes a few milliseconds.
    """
    settings = Compression.of(codec)
    if settings is None or n < 2:
        raise ConfigError("pays_below", expected="a codec and at least 2 nodes", got=f"{codec!r} and {n!r}")
    codec, nbytes = settings.codec, 4 * _COUNT
    encoding_s, decoding_s = coding_s(codec)
    saved = 2 * (n - 1) / n * (nbytes - codec.nbytes(_COUNT, np.dtype(np.float32)))
    return max(0.0, saved) / (encoding_s + (2 * n - 1) / n * decoding_s)
