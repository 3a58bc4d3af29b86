"""Updaters of stores, and compression of what is pushed.

What becomes of a stored value when a sum of pushes arrives.

What is pushed in fewer bits: which codec, and the codes of a key.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from .. import kernels
from ..compression import Compression
from ..core.arrays import Array, is_host
from ..errors import ConfigError, UnsupportedError, type_named
from ..optim import Optimizer, Schedule
from .arguments import Key

Function = Callable[[Key, Array, Array], object]
"""``updater(key, received, stored)``: changes ``stored`` in place; both have the key's shape."""

Rate = float | Schedule
"""A learning rate; a schedule counts the updates of a key."""


class Updater(Protocol):
    """Changes stored values by received ones."""

    by_parts: bool
    """Whether it treats each element by itself, so that the ranks of a node can share a value among them."""

    def rate(self, key: Key) -> float:
        """What may be assigned between updates, alike on all ranks, for them to compare: a learning rate, or 0."""
        ...

    def now(self) -> Updater:
        """This one with the settings of this moment: the update follows later."""
        ...

    def update(self, key: Key, received: Array, stored: Array) -> None:
        """Change ``stored`` in place, and ``received`` at will."""
        ...


@dataclass
class Replace:
    """Without an updater the stored value becomes the sum."""

    by_parts = True

    def rate(self, key: Key) -> float:
        return 0.0

    def now(self) -> Updater:
        return self

    def update(self, key: Key, received: Array, stored: Array) -> None:
        stored[...] = received


@dataclass
class ByFunction:
    """By a function of the user's."""

    function: Function
    by_parts = False

    def rate(self, key: Key) -> float:
        return 0.0

    def now(self) -> Updater:
        return self

    def update(self, key: Key, received: Array, stored: Array) -> None:
        before, given = stored.copy(), stored.view()  # its dtype and flags are the function's to spoil
        try:
            returned = self.function(key, received, given)
            if not (returned is None or returned is given):
                expected, got = "None, and `stored` changed in place", type_named(returned)
                raise ConfigError("updater", expected=f"a function that returns {expected}", got=got)
            if (given.shape, given.dtype) != (stored.shape, stored.dtype):
                expected = f"a function that leaves `stored` {stored.dtype} of shape {stored.shape}"
                raise ConfigError("updater", expected=expected, got=f"{given.dtype} of shape {given.shape}")
        except BaseException as error:
            stored[...] = before  # a push takes effect whole or not at all
            failure = _told(error, "a function")
            failure.add_note(f"in the updater, of key {key!r}")
            if failure is error:
                raise
            raise failure from error


@dataclass
class ByOptimizer:
    """By an update rule, whose state is made when a key is first updated."""

    optimizer: Optimizer
    states: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """Of each key's part that this rank updates, flat, by name."""
    steps: dict[Key, int] = field(default_factory=dict)
    by_parts = True

    def rate(self, key: Key) -> float:
        try:
            return self.optimizer.learning_rate(self.steps.get(key, 0) + 1)
        except ConfigError:
            return math.inf  # the update says what is wrong, on all ranks

    def now(self) -> Updater:
        return ByOptimizer(copy.copy(self.optimizer), self.states, self.steps)

    def update(self, key: Key, received: Array, stored: Array) -> None:
        flat = stored.reshape(-1)
        if key not in self.states:
            self.states[key] = new_state(self.optimizer, flat)
        step = self.steps.get(key, 0) + 1
        try:
            apply_rule(self.optimizer, flat, received.reshape(-1), self.states[key], step)
        except ConfigError as error:
            raise _of_push(error) from error.__cause__
        self.steps[key] = step


def _told(error: BaseException, what: str) -> BaseException:
    """``error``, or, of what ends programs or generators, another one: it may run far from the program that gave it."""
    is_ctrl_c = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
    if is_ctrl_c or (isinstance(error, Exception) and not isinstance(error, StopIteration)):
        return error
    return ConfigError("updater", expected=f"{what} that returns", got=summary(error))


def rate_of(rule: Optimizer) -> Rate:
    """The learning rate that a rule has now.

    Raises:
        ConfigError: what was assigned is none.
    """
    try:
        return rule.lr if isinstance(rule.lr, Schedule) else rule.learning_rate(1)
    except ConfigError as error:
        raise _of_push(error) from None


