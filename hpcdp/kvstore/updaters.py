"""Updaters, which apply pushes to stored values, files of their states, and the compression of pushes.

A file of states is a NumPy .npz archive, read with pickles refused, of one array for each key and state name. Array
names are ``"int:3/momentum"`` and ``"str:weight/momentum"``. In keys, ``%``, NUL and halves of surrogate pairs are
escaped by ``%``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from .. import kernels
from ..compression import Compression
from ..core import files
from ..core.arrays import Array, is_host, to_host
from ..errors import ConfigError, DataError, UnsupportedError, type_named
from ..optim import Optimizer, Schedule
from .arguments import Key

Function = Callable[[Key, Array, Array], object]
"""``updater(key, received, stored)``, which changes ``stored`` in place; both arrays have the key's shape."""

Rate = float | Schedule
"""A learning rate; a schedule is evaluated at a key's number of updates."""


class Updater(Protocol):
    """A rule that applies received values to stored ones."""

    by_parts: bool
    """True if the rule is elementwise, so that the ranks of a node can update one part each."""

    def rate(self, key: Key) -> float:
        """Return the learning rate of the key's next update, which ranks compare; 0 without one."""
        ...

    def now(self) -> Updater:
        """Return a copy with the current settings, for an update that runs later."""
        ...

    def update(self, key: Key, received: Array, stored: Array) -> None:
        """Change ``stored`` in place; ``received`` may be overwritten."""
        ...


@dataclass
class Replace:
    """The updater of a store without one: the sum replaces the stored value."""

    by_parts = True

    def rate(self, key: Key) -> float:
        """See `Updater.rate`."""
        return 0.0

    def now(self) -> Updater:
        """See `Updater.now`."""
        return self

    def update(self, key: Key, received: Array, stored: Array) -> None:
        """See `Updater.update`."""
        stored[...] = received


@dataclass
class ByFunction:
    """An updater that calls a function of the user."""

    function: Function
    by_parts = False

    def rate(self, key: Key) -> float:
        """See `Updater.rate`."""
        return 0.0

    def now(self) -> Updater:
        """See `Updater.now`."""
        return self

    def update(self, key: Key, received: Array, stored: Array) -> None:
        """See `Updater.update`."""
        before, view = stored.copy(), stored.view()  # a view, because the function may change dtype and flags
        try:
            returned = self.function(key, received, view)
            if not (returned is None or returned is view):
                expected = "a function that changes `stored` in place and returns None"
                raise ConfigError("updater", expected=expected, got=type_named(returned))
            if (view.shape, view.dtype) != (stored.shape, stored.dtype):
                expected = f"a function that leaves `stored` {stored.dtype} of shape {stored.shape}"
                raise ConfigError("updater", expected=expected, got=f"{view.dtype} of shape {view.shape}")
        except BaseException as error:
            stored[...] = before  # a push is atomic: it takes effect fully or not at all
            failure = _ordinary(error, "a function")
            failure.add_note(f"in the updater, of key {key!r}")
            if failure is error:
                raise
            raise failure from error


@dataclass
class ByOptimizer:
    """An updater that applies an optimizer's rule, whose state of a key is made at its first update."""

    optimizer: Optimizer
    states: dict[Key, dict[str, Any]] = field(default_factory=dict)
    """Flat states by key and name, of the part that this rank updates."""
    steps: dict[Key, int] = field(default_factory=dict)
    """Number of updates by key."""
    by_parts = True

    def rate(self, key: Key) -> float:
        """See `Updater.rate`."""
        try:
            return self.optimizer.learning_rate(self.steps.get(key, 0) + 1)
        except ConfigError:
            return math.inf  # the update raises the error, on all ranks

    def now(self) -> Updater:
        """See `Updater.now`."""
        return ByOptimizer(copy.copy(self.optimizer), self.states, self.steps)

    def update(self, key: Key, received: Array, stored: Array) -> None:
        """See `Updater.update`."""
        flat = stored.reshape(-1)
        if key not in self.states:
            self.states[key] = new_state(self.optimizer, flat)
        step = self.steps.get(key, 0) + 1
        try:
            apply_rule(self.optimizer, flat, received.reshape(-1), self.states[key], step)
        except ConfigError as error:
            raise _of_push(error) from error.__cause__
        self.steps[key] = step


