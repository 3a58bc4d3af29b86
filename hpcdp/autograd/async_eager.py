"""Asynchronous operator calls, computed by threads of an engine.

A result is a tensor whose values are computed later; reading them waits. Dependent calls run in order, independent ones
in parallel. From the second call of an operator with operands of the same shapes on, the result's shape is known at
once; the first call waits. The design is that of MXNet's arrays (Chen et al., "MXNet", 2015, section 3.2).
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

from ..core.arrays import Array, Device, Streams
from ..engine import Engine, Variable
from ..errors import ConfigError, HpcdpError
from .tape import Operator, catch_up, does_not_fit, first_on_gpu, modes, on_their_gpu
from .tensor import Tensor

_LANE = "compute"
_MOST_SHAPES = 4096
"""Number of kinds of calls whose shapes are cached; the cache is cleared when it is full."""
_OURS = (str(Path(__file__).resolve().parents[1] / "autograd"), str(Path(__file__).resolve().parents[1] / "nn"))

Meta = tuple[tuple[int, ...], Any]
"""Shape and dtype of a result."""


@contextlib.contextmanager
def asynchronous(threads: int | None = None, max_inflight: int = 64) -> Iterator[None]:
    """Make this thread's operator calls return at once inside the ``with`` block, whose end waits for all of them.

    An exception that leaves the block waits, too, except Ctrl-C, which drops the calls that have not begun.

    Reading values waits for them: ``data``, `asnumpy`, `item`, ``float``, ``print``, `Tensor.wait_to_read`. `backward`,
    an in-place change, a `Trainer`'s step and saving wait for all calls of this thread. Results and gradients have the
    same bits as without it. Random numbers and running statistics follow the order of the calls, and NumPy's
    ``errstate`` is that of the call.

    An operator's error is raised when its result is read, or by `waitall`, with a note that names the calling line.

    Arrays and random generators passed to operators must not be changed by other means before `waitall`. The ``data``
    of a tensor is such an array: ``a += 1`` and ``a[0] = 1`` wait for readers of ``a``, but ``a.data[...] += 1`` does
    not.

    A call on a GPU is launched on the stream that is current when it is called, by any thread. Results are read in
    order on that stream. Call `waitall` before recording an event that orders it with another stream.

    With ``HPCDP_ENGINE=synchronous`` each call is computed in this thread before it returns, for debugging.

    Args:
        threads: number of operators computed at a time; default the number of cores.
        max_inflight: number of unfinished calls from which the next call blocks; bounds the memory of results that have
            not been read.

    Raises:
        ConfigError: nested use, or use in a forward that is traced.
    """
    if modes.tracer is not None:
        raise ConfigError(
            "asynchronous", expected="a thread that calls operators directly",
            got="a thread within asynchronous() or hybridize()",
        )  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    with Engine({_LANE: cores if threads is None else threads}, max_inflight) as engine:
        modes.tracer = _Dispatcher(engine)
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            engine.wait_for_all()  # prints further errors
            raise
        finally:
            modes.tracer = None


def waitall() -> None:
    """Wait until all calls of this thread are computed; raises the first error that no read has raised."""
    if modes.tracer is not None:
        modes.tracer.settle()


class _Call:
    """One call of an operator, and its results once they are computed."""

    __slots__ = ("computed", "device", "engine", "variable")

    def __init__(self, engine: Engine, name: str, device: Device | None) -> None:
        self.engine = engine
        self.variable: Variable = engine.variable(name)
        self.device = device
        """The GPU that computes it; None for the host."""
        self.computed: list[Tensor] | None = None

    def results(self) -> list[Tensor]:
        """Wait for the results and return them; raises the operator's error."""
        if self.computed is None:
            self.engine.wait_to_read(self.variable)
        assert self.computed is not None
        return self.computed


