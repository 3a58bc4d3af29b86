"""Calls of operators that return at once, while threads of an engine compute them.

A result is a tensor whose values are still to come: whoever reads them waits. What depends on each other is computed in
order, what does not side by side. Shapes are known at once from the second call of an operator with operands of the
same shapes on; the first one waits. The design is that of MXNet's arrays (Chen et al., "MXNet", 2015, section 3.2).
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..core.arrays import Array
from ..core.devices import Device, Streams
from ..engine import Engine, Variable
from ..errors import ConfigError, HpcdpError
from .tape import Operator, catch_up, does_not_fit, first_on_gpu, modes, on_their_gpu
from .tensor import Tensor

_LANE = "compute"
_MOST_SHAPES = 4096
"""So many kinds of calls are remembered; then all are forgotten."""
_OURS = (str(Path(__file__).resolve().parents[1] / "autograd"), str(Path(__file__).resolve().parents[1] / "nn"))

Meta = tuple[tuple[int, ...], Any]
"""Shape and dtype."""


@contextlib.contextmanager
def asynchronous(threads: int | None = None, max_inflight: int = 64) -> Iterator[None]:
    """Within it operators that this thread calls return at once; leaving it waits for all of them.

    So does an exception that leaves it, but for Ctrl-C, which drops what has not begun. Reading values waits for them
    (``data``, `asnumpy`, `item`, ``float``, ``print``, `Tensor.wait_to_read`); and `backward`, a change in place, a
    `Trainer`'s step and what is saved wait for all calls of this thread. Random numbers are drawn, and running
    statistics move, in the order of the calls; NumPy's ``errstate`` is that of the call. The results, and the
    gradients, are the same to the bit. What an operator raises is raised to whoever reads its result, or by `waitall`,
    with a note that says which line called it. Arrays and random generators that are passed to operators must not be
    changed by other means before `waitall`, and the ``data`` of a tensor is such an array: ``a += 1`` and ``a[0] = 1``
    wait for who still reads ``a``, but ``a.data[...] += 1`` does not.

    A call on a GPU is given to the stream that is current there when it is called, by whatever thread, and results are
    read behind it on that stream. Who orders it with another stream by an event calls `waitall` before recording that.

    With ``HPCDP_ENGINE=synchronous`` each call is computed before it returns, in this thread: for debugging.

    Args:
        threads: so many operators are computed at a time; default as many as there are cores.
        max_inflight: so many calls may be unfinished before the next one blocks, which bounds the memory of results
            that nobody has read yet.

    Raises:
        ConfigError: within itself, or in a forward that is traced.
    """
    if modes.tracer is not None:
        raise ConfigError(
            "asynchronous", expected="a thread whose operators are called as usual",
            got="one within asynchronous(), or in a forward that is traced",
        )  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    with Engine({_LANE: cores if threads is None else threads}, max_inflight) as engine:
        modes.tracer = _Dispatcher(engine)
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            engine.wait_for_all()  # what fails there is printed
            raise
        finally:
            modes.tracer = None


def waitall() -> None:
    """Wait until everything that this thread has called is computed; raises the first error that nobody has seen."""
    if modes.tracer is not None:
        modes.tracer.settle()


class _Call:
    """One call of an operator: what it gives, once it has been computed."""

    __slots__ = ("device", "engine", "found", "variable")

    def __init__(self, engine: Engine, name: str, device: Device | None) -> None:
        self.engine = engine
        self.variable: Variable = engine.variable(name)
        self.device = device
        """The GPU that computes it; None: the host."""
        self.found: list[Tensor] | None = None

    def results(self) -> list[Tensor]:
        """Waits for them, and raises what the operator has raised."""
        if self.found is None:
            self.engine.wait_to_read(self.variable)
        assert self.found is not None
        return self.found


class Pending(Tensor):
    """A result that may still be computed. Its shape and dtype are known; all else waits."""

    __slots__ = ("_call", "_meta", "_number")

    def __init__(self, call: _Call, number: int, meta: Meta) -> None:
        self._call, self._number, self._meta = call, number, meta

    @property
    def call(self) -> _Call:
        return self._call

    @property
    def settled(self) -> Tensor:
        """The tensor that was computed; waits for it."""
        return self._call.results()[self._number]

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Tensor.shape`."""
        return self._meta[0]

    @property
    def dtype(self) -> Any:
        """See `Tensor.dtype`."""
        return self._meta[1]

    @property
    def ndim(self) -> int:
        """See `Tensor.ndim`."""
        return len(self._meta[0])

    @property
    def size(self) -> int:
        """See `Tensor.size`."""
        return math.prod(self._meta[0])

    def __len__(self) -> int:
        if not self._meta[0]:
            raise TypeError("len() of a tensor without axes")
        return self._meta[0][0]

    def __repr__(self) -> str:
        return repr(self.settled)

    def wait_to_read(self) -> None:
        """See `Tensor.wait_to_read`."""
        self._call.results()

    def _values(self) -> Array:
        return self.data  # whatever moves what else

    def __copy__(self) -> Tensor:
        return copy.copy(self.settled)

    def __reduce__(self) -> tuple[Any, ...]:
        return _settled, (self.settled,)  # what was computed is pickled, and copied


def _of_settled(name: str) -> property:
    def get(self: Pending) -> Any:
        return getattr(self.settled, name)

    def put(self: Pending, value: Any) -> None:
        catch_up()
        setattr(self.settled, name, value)

    return property(get, put)


for _name in ("data", "grad", "grad_hook", "grad_req", "node"):
    setattr(Pending, _name, _of_settled(_name))