def _ordinary(error: BaseException, kind: str) -> BaseException:
    """Return ``error``, or a `ConfigError` in place of one that ends programs or generators.

    An updater may run in an engine thread or on a server, which such an error must not end. ``kind`` names it.
    """
    is_ctrl_c = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
    if is_ctrl_c or (isinstance(error, Exception) and not isinstance(error, StopIteration)):
        return error
    return ConfigError("updater", expected=f"{kind} that returns", got=summary(error))


def rate_of(rule: Optimizer) -> Rate:
    """Return a rule's current learning rate.

    Raises:
        ConfigError: the assigned value is not a learning rate.
    """
    try:
        return rule.lr if isinstance(rule.lr, Schedule) else rule.learning_rate(1)
    except ConfigError as error:
        raise _of_push(error) from None


def _of_push(error: ConfigError) -> ConfigError:
    """Return a rule's error about its settings as an error of the push that uses them."""
    return ConfigError("push", where=error.where, expected=error.expected, got=error.got)


def described(error: BaseException) -> str:
    """Return an updater's error on one line, with its key, for other ranks."""
    return "; ".join([summary(error), *getattr(error, "__notes__", ())])


def summary(error: BaseException) -> str:
    """Return an error's type and message."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def state_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of the optimizer's state of a key of ``dtype``."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def new_state(rule: Optimizer, flat: Array) -> dict[str, Array]:
    """Return a rule's initial state for a flat value, in float32 for float16, which is updated in float32."""
    return rule.init_state(flat.astype(state_dtype(flat.dtype), copy=False))


def apply_rule(rule: Optimizer, flat: Array, received: Array, state: dict[str, Array], step: int) -> None:
    """Update a flat value once, in place; float16 is rounded once."""
    is_half = flat.dtype == np.float16
    value, gradient = (x.astype(np.float32) for x in (flat, received)) if is_half else (flat, received)
    try:
        rule.update(value, gradient, state, step=step)
    except BaseException as error:
        if (failure := _ordinary(error, "an update rule")) is error:
            raise
        raise failure from error
    if is_half:
        flat[...] = value


def name_of(function: Any) -> str:
    """Return ``module:name`` of a function, by which ranks compare and servers import it."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(named, '__module__', '')}:{named.__qualname__}"


_HEADER = "hpcdp/kvstore"


_SURROGATE = re.compile("[\ud800-\udfff]")


States = dict[tuple[Key, str], np.ndarray]
"""Optimizer states in the key's shape, by key and name."""


def _name(key: Key) -> str:
    text = str(key).replace("%", "%25").replace("\0", "%00")  # NUL ends a name in an archive
    return f"{type(key).__name__}:{_SURROGATE.sub(lambda half: f'%u{ord(half[0]):04x}', text)}"


def write_key_states(
    path: Path, optimizer: Optimizer, steps: Mapping[Key, int], states: States, names: Mapping[Key, str]
) -> None:
    """Write the states and the number of updates of each key to a file that replaces ``path`` atomically.

    ``names`` are the parameter names of keys that number parameters, see `read_key_states`; it may be empty.

    Raises:
        DataError: the file cannot be written.
    """
    header: dict[str, Any] = {"version": 1, "optimizer": optimizer.config()["name"]}
    header["steps"] = {_name(key): steps[key] for key in steps}
    header["names"] = {_name(key): name for key, name in names.items()}
    arrays = {f"{_name(key)}/{name}": to_host(array) for (key, name), array in states.items()}
    files.write("save_optimizer_states", path, _HEADER, header, arrays)


