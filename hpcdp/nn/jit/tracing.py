"""Tracing: runs a network once and records its operators; and the guards that decide whether a plan may be replayed.

A traced forward runs on tensors that record operator calls and refuse to show their values. Guards detect changes that
plans depend on, by comparing one object: a new object stands for a new state, so concurrent changes cannot hide each
other.
"""

from __future__ import annotations

import copy
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from ...autograd import Tensor, pause, record
from ...autograd.tape import TRACING, Operator, does_not_fit, modes
from ...autograd.tensor import value_of
from ...core.arrays import Array, dtype_of, from_host, is_float
from ...errors import HpcdpError
from .graph import CapturedTensor, Graph, GraphNode, Input, Literal, Meta, Result, Source, calls_as_json


class _State:
    modules: object = object()
    parameters: object = object()


state = _State()
"""Stamps of the attributes of all modules, and of the arrays and hooks of all parameters."""


class ChangeDetector:
    """Detector that reports once after each change of any module, and at first."""

    def __init__(self) -> None:
        self._seen: object = None

    def is_due(self) -> bool:
        """Return whether a module may have changed since the last call."""
        now = state.modules
        before, self._seen = self._seen, now
        return before is not now


def in_module(module: object, name: str) -> None:
    """Register that an attribute of a module is about to change; an error while tracing, replays do not assign."""
    if modes.signature & TRACING:
        raise refusal(
            users_line()[0], "a forward that assigns no attributes", f"an assignment of {type(module).__name__}.{name}",
            "return the value instead, or call hybridize(False)",
        )  # fmt: skip
    state.modules = object()


def in_parameters() -> None:
    """Register that a parameter has another array or hook."""
    state.parameters = object()


def array_of(held: Any) -> Any:
    """Return the array behind a network's attribute, without waiting for a running update."""
    return held.held() if hasattr(held, "held") else held.data if isinstance(held, Tensor) else held


class HeldArrays:
    """Arrays of the network's tensors that ``graph`` reads, and the lists it was traced with."""

    def __init__(self, graph: Graph) -> None:
        self._all = graph.held
        pairs = [(tensor_, array_of(tensor_)) for tensor_ in graph.held]
        self.parameters = [pair for pair in pairs if hasattr(pair[0], "held")]
        self._buffers = [pair for pair in pairs if isinstance(pair[0], Tensor) and not hasattr(pair[0], "held")]
        self._has_its_lists = graph.has_its_lists if graph.lists else None
        self.are_parameters_only = not self._buffers
        self.seen: object = None
        """Stamp of all parameters when these had no hooks and these arrays."""

    def still_hold(self) -> bool:
        """Return whether the tensors still have these arrays, and the lists their content."""
        now = state.parameters
        if self.seen is not now:
            if any(param.held() is not array for param, array in self.parameters):
                return False
            if all(param.data_hook is None for param, _ in self.parameters):
                self.seen = now
        if self._has_its_lists is not None and not self._has_its_lists():
            return False
        return all(buffer.data is array for buffer, array in self._buffers)

    def without_gradients(self) -> list[bool]:
        """Return for each of the network's tensors and arrays whether it gets no gradient."""
        return [getattr(held, "grad_req", "null") == "null" for held in self._all]

    @property
    def are_settled(self) -> bool:
        """True if no update of a parameter can be running."""
        return self.seen is state.parameters

    def wait_for_updates(self) -> None:
        """Wait for the updates of all parameters."""
        if not self.are_settled:
            for param, _ in self.parameters:
                wait_for_update(param)


def wait_for_update(param: Any) -> None:
    """Wait until no update changes ``param``; its array must stay the same."""
    before = param.held()
    if param.data is not before:
        raise HpcdpError("replay", where=param.name, expected="an update in place", got="another array")


def takes_any_batch(graph: Graph, trace: Callable[[list[Tensor]], Graph]) -> bool:
    """Return whether traces with other batch sizes call the same operators in the same way.

    They do not if the forward uses the batch size as a number, e.g. as a divisor or in a loop. ``trace`` traces it
    again.
    """
    if not all(meta.shape for meta in graph.inputs):
        return False
    own = graph.names, calls_as_json(graph)
    try:
        with pause(), np.errstate(all="ignore"):
            traced = map(trace, _others(graph))
            return all((other.names, calls_as_json(other)) == own for other in traced)
    except Exception:  # the forward may reject this batch size with any exception
        return False