class _Dispatcher:
    """What takes the operators of a thread (see `registry.Tracer`)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._effects = engine.variable("effects")
        """Read by all calls, and written by those that do more than to give a result, which so come in their order."""
        self._shapes: dict[tuple[Any, ...], tuple[bool, list[Meta]]] = {}
        self._streams: dict[Device, Streams] = {}

    def read(self) -> None:
        """See `registry.Tracer`; they are there, but those that calls move."""
        self._engine.wait_to_read(self._effects)

    def catch_up(self) -> None:
        """See `registry.Tracer`."""
        self._engine.waitall()

    def settle(self) -> None:
        """See `registry.Tracer`."""
        self._engine.waitall()

    def record(self, called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have an operator computed; what it gives."""
        args, kwargs = tuple(map(_as_it_is, args)), {name: _as_it_is(x) for name, x in kwargs.items()}
        key = _key_of(called, args, kwargs)
        device = _gpu_of(*args, *kwargs.values())
        call, place = _Call(self._engine, called.name, device), self._place_on(device)
        told = modes.recording, modes.training, modes.signature
        numbers = itertools.count(next(modes.numbers))
        context = contextvars.copy_context()  # with NumPy's errstate, as it is here
        where = _caller()
        is_tuple = False

        def compute() -> None:
            nonlocal is_tuple
            before = modes.recording, modes.training, modes.signature, modes.tracer, modes.numbers
            (modes.recording, modes.training, modes.signature), modes.tracer, modes.numbers = told, None, numbers
            try:
                given = {name: _settled(x) for name, x in kwargs.items()}
                with place():
                    try:
                        result = context.run(on_their_gpu, called, [*map(_settled, args)], given)
                    except HpcdpError:
                        raise
                    except ValueError as error:
                        raise does_not_fit(called, args, kwargs, error) from error
            except Exception as error:
                error.add_note(f"in the operator {called.name}, called at {where}")
                raise
            finally:
                modes.recording, modes.training, modes.signature, modes.tracer, modes.numbers = before
            is_tuple = isinstance(result, tuple)
            listed = result if isinstance(result, tuple) else (result,)
            call.found = [each if isinstance(each, Tensor) else Tensor(each) for each in listed]

        reads = []
        for x in (*args, *kwargs.values()):
            if isinstance(x, Pending):
                if x.call.engine is not self._engine:
                    x.wait_to_read()  # another thread's, or of a block that has been left
                reads += [x.call.variable] if x.call.found is None else []
            elif getattr(x, "data_hook", None) is not None:
                _ = x.data  # an update of a parameter is waited for in the thread that trains
        if called.has_effect:
            try:
                self._engine.push(compute, reads, (call.variable, self._effects), _LANE, name=called.name)
            finally:  # what it raises is for those who read its result, and not for all who come later
                self._engine.push(_do_nothing, (), (self._effects,), _LANE)
        else:
            self._engine.push(compute, (*reads, self._effects), (call.variable,), _LANE, name=called.name)
        known = None if key is None else self._shapes.get(key)
        if known is None:
            found = call.results()
            known = is_tuple, [(tuple(each.shape), each.dtype) for each in found]
            if key is not None:
                if len(self._shapes) >= _MOST_SHAPES:
                    self._shapes.clear()
                self._shapes[key] = known
        pending = [Pending(call, number, meta) for number, meta in enumerate(known[1])]
        return tuple(pending) if known[0] else pending[0]

    def _place_on(self, device: Device | None) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """Within what it gives, on any thread, work goes to the stream that is now current on ``device``."""
        if device is None:
            return contextlib.nullcontext
        if device not in self._streams:
            self._streams[device] = Streams(device)
        streams = self._streams[device]
        stream = streams.current()

        @contextlib.contextmanager
        def place() -> Iterator[None]:
            with streams.on_device(), stream:
                yield

        return place


def _gpu_of(*operands: Any) -> Device | None:
    """The GPU of the first operand that is on one, or will be."""
    for x in operands:
        if isinstance(x, Pending):
            device = x.call.device
        else:
            array = first_on_gpu(x)
            device = None if array is None else Device.of(array)
        if device is not None:
            return device
    return None


def _as_it_is(x: Any) -> Any:
    """An operand that is changed, or gets another array, before it is read counts as it was when it was passed."""
    if isinstance(x, list):
        return copy.deepcopy(x)
    return Tensor(x.data) if type(x) is Tensor and x.node is None and x.grad_req == "null" else x


def _do_nothing() -> None:
    pass


def _settled(x: Any) -> Any:
    return x.settled if isinstance(x, Pending) else x


def _key_of(called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What the shapes and dtypes of an operator's results depend on; None where it is values."""
    if called.name == "getitem" and any(str(getattr(x, "dtype", "")) == "bool" for x in args[1:]):
        return None  # a mask chooses any number of elements
    try:
        key = called.name, tuple(map(_described, args)), tuple((name, _described(x)) for name, x in kwargs.items())
        hash(key)
    except TypeError:
        return None
    return key


def _described(x: Any) -> Any:
    if isinstance(x, (np.ndarray, np.generic)) and not x.ndim and x.dtype.kind in "biu":
        return type(x), str(x.dtype), x.item()  # an axis, or the end of a slice
    if isinstance(x, Tensor) or (hasattr(x, "dtype") and not isinstance(x, type)):  # as np.float32 has one
        return Tensor, tuple(x.shape), str(x.dtype)
    if isinstance(x, (float, np.random.Generator)):
        return type(x)
    if isinstance(x, slice):
        return slice, _described(x.start), _described(x.stop), _described(x.step)
    if isinstance(x, (tuple, list)):
        return type(x), *map(_described, x)
    return type(x), x


def _caller() -> str:
    """File and line of the code that called into this library."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