class Pending(Tensor):
    """A result that may still be computed. Its shape and dtype are known; reading anything else waits."""

    __slots__ = ("_call", "_meta", "_number")

    def __init__(self, call: _Call, number: int, meta: Meta) -> None:
        self._call, self._number, self._meta = call, number, meta

    @property
    def call(self) -> _Call:
        """The call that computes this result."""
        return self._call

    @property
    def settled(self) -> Tensor:
        """The computed tensor; waits for it."""
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
        return self.data  # effects of other calls do not change it

    def __copy__(self) -> Tensor:
        return copy.copy(self.settled)

    def __reduce__(self) -> tuple[Any, ...]:
        return _settled, (self.settled,)  # copies and pickles hold the computed tensor


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
    """Receives the operators of a thread, see `tape.Tracer`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._effects = engine.variable("effects")
        """Read by all calls and written by those with effects, which keeps the order of the latter."""
        self._shapes: dict[tuple[Any, ...], tuple[bool, list[Meta]]] = {}
        self._streams: dict[Device, Streams] = {}

    def read(self) -> None:
        """See `tape.Tracer`; waits only for calls with effects, which may change the values."""
        self._engine.wait_to_read(self._effects)

    def catch_up(self) -> None:
        """See `tape.Tracer`."""
        self._engine.waitall()

    def settle(self) -> None:
        """See `tape.Tracer`."""
        self._engine.waitall()

    def record(self, called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Push a call to the engine and return its pending results."""
        args, kwargs = tuple(map(_as_it_is, args)), {name: _as_it_is(x) for name, x in kwargs.items()}
        key = _key_of(called, args, kwargs)
        device = _gpu_of(*args, *kwargs.values())
        call, place = _Call(self._engine, called.name, device), self._place_on(device)
        flags = modes.recording, modes.training, modes.signature
        numbers = itertools.count(next(modes.numbers))
        context = contextvars.copy_context()  # includes NumPy's errstate of the call
        where = _caller()
        is_tuple = False

        def compute() -> None:
            nonlocal is_tuple
            before = modes.recording, modes.training, modes.signature, modes.tracer, modes.numbers
            (modes.recording, modes.training, modes.signature), modes.tracer, modes.numbers = flags, None, numbers
            try:
                computed = {name: _settled(x) for name, x in kwargs.items()}
                with place():
                    try:
                        result = context.run(on_their_gpu, called, [*map(_settled, args)], computed)
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
            call.computed = [x if isinstance(x, Tensor) else Tensor(x) for x in listed]

        reads = []
        for x in (*args, *kwargs.values()):
            if isinstance(x, Pending):
                if x.call.engine is not self._engine:
                    x.wait_to_read()  # a result of another thread, or of an earlier block
                reads += [x.call.variable] if x.call.computed is None else []
            elif getattr(x, "data_hook", None) is not None:
                _ = x.data  # the training thread waits for a parameter's update here
        if called.has_effect:
            try:
                self._engine.push(compute, reads, (call.variable, self._effects), _LANE, name=called.name)
            finally:  # resets `effects`, so that its error reaches readers of its result only, not later calls
                self._engine.push(_do_nothing, (), (self._effects,), _LANE)
        else:
            self._engine.push(compute, (*reads, self._effects), (call.variable,), _LANE, name=called.name)
        known = None if key is None else self._shapes.get(key)
        if known is None:
            results = call.results()
            known = is_tuple, [(tuple(result.shape), result.dtype) for result in results]
            if key is not None:
                if len(self._shapes) >= _MOST_SHAPES:
                    self._shapes.clear()
                self._shapes[key] = known
        pending = [Pending(call, number, meta) for number, meta in enumerate(known[1])]
        return tuple(pending) if known[0] else pending[0]

    def _place_on(self, device: Device | None) -> Callable[[], contextlib.AbstractContextManager[object]]:
        """Return a context manager that, on any thread, directs work to the current stream of ``device``."""
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
    """Return the GPU of the first operand that is, or will be, on one."""
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
    """Return the operand with its present value, unaffected by later changes."""
    if isinstance(x, list):
        return copy.deepcopy(x)
    return Tensor(x.data) if type(x) is Tensor and x.node is None and x.grad_req == "null" else x


def _do_nothing() -> None:
    pass


def _settled(x: Any) -> Any:
    return x.settled if isinstance(x, Pending) else x


def _key_of(called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return the key that determines shapes and dtypes of an operator's results; None if they depend on values."""
    if called.name == "getitem" and any(str(getattr(x, "dtype", "")) == "bool" for x in args[1:]):
        return None  # the result's shape depends on the values of the mask
    try:
        key = called.name, tuple(map(_described, args)), tuple((name, _described(x)) for name, x in kwargs.items())
        hash(key)
    except TypeError:
        return None
    return key


def _described(x: Any) -> Any:
    if isinstance(x, (np.ndarray, np.generic)) and not x.ndim and x.dtype.kind in "biu":
        return type(x), str(x.dtype), x.item()  # an axis, or a bound of a slice
    if isinstance(x, Tensor) or (hasattr(x, "dtype") and not isinstance(x, type)):  # the type np.float32 has one, too
        return Tensor, tuple(x.shape), str(x.dtype)
    if isinstance(x, (float, np.random.Generator)):
        return type(x)
    if isinstance(x, slice):
        return slice, _described(x.start), _described(x.stop), _described(x.step)
    if isinstance(x, (tuple, list)):
        return type(x), *map(_described, x)
    return type(x), x


def _caller() -> str:
    """Return file and line of the code that called into this library."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