def _others(graph: Graph) -> Iterator[list[Tensor]]:
    """Yield zeros for each input, with about twice its batch size, and with one sample."""
    yield zeros_for(graph, lambda size: 2 * size + 1)
    yield zeros_for(graph, lambda size: 1)


def zeros_for(graph: Graph, rows: Callable[[int], int]) -> list[Tensor]:
    """Return zeros for each input, with the batch size ``rows(size)``, on the device of the network's tensors."""
    like = array_of(graph.held[0]) if graph.held else np.empty(0)
    shapes = [(*map(rows, meta.shape[:1]), *meta.shape[1:]) for meta in graph.inputs]
    zeros = [np.zeros(shape, dtype_of(meta.dtype)) for shape, meta in zip(shapes, graph.inputs, strict=True)]
    return [Tensor(from_host(array, like)) for array in zeros]


def with_pauses(graph: Graph, trace: Callable[[list[Tensor]], Graph]) -> Graph:
    """Return ``graph`` with gradients stopped at results computed within ``pause()``.

    A prediction records nothing, so its graph does not show pauses; ``trace`` traces the forward again while recording.
    """
    try:
        with record(train_mode=False):
            recorded = trace(zeros_for(graph, lambda rows: rows))
    except Exception:  # the forward may reject zeros, or recording, with any exception
        return graph
    if all(node.is_recorded for node in recorded.nodes) or calls_as_json(recorded) != calls_as_json(graph):
        return graph
    return _detached(graph, [not node.is_recorded for node in recorded.nodes])


def _detached(graph: Graph, paused: list[bool]) -> Graph:
    """Return ``graph`` with a ``detach`` between each result of a ``paused`` node and readers that are not paused."""
    nodes: list[GraphNode] = []
    moved: dict[Result, Result] = {}
    detached: dict[Result, Result] = {}

    def outside(source: Source) -> Source:
        if not isinstance(source, Result):
            return source
        meta = graph.nodes[source.node].outputs[source.output]
        if not paused[source.node] or not is_float(dtype_of(meta.dtype)):
            return moved[source]
        if source not in detached:
            detached[source] = Result(len(nodes))
            nodes.append(GraphNode("detach", (moved[source],), {}, (meta,)))
        return detached[source]

    for number, node in enumerate(graph.nodes):
        within = [moved[source] if isinstance(source, Result) else source for source in node.inputs]
        inputs = within if paused[number] else map(outside, node.inputs)
        made = replace(node, inputs=tuple(inputs))
        moved |= {Result(number, i): Result(len(nodes), i) for i in range(len(node.outputs))}
        nodes.append(made)
    return replace(graph, nodes=nodes, outputs=tuple(map(outside, graph.outputs)))


