"""Guards: whether a plan may be replayed, or the program has changed what it depends on.

Whether anything that plans depend on may have changed since they last looked: one comparison instead of many.

A new object stands for a new state, so that threads that change something at once cannot miss each other's changes.

The arrays of a network's tensors that a plan reads, as long as they are those.

Whether a graph that was traced with one batch computes what the network does with any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...autograd import Tensor, pause
from ...autograd.dispatch import TRACING, modes
from ...core.arrays import dtype_of, from_host
from ...errors import HpcdpError
from .graph import Graph
from .serialize import calls_as_json


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
        from .tracing import refusal, users_line

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
