"""Checks of state dictionaries, and arrays that ranks of a node hold together.

What the state of a run is made of, for whoever has some to save.

A **state** is what `Stateful.state_dict` gives: dicts (of str or int), lists and tuples of arrays, numbers, texts,
None, and further objects with a state. An array is taken to be alike on all ranks, unless it stands in a `Sharded`, of
which ranks hold parts, or in a `PerRank`.

Arrays that are not to be changed in place, as those that several ranks hold together.

What one rank changes in them the others see, and a program that all ranks run would change them once for each.
"""

from __future__ import annotations

import contextlib
import math
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.lib.array_utils import byte_bounds

from ..errors import ConfigError, HpcdpError, type_named
from .arrays import Array, on_device_of
from .devices import to_device_of

_held: dict[int, tuple[int, str]] = {}
"""By the address of the first byte of each: that behind the last one, and what a change would be."""

_themselves: set[int] = set()
"""The ids of those that `refusing` was given."""


def hold_together(array: np.ndarray, ranks: int) -> None:
    """From now on, as long as somebody has it, ``array`` and what lies in its memory is what so many ranks hold."""
    first, last = byte_bounds(array)
    _held[first] = last, f"one of what {ranks} ranks hold together, which each of them would change"
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    weakref.finalize(whole, _held.pop, first, None).atexit = False


@contextlib.contextmanager
def refusing(arrays: Iterable[Any], change: str) -> Iterator[None]:
    """Within it a change of those in host memory is refused as ``change`` says."""
    on_host = [each for each in arrays if isinstance(each, np.ndarray) and each.size]
    added = {first: (last, change) for first, last in map(byte_bounds, on_host) if first not in _held}
    _held.update(added)
    _themselves.update(map(id, on_host))
    try:
        yield
    finally:
        _themselves.difference_update(map(id, on_host))
        for first in added:
            _held.pop(first, None)


def change_of(array: Any) -> str | None:
    """What a change of ``array`` in place would be, where it is not to be changed."""
    if not _held or not isinstance(array, np.ndarray) or not array.size:
        return None
    if array.base is None and id(array) not in _themselves:  # memory of its own; to ask where it lies takes 2 us
        return None
    first, last = byte_bounds(array)
    held = list(_held.items())  # ranks may be threads
    return next((change for begin, (end, change) in held if begin < last and first < end), None)


def refuse_change(array: Any, name: str = "", operation: str = "in-place change") -> None:
    """Raises `HpcdpError` where ``array`` is not to be changed in place."""
    change = change_of(array)
    if change is not None:
        raise HpcdpError(
            operation, where=name or None, expected="an array of its own, or its trainer's changing_parameters()",
            got=change, remedy="without that Trainer give it an array of its own: param.data = param.data.copy()",
        )  # fmt: skip


@runtime_checkable
class Stateful(Protocol):
    """What can be saved, and restored in place."""

    def state_dict(self) -> Any:
        """A state, of which arrays may be the object's own, not copies."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Take over such a state; where arrays are the object's own, they have been filled already."""
        ...


@dataclass(frozen=True)
class Saved:
    """What a checkpoint has beside the state of one object."""

    names: Sequence[str]
    """Of all that is no dict, list or tuple, in the order of saving, after renaming."""
    renamed: Mapping[str, str]
    """New names, by those that the checkpoint has."""
    shape_of: Callable[[str], tuple[int, ...]]
    """The shape of a tensor."""


class FitsSaved:
    """An object whose state may have been saved in another order, or under other names, than it has now."""

    def fitted(self, form: Any, saved: Saved) -> Any:
        """Return the form of a saved state as the object would save it now.

        Args:
            form: see `hpcdp.checkpoint.flatten`.
            saved: what the checkpoint has beside.

        Raises:
            ConfigError: what belongs to what is not known.
        """
        return form


@dataclass(frozen=True, eq=False)
class Part:
    """A run of a tensor's elements, in C order."""

    first: int
    """The number of its first element in the whole tensor."""
    values: Array
    """Shape ``(count,)``, contiguous; read when a state is saved, and filled when it is restored."""