def read_key_states(
    path: Path, optimizer: Optimizer, shapes: Mapping[Key, tuple[int, ...]], names: Mapping[Key, str]
) -> tuple[dict[Key, int], States]:
    """Return the number of updates of each key, and its states.

    Args:
        path: the file.
        optimizer: the optimizer whose states the file must have.
        shapes: the shapes of the store's keys.
        names: the parameter names of keys that number parameters. Where the file has names, too, they match its keys
            to the store's.

    Raises:
        DataError: the file is missing, damaged, or of another optimizer, or other keys or shapes.
    """
    fields = {"optimizer": str, "steps": dict}
    header, arrays = files.read("load_optimizer_states", path, _HEADER, fields, "save_optimizer_states")
    updated, saved_by, mine = header["steps"], header["optimizer"], optimizer.config()["name"]
    if saved_by != mine:
        raise DataError("load_optimizer_states", where=path, expected=f"states of {mine}", got=f"states of {saved_by}")
    keys = {_name(key): key for key in shapes}
    called = header.get("names") if names else None
    if isinstance(called, dict) and called:
        keys_by_name = {name: key for key, name in names.items()}
        keys = {key: keys_by_name[name] for key, name in called.items() if name in keys_by_name}
    strange = next((name for name in updated if name not in keys), None)
    if strange is not None:
        raise DataError("load_optimizer_states", where=path, expected="states of this store's keys", got=strange)
    states: States = {}
    for name in updated:
        for state in optimizer.state_names():
            array = arrays.pop(f"{name}/{state}", None)
            if array is None or array.shape != tuple(shapes[keys[name]]):
                got = "no such array" if array is None else f"shape {array.shape}"
                where = f"{path}, {name}/{state}"
                raise DataError("load_optimizer_states", where=where, expected=f"shape {shapes[keys[name]]}", got=got)
            states[keys[name], state] = array
    if arrays:
        raise DataError("load_optimizer_states", where=path, expected="no other arrays", got=next(iter(arrays)))
    return {keys[name]: int(count) for name, count in updated.items()}, states


def is_store_file(path: Path) -> bool:
    """Return whether ``path`` is a file of `KVStore.save_optimizer_states`."""
    with contextlib.suppress(Exception):  # of a damaged file zipfile raises several kinds; `files.read` reports it
        if path.is_file():  # opening a FIFO would wait for a writer
            with zipfile.ZipFile(path) as archive:
                return f"{_HEADER}.npy" in archive.namelist()
    return False


_ALIGNED_NBYTES = 64


def check_codable(operation: str, values: Iterable[tuple[Key, Array]]) -> None:
    """Raise `UnsupportedError` unless codecs support all ``values``."""
    for key, value in values:
        if not is_host(value) or value.dtype not in (np.float16, np.float32, np.float64):
            got, remedy = value.dtype, None
            if not is_host(value):
                got = "an array on a device"
                remedy = "call set_gradient_compression() before init(), so that keys are kept on the host"
            expected = "a NumPy array of float16, float32 or float64 in a store that compresses"
            raise UnsupportedError(operation, where=f"key {key!r}", expected=expected, got=got, remedy=remedy)


class Codes:
    """The encoder of one worker's pushes of a key, part by part, with error feedback.

    Args:
        ends: boundaries of the parts, from 0 to the key's number of elements.
        dtype: dtype of the key.
    """

    def __init__(self, compression: Compression, ends: Sequence[int], dtype: np.dtype) -> None:
        kernels.load("gradients")  # compiled here, not in the first push, for which other ranks wait
        self._feedback = compression.for_array(int(ends[-1]), dtype)
        self.parts = [slice(int(first), int(last)) for first, last in pairwise(ends)]
        """Elements of each part."""
        self.places: list[slice] = []
        """Bytes of each part's codes in a wire array."""
        self.nbytes = 0
        """Bytes of a wire array, in which each part begins at a cache line."""
        self.sent_nbytes = 0
        """Bytes of all codes, without padding."""
        for part in self.parts:
            nbytes = self._feedback.nbytes(part.stop - part.start) if part.stop > part.start else 0
            self.places.append(slice(self.nbytes, self.nbytes + nbytes))
            self.nbytes += -(-nbytes // _ALIGNED_NBYTES) * _ALIGNED_NBYTES
            self.sent_nbytes += nbytes

    @property
    def residual(self) -> np.ndarray:
        """Rounding errors that later pushes send, shape ``(count,)``."""
        return self._feedback.residual

    def encode(self, x: np.ndarray, wire: np.ndarray) -> None:
        """Encode ``x``, shape ``(count,)``, to ``wire``, uint8, shape ``(nbytes,)``, and update the residual."""
        for part, place in zip(self.parts, self.places, strict=True):
            if part.stop > part.start:
                self._feedback.encode(x[part], part, wire[place])

    def add(self, codes: Iterable[np.ndarray], out: np.ndarray) -> None:
        """Decode and sum the ``codes`` of one part in order; float16 is summed in float32.

        Args:
            codes: uint8 arrays of one part's codes.
            out: the sum, overwritten, shape ``(elements of the part,)``.
        """
        decode = self._feedback.codec.decode
        added = np.empty_like(out)
        total = np.zeros(out.size, np.result_type(out.dtype, np.float32))
        for part_codes in codes:
            decode(part_codes, added)
            total += added
        out[...] = total