_HERE = Path(__file__).resolve().parent
_OURS = (str(_HERE.parent), str(_HERE.parents[1] / "autograd"), str(Path(np.__file__).parent))
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_WORDS = {
    "__bool__": "bool(tensor), as if, while and assert do", "__float__": "float(tensor)", "__int__": "int(tensor)",
    "__repr__": "the text of a tensor, as print() does",
    "__format__": "the text of a tensor, as an f-string does", "__array__": "a tensor as a NumPy array",
    **dict.fromkeys(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"), "a change in place"),
    "grad": "autograd.grad", "__index__": "a tensor as an index", "__init__": "Tensor(tensor)",
    "data": "tensor.data", "item": "tensor.item()", "asnumpy": "tensor.asnumpy()", "waitall": "autograd.waitall()",
}  # fmt: skip


def users_line() -> tuple[str, str]:
    """Return file and line of the code that called into this library, and the name of the function it called.

    In a traced forward it is the last line before a call into Python's standard library (such as `logging`), which may
    have called back.
    """
    frame, called = sys._getframe(1), ""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_filename.startswith(_OURS[1:3]) or "Traced" in frame.f_code.co_qualname:
            called = frame.f_code.co_name
        frame = frame.f_back
    return _line_of(_before_pythons_library(frame) or frame), called


def _before_pythons_library(innermost: FrameType) -> FrameType | None:
    line, frame = None, innermost
    while frame.f_code is not TracingRun.run.__code__:
        if frame.f_code.co_filename.startswith(_LIBRARY) and "site-packages" not in frame.f_code.co_filename:
            line = None
        elif line is None and not frame.f_code.co_filename.startswith(_OURS):
            line = frame
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return line


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _defined(forward: Any) -> str:
    """Return file and line where ``forward`` begins, since a returned forward has no frame."""
    code = getattr(forward, "__code__", None)
    if code is None or code.co_filename.startswith(_OURS):
        return users_line()[0]
    return f"{code.co_filename}:{code.co_firstlineno}"


def _refuse(remedy: str = "", got: str = "") -> NoReturn:
    where, called = users_line()
    raise refusal(
        where, "a forward that does not need the values of tensors", got or _WORDS.get(called, f"tensor.{called}"),
        remedy or "take operations on tensors (autograd.where for a condition), move it out of forward, or call "
        "hybridize(False)",
    )  # fmt: skip


def refusal(where: str, expected: str, got: str, remedy: str) -> HpcdpError:
    """Return an error to raise in a traced forward; the trace fails even if the forward catches it."""
    error = HpcdpError("trace", where=where, expected=expected, got=got, remedy=remedy)
    if isinstance(modes.tracer, TracingRun):
        modes.tracer.refused = modes.tracer.refused or error
    return error


class Traced(Tensor):
    """Tensor of a traced forward, with a shape and a dtype but no values."""

    __slots__ = ("inner", "source", "tracer")

    def __init__(self, tracer: TracingRun, source: Source, inner: Tensor) -> None:
        self.tracer, self.source, self.inner = tracer, source, inner
        self.grad, self.grad_req, self.grad_hook, self.node = None, "null", None, None

    @property
    def data(self) -> Array:  # type: ignore[override]
        """Raise an error: a replay would not repeat what is done with the values."""
        if modes.tracer is not self.tracer:
            raise refusal(
                users_line()[0], "tensors of the current call", "a tensor kept from a traced call",
                "return it from forward, or call hybridize(False)",
            )  # fmt: skip
        _refuse()

    @property
    def settled(self) -> Tensor:
        """Raise an error: gradients of `autograd.grad` and `backward` would be those of the trace."""
        return Tensor(self.data)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        return self.inner.shape

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.inner.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.inner.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.inner.size

    def __len__(self) -> int:
        return self.shape[0]

    def attach_grad(self, grad_req: str = "write") -> None:
        """Raise an error: a replay would not repeat it."""
        _refuse()

    def backward(self, head_grad: Any = None, retain_graph: bool = False) -> None:
        """Raise an error: a replay would not repeat it."""
        _refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse("make a new tensor")

    def _in_place(self, operation: Any, other: Any) -> NoReturn:
        _refuse("write x = x + y", "a change in place")


class TracingRun:
    """Tracing of one run of a module's forward; ``held`` has path and value of all its tensors and arrays."""

    def __init__(self, held: Sequence[tuple[str, Any]], inputs: Sequence[Tensor]) -> None:
        self.graph = Graph(tuple(_meta(x) for x in inputs))
        self._known: dict[int, tuple[str, Any, bool]] = {}
        for name, value in held:
            if isinstance(value, Tensor):
                array = value.held() if hasattr(value, "held") else value.data
                self._known.setdefault(id(array), (name, value, True))
        for name, value in reversed(held):  # the first of several names wins
            self._known[id(value)] = (name, value, False)
        self._numbers: dict[str, int] = {}
        self.refused: HpcdpError | None = None
        """The first error raised by `refusal` in this run."""

    def run(self, forward: Any, inputs: Sequence[Tensor]) -> Any:
        """Return the result of ``forward`` for the given tensors, while tracing it."""
        before = modes.tracer, modes.signature
        modes.tracer = self
        modes.signature |= TRACING
        try:
            returned = forward(*[Traced(self, Input(i), x) for i, x in enumerate(inputs)])
            if self.refused is not None:
                raise self.refused
            self.graph.form = next((kind.__name__ for kind in (tuple, list) if isinstance(returned, kind)), "one")
            outputs = list(returned) if isinstance(returned, (tuple, list)) else [returned]
            for output in outputs:
                if not isinstance(output, Tensor):
                    within = "" if self.graph.form == "one" else f" in a {self.graph.form}"
                    raise HpcdpError(
                        "trace", where=_defined(forward),
                        expected="a forward that returns a tensor, or a tuple or list of them",
                        got=("None" if output is None else type(output).__name__) + within,
                        remedy="return one tuple of tensors, or call hybridize(False)",
                    )  # fmt: skip
            self.graph.outputs = tuple(self._source(output) for output in outputs)
        finally:
            modes.tracer, modes.signature = before
        plain = [_inner(output) for output in outputs]
        self.graph = self.graph.without_unused()
        return plain[0] if self.graph.form == "one" else tuple(plain) if self.graph.form == "tuple" else plain

    def record(self, called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator and record it."""
        bound = called.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        inputs: list[Any] = []
        for name in called.inputs:
            value = bound.arguments[name]
            is_many = called.signature.parameters[name].kind is called.signature.parameters[name].VAR_POSITIONAL
            inputs += value if is_many else [value]
        sources = tuple(self._source(x) for x in inputs)
        if called.name == "getitem" and any(_is_mask(value_of(_inner(x))) for x in inputs[1:]):  # lists are fixed
            _refuse("use autograd.where: how many elements a mask selects depends on values", "a tensor as a mask")
        modes.tracer = None
        try:
            result = called.function(*map(_inner, args), **{name: _inner(value) for name, value in kwargs.items()})
        except HpcdpError:
            raise
        except ValueError as error:
            raise does_not_fit(called, args, kwargs, error) from error
        finally:
            modes.tracer = self
        attributes = {name: _plain(bound.arguments[name]) for name in called.attributes}
        results = [value if isinstance(value, Tensor) else Tensor(value) for value in _listed(result)]
        node = len(self.graph.nodes)
        metas = tuple(_meta(result) for result in results)
        self.graph.nodes.append(GraphNode(called.name, sources, attributes, metas, modes.recording))
        traced = [Traced(self, Result(node, i), inner) for i, inner in enumerate(results)]
        return tuple(traced) if isinstance(result, tuple) else traced[0]

    def read(self) -> None:
        """Raise an error: replays would use the present values."""
        _refuse()

    def catch_up(self) -> None:
        """Do nothing; see `autograd.tape.Tracer`. Layers set deferred shapes at their first call."""

    def settle(self) -> None:
        """Raise an error: a replay would neither change a tensor of the network nor wait."""
        _refuse("return the value and pass it to the next call, or call hybridize(False)")

    def _source(self, x: Any) -> Source:
        if isinstance(x, Traced):
            if x.tracer is not self:
                _refuse("return a tensor of an earlier call, and pass it to the next one")
            return x.source
        if isinstance(x, np.generic):  # first, since np.float64 is a subclass of float
            return Literal(x.item(), str(x.dtype))
        if x is None or isinstance(x, (bool, int, float)):
            return None if x is None else Literal(x)
        if isinstance(x, (list, tuple, range)):
            return self._numbers_in(x)
        name, value, is_detached = self._known.get(id(x), ("", None, False))
        if not name:
            raise refusal(
                users_line()[0], "tensors computed from inputs and attributes",
                f"an array of shape {tuple(x.shape)} from elsewhere, fixed in replays"
                if hasattr(x, "shape") else f"a {type(x).__name__}",
                "set it as an attribute of the module (not in a list), pass it as an input, or call hybridize(False)",
            )  # fmt: skip
        if name not in self._numbers:
            self._numbers[name] = len(self.graph.held)
            self.graph.held.append(value)
            self.graph.names.append(name)
            self.graph.kinds.append((value.shape, value.dtype))
        return CapturedTensor(self._numbers[name], is_detached)

    def _numbers_in(self, x: Sequence[Any]) -> Literal:
        try:
            numbers = _numbers(x)
        except TypeError as error:
            raise refusal(
                users_line()[0], "tensors, or numbers in lists", f"a {type(x).__name__} of other objects",
                "use autograd.stack, or call hybridize(False)",
            ) from error  # fmt: skip
        if not isinstance(x, range):
            self.graph.lists.append((x, copy.deepcopy(x)))
        dtype = np.asarray(x).dtype
        return Literal(numbers, None if dtype == np.asarray(numbers).dtype else str(dtype))


def _numbers(x: Any) -> Any:
    """Return a copy of the numbers in nested lists."""
    if isinstance(x, (list, tuple, range)):
        return [_numbers(element) for element in x]
    number = x.item() if isinstance(x, np.generic) else x
    if not isinstance(number, (bool, int, float)):
        raise TypeError
    return number


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, Traced) else x


def _is_mask(key: Any) -> bool:
    return hasattr(key, "dtype") and bool(key.dtype == bool)


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _meta(x: Tensor) -> Meta:
    return Meta(tuple(x.shape), str(x.dtype))


def _plain(value: Any) -> Any:
    """Return an attribute as a serializable value, except for a random generator."""
    if isinstance(value, (type, np.dtype)):
        return str(np.dtype(value))
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, np.generic):
        number = value.item()
        return value if isinstance(number, float) else number  # a float's dtype may change the result's bits
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if isinstance(value, (tuple, list)):
        return tuple(_plain(element) for element in value)
    return value
