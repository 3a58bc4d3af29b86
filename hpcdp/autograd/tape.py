"""The tape: what was computed from what, and the way back.

A node is one recorded operation. Nodes are numbered as they are made, so descending numbers are an order in which every
operation comes after all that used its result; no recursion is needed, however deep the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.arrays import Array, array_namespace, is_cupy, on_device_of
from ..core.devices import to_device_of
from ..errors import HpcdpError, type_named
from ..kernels import kernels_for
from ..kernels.buffers import empty
from .dispatch import catch_up, modes

if TYPE_CHECKING:
    from .tensor import Tensor

Pullback = Callable[..., None]
"""``pullback(gy, *gradients)``: from the gradient ``gy`` of an operation's result, add to that of each of its inputs.

There is one `Gradient` for every input, None where nobody asks for it. ``gy`` must not be changed.
"""


class Node:
    """One recorded operation.

    ``inputs`` holds for every input the node that made it, the leaf tensor that it is, or None where no gradient is
    wanted. When the tape is freed, both ``inputs`` and ``pullback``, and with it the saved arrays, are dropped.
    """

    __slots__ = ("dtype", "inputs", "number", "pullback", "shape")

    def __init__(self, value: Array, inputs: tuple[Node | Tensor | None, ...], pullback: Pullback) -> None:
        self.shape: tuple[int, ...] = value.shape
        self.dtype = value.dtype
        self.inputs = inputs
        self.pullback: Pullback | None = pullback
        self.number = next(modes.numbers)

    def free(self) -> None:
        """Drop what only this operation's backward needs."""
        self.inputs = ()
        self.pullback = None


class Gradient:
    """The gradient of one tensor while backward sums its contributions.

    For a leaf it lies in ``leaf.grad`` from the first contribution on, so that nothing is copied.
    """

    __slots__ = ("_given", "_home", "_private", "_xp", "dtype", "shape", "value")

    def __init__(self, of: Node | Tensor, xp: Any, home: Array | None = None, adds: bool = False) -> None:
        like = of if home is None else home  # which are alike; a parameter waits for its update before it says so
        self.shape: tuple[int, ...] = like.shape
        self.dtype = like.dtype
        self._xp = xp
        self.value: Array = home if adds else None
        self._home: Array = home
        self._private = adds
        self._given: Array = None

    def begin(self, home: Array | None = None, adds: bool = False) -> None:
        """Forget what was added; from now on it lies in ``home``, with what that holds if it ``adds``."""
        self._home, self.value = home, home if adds else None
        self._private, self._given = adds, None

    def empty(self) -> Array:
        """Where to write a whole contribution before `add`: a contiguous array of its shape and dtype.

        A leaf that an operation takes twice asks twice before it adds: the home is given out once.
        """
        fresh = self.value is None and self._given is None
        at_home = fresh and self._home is not None and self._home.flags.c_contiguous
        self._given = self._home if at_home else empty(self.shape, self.dtype, self._xp)
        return self._given

    def add(self, contribution: Array) -> None:
        """Add an array of the tensor's shape. It may be kept, so it must not be changed afterwards."""
        if self.value is None:
            if self._home is None:
                self.value = contribution if contribution.dtype == self.dtype else contribution.astype(self.dtype)
                self._private = contribution is self._given
            else:
                if contribution is not self._home:
                    self._home[...] = contribution
                self.value = self._home
                self._private = True
        else:
            first, kernels = self.value, kernels_for("elementwise", self.value, plain_on_host=True)
            if not self._private:  # it is somebody else's array
                self.value, self._private = empty(self.shape, self.dtype, self._xp), True
            kernels.add(first, contribution, self.value)

    @property
    def home(self) -> Array | None:
        """Where a leaf's gradient lies; None where it is asked for as a new array, and for results of operations."""
        return self._home

    def replace(self, value: Array) -> None:
        """``value``, which is the home where there is one, and nobody else's, is the sum of all that was added."""
        self.value, self._private = value, True

    def finish(self) -> Array:
        """The sum; zeros where nothing was added."""
        if self.value is None:
            zeros = self.empty()
            zeros[...] = 0
            self.add(zeros)
        return self.value

    def take(self) -> Array:
        """The sum as an array that nobody else has."""
        value = self.finish()
        with on_device_of(value):
            return value if self._private else self._xp.asarray(value).copy()


