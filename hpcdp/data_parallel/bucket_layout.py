"""Buckets of gradients: their layout and state. `cpu_reduction` and `gpu_reduction` allocate their memory.

The layout, which is the place of each parameter's gradient, is a pure function of the model. It does not depend on
ranks, time or earlier steps, so all ranks agree, and a resumed run sums in the same order.

Fusing gradients into buckets is from Sergeev and Del Balso, "Horovod", 2018, section 4. Closing buckets in the order in
which backward produces gradients, with a small first one, is from Li et al., "PyTorch Distributed", 2020, section
3.2.3.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from ..core.arrays import Array, words
from ..core.checks import is_number
from ..errors import ConfigError, listed

MIB = 2**20
LINE_NBYTES = 64
"""Alignment of slots and shards, a cache line: no two ranks write to the same line, and loads are aligned."""

_DEFAULT_BUCKETS, _DEFAULT_CAPS_MB = 8, (1.0, 25.0)


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a bucket."""

    name: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    """Elements from the bucket's beginning."""

    @property
    def count(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Buckets and their slots, in the order in which backward is expected to fill them."""

    slots: tuple[Slot, ...]
    """Slots in the order of the model's parameters."""
    counts: tuple[int, ...]
    """Number of elements of every bucket, whole cache lines."""
    dtypes: tuple[np.dtype, ...]
    """Dtype of every bucket; parameters of different dtypes never share a bucket."""

    @property
    def digest(self) -> str:
        """Hash of the layout, the same on every rank and in every run of the same model."""
        text = repr((self.slots, self.counts, [dtype.str for dtype in self.dtypes]))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def longest_nbytes(self) -> int:
        """Bytes of the longest bucket."""
        return max((count * dtype.itemsize for count, dtype in zip(self.counts, self.dtypes, strict=True)), default=0)

    def slots_of(self, bucket: int) -> list[Slot]:
        """Return the slots in a bucket, in the order of the model's parameters."""
        return [slot for slot in self.slots if slot.bucket == bucket]

    def shard(self, bucket: int, parts: int, part: int) -> tuple[int, int]:
        """Return the range of elements of shard ``part`` of ``parts`` of a bucket, in whole cache lines."""
        per_line = LINE_NBYTES // self.dtypes[bucket].itemsize
        lines = self.counts[bucket] // per_line
        return lines * part // parts * per_line, lines * (part + 1) // parts * per_line


def _default_cap_mb(counts: Sequence[int], params: Sequence[tuple[str, tuple[int, ...], np.dtype]]) -> float:
    least_mb, most_mb = _DEFAULT_CAPS_MB
    nbytes = sum(count * dtype.itemsize for count, (_, _, dtype) in zip(counts, params, strict=True))
    return min(most_mb, max(least_mb, nbytes / MIB / _DEFAULT_BUCKETS))


def plan(
    params: Sequence[tuple[str, tuple[int, ...], np.dtype]],
    bucket_cap_mb: float | None = None,
    first_cap_mb: float = 1,
    room_for: Sequence[int] | None = None,
) -> Layout:
    """Lay out parameters in buckets, last parameter first, since backward produces its gradient first.

    Args:
        params: name, shape and dtype of every parameter, in order of first use.
        bucket_cap_mb: size limit of a bucket in MiB; a larger parameter has its own bucket. None: an eighth of the
            model, so that a small model is not sent as a whole after backward, but from 1 to 25.
        first_cap_mb: size limit of the first bucket, small so that communication starts early.
        room_for: space for each parameter in elements, at least its own number, which is the default.

    Raises:
        ConfigError: a cap that is not positive, or two parameters of one name.
    """
    room_for = [math.prod(shape) for _, shape, _ in params] if room_for is None else room_for
    if bucket_cap_mb is None:
        bucket_cap_mb = _default_cap_mb(room_for, params)
    if not (is_number(bucket_cap_mb) and bucket_cap_mb > 0 and first_cap_mb > 0):
        raise ConfigError("bucket plan", where="bucket_cap_mb", expected="a positive size", got=repr(bucket_cap_mb))
    names = [name for name, _, _ in params]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ConfigError(
            "bucket plan", where="params", expected="different names", got=f"{twice!r} twice",
            remedy="make two networks children of one Module, which prefixes the names of their parameters",
        )  # fmt: skip
    counts: list[int] = []
    dtypes: list[np.dtype] = []
    slots: dict[str, Slot] = {}
    filling: dict[np.dtype, int] = {}  # open bucket of every dtype
    for (name, shape, dtype), count in zip(reversed(params), reversed(room_for), strict=True):
        per_line = LINE_NBYTES // dtype.itemsize
        room = -(-count // per_line) * per_line
        bucket = filling.get(dtype)
        cap_mb = first_cap_mb if bucket == 0 else bucket_cap_mb
        if bucket is None or (counts[bucket] and (counts[bucket] + room) * dtype.itemsize > cap_mb * MIB):
            bucket = filling[dtype] = len(counts)
            counts.append(0)
            dtypes.append(dtype)
        slots[name] = Slot(name, tuple(shape), bucket, counts[bucket])
        counts[bucket] += room
    return Layout(tuple(slots[name] for name in names), tuple(counts), tuple(dtypes))


_MOST_NAMES = 2


class ParameterLike(Protocol):
    """A parameter whose gradient can be reduced, such as `hpcdp.nn.Parameter`.

    An optional ``data_hook``, which is called before ``data`` is read, lets its update run beside the next forward. It
    then also gets an ``update_hook``, which must be called before ``grad`` is read.
    """

    name: str
    data: Array
    grad: Array
    grad_req: str
    grad_hook: Any


class Accumulation:
    """The ``grad_req`` of a trainer's parameters, which is "add" instead of "write" while gradients accumulate."""

    def __init__(self, params: Mapping[str, ParameterLike]) -> None:
        self._params = params
        self._overwritten: set[str] = set()
        """Parameters whose gradients backward overwrites at other times."""
        self.is_on = False

    def begin(self) -> None:
        """Let backward add to the gradients; parameters with ``grad_req="null"`` stay without."""
        self.is_on = True
        for name, param in self._params.items():
            if param.grad_req == "write":
                self._overwritten.add(name)
                param.grad_req = "add"

    def end(self) -> None:
        """Let backward overwrite gradients again, except where the program has set another ``grad_req`` since."""
        for name in self._overwritten:
            if self._params[name].grad_req == "add":
                self._params[name].grad_req = "write"
        self._overwritten.clear()
        self.is_on = False


class State(Enum):
    """The state of a bucket within a step."""

    FILLING = "backward has still to write some of its gradients"
    READY = "all its gradients are written"
    LAUNCHED = "its reduction runs, and its gradients must not be written"
    REDUCED = "this rank's shard, or the whole row, holds the sum over all ranks"


class Bucket:
    """One flat buffer of gradients with a row for each rank that shares it."""

    def __init__(self, number: int, slots: Sequence[Slot], rows: Array, rank: int, shard: tuple[int, int]) -> None:
        self.number = number
        self.slots = slots
        self.rows = rows
        """Gradients, shape ``(ranks that share the bucket, elements)``."""
        self.words = words(rows)
        """View of ``rows`` for the kernels."""
        self.mine: Array = rows[rank]
        """This rank's row, shape ``(elements,)``."""
        self.shard = shard
        """Columns that this rank sums: the first, and one after the last."""
        self.names = frozenset(slot.name for slot in slots)
        self.missing = self.awaited = set(self.names)
        """Parameters whose gradient backward has not written in this step, and those that it must write before the
        reduction is launched, which differ while gradients accumulate."""
        self.state = State.FILLING
        self.ready_ns = self.launched_ns = self.done_ns = 0

    def view(self, slot: Slot) -> Array:
        """Return the gradient of one parameter: a view of this rank's row in the parameter's shape."""
        return self.mine[slot.offset : slot.offset + slot.count].reshape(slot.shape)

    def mark_reduced(self) -> None:
        """Record that this rank's shard holds the sum."""
        self.state = State.REDUCED
        self.done_ns = time.perf_counter_ns()

    def described(self) -> str:
        """Describe the bucket by its number, first parameters and size."""
        names = listed([slot.name for slot in self.slots], _MOST_NAMES)
        return f"bucket {self.number} ({names}; {self.mine.nbytes} bytes)"
