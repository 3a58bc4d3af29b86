"""What was recorded, and running it backward.

An operation that is recorded leaves a `Node` with its inputs and a function for its gradients. Backward visits nodes
from the last to the first (Griewank and Walther, "Evaluating Derivatives", 2008, chapter 3.2), so a leaf's gradient is
complete as early as it can be, and its hook is called there and then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..arrays import Array, array_namespace
from ..errors import GraphError
from .modes import is_recording

if TYPE_CHECKING:
    from .tensor import Tensor

SKIP = False
"""In `into`: this input needs no gradient."""
NEW = None
"""In `into`: return the gradient as an array of its own (so ``out=into[i]`` does right in both cases)."""

Into = Any
"""`SKIP`, `NEW`, or the array to write the gradient to and return."""

Backward = Callable[[Array, Sequence[Into]], Sequence[Array | None]]
"""Takes the output's gradient, and for each input where its gradient is to go; returns the inputs' gradients. Must not
change the output's gradient, which may be another node's too."""

_numbers = itertools.count()


class Node:
    """One recorded operation."""

    __slots__ = ("backward", "inputs", "name", "number")

    def __init__(self, name: str, inputs: tuple[Tensor, ...], backward: Backward) -> None:
        self.name = name
        self.inputs = inputs
        self.backward: Backward | None = backward
        self.number = next(_numbers)


def needs_record(inputs: Sequence[Tensor]) -> bool:
    """Whether an operation on ``inputs`` is to be recorded."""
    return is_recording() and any(x.node is not None or x.grad_req != "null" for x in inputs)


def backward(
    heads: Sequence[Tensor], head_grads: Sequence[Array | None] | None = None, retain_graph: bool = False
) -> None:
    """Differentiate ``heads`` with respect to all leaves that have a gradient attached; see `Tensor.backward`.

    Args:
        heads: what to differentiate; their gradients add up.
        head_grads: for each head the gradient to start from, of its shape; ones where None.
        retain_graph: keep the record for another backward.
    """
    _Pass(heads, head_grads, retain_graph, {}).run()


def grad(
    heads: Sequence[Tensor] | Tensor,
    variables: Sequence[Tensor],
    head_grads: Sequence[Array | None] | None = None,
    retain_graph: bool = False,
) -> list[Array]:
    """The gradients of ``heads`` with respect to ``variables``, as new arrays; no ``.grad`` is changed, no hook called.

    Raises:
        GraphError: a variable is not part of the recorded computation.
    """
    heads = [heads] if not isinstance(heads, (list, tuple)) else heads
    caught: dict[int, Array | None] = {id(variable): None for variable in variables}
    _Pass(heads, head_grads, retain_graph, caught).run()
    found = [caught[id(variable)] for variable in variables]
    for variable, gradient in zip(variables, found, strict=True):
        if gradient is None:
            raise GraphError(
                "grad", where=f"variable of shape {variable.shape}", expected="a variable that heads depend on"
            )
    return found


class _Pass:
    """One run backward. With ``caught`` gradients go there, by id of the variable, and nowhere else."""

    def __init__(
        self,
        heads: Sequence[Tensor],
        head_grads: Sequence[Array | None] | None,
        retain_graph: bool,
        caught: dict[int, Array | None],
    ) -> None:
        self.heads = heads
        self.head_grads = [None] * len(heads) if head_grads is None else head_grads
        self.retain_graph = retain_graph
        self.caught = caught
        self.grads: dict[Node, Array] = {}
        self.uses: dict[int, int] = {}
        self.touched: set[int] = set()

    def run(self) -> None:
        for head in self.heads:
            if head.node is None and head.grad_req == "null":
                raise GraphError(
                    "backward",
                    expected="a result computed inside autograd.record() from tensors with attach_grad()",
                    got=f"a tensor of shape {head.shape} without a record",
                )
        nodes = self._collect()
        for head, gradient in zip(self.heads, self.head_grads, strict=True):
            start = _seed(head, gradient)
            self._give(head, start)
        for node in nodes:
            gradient = self.grads.pop(node, None)
            if gradient is not None:
                self._visit(node, gradient)
            else:
                for x in node.inputs:
                    self._one_use_less(x)
            if not self.retain_graph:
                node.backward, node.inputs = None, ()

    def _collect(self) -> list[Node]:
        """All nodes that heads depend on, last first; counts how often each leaf is used."""
        for head in self.heads:
            self.uses[id(head)] = self.uses.get(id(head), 0) + 1
        found = {head.node for head in self.heads if head.node is not None}
        pending = list(found)
        while pending:
            node = pending.pop()
            if node.backward is None:
                raise GraphError(
                    "backward",
                    where=node.name,
                    expected="a record that is still there",
                    got="one that an earlier backward has freed",
                    remedy="pass retain_graph=True to the earlier backward",
                )
            for x in node.inputs:
                self.uses[id(x)] = self.uses.get(id(x), 0) + 1
                if x.node is not None and x.node not in found:
                    found.add(x.node)
                    pending.append(x.node)
        return sorted(found, key=lambda node: -node.number)

    def _visit(self, node: Node, gradient: Array) -> None:
        assert node.backward is not None
        seen: set[int] = set()  # an operation on twice the same leaf must not get its buffer twice
        into = []
        for x in node.inputs:
            into.append(NEW if id(x) in seen else self._into(x))
            seen.add(id(x))
        for x, place, part in zip(node.inputs, into, node.backward(gradient, into), strict=True):
            if place is not SKIP and part is not None:
                self._give(x, part)
            else:
                self._one_use_less(x)

    def _into(self, x: Tensor) -> Into:
        if id(x) in self.caught or x.node is not None:
            return NEW
        if x.grad_req == "null" or self.caught:
            return SKIP
        return x.grad if x.grad_req == "write" and id(x) not in self.touched else NEW

    def _give(self, x: Tensor, gradient: Array) -> None:
        """Add a part of x's gradient to where it belongs."""
        if id(x) in self.caught:
            before = self.caught[id(x)]
            self.caught[id(x)] = gradient + 0 if before is None else before + gradient
        if x.node is not None:
            before = self.grads.get(x.node)
            self.grads[x.node] = gradient if before is None else before + gradient
        elif x.grad_req != "null" and not self.caught:
            if gradient is not x.grad:
                if x.grad_req == "write" and id(x) not in self.touched:
                    x.grad[...] = gradient
                else:
                    x.grad += gradient
            self.touched.add(id(x))
            self._one_use_less(x)

    def _one_use_less(self, x: Tensor) -> None:
        if x.node is None:
            self.uses[id(x)] -= 1
            complete = self.uses[id(x)] == 0 and id(x) in self.touched
            if complete and x.grad_hook is not None:
                x.grad_hook(x)


def _seed(head: Tensor, gradient: Array | None) -> Array:
    xp = array_namespace(head.data)
    if gradient is None:
        return xp.ones(head.shape, dtype=head.dtype)
    gradient = getattr(gradient, "data", gradient) if not hasattr(gradient, "__array_namespace__") else gradient
    if tuple(gradient.shape) != head.shape:
        raise GraphError("backward", where="head_grad", expected=f"shape {head.shape}", got=f"shape {gradient.shape}")
    return gradient