class NumberHeads:
    """Operations that made a single number of many, as a backward that begins with single numbers meets them.

    Args:
        count: how many heads there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.reductions: list[tuple[Array, tuple[int, ...]]] = []
        """The gradient of the result and the shape of the operand of each such operation; without those whose operand
        was itself made by an operation over the first axis, of samples."""

    def note(self, node: Node, gy: Array) -> None:
        """Note an operation, of whose result ``gy`` is the gradient, if it is one of those."""
        if gy.size != 1:
            return
        for source in node.inputs:
            if isinstance(source, Node) and math.prod(source.shape) > 1:
                below = (each for each in source.inputs if isinstance(each, Node))
                if not any(each.shape[1:] == source.shape for each in below):
                    self.reductions.append((gy, source.shape))


def backward(
    heads: Tensor | Sequence[Tensor],
    head_grads: Array | Tensor | Sequence[Any] | None = None,
    retain_graph: bool = False,
) -> None:
    """Compute the gradients of the sum of ``heads`` with respect to all leaves and leave them in ``leaf.grad``.

    A leaf's gradient is overwritten, added to or left alone as ``leaf.grad_req`` says ("write", "add", "null"), always
    in place. As soon as it is complete, ``leaf.grad_hook(leaf)`` is called, in this thread, before backward goes on.
    Waits for all asynchronous calls of this thread, which may read gradients.

    Args:
        heads: tensors computed while recording.
        head_grads: for each head an array of its shape, or None for ones, so that gradients of a loss of shape
            ``(batch,)`` are sums over the batch.
        retain_graph: keep the tape, so that backward can run through it again.

    Raises:
        HpcdpError: a head was not recorded, its tape is freed, or a head gradient has another shape.
    """
    catch_up()
    pairs = pairs_of(heads, head_grads)
    walk = _Pass(pairs, None)
    if not all(seed.size == 1 for _, seed in pairs):
        walk.run(pairs, retain_graph)
        return
    walk.number_heads = modes.number_heads = NumberHeads(len(pairs))
    try:
        walk.run(pairs, retain_graph)
    finally:
        modes.number_heads = None


def grad(
    heads: Tensor | Sequence[Tensor],
    variables: Tensor | Sequence[Tensor],
    head_grads: Array | Tensor | Sequence[Any] | None = None,
    retain_graph: bool = False,
) -> Any:
    """The gradients of the sum of ``heads`` with respect to ``variables``, as new arrays; no ``.grad`` is touched.

    Args:
        variables: leaves with a gradient attached, or results of recorded operations.

    Returns:
        One array for a single variable, else a list; zeros where the heads do not depend on a variable.

    Raises:
        HpcdpError: as `backward`.
    """
    wanted = _settled("grad", variables if isinstance(variables, Sequence) else [variables])
    for variable in wanted:
        if variable.node is None and variable.grad_req == "null":
            raise HpcdpError(
                "grad",
                where="variables",
                expected="tensors with a gradient attached, or recorded ones",
                got=f"one of shape {tuple(variable.shape)} that is neither",
                remedy="call its attach_grad() before recording",
            )
    pairs = pairs_of(heads, head_grads)
    walk = _Pass(pairs, [variable.node or variable for variable in wanted])
    walk.run(pairs, retain_graph)
    found: list[Array] = []
    for variable in wanted:  # one that is asked for twice gets two arrays
        gradient = walk.found(variable)
        with on_device_of(gradient):
            found.append(gradient + 0 if any(gradient is other for other in found) else gradient)
    return found if isinstance(variables, Sequence) else found[0]


def leaves_below(heads: Sequence[Tensor]) -> list[Tensor]:
    """The leaves from which ``heads``, results of recorded operations, were computed, in the order in which `backward`
    completes their gradients."""
    return [leaf for _, completed in GraphWalk([(head, head.data) for head in heads]).turns() for leaf in completed]


def add_gradients(
    heads: Sequence[Tensor],
    head_grads: Sequence[Array],
    into: dict[Tensor, Gradient],
    completed: Callable[[Tensor], None] | None = None,
) -> None:
    """Add what `backward` would to the gradients of the leaves in ``into``, and complete them; the tape stays, and in
    the place of hooks ``completed(leaf)`` is called."""
    pairs = list(zip(heads, head_grads, strict=True))
    walk = _Pass(pairs, list(into))
    walk.gradients.update(into)
    walk.completed = completed
    walk.run(pairs, retain_graph=True)


def _settled(operation: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those on the tape that ``tensors`` stand for; `HpcdpError` for what is none, as the arrays that `grad` gives."""
    try:
        return [each.settled for each in tensors]
    except AttributeError as error:
        odd = next((each for each in tensors if not hasattr(each, "settled")), None)
        if odd is None:
            raise
        raise HpcdpError(
            operation, expected="tensors", got=type_named(odd),
            remedy="a gradient is an array, which is on no tape: there are none of gradients",
        ) from error  # fmt: skip


