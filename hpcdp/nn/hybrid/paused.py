"""What a forward computes while recording is paused: a graph of predictions, which record nothing, does not tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...arrays import dtype_of, is_float
from ...autograd import Tensor, record
from .batches import zeros_for
from .graph import Graph, Node, Result, Source
from .saved import calls_as_json


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
    nodes: list[Node] = []
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
            nodes.append(Node("detach", (moved[source],), {}, (meta,)))
        return detached[source]

    for number, node in enumerate(graph.nodes):
        within = [moved[each] if isinstance(each, Result) else each for each in node.inputs]
        inputs = within if paused[number] else map(outside, node.inputs)
        made = replace(node, inputs=tuple(inputs))
        moved |= {Result(number, i): Result(len(nodes), i) for i in range(len(node.outputs))}
        nodes.append(made)
    return replace(graph, nodes=nodes, outputs=tuple(map(outside, graph.outputs)))
