"""Arguments of stores: kinds, keys, values, and handles of pulls under way.

What a call names: one key or several, each with one array or, one a device, with a list of them.

What the names of stores mean.

A value on its way from a store, and who waits for it.

One key of a store.

Arrays on the host and on GPUs: where a value is kept, what is pushed is brought, and what is pulled is carried.

On a GPU all is given to the stream that is current there in the thread that calls, and nobody waits; a copy to the host
waits until the array is computed.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..comm.cuda_memory import SUMMED_KINDS
from ..core.arrays import (
    Array,
    array_namespace,
    from_host,
    has_namespace,
    is_bfloat16,
    is_float,
    is_host,
    on_device_of,
    to_host,
    words,
)
from ..core.devices import lie_together, to_device_of
from ..engine import Variable
from ..errors import ConfigError, HpcdpError, UnsupportedError, type_named
from ..kernels import kernels_for
from ..kernels.reference.gradients import SUM


class StoreKind(NamedTuple):
    """What a name means."""

    scope: str
    """Whose pushes meet: those of one process, or of all ranks of a world."""
    sums: str
    """Where arrays of several devices are added up: in host memory, or on a device."""
    updates: str
    """Who changes a value, and when."""


KINDS = {
    "local": StoreKind("process", "host", "the process, at each push"),
    "device": StoreKind("process", "device", "the process, at each push"),
    "dist_sync": StoreKind("world", "host", "the owners of its parts, when all ranks have pushed"),
    "dist": StoreKind("world", "host", "as dist_sync, which it stands for"),
    "dist_device_sync": StoreKind("world", "device", "the owners of its parts, when all ranks have pushed"),
    "dist_async": StoreKind("world", "host", "whoever pushes, or the server that keeps it, at each push"),
}
"""The valid names of `create`."""


class PullHandle:
    """A value that was asked for. It waits where it is read: `wait`, ``numpy.asarray``, indexing."""

    def __init__(self, until_filled: Callable[[], None], place: Array, version: Callable[[], int]) -> None:
        self._until_filled, self._place, self._version = until_filled, place, version

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the key."""
        return tuple(self._place.shape)

    @property
    def dtype(self) -> np.dtype:
        """That of the key."""
        return np.dtype(self._place.dtype)

    def wait(self) -> Array:
        """The array, when it is there; what a push before it raised is raised here."""
        self._until_filled()
        return self._place

    @property
    def version(self) -> int:
        """How many pushes of the key had taken effect in it; those of all workers together count as one where they are
        merged."""
        self._until_filled()
        return self._version()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(to_host(self.wait()), dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        return self.wait()[index]

    def __repr__(self) -> str:
        return f"PullHandle({self.wait()!r})"


def can_wait(target: Any) -> bool:
    """Whether what reads ``target.data`` can be made to wait, as it can for a network's parameter."""
    return hasattr(target, "data_hook")


class Failed:
    """What a parameter calls before it is read where its value has not come: raises why, again and again."""

    def __init__(self, pulled: PullHandle) -> None:
        self._pulled = pulled

    def __call__(self, parameter: Any) -> None:
        self._pulled.wait()


class PendingPull:
    """What a parameter calls before it is read while its value is on its way.

    Several threads may: one that comes late from its wait leaves the hook of the next pull alone.
    """

    _ending = threading.Lock()

    def __init__(self, pulled: PullHandle) -> None:
        self._pulled, self._thread = pulled, threading.get_ident()
        self.waited: Callable[[int, int], None] = lambda begin_ns, end_ns: None
        """Told of each wait of the thread that has pulled."""

    def __call__(self, parameter: Any) -> None:
        begin_ns = time.perf_counter_ns()
        try:
            self._pulled.wait()
        except Exception:
            self._end(parameter, Failed(self._pulled))
            raise
        self._end(parameter, None)  # not before: whoever reads meanwhile waits, too
        if threading.get_ident() == self._thread:
            self.waited(begin_ns, time.perf_counter_ns())

    def _end(self, parameter: Any, hook: Failed | None) -> None:
        with self._ending:
            if parameter.data_hook is self:
                parameter.data_hook = hook


def array_of(parameter: Any) -> Array:
    """What a parameter holds, when all is there that is on its way: to be overwritten, so what has failed is over."""
    try:
        return parameter.data
    except Exception:
        if not isinstance(parameter.data_hook, Failed):
            raise
        parameter.data_hook = None
        return parameter.data


Key = int | str
_INT64 = np.iinfo(np.int64)


def listed_keys(operation: str, key: object) -> list[Key]:
    """The keys of a call, those of types that are made of int or str, as NumPy's and enumerations, as such.

    Raises:
        ConfigError: something among them is no key.
    """
    keys: list[Any] = list(key) if isinstance(key, list | tuple) else [key]
    for each in keys:
        if not isinstance(each, int | str | np.integer) or isinstance(each, bool):
            raise ConfigError(operation, where="key", expected="an int, a str or a list of them", got=repr(each))
    keys = [str.__str__(each) if isinstance(each, str) else int(each) for each in keys]
    if not keys or "" in keys:
        raise ConfigError(operation, where="key", expected="a key or more, none of them empty", got=repr(key))
    return keys


def one_for_each_key(operation: str, where: str, values: object, count: int) -> Sequence[Any]:
    """Return ``values``, a list of ``count``; `ConfigError` where they are none."""
    if not isinstance(values, list | tuple) or len(values) != count:
        got = f"{len(values)}" if isinstance(values, list | tuple) else type(values).__name__
        raise ConfigError(operation, where=where, expected=f"a list of {count}, one for each key", got=got)
    return values


def grouped(operation: str, key: object, value: Any) -> dict[Key, list[Any]]:
    """The values of every key, those of one that stands there twice together.

    Args:
        value: for one key an array or a list of arrays, for several a list of those.

    Raises:
        ConfigError: something is no key, or there are other than as many values.
    """
    keys = listed_keys(operation, key)
    values = one_for_each_key(operation, "value", value, len(keys)) if isinstance(key, list | tuple) else [value]
    found: dict[Key, list[Any]] = {}
    for each, of_key in zip(keys, values, strict=True):
        arrays = of_key if isinstance(of_key, list | tuple) else [of_key]
        if operation != "pull":  # to which nothing can be written
            arrays = [np.asarray(array) if isinstance(array, np.generic) else array for array in arrays]
        found.setdefault(each, []).extend(arrays)
        if not found[each]:
            raise ConfigError(operation, where=f"key {each!r}", expected="an array or more", got="an empty list")
    return found


def new_keys(key: object, value: Any, there: Collection[Key]) -> dict[Key, Array]:
    """The keys that ``init`` shall make, and what they begin with.

    Args:
        there: those that were made before.

    Raises:
        ConfigError: one of them is there already, or is an int where others are strs, or comes with no single array.
    """
    values: dict[Key, Array] = {}
    kinds = {type(each) for each in there}
    for each, arrays in grouped("init", key, value).items():
        kinds.add(type(each))
        if each in there:
            raise ConfigError("init", where=f"key {each!r}", expected="a new key", got="one that was made before")
        if len(kinds) > 1:
            raise ConfigError("init", where=f"key {each!r}", expected="keys that are all int or all str", got="both")
        if len(arrays) != 1 or not is_array(arrays[0]):
            got = type_named(arrays[0]) if len(arrays) == 1 else f"a list of {len(arrays)}"
            raise ConfigError("init", where=f"key {each!r}", expected="one array", got=got)
        values[each] = arrays[0]
    return values


def checked_rows(operation: str, row_ids: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The rows of a value of that shape which are named, each once, in order.

    Raises:
        ConfigError: there are no such rows.
    """
    try:
        rows = to_host(row_ids) if is_array(row_ids) else np.asarray(row_ids)
    except HpcdpError:
        raise
    except ValueError:  # lists of several lengths
        rows = np.empty((0, 0))
    if isinstance(row_ids, list | tuple) and not row_ids:
        rows = np.empty(0, np.int64)
    num_rows = shape[0] if shape else 0
    if (
        row_ids is None
        or rows.ndim != 1
        or (rows.size and (rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= num_rows))
    ):
        expected = f"integers from 0 to {num_rows - 1}"
        raise ConfigError(operation, where="row_ids", expected=expected, got=repr(row_ids)[:80])
    return np.unique(rows).astype(np.int64)


def _is_list(x: Any) -> bool:
    return isinstance(x, list | tuple) or getattr(x, "ndim", 0) == 1


def rows_of_each(row_ids: Any, count: int) -> list[Any]:
    """Rows for so many arrays: a list of as many lists or arrays, or one for all.

    Raises:
        ConfigError: there are other than as many lists.
    """
    if not (isinstance(row_ids, list | tuple) and row_ids and all(map(_is_list, row_ids))):
        return [row_ids] * count
    if len(row_ids) != count:
        expected = f"rows for {'each of ' if count > 1 else ''}{count} array{'s' if count > 1 else ''}, or for all"
        raise ConfigError("row_sparse_pull", where="row_ids", expected=expected, got=f"{len(row_ids)} lists")
    return list(row_ids)


def checked_file(operation: str, path: Any) -> Path:
    """The path of a file, which may not be there yet.

    Raises:
        ConfigError: it names none, or something that is no regular file.
    """
    if isinstance(path, str | os.PathLike) and os.fspath(path) and Path(path).name and "\0" not in str(path):
        file = Path(path)
        if file.is_dir() or not file.exists() or file.is_file():
            return file
    raise ConfigError(operation, where="path", expected="the name of a file", got=repr(path))


def checked_integer(operation: str, where: str, number: object) -> int:
    """``number`` as an int that travels in 64 bits.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        found = None
    if found is None or not _INT64.min <= found <= _INT64.max:
        raise ConfigError(operation, where=where, expected="an integer", got=repr(number))
    return found


def is_array(x: object) -> bool:
    """Whether ``x`` is an array: no number, no parameter of a network, nothing masked."""
    if isinstance(x, np.ndarray | np.generic):
        return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)
    return has_namespace(x)


STORABLE = tuple(np.dtype(name) for name in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"))
"""What ranks can merge and send each other."""


def check_storable(values: Mapping[Key, Array]) -> None:
    """Raises `UnsupportedError` unless all ``values`` are of a dtype that stores keep."""
    for key, value in values.items():
        if value.dtype not in STORABLE or not value.dtype.isnative:
            expected = f"an array of {', '.join(map(str, STORABLE))}"
            got = value.dtype.name if is_bfloat16(value) else value.dtype.str
            raise UnsupportedError("init", where=f"key {key!r}", expected=expected, got=got)


def check_array(operation: str, key: Key, value: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raises `UnsupportedError` unless ``value`` is an array of that shape and dtype.

    To pull to it must be one that can be written, of any float dtype for a float key; or a parameter of a network,
    which can wait for a whole value.
    """
    pulls = operation in ("pull", "row_sparse_pull")
    if operation == "pull" and can_wait(value):
        value = array_of(value)
    fits = is_array(value)
    casts = fits and pulls and is_float(np.dtype(value.dtype)) and is_float(dtype)
    if not fits or tuple(value.shape) != shape or (np.dtype(value.dtype) != dtype and not casts):
        got = f"{tuple(value.shape)} {value.dtype}" if fits else type_named(value)
        raise UnsupportedError(operation, where=f"key {key!r}", expected=f"an array of {shape} {dtype}", got=got)
    if pulls and is_host(value) and not value.flags.writeable:
        raise UnsupportedError(operation, where=f"key {key!r}", expected="an array to write to", got="a read-only one")


def merged(values: Sequence[Array]) -> Array:
    """The sum of arrays of one shape and dtype, in their order, as a new array; half precision is added in single."""
    first, *others = values
    if not others:
        return first.copy()
    wide = np.result_type(first.dtype, np.float32) if is_host(first) and first.dtype.kind == "f" else first.dtype
    total = first.astype(wide)  # a copy
    for each in others:
        total += each
    return total.astype(first.dtype, copy=False)


@dataclass
class Entry:
    """One key."""

    key: Key
    stored: Array
    """In the key's shape. Read and written by tasks of the engine alone, or by who holds the variable."""
    variable: Variable
    """Written when a push has taken effect."""
    pushes: int = 0
    """Of this worker, so far."""
    spared_nbytes: int = 0
    """By encoding them."""
    number: int = 0
    """Of the key among those of its store, where workers push together."""

    @property
    def plain_nbytes(self) -> int:
        """Of this worker's pushes so far, if none was encoded."""
        return self.pushes * int(self.stored.nbytes)

    def count(self, sent_nbytes: int | None = None) -> None:
        """One push more, of so many bytes; None: it is not encoded."""
        self.pushes += 1
        if sent_nbytes is not None:
            self.spared_nbytes += int(self.stored.nbytes) - sent_nbytes


_MOST_ROWS = 32
"""Arrays that a kernel adds up in one pass."""


def like(x: Array) -> Array:
    """A new array of the same shape and dtype, where ``x`` is."""
    with on_device_of(x):
        return array_namespace(x).empty(x.shape, dtype=x.dtype)


def lies_as(value: Array, target: Array) -> bool:
    """Whether ``value`` is copied to ``target`` as it is: both lie together, and have one dtype."""
    return value.dtype == target.dtype and lie_together(target, value)


def carry(value: Array, target: Array) -> None:
    """Write ``value`` to ``target``, wherever both are; cast to its dtype, without a word of what becomes infinite."""
    casts = value.dtype != target.dtype
    with on_device_of(target), np.errstate(over="ignore") if casts else contextlib.nullcontext():
        target[...] = to_device_of(value, target)


def fill(place: Array, value: Array, rows: np.ndarray | None) -> None:
    """Write ``value`` to ``place``, or some ``rows`` of it and else zeros; both lie together."""
    if rows is None:
        place[...] = value
    else:
        place[...] = 0
        if rows.size:  # of a number there are none, and it has no axis to name them
            at = from_host(rows, value)
            place[at] = value[at]


def sum_into(out: Array, arrays: Sequence[Array]) -> None:
    """The sum of ``arrays``, on whatever devices, in their order; half precision is added in single.

    Args:
        out: on a device, contiguous; apart from them.
    """
    here = [to_device_of(x, out) for x in arrays]
    with on_device_of(out):
        if len(here) == 1 or np.dtype(out.dtype).name not in SUMMED_KINDS:
            out[...] = here[0] if len(here) == 1 else merged(here)
            return
        rows, total = [_flat(x) for x in here], _flat(out)
        kernels = kernels_for("reduce", out)
        kernels.combine(rows[:_MOST_ROWS], 0, total.size, total, SUM)
        for first in range(_MOST_ROWS, len(rows), _MOST_ROWS - 1):
            more = [total, *rows[first : first + _MOST_ROWS - 1]]
            kernels.combine_into(more, 0, total.size, 0, SUM)


def _flat(x: Array) -> Array:
    """``x`` as the kernels take it."""
    return words(array_namespace(x).ascontiguousarray(x).reshape(-1))