@dataclass(frozen=True, eq=False)
class Sharded:
    """A tensor of which this rank holds some parts.

    All ranks together hold all of it. Where several hold the same parts, those are alike, and each of them says so by
    the same ``copies`` and another ``copy``.
    """

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: np.dtype
    parts: Sequence[Part]
    copies: int = 1
    """So many ranks hold these parts."""
    copy: int = 0
    """Which of them this rank is, from 0."""
    shares: bool = False
    """Rows (the first axis) are shares of one sum: where a state was saved with another number of rows, each row gets
    the same share of what they had together."""

    @property
    def count(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class PerRank:
    """A state that each rank has for itself, such as that of a random generator.

    It is restored where there are as many ranks as when it was saved. Else it is left as it is, and who takes over the
    state is given None in its place.
    """

    value: Any


@dataclass(frozen=True)
class Cut:
    """Which part of a whole array an array is, where the whole is cut along an axis and each rank has a part."""

    axis: int
    first: int
    """Where this part begins along the axis."""
    total: int
    """How long the whole is along it."""

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole, of a part of ``shape``."""
        return (*shape[: self.axis], self.total, *shape[self.axis + 1 :])

    def runs(self, shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Where elements ``first`` to ``last`` of a part of ``shape`` lie in the whole, both in C order.

        Yields:
            For each run of elements that stay together, where it begins in the part and in the whole, and its length.
        """
        inner = math.prod(shape[self.axis + 1 :])
        width, stride = shape[self.axis] * inner, self.total * inner
        if width == stride:
            yield first, first, last - first
            return
        while first < last:
            row, column = divmod(first, width)
            count = min(last - first, width - column)
            yield first, row * stride + self.first * inner + column, count
            first += count


def require_state(of: str, state: object, *names: str) -> None:
    """Raises `ConfigError` unless ``state`` is a dict with these names."""
    if isinstance(state, Mapping) and all(name in state for name in names):
        return
    if isinstance(state, Mapping):
        got = f"one without {next(name for name in names if name not in state)!r}"
    else:
        got = type(state).__name__
    raise ConfigError("load_state_dict", where=of, expected="a dict such as its state_dict() returns", got=got)


def cut_of(param: object) -> Cut | None:
    """Which part of a whole a parameter is; None of one that is whole."""
    return getattr(param, "cut", None)


def take(where: str, own: Sharded, given: Any) -> None:
    """Fill this rank's parts of a tensor, in place; what has been filled already costs nothing.

    Args:
        where: what an error calls the tensor.
        own: what this rank holds of it.
        given: the same of another state, or the whole tensor as an array; of any device.

    Raises:
        ConfigError: ``given`` is no tensor, or has another shape or other parts.
    """
    runs = [slice(part.first, part.first + part.values.shape[0]) for part in own.parts]
    theirs = [(part.first, part.values.shape[0]) for part in given.parts] if isinstance(given, Sharded) else None
    if not hasattr(given, "shape"):
        expected = f"a tensor of shape {own.shape}"
        raise ConfigError("load_state_dict", where=where, expected=expected, got=type_named(given))
    if tuple(given.shape) != own.shape or theirs not in (None, [(run.start, run.stop - run.start) for run in runs]):
        raise ConfigError(
            "load_state_dict", where=where, expected=f"shape {own.shape}, or the part of it that this rank holds",
            got=f"shape {tuple(given.shape)}" + ("" if theirs is None else f", {len(theirs)} parts of it"),
            remedy="restore it from a checkpoint, which gives each rank its part",
        )  # fmt: skip
    for part, run, number in zip(own.parts, runs, range(len(runs)), strict=True):
        with on_device_of(part.values):
            if theirs is None:
                part.values[...] = to_device_of(given.reshape(-1)[run], part.values)
            elif not _same_memory(part.values, given.parts[number].values):
                part.values[...] = to_device_of(given.parts[number].values, part.values)


def _same_memory(x: Array, y: Array) -> bool:
    on_host = isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
    return x is y or (on_host and x.__array_interface__["data"] == y.__array_interface__["data"])


def unquoted(name: str) -> str:
    """Return the name of a tensor of a state with its keys as the program knows them; only slashes end a key."""
    return "/".join("" if key == "%" else urllib.parse.unquote(key) for key in name.split("/"))
