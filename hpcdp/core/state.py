"""State dictionaries, and arrays that must not be changed in place.

A **state** is what `Stateful.state_dict` returns: dicts (with keys str or int), lists and tuples of arrays, numbers,
texts, None, and further objects with a state. An array is assumed to be equal on all ranks, unless it is in a
`Sharded`, of which ranks hold parts, or in a `PerRank`.

Arrays that several ranks hold in shared memory must not be changed in place: other ranks would see one rank's change,
and a program that all ranks run would apply it once per rank.
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
from .arrays import Array, on_device_of, to_device_of

held: dict[int, tuple[int, str]] = {}
"""The end address of each protected memory range, and the description of an array there, by its first address."""

_themselves: set[int] = set()
"""The ids of arrays that were passed to `refusing`."""


def hold_together(array: np.ndarray, ranks: int) -> None:
    """Protect ``array``, and all views of its memory, as shared by ``ranks`` ranks for as long as it exists."""
    first, last = byte_bounds(array)
    held[first] = last, f"an array whose memory {ranks} ranks share"
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    weakref.finalize(owner, held.pop, first, None).atexit = False


@contextlib.contextmanager
def refusing(arrays: Iterable[Any], description: str) -> Iterator[None]:
    """Refuse changes of those ``arrays`` that are in host memory within this context."""
    on_host = [array for array in arrays if isinstance(array, np.ndarray) and array.size]
    added = {first: (last, description) for first, last in map(byte_bounds, on_host) if first not in held}
    held.update(added)
    _themselves.update(map(id, on_host))
    try:
        yield
    finally:
        _themselves.difference_update(map(id, on_host))
        for first in added:
            held.pop(first, None)


def protection_of(array: Any) -> str | None:
    """Describe ``array`` if it must not be changed in place; else return None."""
    if not held or not isinstance(array, np.ndarray) or not array.size:
        return None
    if array.base is None and id(array) not in _themselves:  # it owns its memory, and byte_bounds takes 2 us
        return None
    first, last = byte_bounds(array)
    ranges = list(held.items())  # a copy, because ranks may be threads
    return next((description for begin, (end, description) in ranges if begin < last and first < end), None)


def refuse_change(array: Any, name: str = "", operation: str = "in-place change") -> None:
    """Raise `HpcdpError` if ``array`` must not be changed in place."""
    description = protection_of(array)
    if description is not None:
        raise HpcdpError(
            operation, where=name or None, expected="an array that this rank alone holds", got=description,
            remedy="on all ranks, get and change it inside `with trainer.changing_parameters():`; if that Trainer is "
            "gone, assign param.data = param.data.copy()",
        )  # fmt: skip


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved, and restored in place."""

    def state_dict(self) -> Any:
        """Return a state; its arrays may be the object's own, not copies."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Restore such a state. Arrays that are the object's own have been filled already."""
        ...


@dataclass(frozen=True)
class Saved:
    """The contents of a checkpoint beside the state of one object."""

    names: Sequence[str]
    """The names of all leaves (values that are no dict, list or tuple) in saving order, after renaming."""
    renamed: Mapping[str, str]
    """New names by the names in the checkpoint."""
    shape_of: Callable[[str], tuple[int, ...]]
    """Returns the shape of a tensor by its name."""


class FitsSaved:
    """An object whose state may have been saved in another order, or under other names, than it has now."""

    def fitted(self, form: Any, saved: Saved) -> Any:
        """Return the form of a saved state as the object would save it now.

        Args:
            form: see `hpcdp.checkpoint.flatten`.
            saved: the contents of the checkpoint beside the state.

        Raises:
            ConfigError: saved and current entries cannot be matched.
        """
        return form


@dataclass(frozen=True, eq=False)
class Part:
    """A run of a tensor's elements, in C order."""

    first: int
    """The index of the first element in the whole tensor."""
    values: Array
    """The elements, shape ``(count,)``, contiguous; read when a state is saved, filled when it is restored."""