def _of_push(error: ConfigError) -> ConfigError:
    """What a rule says of its settings when it is used, long after they were given."""
    return ConfigError("push", where=error.where, expected=error.expected, got=error.got)


def described(error: BaseException) -> str:
    """An error of an updater for other ranks, in one line, with its key."""
    return "; ".join([summary(error), *getattr(error, "__notes__", ())])


def summary(error: BaseException) -> str:
    """Its kind, and what it says, if anything."""
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def state_dtype(dtype: np.dtype) -> np.dtype:
    """Of the optimizer's state of a key of ``dtype``."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def new_state(rule: Optimizer, flat: Array) -> dict[str, Array]:
    """The state of a rule for a flat value; of float16 in float32, in which it is updated."""
    return rule.init_state(flat.astype(state_dtype(flat.dtype), copy=False))


def apply_rule(rule: Optimizer, flat: Array, received: Array, state: dict[str, Array], step: int) -> None:
    """One update of a flat value, in place; float16 is rounded once."""
    is_half = flat.dtype == np.float16
    value, gradient = (x.astype(np.float32) for x in (flat, received)) if is_half else (flat, received)
    try:
        rule.update(value, gradient, state, step=step)
    except BaseException as error:
        if (failure := _told(error, "an update rule")) is error:
            raise
        raise failure from error
    if is_half:
        flat[...] = value


def name_of(function: Any) -> str:
    """By what ranks know a function that each of them has: ``module:name``."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '')}:{named.__qualname__}"


_ALIGNED_NBYTES = 64


def check_codable(operation: str, values: Iterable[tuple[Key, Array]]) -> None:
    """Raises `UnsupportedError` unless codecs take all ``values``."""
    for key, value in values:
        if not is_host(value) or value.dtype not in (np.float16, np.float32, np.float64):
            got, remedy = value.dtype, None
            if not is_host(value):
                got, remedy = "an array on a device", "set the compression before init: then the host keeps the keys"
            expected = "a NumPy array of float16, float32 or float64 in a store that compresses"
            raise UnsupportedError(operation, where=f"key {key!r}", expected=expected, got=got, remedy=remedy)


class Codes:
    """What one worker pushes of a key, encoded part by part, with what was not sent before.

    Args:
        ends: where the parts begin and end, the first at 0.
        dtype: of the key.
    """

    def __init__(self, compression: Compression, ends: Sequence[int], dtype: np.dtype) -> None:
        kernels.load("compress")  # not in the first push, for which others wait
        self._feedback = compression.for_array(int(ends[-1]), dtype)
        self.parts = [slice(int(first), int(last)) for first, last in pairwise(ends)]
        """The elements of each part."""
        self.places: list[slice] = []
        """The bytes of each part's codes in a wire."""
        self.nbytes = 0
        """Of a wire, whose parts begin at cache lines."""
        self.sent_nbytes = 0
        """Of all codes in it."""
        for part in self.parts:
            nbytes = self._feedback.nbytes(part.stop - part.start) if part.stop > part.start else 0
            self.places.append(slice(self.nbytes, self.nbytes + nbytes))
            self.nbytes += -(-nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
            self.sent_nbytes += nbytes

    @property
    def residual(self) -> np.ndarray:
        """What was not sent yet, shape ``(count,)``."""
        return self._feedback.residual

    def encode(self, x: np.ndarray, wire: np.ndarray) -> None:
        """Encode ``x``, shape ``(count,)``, to ``wire``, uint8, shape ``(nbytes,)``; what is not sent is remembered."""
        for part, place in zip(self.parts, self.places, strict=True):
            if part.stop > part.start:
                self._feedback.encode(x[part], part, wire[place])

    def add(self, codes: Iterable[np.ndarray], out: np.ndarray) -> None:
        """The sum of what the ``codes`` of one part say, in their order; float16 is added in float32.

        Args:
            out: is overwritten, shape ``(elements of the part,)``.
        """
        decode = self._feedback.codec.decode
        added = np.empty_like(out)
        total = np.zeros(out.size, np.result_type(out.dtype, np.float32))
        for each in codes:
            decode(each, added)
            total += added
        out[...] = total
