"""Arguments of stores: kinds, keys and values, handles of pulls, and copies between host and GPUs.

On a GPU, work is queued on the calling thread's current stream without waiting. A copy to the host waits until the
array is computed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..comm.gpu_buckets.transport import SUMMED_KINDS
from ..core.arrays import (
    Array,
    Device,
    array_namespace,
    from_host,
    has_namespace,
    is_bfloat16,
    is_float,
    is_host,
    lie_together,
    on_device_of,
    to_device_of,
    to_host,
    words,
)
from ..core.checks import whole_number
from ..engine import Variable
from ..errors import ConfigError, HpcdpError, UnsupportedError, type_named
from ..kernels import kernels_for
from ..kernels.reference import SUM


class StoreKind(NamedTuple):
    """A kind of store."""

    scope: str
    """Scope of a store: one "process", or all ranks of a "world"."""
    sums: str
    """Memory in which arrays of several devices are summed: "host" or "device"."""
    updates: str
    """Process that updates a value, and when, in words."""


KINDS = {
    "local": StoreKind("process", "host", "the process, at each push"),
    "device": StoreKind("process", "device", "the process, at each push"),
    "dist_sync": StoreKind("world", "host", "the owners of its parts, when all ranks have pushed"),
    "dist": StoreKind("world", "host", "as dist_sync, of which it is an alias"),
    "dist_device_sync": StoreKind("world", "device", "the owners of its parts, when all ranks have pushed"),
    "dist_async": StoreKind("world", "host", "the worker that pushes, or the server that keeps the key, at each push"),
}
"""Kinds of stores by the names that `create` accepts."""


class PullHandle:
    """The future value of a pull; `wait`, ``numpy.asarray`` and indexing wait for it."""

    def __init__(self, until_filled: Callable[[], None], place: Array, version: Callable[[], int]) -> None:
        self._until_filled, self._place, self._version = until_filled, place, version

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the key."""
        return tuple(self._place.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the key."""
        return np.dtype(self._place.dtype)

    def wait(self) -> Array:
        """Wait for the array and return it; raise the error of an earlier push of the key that failed."""
        self._until_filled()
        return self._place

    @property
    def version(self) -> int:
        """Number of pushes of the key that the value includes; merged pushes of all workers count as one."""
        self._until_filled()
        return self._version()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(to_host(self.wait()), dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> Any:
        return self.wait()[index]

    def __repr__(self) -> str:
        return f"PullHandle({self.wait()!r})"


def can_wait(target: Any) -> bool:
    """Return whether readers of ``target.data`` can wait for a pull, as those of a network's parameter can."""
    return hasattr(target, "data_hook")


class FailedPull:
    """The ``data_hook`` of a parameter whose pull failed, which raises the error at each read."""

    def __init__(self, pulled: PullHandle) -> None:
        self._pulled = pulled

    def __call__(self, parameter: Any) -> None:
        """Wait for the pull, before ``parameter`` is read."""
        self._pulled.wait()


class PendingPull:
    """The ``data_hook`` of a parameter with a pull under way, which waits at the first read.

    Several threads may read. A thread that returns late from its wait does not remove the hook of the next pull.
    """

    _ending = threading.Lock()

    def __init__(self, pulled: PullHandle) -> None:
        self._pulled, self._thread = pulled, threading.get_ident()
        self.waited: Callable[[int, int], None] = lambda begin_ns, end_ns: None
        """Called with begin and end of each wait of the pulling thread."""

    def __call__(self, parameter: Any) -> None:
        """Wait for the pull, before ``parameter`` is read."""
        begin_ns = time.perf_counter_ns()
        try:
            self._pulled.wait()
        except Exception:
            self._end(parameter, FailedPull(self._pulled))
            raise
        self._end(parameter, None)  # after the wait, so that concurrent readers wait, too
        if threading.get_ident() == self._thread:
            self.waited(begin_ns, time.perf_counter_ns())

    def _end(self, parameter: Any, hook: FailedPull | None) -> None:
        with self._ending:
            if parameter.data_hook is self:
                parameter.data_hook = hook


def array_of(parameter: Any) -> Array:
    """Return a parameter's array once its pull has ended, to be overwritten; the error of a failed pull is dropped."""
    try:
        return parameter.data
    except Exception:
        if not isinstance(parameter.data_hook, FailedPull):
            raise
        parameter.data_hook = None
        return parameter.data


Key = int | str
_INT64 = np.iinfo(np.int64)


def listed_keys(operation: str, key: object) -> list[Key]:
    """Return the keys of a call as a list; NumPy integers, enumerations and other subclasses become int or str.

    Raises:
        ConfigError: a key is not an int or str, or is empty.
    """
    keys: list[Any] = list(key) if isinstance(key, list | tuple) else [key]
    for name in keys:
        if not isinstance(name, int | str | np.integer) or isinstance(name, bool):
            raise ConfigError(operation, where="key", expected="an int, a str or a list of them", got=repr(name))
    keys = [str.__str__(name) if isinstance(name, str) else int(name) for name in keys]
    if not keys or "" in keys:
        raise ConfigError(operation, where="key", expected="one or more keys, none of them empty", got=repr(key))
    return keys


def one_for_each_key(operation: str, where: str, values: object, count: int) -> Sequence[Any]:
    """Return ``values``, or raise `ConfigError` unless they are a list of ``count``."""
    if not isinstance(values, list | tuple) or len(values) != count:
        got = f"a list of {len(values)}" if isinstance(values, list | tuple) else type_named(values)
        raise ConfigError(operation, where=where, expected=f"a list of {count}, one for each key", got=got)
    return values


def grouped(operation: str, key: object, value: Any) -> dict[Key, list[Any]]:
    """Return the arrays of a call by key; those of a repeated key are joined.

    ``value`` is an array or a list of arrays for one key, a list of those for several.

    Raises:
        ConfigError: something is not a key, or the number of values is not that of keys.
    """
    keys = listed_keys(operation, key)
    values = one_for_each_key(operation, "value", value, len(keys)) if isinstance(key, list | tuple) else [value]
    by_key: dict[Key, list[Any]] = {}
    for name, of_key in zip(keys, values, strict=True):
        arrays = of_key if isinstance(of_key, list | tuple) else [of_key]
        if operation != "pull":  # a NumPy scalar can be pushed, but not written to
            arrays = [np.asarray(array) if isinstance(array, np.generic) else array for array in arrays]
        by_key.setdefault(name, []).extend(arrays)
        if not by_key[name]:
            raise ConfigError(operation, where=f"key {name!r}", expected="one or more arrays", got="an empty list")
    return by_key


def new_keys(key: object, value: Any, existing: Collection[Key]) -> dict[Key, Array]:
    """Return the initial values of the keys that ``init`` makes beside ``existing`` ones.

    Raises:
        ConfigError: a key exists already, or is an int where others are strs, or has not one array.
    """
    values: dict[Key, Array] = {}
    kinds = {type(name) for name in existing}
    for name, arrays in grouped("init", key, value).items():
        kinds.add(type(name))
        if name in existing:
            raise ConfigError("init", where=f"key {name!r}", expected="a new key", got="a key of an earlier init()")
        if len(kinds) > 1:
            raise ConfigError("init", where=f"key {name!r}", expected="keys that are all int or all str", got="both")
        if len(arrays) != 1 or not is_array(arrays[0]):
            got = type_named(arrays[0]) if len(arrays) == 1 else f"a list of {len(arrays)}"
            raise ConfigError("init", where=f"key {name!r}", expected="one array", got=got)
        values[name] = arrays[0]
    return values


def checked_rows(operation: str, row_ids: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Return row numbers of a value of that shape, sorted and unique, int64.

    Raises:
        ConfigError: the value has no such rows.
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


def rows_of_each(row_ids: Any, count: int) -> list[Any]:
    """Return the row numbers of each of ``count`` arrays, from a list of as many lists or arrays, or one for all.

    Raises:
        ConfigError: the number of lists is not ``count``.
    """
    is_list_of_lists = isinstance(row_ids, list | tuple) and all(
        isinstance(rows, list | tuple) or getattr(rows, "ndim", 0) == 1 for rows in row_ids
    )
    if not (is_list_of_lists and row_ids):
        return [row_ids] * count
    if len(row_ids) != count:
        expected = f"rows for {'each of ' if count > 1 else ''}{count} array{'s' if count > 1 else ''}, or for all"
        raise ConfigError("row_sparse_pull", where="row_ids", expected=expected, got=f"{len(row_ids)} lists")
    return list(row_ids)


def checked_file(operation: str, path: Any) -> Path:
    """Return the path of a file, which need not exist.

    Raises:
        ConfigError: ``path`` is not a path, or names something other than a regular file.
    """
    if isinstance(path, str | os.PathLike) and os.fspath(path) and Path(path).name and "\0" not in str(path):
        file = Path(path)
        if file.is_dir() or not file.exists() or file.is_file():
            return file
    raise ConfigError(operation, where="path", expected="the name of a file", got=repr(path))


def checked_integer(operation: str, where: str, number: object) -> int:
    """Return ``number`` as an int of 64 bits; `ConfigError` for anything else."""
    return whole_number(operation, where, number, _INT64.min, _INT64.max, expected="an integer")


def is_array(x: object) -> bool:
    """Return whether ``x`` is an array, and not a scalar, a network's parameter or a masked array."""
    if isinstance(x, np.ndarray | np.generic):
        return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray)
    return has_namespace(x)


STORABLE = tuple(np.dtype(name) for name in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"))
"""Dtypes that ranks can merge and send."""


def check_storable(values: Mapping[Key, Array]) -> None:
    """Raise `UnsupportedError` unless all ``values`` have a dtype in `STORABLE`."""
    for key, value in values.items():
        if value.dtype not in STORABLE or not value.dtype.isnative:
            expected = f"an array of {', '.join(map(str, STORABLE))}"
            got = value.dtype.name if is_bfloat16(value) else value.dtype.str
            raise UnsupportedError("init", where=f"key {key!r}", expected=expected, got=got)


def check_one_gpu(values: Mapping[Key, Array]) -> None:
    """Raise `UnsupportedError` unless all ``values`` are on one GPU."""
    devices = {key: Device.of(value) for key, value in values.items()}
    first = next(iter(devices.values()), None)
    odd = next((key for key, device in devices.items() if device != first), None)
    if odd is not None:
        raise UnsupportedError(
            "init", where=f"key {odd!r}", expected=f"an array on {first}, like the other keys",
            got=f"an array on {devices[odd]}",
        )  # fmt: skip


def check_array(operation: str, key: Key, value: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Raise `UnsupportedError` unless ``value`` is an array of that shape and dtype.

    The target of a pull must be writable, may have any float dtype for a float key, and may be a network's parameter.
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
        raise UnsupportedError(
            operation, where=f"key {key!r}", expected="a writable array", got="a read-only array",
            remedy="pass a copy of the array",
        )  # fmt: skip


def merged(values: Sequence[Array]) -> Array:
    """Return the sum of arrays of one shape and dtype, in order, as a new array; float16 is summed in float32."""
    first, *more = values
    if not more:
        return first.copy()
    wide = np.result_type(first.dtype, np.float32) if is_host(first) and first.dtype.kind == "f" else first.dtype
    total = first.astype(wide)  # a copy
    for value in more:
        total += value
    return total.astype(first.dtype, copy=False)


@dataclass
class Entry:
    """One key of a store."""

    key: Key
    stored: Array
    """Value in the key's shape, read and written only by engine tasks or the holder of ``variable``."""
    variable: Variable
    """Engine variable that each push writes."""
    pushes: int = 0
    """Number of this worker's pushes."""
    spared_nbytes: int = 0
    """Bytes saved by compression of these pushes."""
    number: int = 0
    """Number of the key in its store, where workers push together."""

    def count(self, sent_nbytes: int | None = None) -> None:
        """Count a push of ``sent_nbytes`` bytes; None without compression."""
        self.pushes += 1
        if sent_nbytes is not None:
            self.spared_nbytes += int(self.stored.nbytes) - sent_nbytes


_MOST_ROWS = 32
"""Number of arrays that a kernel sums in one pass."""


def like(x: Array) -> Array:
    """Return a new array of the same shape and dtype on the device of ``x``."""
    with on_device_of(x):
        return array_namespace(x).empty(x.shape, dtype=x.dtype)


def lies_as(value: Array, target: Array) -> bool:
    """Return whether ``value`` and ``target`` have one dtype and device, so that a plain copy suffices."""
    return value.dtype == target.dtype and lie_together(target, value)


def carry(value: Array, target: Array) -> None:
    """Copy ``value`` to ``target``, across devices, with a cast; overflow to infinity gives no warning."""
    casts = value.dtype != target.dtype
    with on_device_of(target), np.errstate(over="ignore") if casts else contextlib.nullcontext():
        target[...] = to_device_of(value, target)


def fill(place: Array, value: Array, rows: np.ndarray | None) -> None:
    """Copy ``value`` to ``place`` on the same device; with ``rows`` only those, and zeros elsewhere."""
    if rows is None:
        place[...] = value
    else:
        place[...] = 0
        if rows.size:  # an array without axes has no rows, and cannot be indexed by them
            at = from_host(rows, value)
            place[at] = value[at]


def sum_into(out: Array, arrays: Sequence[Array]) -> None:
    """Sum ``arrays`` of any devices in order into ``out``; float16 is summed in float32.

    ``out`` is contiguous, on a device, and shares no memory with ``arrays``.
    """
    here = [to_device_of(x, out) for x in arrays]
    with on_device_of(out):
        if len(here) == 1 or np.dtype(out.dtype).name not in SUMMED_KINDS:
            out[...] = here[0] if len(here) == 1 else merged(here)
            return
        rows, total = [_flat(x) for x in here], _flat(out)
        kernels = kernels_for("gradients", out)
        kernels.combine(rows[:_MOST_ROWS], 0, total.size, total, SUM)
        for first in range(_MOST_ROWS, len(rows), _MOST_ROWS - 1):
            more = [total, *rows[first : first + _MOST_ROWS - 1]]
            kernels.combine_into(more, 0, total.size, 0, SUM)


def _flat(x: Array) -> Array:
    """Return ``x`` as a flat array of the words that kernels sum."""
    return words(array_namespace(x).ascontiguousarray(x).reshape(-1))