@dataclass(frozen=True, eq=False)
class Sharded:
    """A tensor of which this rank holds some parts.

    All ranks together hold all of it. Ranks that hold the same parts have equal values; they give the same ``copies``
    and different values of ``copy``.
    """

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: np.dtype
    parts: Sequence[Part]
    copies: int = 1
    """The number of ranks that hold these parts."""
    copy: int = 0
    """The index of this rank among them, from 0."""
    shares: bool = False
    """Rows (the first axis) are shares of one sum. If a state was saved with another number of rows, all rows get equal
    shares of the saved sum.
    """

    @property
    def count(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class PerRank:
    """A state that each rank has for itself, such as that of a random generator.

    It is restored if the number of ranks is the same as at saving. Otherwise it stays as it is, and `load_state_dict`
    gets None in its place.
    """

    value: Any


@dataclass(frozen=True)
class Cut:
    """The position of an array in a whole array that is split along an axis, with one part per rank."""

    axis: int
    first: int
    """The index along the axis at which this part begins."""
    total: int
    """The length of the whole along the axis."""

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole array for a part's ``shape``."""
        return (*shape[: self.axis], self.total, *shape[self.axis + 1 :])

    def runs(self, shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Map elements ``first`` to ``last`` of a part of ``shape`` to the whole, both in C order.

        Yields:
            For each contiguous run of elements: its start in the part, its start in the whole, and its length.
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
    """Raise `ConfigError` unless ``state`` is a dict with these names."""
    if isinstance(state, Mapping) and all(name in state for name in names):
        return
    if isinstance(state, Mapping):
        got = f"one without {next(name for name in names if name not in state)!r}"
    else:
        got = type(state).__name__
    raise ConfigError("load_state_dict", where=of, expected="a dict such as its state_dict() returns", got=got)


def cut_of(param: object) -> Cut | None:
    """Return the `Cut` of a parameter; None for one that is not split."""
    return getattr(param, "cut", None)


def take(where: str, own: Sharded, source: Any) -> None:
    """Fill this rank's parts of a tensor in place; parts that share memory with the source cost nothing.

    Args:
        where: the tensor's name in errors.
        own: this rank's parts of the tensor.
        source: the same parts of another state, or the whole tensor as an array; on any device.

    Raises:
        ConfigError: ``source`` is no tensor, or has another shape or other parts.
    """
    runs = [slice(part.first, part.first + part.values.shape[0]) for part in own.parts]
    source_spans = (
        [(part.first, part.values.shape[0]) for part in source.parts] if isinstance(source, Sharded) else None
    )
    if not hasattr(source, "shape"):
        expected = f"a tensor of shape {own.shape}"
        raise ConfigError("load_state_dict", where=where, expected=expected, got=type_named(source))
    own_spans = [(part.first, part.values.shape[0]) for part in own.parts]
    if tuple(source.shape) != own.shape or source_spans not in (None, own_spans):
        raise ConfigError(
            "load_state_dict", where=where, expected=f"shape {own.shape}, or this rank's part of it",
            got=f"shape {tuple(source.shape)}" + ("" if source_spans is None else f", {len(source_spans)} parts of it"),
            remedy="restore it with checkpoint.Manager.restore, which gives each rank its part",
        )  # fmt: skip
    for part, run, number in zip(own.parts, runs, range(len(runs)), strict=True):
        with on_device_of(part.values):
            if source_spans is None:
                part.values[...] = to_device_of(source.reshape(-1)[run], part.values)
            elif not _same_memory(part.values, source.parts[number].values):
                part.values[...] = to_device_of(source.parts[number].values, part.values)


def _same_memory(x: Array, y: Array) -> bool:
    on_host = isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
    return x is y or (on_host and x.__array_interface__["data"] == y.__array_interface__["data"])


def unquoted(name: str) -> str:
    """Return a tensor's name with its keys as in the program; only slashes separate keys."""
    return "/".join("" if key == "%" else urllib.parse.unquote(key) for key in name.split("/"))
