"""The arrays of collectives: checks of arguments, and staging in host memory.

The algorithms work on flat host arrays. GPU arrays are staged in pinned host memory, which a GPU reads and writes
several times as fast as pageable memory. CuPy caches it; ``cupy.get_default_pinned_memory_pool().free_all_blocks()``
frees it.

`accepts_tensors` lets a function take tensors of PyTorch, and of other kinds in `core.arrays.kinds`, as arrays.
`validation` makes an invalid argument on some ranks an error of all.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from ..comm import World, init
from ..comm.consistency import Call, Refused
from ..comm.progress import Operation, ProgressEngine
from ..comm.watchdog import Watchdog
from ..core.arrays import (
    Array,
    ArrayKind,
    Device,
    Streams,
    copied_to_host,
    from_host,
    is_cupy,
    is_float,
    kinds,
    on_device_of,
    to_device_of,
    to_host,
)
from ..core.state import refuse_change
from ..errors import ConfigError, HpcdpError, MismatchError, UnsupportedError, type_named

P = ParamSpec("P")
T = TypeVar("T")


_ARRAY_ARGUMENTS = ("x", "xs", "out")
"""The names of arguments that may be tensors or lists of them."""

_plain_types: set[type] = {np.ndarray, type(None)}
"""Types of arguments that are no tensor and contain none; extended at the first argument of another type."""


def accepts_tensors(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` so that its arrays may be tensors, also in lists; then results are tensors, too.

    An argument in which the function leaves its result is returned itself. A nonblocking operation returns tensors from
    ``wait()``. The wrapper is compiled with the parameters of ``function``, as the methods of dataclasses are, because
    ``*args, **kwargs`` would cost four times as much.
    """
    code = function.__code__  # type: ignore[attr-defined]
    by_place = code.co_varnames[: code.co_argcount]
    by_name = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    star = ["*"] if by_name else []
    is_plain = " and ".join(f"type({name}) in plain" for name in by_place + by_name if name in _ARRAY_ARGUMENTS)
    namespace: dict[str, Any] = {"function": function, "plain": _plain_types, "with_tensors": with_tensors}
    namespace["__name__"] = function.__module__  # errors look for the outermost function of hpcdp
    source = f"""
def {function.__name__}({", ".join([*by_place, *star, *by_name])}):
    if {is_plain}:
        return function({", ".join([*by_place, *(f"{name}={name}" for name in by_name)])})
    return with_tensors(function, {", ".join(f"{name}={name}" for name in by_place + by_name)})
"""
    exec(compile(source, "<accepts_tensors>", "exec"), namespace)
    made = namespace[function.__name__]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__  # type: ignore[attr-defined]
    return functools.update_wrapper(made, function)  # type: ignore[no-any-return]


def are_plain(x: object, out: object = None) -> bool:
    """Return whether no argument is a tensor, or a list that may contain one.

    For functions that do without `accepts_tensors`, which costs up to 3 us after a wait.
    """
    if type(x) in _plain_types and type(out) in _plain_types:
        return True
    return all(any(array is other for other in present.converted) for array in (x, out) if array is not None)


def with_tensors(function: Callable[..., Any], /, **arguments: Any) -> Any:
    """Call ``function`` with arrays in the place of tensors; see `accepts_tensors`."""
    call = _TensorCall(function.__name__)
    arrays = {name: call.array(name, x) if name in _ARRAY_ARGUMENTS else x for name, x in arguments.items()}
    outer = present.kind, present.converted
    present.kind, present.converted = call.kind, [arrays[name] for name in _ARRAY_ARGUMENTS if name in arrays]
    try:
        with call.order:
            result = function(**arrays)
    finally:
        present.kind, present.converted = outer
    return call.in_kind(result)


class _Present(threading.local):
    """The call of a function of `accepts_tensors` in this thread."""

    kind: ArrayKind | None = None
    """The kind of its tensors, if any."""
    converted: Sequence[object] = ()
    """Its arguments after tensors have been replaced."""