def pairs_of(heads: Any, head_grads: Any) -> list[tuple[Tensor, Array]]:
    """Each head with its gradient, ones where there is none; raises as `backward` where one is no head."""
    if not isinstance(heads, Sequence):
        heads, head_grads = [heads], [head_grads]
    elif head_grads is None:
        head_grads = [None] * len(heads)
    if len(head_grads) != len(heads):
        raise HpcdpError("backward", expected=f"{len(heads)} head gradients", got=len(head_grads))
    pairs = []
    for head, seed in zip(_settled("backward", heads), head_grads, strict=True):
        if head.node is None and head.grad_req == "null":
            raise HpcdpError(
                "backward",
                expected="a head computed from attached tensors while recording",
                got=f"a tensor of shape {head.shape} that is not on the tape",
                remedy="compute it inside `with autograd.record():`",
            )
        with on_device_of(head.data):
            pairs.append((head, _seed_of(head.data, seed)))
    return pairs


def _seed_of(value: Array, given: Any) -> Array:
    """The gradient of a head, of ``value``, where that is; see `backward` for what may be given."""
    xp, given = array_namespace(value), getattr(given, "data", given) if hasattr(given, "grad_req") else given
    if given is None:  # CuPy's full would take twice as long
        return xp.ones(value.shape, dtype=value.dtype)
    if isinstance(given, int | float):
        return xp.full(value.shape, given, dtype=value.dtype)
    seed = given if hasattr(given, "shape") else np.full(value.shape, given, dtype=value.dtype)
    if tuple(seed.shape) != value.shape:
        raise HpcdpError("backward", where="head_grads", expected=f"shape {value.shape}", got=tuple(seed.shape))
    return to_device_of(seed, value) if is_cupy(seed) or is_cupy(value) else seed


class GraphWalk:
    """What lies below the heads of ``pairs``, each a head and its gradient."""

    def __init__(self, pairs: list[tuple[Tensor, Array]]) -> None:
        self.uses: dict[Any, int] = {}
        """How often each leaf is used."""
        self.nodes: list[Node] = []
        """In the order in which they were recorded."""
        stack: list[Any] = [head.node or head for head, _ in pairs]
        seen = set()
        while stack:
            each = stack.pop()
            if not isinstance(each, Node):
                self.uses[each] = self.uses.get(each, 0) + 1
            elif each not in seen:
                if each.pullback is None:
                    raise HpcdpError(
                        "backward",
                        expected="a tape that is still there",
                        got="one that an earlier backward has freed",
                        remedy="call the earlier one with retain_graph=True",
                    )
                seen.add(each)
                self.nodes.append(each)
                stack.extend(source for source in each.inputs if source is not None)
        self.nodes.sort(key=lambda node: node.number)

    def turns(self) -> Iterator[tuple[Node, list[Tensor]]]:
        """The nodes in the order in which backward comes to them, and the leaves whose last use each of them is."""
        left = dict(self.uses)
        for node in reversed(self.nodes):
            completed = []
            for each in node.inputs:
                if each is not None and not isinstance(each, Node):
                    left[each] -= 1
                    if not left[each]:
                        completed.append(each)
            yield node, completed


