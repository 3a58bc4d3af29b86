"""Tracing: a network is run once, and its operators are recorded.

Tracing: a forward is run once on tensors that note which operators it calls, and refuse to show their values.

What a forward computes while recording is paused: a graph of predictions, which record nothing, does not tell.

Guards: whether a plan may be replayed, or the program has changed what it depends on.

Whether anything that plans depend on may have changed since they last looked: one comparison instead of many.

A new object stands for a new state, so that threads that change something at once cannot miss each other's changes.

The arrays of a network's tensors that a plan reads, as long as they are those.

Whether a graph that was traced with one batch computes what the network does with any other.
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
"""What stands for the attributes of all modules, and for the arrays and hooks of all parameters."""


class Look:
    """Tells once after each change whether a module may have changed, and at first."""

    def __init__(self) -> None:
        self._seen: object = None

    def is_due(self) -> bool:
        now = state.modules
        before, self._seen = self._seen, now
        return before is not now


def in_module(module: object, name: str) -> None:
    """An attribute of a module is about to change.

    Raises:
        HpcdpError: this thread traces: a replay would not change it.
    """
    if modes.signature & TRACING:
        raise refusal(
            users_line()[0], "a forward that only computes", f"one that assigns {type(module).__name__}.{name}",
            "return what is to be kept, or call hybridize(False)",
        )  # fmt: skip
    state.modules = object()


def in_parameters() -> None:
    """A parameter has another array or hook."""
    state.parameters = object()


def array_of(held: Any) -> Any:
    """The array behind what a network has as an attribute, without waiting for an update of it."""
    return held.held() if hasattr(held, "held") else held.data if isinstance(held, Tensor) else held


class HeldArrays:
    """The arrays of the tensors and arrays of a network that ``graph`` holds, and the lists that it was traced with."""

    def __init__(self, graph: Graph) -> None:
        self._all = graph.held
        pairs = [(each, array_of(each)) for each in graph.held]
        self.parameters = [pair for pair in pairs if hasattr(pair[0], "held")]
        self._buffers = [pair for pair in pairs if isinstance(pair[0], Tensor) and not hasattr(pair[0], "held")]
        self._has_its_lists = graph.has_its_lists if graph.lists else None
        self.are_parameters_only = not self._buffers
        self.seen: object = None
        """The state of all parameters at which these had no hooks and these arrays."""

    def still_hold(self) -> bool:
        """Whether the tensors still have these arrays, and the lists these numbers."""
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
        """Which of the network's tensors and arrays get no gradient."""
        return [getattr(each, "grad_req", "null") == "null" for each in self._all]

    @property
    def are_settled(self) -> bool:
        """Whether no update of a parameter may be under way."""
        return self.seen is state.parameters

    def wait_for_updates(self) -> None:
        """Wait for the updates of all parameters."""
        if not self.are_settled:
            for param, _ in self.parameters:
                wait_for_update(param)


def wait_for_update(param: Any) -> None:
    """Wait until nothing changes the values of ``param``, whose array must stay the same."""
    before = param.held()
    if param.data is not before:
        raise HpcdpError("replay", where=param.name, expected="an update in place", got="another array")


def takes_any_batch(graph: Graph, trace: Callable[[list[Tensor]], Graph]) -> bool:
    """Whether traces with other numbers of rows, the first axis of all inputs, call the same operators alike.

    They do not where the forward has made a number of the batch's, as the divisor of a mean over it, or a loop's end.

    Args:
        trace: traces the network's forward once more, and returns its graph.
    """
    if not all(each.shape for each in graph.inputs):
        return False
    own = graph.names, calls_as_json(graph)
    try:
        with pause(), np.errstate(all="ignore"):
            traced = map(trace, _others(graph))
            return all((each.names, calls_as_json(each)) == own for each in traced)
    except Exception:  # whatever a forward raises that does not take so many rows
        return False


def _others(graph: Graph) -> Iterator[list[Tensor]]:
    """Zeros for each input, with about twice its rows, and with one."""
    yield zeros_for(graph, lambda had: 2 * had + 1)
    yield zeros_for(graph, lambda had: 1)


def zeros_for(graph: Graph, rows: Callable[[int], int]) -> list[Tensor]:
    """Zeros for each input, with as many rows as ``rows`` makes of its own, where the network's tensors are."""
    like = array_of(graph.held[0]) if graph.held else np.empty(0)
    shapes = [(*map(rows, each.shape[:1]), *each.shape[1:]) for each in graph.inputs]
    zeros = [np.zeros(shape, dtype_of(each.dtype)) for shape, each in zip(shapes, graph.inputs, strict=True)]
    return [Tensor(from_host(each, like)) for each in zeros]


