"""Whether a graph that was traced with one batch computes what the network does with any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ...arrays import dtype_of, from_host
from ...autograd import Tensor, pause
from .graph import Graph
from .held import array_of
from .saved import calls_as_json


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
