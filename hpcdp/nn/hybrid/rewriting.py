"""Rewriting: what a graph computes in fewer passes over memory, to the same bits."""

from __future__ import annotations

from dataclasses import replace

from .graph import Graph, Node, Result

_TAKES_ACTIVATION = ("dense", "conv2d")


def rewritten(graph: Graph, recording: bool) -> Graph:
    """The graph as it is planned; ``recording`` says whether backward may follow."""
    return with_activations(graph)


def with_activations(graph: Graph) -> Graph:
    """Convolutions and dense layers together with the ReLU that alone reads them.

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
