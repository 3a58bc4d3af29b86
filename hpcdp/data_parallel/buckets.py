"""Buckets of gradients: their layout, their memory and state, and unused parameters.

Which bucket a parameter's gradient lies in, and where: a pure function of the model.

Nothing here depends on ranks, time or earlier steps, so all ranks agree and a resumed run sums in the same order.
Fusing gradients into buckets is from Sergeev and Del Balso, "Horovod", 2018, section 4; closing them in the order in
which backward produces gradients, with a small first one, from Li et al., "PyTorch Distributed", 2020, section 3.2.3.

One bucket of gradients: its memory, and where it is on its way.

Which parameters any rank has used in a step, counted in the numbers of the step's closing exchange.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from ..core.arrays import Array, words
from ..core.checks import is_number
from ..errors import ConfigError, listed

MIB = 2**20
LINE_NBYTES = 64
"""Slots and shards begin at multiples of a cache line: no two ranks write to the same line, and loads are aligned."""

_DEFAULT_BUCKETS, _DEFAULT_CAPS_MB = 8, (1.0, 25.0)


@dataclass(frozen=True)
class Slot:
    """The place of one parameter."""

    name: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    """In elements from the bucket's beginning."""

    @property
    def count(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Buckets and the slots in them, in the order in which backward is expected to fill them."""

    slots: tuple[Slot, ...]
    """In the order of the model's parameters."""
    counts: tuple[int, ...]
    """Elements of every bucket, whole cache lines."""
    dtypes: tuple[np.dtype, ...]
    """Of every bucket: parameters of different dtypes never share one."""

    @property
    def digest(self) -> str:
        """A hash of all of it, the same on every rank and in every run of the same model."""
        text = repr((self.slots, self.counts, [dtype.str for dtype in self.dtypes]))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def longest_nbytes(self) -> int:
        """Of all buckets."""
        return max((count * dtype.itemsize for count, dtype in zip(self.counts, self.dtypes, strict=True)), default=0)

    def slots_of(self, bucket: int) -> list[Slot]:
        """Return the slots in a bucket, in the order of the model's parameters."""
        return [slot for slot in self.slots if slot.bucket == bucket]

    def shard(self, bucket: int, parts: int, part: int) -> tuple[int, int]:
        """The first element of shard ``part`` of ``parts`` of a bucket and the one after its last, on whole lines."""
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
        bucket_cap_mb: a bucket is closed before it would exceed so many MiB; a larger parameter has one to itself.
            None: an eighth of the model, so that a small one is not sent as a whole after backward, but from 1 to 25.
        first_cap_mb: the same for the first bucket, small so that communication starts early.
        room_for: leave room for so many elements of each parameter, at least as many as it has. None: as many.

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
            remedy="make two networks children of one Module, which puts their names before those of their parameters",
        )  # fmt: skip
    counts: list[int] = []
    dtypes: list[np.dtype] = []
    slots: dict[str, Slot] = {}
    filling: dict[np.dtype, int] = {}  # the open bucket of every dtype
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


class Parameter(Protocol):
    """What a parameter must be for its gradient to be reduced; `hpcdp.nn.Parameter` is one.

    If it has a ``data_hook``, too, which is called before ``data`` is read, its update may run beside the next forward;
    it is then given an ``update_hook``, to be called before ``grad`` is read.
    """

    name: str
    data: Array
    grad: Array
    grad_req: str
    grad_hook: Any


class State(Enum):
    """Where a bucket is on its way."""

    FILLING = "backward has still to write some of its gradients"
    READY = "all its gradients are written"
    LAUNCHED = "its reduction is under way; nobody may write its gradients"
    REDUCED = "this rank's shard, or all of it, holds the sum over all ranks"


class Bucket:
    """One flat buffer of gradients and this rank's part in it."""

    def __init__(self, number: int, slots: Sequence[Slot], rows: Array, rank: int, shard: tuple[int, int]) -> None:
        self.number = number
        self.slots = slots
        self.rows = rows
        """Shape ``(ranks that share it, elements)``."""
        self.words = words(rows)
        """``rows`` as the kernels take them."""
        self.mine: Array = rows[rank]
        """This rank's row, shape ``(elements,)``."""
        self.shard = shard
        """The columns that this rank sums: first, and one after the last."""
        self.names = frozenset(slot.name for slot in slots)
        self.missing = self.awaited = set(self.names)
        """Parameters whose gradient backward has not written in this step, and those that it has still to write before
        the reduction can be launched: others only while gradients accumulate."""
        self.state = State.FILLING
        self.ready_ns = self.launched_ns = self.done_ns = 0

    def view(self, slot: Slot) -> Array:
        """The gradient of one parameter: a view of this rank's row in the parameter's shape."""
        return self.mine[slot.offset : slot.offset + slot.count].reshape(slot.shape)

    def mark_reduced(self) -> None:
        """Record that this rank's shard holds the sum."""
        self.state = State.REDUCED
        self.done_ns = time.perf_counter_ns()

    def described(self) -> str:
        """Its number, first parameters and size, for messages."""
        names = listed([slot.name for slot in self.slots], _MOST_NAMES)
        return f"bucket {self.number} ({names}; {self.mine.nbytes} bytes)"


_EXACT_BITS = 52
"""Whole numbers of so many bits have exact sums in float64."""


class UsageCounts:
    """By how many ranks each parameter was used: several counts share one float64, so that they need no message.

    Args:
        names: of the parameters, alike on all ranks.
        size: how many ranks there are.
    """

    def __init__(self, names: Sequence[str], size: int) -> None:
        bits = size.bit_length()
        per_number = _EXACT_BITS // bits
        self._names, self._size, self._mask = list(names), size, (1 << bits) - 1
        self._places = {
            name: (place // per_number, place % per_number * bits) for place, name in enumerate(self._names)
        }
        used_by_one = [0] * -(-len(self._names) // per_number)
        for number, shift in self._places.values():
            used_by_one[number] |= 1 << shift
        self._all = tuple(map(float, used_by_one))
        self._all_by_all = [size * each for each in self._all]

    @property
    def length(self) -> int:
        """How many numbers a rank adds to the exchange."""
        return len(self._all)

    def numbers(self, missing: Collection[str]) -> Sequence[float]:
        """Return what this rank adds, which has used all parameters but those ``missing``."""
        if not missing:
            return self._all
        found = list(self._all)
        for name in missing:
            number, shift = self._places[name]
            found[number] -= 1 << shift
        return found

    def unused(self, sums: Sequence[float]) -> frozenset[str]:
        """Return the parameters that no rank has used, from the sums of all ranks' `numbers`."""
        if list(sums) == self._all_by_all:
            return frozenset()
        counts = [int(each) for each in sums]
        places = self._places.items()
        return frozenset(name for name, (number, shift) in places if not counts[number] >> shift & self._mask)