present = _Present()


class _TensorCall:
    """The tensors of one call, and their arrays."""

    def __init__(self, operation: str) -> None:
        self.order = contextlib.ExitStack()
        self._operation = operation
        self.kind: ArrayKind | None = None
        self._is_plain = True
        self._arguments: list[tuple[Array, Any]] = []

    def array(self, where: str, x: Any) -> Any:
        """Return an array over the memory of a tensor or of a subclass of ``np.ndarray``; ``x`` itself otherwise.

        For a list, return a list of what this returns for its items.
        """
        if type(x) is list or type(x) is tuple:
            return [self.array(f"{where}[{i}]", item) for i, item in enumerate(x)]
        kind = kinds[type(x)]
        if kind is not None:
            array = kind.as_array(self._operation, where, x)
            if self.kind is None:
                self.kind = kind
                self.order.enter_context(kind.ordered_with(x))
        elif isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray):
            array = np.asarray(x)  # a subclass such as np.matrix may index and reshape in ways of its own
        else:
            array = x
            _plain_types.add(type(x))
        self._is_plain &= array is x
        self._arguments.append((array, x))
        return array

    def in_kind(self, result: Any) -> Any:
        """Return a result with tensors for its arrays, and the arguments in which it was left."""
        if self._is_plain or result is None or type(result) is int or kinds[type(result)] is not None:
            return result
        if isinstance(result, Operation):
            result.convert = self.in_kind
            return result
        if isinstance(result, (list, tuple)):
            return type(result)(self.in_kind(item) for item in result)
        for array, x in self._arguments:
            if array is result:
                kind = kinds[type(x)]
                if kind is not None:
                    kind.written(x, array)
                return x
        return result if self.kind is None else self.kind.of_array(result)


class _InvalidCall(Call):
    """A collective call that this rank refuses; such calls of several ranks count as the same."""

    __slots__ = ("_error",)

    def __init__(self, error: HpcdpError) -> None:
        super().__init__("an invalid call")
        self._error = error

    def __str__(self) -> str:
        name = self._error.operation
        return f"{name} with an invalid argument ({str(self._error).removeprefix(name).strip(' :')})"


def tell(world: World, error: HpcdpError) -> None:
    """Compare this rank's call, which is invalid, with those of all ranks, so that the other ranks fail, too.

    Ranks that make a valid call, which they compare, raise a `MismatchError` that names this rank and ``error``.
    """
    is_of_arguments = isinstance(error, (UnsupportedError, ConfigError)) and not error.is_on_every_rank
    if error.is_settled or not is_of_arguments or world.size == 1 or isinstance(world.comm, Refused):
        return
    error.is_settled = True
    progress = ProgressEngine.of(world)
    with world.meeting(), Watchdog.of(world).watching(error.operation, lambda: "an invalid argument"):
        progress.finish()
        with contextlib.suppress(MismatchError):  # this rank raises its own error
            progress.calls.agree(_InvalidCall(error))


