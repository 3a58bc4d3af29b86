"""Rewriting: what a graph computes in fewer passes over memory, to the same bits."""

from __future__ import annotations

from dataclasses import replace

from ...arrays import dtype_of
from .graph import Graph, Held, Meta, Node, Result, Source

_TAKES_ACTIVATION = ("affine", "conv2d", "dense")


def rewritten(graph: Graph, recording: bool) -> Graph:
    """The graph as it is planned; ``recording`` says whether backward may follow."""
    return with_activations(with_biases(graph))


def with_biases(graph: Graph) -> Graph:
    """Products together with the bias that is added to each by the very next operator, which alone reads it."""
    uses = graph.num_uses()
    nodes: list[Node | None] = list(graph.nodes)
    moved = {}
    for number, node in enumerate(graph.nodes):
        before = graph.nodes[number - 1] if number else node
        if node.operator != "add" or before.operator != "matmul" or uses[number - 1] != 1:
            continue
        bias = next((each for each in node.inputs if each != Result(number - 1)), None)
        if before.is_recorded == node.is_recorded and _is_bias(graph, bias, before.outputs[0]):
            inputs = (*before.inputs, bias)
            nodes[number - 1] = replace(before, operator="affine", inputs=inputs, attributes={"activation": None})
            nodes[number] = None
            moved[number] = number - 1
    return graph.changed_to(nodes, moved)


def _is_bias(graph: Graph, source: Source, product: Meta) -> bool:
    if not isinstance(source, Held) or dtype_of(product.dtype).char not in "fd":
        return False
    shape, dtype = graph.kinds[source.number]
    return shape == product.shape[-1:] != () and str(dtype) == product.dtype


def with_activations(graph: Graph) -> Graph:
    """Convolutions, dense layers and products with a bias together with the ReLU that alone reads them.

    The node stands where the convolution stood, so backward adds up gradients in the same order.
    """
    uses = graph.num_uses()
    nodes: list[Node | None] = list(graph.nodes)
    moved = {}
    for number, node in enumerate(graph.nodes):
        source = node.inputs[0] if node.operator == "relu" else None
        if not isinstance(source, Result) or uses[source.node] != 1:
            continue
        before = graph.nodes[source.node]
        if (
            before.operator in _TAKES_ACTIVATION
            and before.attributes["activation"] is None
            and before.is_recorded == node.is_recorded
        ):
            nodes[source.node] = replace(before, attributes={**before.attributes, "activation": "relu"})
            nodes[number] = None
            moved[number] = source.node
    return graph.changed_to(nodes, moved)
