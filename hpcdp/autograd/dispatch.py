"""The modes of autograd, and the dispatch of operators to arrays or tensors.

Whether this thread records operations, and whether layers behave as in training.

Both flags are a thread's own: ranks that are threads of one process would otherwise mix their tapes.

Operators by name, and what a thread that traces or plans is told of them.

A network is traced by noting which operators are called with what (`Tracer`), and its plan is made by calling them once
more, each of which then says how its result is computed again into the same array (`Again`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar

import numpy as np

from ..core.arrays import Array, array_namespace, is_cupy
from ..core.devices import Device
from ..errors import ArrayMixError, UnsupportedError

if TYPE_CHECKING:
    from .tape import NumberHeads


TRACING = 4
"""What tracing adds to the signature of a thread's modes."""
_NODES_OF_A_CALL = 1 << 20
"""More than one operator puts on the tape."""


class _Modes(threading.local):
    recording = False
    training = False
    signature = 0
    """One number for the modes: 1 while recording, 2 while training, and 4 more while a thread traces."""
    tracer: Tracer | None = None
    """What takes this thread's operators, while it traces or calls them asynchronously."""
    numbers = itertools.count(0, _NODES_OF_A_CALL)
    """Of the nodes that this thread puts on the tape: those of an operator that is computed later are numbered on from
    one that was drawn when it was called."""
    number_heads: NumberHeads | None = None
    """The heads of the backward that this thread is in, where each is a single number."""
    capture: Callable[..., Any] | None = None
    """What is told how an operator's result is computed again, in place of the tape, while this thread plans."""


modes = _Modes()
"""The flags of the calling thread."""


def is_recording() -> bool:
    """Whether operations of this thread are put on the tape."""
    return modes.recording


def is_training() -> bool:
    """Whether dropout drops and batch normalisation uses the batch's statistics in this thread."""
    return modes.training


class _Set(contextlib.ContextDecorator):
    """Sets what is not None inside the ``with`` block. Written out: a generator would take 2 us more of a step."""

    def __init__(self, recording: bool | None = None, training: bool | None = None) -> None:
        self._recording, self._training = recording, training
        self._before: list[tuple[bool, bool, int]] = []

    def _recreate_cm(self) -> Self:  # of a decorated function, which several threads may call at once
        return type(self)(self._recording, self._training)

    def __enter__(self) -> None:
        here = modes
        self._before.append((here.recording, here.training, here.signature))
        if self._recording is not None:
            here.recording = self._recording
        if self._training is not None:
            here.training = self._training
        here.signature = (here.signature & TRACING) + here.recording + 2 * here.training

    def __exit__(self, *_: object) -> None:
        modes.recording, modes.training, modes.signature = self._before.pop()


def record(train_mode: bool = True) -> contextlib.AbstractContextManager[None]:
    """Put this thread's operations on the tape inside the ``with`` block; layers train if ``train_mode`` is true."""
    return _Set(recording=True, training=train_mode)


def pause(train_mode: bool = False) -> contextlib.AbstractContextManager[None]:
    """Keep this thread's operations off the tape inside the ``with`` block."""
    return _Set(recording=False, training=train_mode)


def train_mode() -> contextlib.AbstractContextManager[None]:
    """Let layers behave as in training inside the ``with`` block; recording stays as it is."""
    return _Set(training=True)


def predict_mode() -> contextlib.AbstractContextManager[None]:
    """Let layers behave as in prediction inside the ``with`` block; recording stays as it is."""
    return _Set(training=False)


_OF_NUMPY = (np.ndarray, np.generic)
P = ParamSpec("P")
R = TypeVar("R")

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""
Again = tuple[Any, ...] | Callable[[Array], Sequence[Call]]
"""How an operator's result is computed again from the same operands, which meanwhile hold other values.

Either the name of a function of the arrays' namespace and its operands, ``("add", x, y)``, which takes ``out`` behind
them, or a function that for an array gives the calls that compute into it.
"""


def calls_of(again: Again, value: Array) -> Sequence[Call]:
    """What computes an operator's result again, into ``value``."""
    if callable(again):
        return again(value)
    name, *operands = again
    return [(partial(getattr(array_namespace(value), name), *operands, out=value), ())]


@contextlib.contextmanager
def captured() -> Iterator[list[tuple[Any, ...]]]:
    """Operators of this thread, which records, put nothing on the tape: the list has of each its inputs, its pullback
    and how it is computed again."""
    told: list[tuple[Any, ...]] = []

    def capture(_result: object, *what: Any) -> None:
        told.append(what)

    before = modes.recording, modes.capture
    modes.recording, modes.capture = True, capture
    try:
        yield told
    finally:
        modes.recording, modes.capture = before