class _Pass(GraphWalk):
    """One run through the tape; ``wanted`` are the nodes and leaves that `grad` asks for, None means backward."""

    def __init__(self, pairs: list[tuple[Tensor, Array]], wanted: list[Any] | None) -> None:
        super().__init__(pairs)
        self._wanted = None if wanted is None else set(wanted)
        self._xp = array_namespace(*(seed for _, seed in pairs)) if pairs else np
        self.gradients: dict[Any, Gradient] = {}
        self.completed: Callable[[Tensor], None] | None = None
        """Called with each of the wanted leaves when its gradient is complete."""
        self.number_heads: NumberHeads | None = None
        self._kept: dict[Any, Array] = {}

    def run(self, pairs: list[tuple[Tensor, Array]], retain_graph: bool) -> None:
        for head, seed in pairs:
            source: Node | Tensor = head.node or head
            gradient = self._gradient(source)
            if gradient is not None:
                with on_device_of(seed):  # on which a head that is given twice, or a leaf, adds it up
                    gradient.add(seed)
            if source is head:
                self._used(head)
        number_heads = self.number_heads
        while self.nodes:
            node = self.nodes.pop()
            gradient = self.gradients.pop(node, None)
            if gradient is not None:
                gy = gradient.finish()
                if self._wanted is not None and node in self._wanted:
                    self._kept[node] = gradient.take()
                if number_heads is not None:
                    number_heads.note(node, gy)
                assert node.pullback is not None
                if type(gy) is np.ndarray:  # on the host no more is asked
                    node.pullback(gy, *[self._gradient(source) for source in node.inputs])
                else:
                    with on_device_of(gy):
                        node.pullback(gy, *[self._gradient(source) for source in node.inputs])
            for each in node.inputs:
                if each is not None and not isinstance(each, Node):
                    self._used(each)
            if not retain_graph:
                node.free()

    def found(self, variable: Tensor) -> Array:
        """What `grad` returns for one variable."""
        source = variable.node or variable
        if source not in self._kept:
            xp = array_namespace(variable.data)
            with on_device_of(variable.data):
                self._kept[source] = xp.zeros(variable.shape, dtype=variable.dtype)
        return self._kept[source]

    def _gradient(self, source: Any) -> Gradient | None:
        """Where contributions to ``source`` go; None where they are not wanted."""
        if source is None:
            return None
        gradient = self.gradients.get(source)
        if gradient is None:
            if isinstance(source, Node):
                gradient = Gradient(source, self._xp)
            elif self._wanted is not None:
                if source not in self._wanted:
                    return None
                gradient = Gradient(source, self._xp)
            elif source.grad_req == "null":
                return None
            else:
                home = source.grad
                if home is None:
                    with on_device_of(source.data):  # which need not be where its operation was
                        home = source.grad = self._xp.zeros(source.shape, dtype=source.dtype)
                gradient = Gradient(source, self._xp, home=home, adds=source.grad_req == "add")
            self.gradients[source] = gradient
        return gradient

    def _used(self, leaf: Any) -> None:
        """One use of ``leaf`` is done; after the last one its gradient is complete."""
        self.uses[leaf] = uses = self.uses[leaf] - 1
        if uses:
            return
        gradient = self.gradients.pop(leaf, None) or self._gradient(leaf)
        if gradient is None:
            return
        if self._wanted is not None:
            self._kept[leaf] = gradient.take()
            if self.completed is not None:
                self.completed(leaf)
            return
        gradient.finish()
        if leaf.grad_hook is not None:
            leaf.grad_hook(leaf)
