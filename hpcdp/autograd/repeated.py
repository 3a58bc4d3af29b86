"""Backward through a tape that is kept, again and again: the way is looked for once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .tape import Gradient, Pullback, Way, pairs_of
from .tensor import Tensor


class _Turn(NamedTuple):
    """One operation of the way."""

    pullback: Pullback
    own: Gradient
    of_inputs: tuple[Gradient | None, ...]
    completed: tuple[tuple[Tensor, Gradient], ...]
    """Leaves of which this was the last use."""


class RepeatedBackward:
    """What ``backward(head, head_grad, retain_graph=True)`` does, to the same bits, with hooks at the same places.

    Args:
        head: computed on the host by recorded operations, whose pullbacks may be called again when their operands have
            other values. Leaves with ``grad_req="null"`` get no gradient, also if they would later.

    Raises:
        HpcdpError: as `backward`.
    """

    def __init__(self, head: Tensor) -> None:
        way = Way(pairs_of(head, None))
        gradients = {node: Gradient(node, np) for node in way.nodes}
        self._leaves = {leaf: Gradient(leaf, np) for leaf in way.uses if leaf.grad_req != "null"}
        wanted = gradients | self._leaves
        assert head.node is not None
        self._head = gradients[head.node]
        self._turns: list[_Turn] = []
        for node, completed in way.turns():
            assert node.pullback is not None
            inputs = tuple(wanted.get(source) for source in node.inputs)
            done = tuple((leaf, self._leaves[leaf]) for leaf in completed if leaf in self._leaves)
            self._turns.append(_Turn(node.pullback, gradients[node], inputs, done))

    def run(self, head_grad: np.ndarray) -> None:
        """Compute the gradients of all leaves anew; ``head_grad`` is of the head's shape and dtype."""
        for leaf, gradient in self._leaves.items():
            home = leaf.grad
            if home is None:
                home = leaf.grad = np.zeros(leaf.shape, leaf.dtype)
            gradient.begin(home, leaf.grad_req == "add")
        self._head.add(head_grad)
        try:
            for pullback, own, of_inputs, completed in self._turns:
                gy = own.finish()
                own.begin()
                pullback(gy, *of_inputs)
                for leaf, gradient in completed:
                    gradient.finish()
                    if leaf.grad_hook is not None:
                        leaf.grad_hook(leaf)
        finally:  # also where a hook has raised
            for _, own, _, _ in self._turns:
                own.begin()