def with_pauses(graph: Graph, trace: Callable[[list[Tensor]], Graph]) -> Graph:
    """``graph``, in which no gradient goes back through what the forward computes within ``pause()``.

    Args:
        trace: traces the network's forward once more, here while recording, and returns its graph.
    """
    try:
        with record(train_mode=False):
            recorded = trace(zeros_for(graph, lambda rows: rows))
    except Exception:  # whatever a forward raises that knows zeros, or recording, from a prediction
        return graph
    if all(node.is_recorded for node in recorded.nodes) or calls_as_json(recorded) != calls_as_json(graph):
        return graph
    return _detached(graph, [not node.is_recorded for node in recorded.nodes])


def _detached(graph: Graph, paused: list[bool]) -> Graph:
    """``graph`` with an operator ``detach`` between each result of a ``paused`` node and those that are not."""
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
        within = [moved[each] if isinstance(each, Result) else each for each in node.inputs]
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
    """File and line of the code that called into this library, and the name of what it called.

    Of a forward that is traced it is the last line before one of Python's own library, as of `logging`, which may have
    called others: nobody can change those.
    """
    frame, called = sys._getframe(1), ""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_filename.startswith(_OURS[1:3]) or "Traced" in frame.f_code.co_qualname:
            called = frame.f_code.co_name
        frame = frame.f_back
    return _line_of(_before_pythons_library(frame) or frame), called


def _before_pythons_library(innermost: FrameType) -> FrameType | None:
    found, frame = None, innermost
    while frame.f_code is not TracingRun.run.__code__:
        if frame.f_code.co_filename.startswith(_LIBRARY) and "site-packages" not in frame.f_code.co_filename:
            found = None
        elif found is None and not frame.f_code.co_filename.startswith(_OURS):
            found = frame
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return found


def _line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _defined(forward: Any) -> str:
    """File and line where ``forward`` begins: it has returned, so that no frame tells the line of its result."""
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
    """An error to raise in a forward that is traced; the trace fails also if the forward catches it."""
    error = HpcdpError("trace", where=where, expected=expected, got=got, remedy=remedy)
    if isinstance(modes.tracer, TracingRun):
        modes.tracer.refused = modes.tracer.refused or error
    return error


class Traced(Tensor):
    """A tensor of a forward that is traced: it has a shape and a dtype, and takes part in operations."""

    __slots__ = ("inner", "source", "tracer")

    def __init__(self, tracer: TracingRun, source: Source, inner: Tensor) -> None:
        self.tracer, self.source, self.inner = tracer, source, inner
        self.grad, self.grad_req, self.grad_hook, self.node = None, "null", None, None

    @property
    def data(self) -> Array:  # type: ignore[override]
        """Refused: a replay would not see what is done with it."""
        if modes.tracer is not self.tracer:
            raise refusal(
                users_line()[0], "tensors of calls that are under way", "one that a call has kept which was traced",
                "return it, or call hybridize(False)",
            )  # fmt: skip
        _refuse()

    @property
    def settled(self) -> Tensor:
        """Refused: for `autograd.grad` and `backward`, whose gradients would be those of the trace."""
        return Tensor(self.data)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner.shape

    @property
    def dtype(self) -> Any:
        return self.inner.dtype

    @property
    def ndim(self) -> int:
        return self.inner.ndim

    @property
    def size(self) -> int:
        return self.inner.size

    def __len__(self) -> int:
        return self.shape[0]

    def attach_grad(self, grad_req: str = "write") -> None:
        _refuse()

    def backward(self, head_grad: Any = None, retain_graph: bool = False) -> None:
        _refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse("make a new tensor")

    def _in_place(self, operation: Any, other: Any) -> NoReturn:
        _refuse("write x = x + y", "a change in place")