def validation(function: Callable[Concatenate[str, World, P], T]) -> Callable[Concatenate[str, World, P], T]:
    """Return ``function``, which checks the arguments of a collective, so that all ranks raise if one refuses them.

    It must run before the ranks compare their calls. A rank that refuses its arguments waits for the other ranks.
    """

    @functools.wraps(function)
    def check(operation: str, world: World, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return function(operation, world, *arguments, **named)
        except HpcdpError as error:
            tell(world, error)
            raise

    return check


@contextlib.contextmanager
def errors_of(operation: str) -> Iterator[None]:
    """Let errors name the ``operation`` that the user has called, instead of another one that runs for it."""
    try:
        yield
    except HpcdpError as error:
        error.operation = operation
        raise


def to_host_memory(x: Array) -> np.ndarray:
    """Return a contiguous copy of ``x`` in host memory, pinned if ``x`` is contiguous on a GPU."""
    if not _is_quick(x):
        return np.asarray(copied_to_host(x), order="C")
    streams = Streams(Device.of(x))
    host = streams.pinned(x.nbytes).view(np.dtype(x.dtype)).reshape(x.shape)
    _copy(streams, host, x)
    return host


def on_host(x: Array) -> np.ndarray:
    """Return ``x`` in host memory, see `arrays.to_host`; a GPU array is copied to pinned memory."""
    return to_host_memory(x) if is_cupy(x) else to_host(x)


def bring_back(host: np.ndarray, target: Array) -> None:
    """Copy ``host`` to ``target``, an array on any device."""
    if _is_quick(target):
        _copy(Streams(Device.of(target)), target, host)
    else:
        with on_device_of(target):
            target[...] = from_host(host, target)
        if is_cupy(target):  # a nonblocking operation copies on another stream than its caller's
            streams = Streams(Device.of(target))
            streams.synchronize(streams.current())


def _is_quick(x: Array) -> bool:
    return is_cupy(x) and x.size > 0 and x.flags.c_contiguous


def _copy(streams: Streams, target: Array, source: Array) -> None:
    """Copy and wait, because CuPy reuses pinned memory without regard to streams once an array is freed."""
    stream = streams.current()
    streams.copy_async(target, source, stream)
    streams.synchronize(stream)


def ranks_of(world: World | None) -> World:
    """Return ``world``, or the world of `init` for None."""
    if type(world) is World:
        return world
    if world is None:
        return init()
    if not isinstance(world, World):
        raise UnsupportedError("collective", where="world", expected="a World, see hpcdp.init()", got=repr(world))
    return world


def checked_root(operation: str, root: int, world: World, where: str = "root") -> int:
    """Return the rank ``root`` as an int; raise `UnsupportedError` unless it is a rank of ``world``."""
    if type(root) is int and 0 <= root < world.size:
        return root
    try:
        rank = -1 if isinstance(root, bool) else operator.index(root)
    except TypeError:
        rank = -1
    if not 0 <= rank < world.size:
        raise UnsupportedError(operation, where=where, expected=f"a rank from 0 to {world.size - 1}", got=repr(root))
    return rank


def movable(operation: str, x: Array, where: str = "x") -> np.ndarray:
    """Return ``x`` on the host, contiguous and writeable, for an operation that moves data without reducing it.

    Raises:
        UnsupportedError: it is no array, or of a dtype that has no fixed number of bytes in native byte order.
    """
    if type(x) is not np.ndarray:
        check_array(operation, where, x)
    host = on_host(x)
    if not (host.dtype.kind in "iufbc" or is_float(host.dtype)) or not host.dtype.isnative:
        expected = "a native integer, float, complex or bool"
        raise UnsupportedError(operation, where="dtype", expected=expected, got=host.dtype.str)
    return source_of(host)


def apart(x: T, out: Array | None) -> T:
    """Return ``x``, or a copy if it overlaps ``out``, which receives while ``x`` is sent."""
    return x.copy() if type(x) is type(out) is np.ndarray and np.may_share_memory(x, out) else x


def bytes_of(x: np.ndarray) -> np.ndarray:
    """Return ``x``, contiguous, as bytes, shape ``(nbytes,)``; no copy."""
    return flat(x).view(np.uint8)


def check_like(operation: str, out: Array, shape: tuple[int, ...], dtype: Any) -> None:
    """Check that ``out`` is a writeable array of this shape and dtype."""
    check_array(operation, "out", out)
    if tuple(out.shape) != shape or out.dtype != dtype:
        got = f"{tuple(out.shape)} {out.dtype}"
        raise UnsupportedError(operation, where="out", expected=f"{shape} {dtype} as x", got=got)
    check_writeable(operation, "out", out)


def check_array(operation: str, where: str, x: Array) -> None:
    """Check that ``x`` is an array without a mask."""
    if not hasattr(x, "dtype"):
        raise no_array(operation, where, x)
    refuse_mask(operation, where, x)


def no_array(operation: str, where: str, x: object) -> UnsupportedError:
    """Return the error for ``x``, which is no array.

    Numbers of Python are refused, because a result cannot be left in them, and ranks could differ in their types.
    """
    is_number = isinstance(x, (int, float, complex))
    remedy = f"pass np.array({x!r})" if is_number else "pass np.array(...)" if isinstance(x, (list, tuple)) else None
    return UnsupportedError(operation, where=where, expected="an array", got=type_named(x), remedy=remedy)


def refuse_mask(operation: str, where: str, x: Array) -> None:
    """Raise `UnsupportedError` for a masked array, whose mask would be lost."""
    if isinstance(x, np.ma.MaskedArray):
        raise UnsupportedError(operation, where=where, expected="an array without a mask", got="a masked array")


def is_writeable(x: Array) -> bool:
    """Return whether ``x`` may be written to."""
    return bool(getattr(getattr(x, "flags", None), "writeable", True))


def check_writeable(operation: str, where: str, x: Array) -> None:
    """Check that ``x`` may be written to."""
    if not is_writeable(x):
        is_number = isinstance(x, np.generic)
        got, remedy = ("a number", f"pass np.array({x.item()!r})") if is_number else ("a read-only array", None)
        raise UnsupportedError(operation, where=where, expected="a writeable array", got=got, remedy=remedy)
    if overlaps_itself(x):
        raise UnsupportedError(
            operation, where=where, expected="an array to write to whose elements share no memory",
            got=f"one of shape {tuple(x.shape)} and strides {tuple(x.strides)} bytes", remedy="pass a copy",
        )  # fmt: skip
    refuse_change(x, where, operation)


def overlaps_itself(x: Array) -> bool:
    """Return whether elements of ``x`` share memory, as those of an expanded tensor do.

    Axes of which each steps over the extent of all shorter steps share none. For others, the places of all elements are
    compared.
    """
    strides = getattr(x, "strides", None)
    if not strides or getattr(getattr(x, "flags", None), "c_contiguous", True) or not x.size:
        return False
    axes = sorted((abs(step), length) for step, length in zip(strides, x.shape, strict=True) if length > 1)
    extent = x.dtype.itemsize
    for step, length in axes:
        if step < extent:
            break
        extent += step * (length - 1)
    else:
        return False
    if not axes[0][0]:
        return True
    places = np.zeros(1, np.int64)
    for step, length in axes:
        places = np.add.outer(places, step * np.arange(length)).reshape(-1)
    places.sort()
    return bool((np.diff(places) < x.dtype.itemsize).any())


def receiver(operation: str, x: Array, out: Array) -> Array:
    """Return ``out``, which must be like ``x``, after copying ``x`` to it."""
    check_like(operation, out, tuple(x.shape), x.dtype)
    with on_device_of(out):
        out[...] = to_device_of(x, out)
    return out


def flat(x: np.ndarray) -> np.ndarray:
    """Return ``x``, contiguous, as one axis; no copy."""
    return x if x.ndim == 1 else x.reshape(-1)


def source_of(x: Array) -> np.ndarray:
    """Return ``x`` as a contiguous, writeable host array, which MPI requires even for sending."""
    host = on_host(x)
    return host if host.flags.carray else np.array(host, order="C")


def staged_of(operation: str, target: Array, where: str = "x") -> np.ndarray:
    """Return ``target`` itself if it is a contiguous, aligned and writeable host array, else a copy in one."""
    if type(target) is np.ndarray and target.flags.carray:
        refuse_change(target, where, operation)
        return target
    check_array(operation, where, target)
    check_writeable(operation, where, target)
    return to_host_memory(target)