@dataclass(frozen=True)
class Operator:
    """What `operator` has registered."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    """The arguments that may be tensors; the others are attributes."""
    takes_many: bool
    """Whether the inputs are the positional arguments, any number of them."""
    attributes: tuple[str, ...]
    has_effect: bool
    """Whether a call does more than to give a result: it draws random numbers or changes an input."""
    signature: inspect.Signature


class Tracer(Protocol):
    """What takes the operators that its thread calls: notes them, or has them computed later."""

    def record(self, called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns."""
        ...

    def read(self) -> None:
        """The values of a tensor that is no result of a call are about to be read."""
        ...

    def catch_up(self) -> None:
        """Compute all that was taken and is to be computed later: a network is about to be changed or copied."""
        ...

    def settle(self) -> None:
        """Wait until all that was taken is computed: tensors are about to change in place."""
        ...


def catch_up() -> None:
    """Wait for this thread's calls that are computed later: they are to have a network as it was."""
    if modes.tracer is not None:
        modes.tracer.catch_up()


def first_on_gpu(*operands: Any) -> Array | None:
    """Of tensors, arrays and other operands the array of the first one that is on a GPU."""
    return next(filter(is_cupy, map(_array_of, operands)), None)


def _array_of(x: Any) -> Any:
    if isinstance(x, _OF_NUMPY) or is_cupy(x):  # their own ``data`` is memory, which NumPy denies to bfloat16
        return x
    return getattr(x, "data", None)


def on_their_gpu(called: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives, computed on the GPU of its operands, if they are on one, whatever the current one is.

    Raises:
        ArrayMixError: they are on several, or NumPy's among them are not what the operator takes beside those on a GPU.
    """
    given = [_array_of(x) for x in (*args, *kwargs.values())]
    there = [x for x in given if is_cupy(x)]
    if not there:
        return called.function(*args, **kwargs)
    home = there[0].device
    for x in there[1:]:
        if x.device.id != home.id:
            raise _mixed(called, " and ".join(sorted({repr(Device.of(each)) for each in there})))
    with home:
        try:
            return called.function(*args, **kwargs)
        except (ArrayMixError, TypeError) as error:
            if not any(isinstance(x, np.ndarray) for x in given) and not any(isinstance(x, list | tuple) for x in args):
                raise
            raise _mixed(called, f"the host and {Device.of(there[0])}") from error


def _mixed(called: Operator, where: str) -> ArrayMixError:
    return ArrayMixError(
        called.name, expected="operands on one device", got=f"some on {where}",
        remedy="bring them to one: net.to(device), device.put(x), DataLoader(..., device=...)",
    )  # fmt: skip


def does_not_fit(
    called: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], error: ValueError
) -> UnsupportedError:
    """What to raise for an error of NumPy's or CuPy's, which names no operator and may tell half of the shapes."""
    given = [x for x in (*args, *kwargs.values()) if hasattr(x, "shape") and not isinstance(x, np.dtype)]
    shapes = ", ".join(str(tuple(x.shape)) for x in given)
    if len(given) > 1:
        expected = "operands whose shapes fit each other"
        return UnsupportedError(called.name, expected=expected, got=shapes, remedy=str(error))
    return UnsupportedError(called.name, expected=f"arguments that fit an operand of shape {shapes}", got=str(error))


OPERATORS: dict[str, Operator] = {}
"""All operators by name."""
CALLS: dict[str, Callable[..., Any]] = {}
"""For each what programs call, which a tracer notes."""


def operator(
    name: str, inputs: Sequence[str] = ("x",), has_effect: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as the operator ``name``, whose arguments called ``inputs`` may be tensors.

    While this thread traces, calls go to its tracer; else straight to the function, which computes on the GPU of its
    operands, if they are on one, whatever this thread's current one is. A ValueError of it is raised as an
    `UnsupportedError` that names the operator, operands on several devices are an `ArrayMixError` that does.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        takes_many = any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values())
        attributes = tuple(each for each in signature.parameters if each not in inputs)
        own = Operator(name, function, tuple(inputs), takes_many, attributes, has_effect, signature)
        OPERATORS[name] = own

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            tracer = modes.tracer
            if tracer is not None:
                return tracer.record(own, args, kwargs)  # type: ignore[no-any-return]
            try:
                if "cupy" not in sys.modules:
                    return function(*args, **kwargs)  # all is on the host
                return on_their_gpu(own, args, kwargs)
            except ValueError as error:
                raise does_not_fit(own, args, kwargs, error) from error

        CALLS[name] = call
        return call

    return register