class TracingRun:
    """One traced run of a module's forward.

    Args:
        held: path and value of every tensor and array among the attributes of the module and its parts.
    """

    def __init__(self, held: Sequence[tuple[str, Any]], given: Sequence[Tensor]) -> None:
        self.graph = Graph(tuple(_meta(each) for each in given))
        self._known: dict[int, tuple[str, Any, bool]] = {}
        for name, value in held:
            if isinstance(value, Tensor):
                array = value.held() if hasattr(value, "held") else value.data
                self._known.setdefault(id(array), (name, value, True))
        for name, value in reversed(held):  # of one that has several names the first counts, as everywhere
            self._known[id(value)] = (name, value, False)
        self._numbers: dict[str, int] = {}
        self.refused: HpcdpError | None = None
        """What the forward was refused first."""

    def run(self, forward: Any, given: Sequence[Tensor]) -> Any:
        """What ``forward`` returns for the given tensors, as without a trace."""
        before = modes.tracer, modes.signature
        modes.tracer = self
        modes.signature |= TRACING
        try:
            found = forward(*[Traced(self, Input(i), each) for i, each in enumerate(given)])
            if self.refused is not None:
                raise self.refused
            self.graph.form = "tuple" if isinstance(found, tuple) else "list" if isinstance(found, list) else "one"
            outputs = list(found) if isinstance(found, (tuple, list)) else [found]
            for each in outputs:
                if not isinstance(each, Tensor):
                    within = "" if self.graph.form == "one" else f" in a {self.graph.form}"
                    raise HpcdpError(
                        "trace", where=_defined(forward),
                        expected="a forward that returns a tensor, or a tuple or list of them",
                        got=("None" if each is None else type(each).__name__) + within,
                        remedy="nested results, dicts and None are not supported; return one tuple of tensors, or call "
                        "hybridize(False)",
                    )  # fmt: skip
            self.graph.outputs = tuple(self._source(each) for each in outputs)
        finally:
            modes.tracer, modes.signature = before
        plain = [_inner(each) for each in outputs]
        self.graph = self.graph.without_unused()
        return plain[0] if self.graph.form == "one" else tuple(plain) if self.graph.form == "tuple" else plain

    def record(self, called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator and note it."""
        bound = called.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        inputs: list[Any] = []
        for name in called.inputs:
            value = bound.arguments[name]
            is_many = called.signature.parameters[name].kind is called.signature.parameters[name].VAR_POSITIONAL
            inputs += value if is_many else [value]
        sources = tuple(self._source(each) for each in inputs)
        if called.name == "getitem" and any(_is_mask(value_of(_inner(each))) for each in inputs[1:]):  # lists are fixed
            _refuse("take autograd.where: how many elements a mask chooses depends on values", "a tensor as a mask")
        modes.tracer = None
        try:
            result = called.function(*map(_inner, args), **{name: _inner(each) for name, each in kwargs.items()})
        except HpcdpError:
            raise
        except ValueError as error:
            raise does_not_fit(called, args, kwargs, error) from error
        finally:
            modes.tracer = self
        attributes = {name: _plain(bound.arguments[name]) for name in called.attributes}
        found = [each if isinstance(each, Tensor) else Tensor(each) for each in _listed(result)]
        node = len(self.graph.nodes)
        metas = tuple(_meta(each) for each in found)
        self.graph.nodes.append(GraphNode(called.name, sources, attributes, metas, modes.recording))
        traced = [Traced(self, Result(node, i), each) for i, each in enumerate(found)]
        return tuple(traced) if isinstance(result, tuple) else traced[0]

    def read(self) -> None:
        """Refused: replays would go on with the values of now."""
        _refuse()

    def catch_up(self) -> None:
        """See `registry.Tracer`; layers find out their shapes when they are called first."""

    def settle(self) -> None:
        """Refused: no replay would change a tensor of the network, or wait."""
        _refuse("return what is to be kept, and pass it to the next call, or call hybridize(False)")

    def _source(self, x: Any) -> Source:
        if isinstance(x, Traced):
            if x.tracer is not self:
                _refuse("a tensor of an earlier call was kept: return it, and pass it to the next one")
            return x.source
        if isinstance(x, np.generic):  # first, since a float64 is a float of Python's, too
            return Literal(x.item(), str(x.dtype))
        if x is None or isinstance(x, (bool, int, float)):
            return None if x is None else Literal(x)
        if isinstance(x, (list, tuple, range)):
            return self._numbers_in(x)
        name, value, is_detached = self._known.get(id(x), ("", None, False))
        if not name:
            raise refusal(
                users_line()[0], "tensors that are computed from the inputs, and attributes",
                f"an array of shape {tuple(x.shape)} from elsewhere, fixed in replays"
                if hasattr(x, "shape") else f"a {type(x).__name__}",
                "keep it as an attribute of the module (a part in a list is none), pass it as an input, or call "
                "hybridize(False)",
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
                users_line()[0], "tensors, or numbers in lists", f"a {type(x).__name__} with something else in it",
                "take autograd.stack of it, or call hybridize(False)",
            ) from error  # fmt: skip
        if not isinstance(x, range):
            self.graph.lists.append((x, copy.deepcopy(x)))
        dtype = np.asarray(x).dtype
        return Literal(numbers, None if dtype == np.asarray(numbers).dtype else str(dtype))


def _numbers(x: Any) -> Any:
    """The numbers in ``x``, in lists of their own."""
    if isinstance(x, (list, tuple, range)):
        return [_numbers(each) for each in x]
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
    """An attribute as it can be written down, but for a random generator."""
    if isinstance(value, (type, np.dtype)):
        return str(np.dtype(value))
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if isinstance(value, np.generic):
        number = value.item()
        return value if isinstance(number, float) else number  # the dtype of a float may change a result's bits
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    if isinstance(value, (tuple, list)):
        return tuple(_plain(each) for each in value)
    return value
