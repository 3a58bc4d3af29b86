"""The tape: what was computed from what, and the way back.

A node is one recorded operation. Nodes are numbered as they are made, so descending numbers are an order in which every
operation comes after all that used its result; no recursion is needed, however deep the graph.

The modes of autograd, and the dispatch of operators to arrays or tensors.

Whether this thread records operations, and whether layers behave as in training.

Both flags are a thread's own: ranks that are threads of one process would otherwise mix their tapes.

Operators by name, and what a thread that traces or plans is told of them.

A network is traced by noting which operators are called with what (`Tracer`), and its plan is made by calling them once
more, each of which then says how its result is computed again into the same array (`Again`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, Self, TypeVar

import numpy as np

from ..core.arrays import Array, array_namespace, is_cupy, on_device_of
from ..core.devices import Device, to_device_of
from ..errors import ArrayMixError, HpcdpError, UnsupportedError, type_named
from ..kernels import kernels_for
from ..kernels.buffers import empty

if TYPE_CHECKING:
    from .tensor import Tensor

TRACING = 4
"""What tracing adds to the signature of a thread's modes."""
_NODES_OF_A_CALL = 1 << 20
"""More than one operator puts on the tape."""


class _Modes(threading.local):
    recording = False
    training = False
    signature = 0
    """One number for the modes: 1 while recording, 2 while training, and 4 more while a thread traces."""
    tracer: Tracer | None = None
    """What takes this thread's operators, while it traces or calls them asynchronously."""
    numbers = itertools.count(0, _NODES_OF_A_CALL)
    """Of the nodes that this thread puts on the tape: those of an operator that is computed later are numbered on from
    one that was drawn when it was called."""
    number_heads: NumberHeads | None = None
    """The heads of the backward that this thread is in, where each is a single number."""
    capture: Callable[..., Any] | None = None
    """What is told how an operator's result is computed again, in place of the tape, while this thread plans."""


modes = _Modes()
"""The flags of the calling thread."""


def is_recording() -> bool:
    """Whether operations of this thread are put on the tape."""
    return modes.recording


def is_training() -> bool:
    """Whether dropout drops and batch normalisation uses the batch's statistics in this thread."""
    return modes.training


class _Set(contextlib.ContextDecorator):
    """Sets what is not None inside the ``with`` block. Written out: a generator would take 2 us more of a step."""

    def __init__(self, recording: bool | None = None, training: bool | None = None) -> None:
        self._recording, self._training = recording, training
        self._before: list[tuple[bool, bool, int]] = []

    def _recreate_cm(self) -> Self:  # of a decorated function, which several threads may call at once
        return type(self)(self._recording, self._training)

    def __enter__(self) -> None:
        here = modes
        self._before.append((here.recording, here.training, here.signature))
        if self._recording is not None:
            here.recording = self._recording
        if self._training is not None:
            here.training = self._training
        here.signature = (here.signature & TRACING) + here.recording + 2 * here.training

    def __exit__(self, *_: object) -> None:
        modes.recording, modes.training, modes.signature = self._before.pop()


def record(train_mode: bool = True) -> contextlib.AbstractContextManager[None]:
    """Put this thread's operations on the tape inside the ``with`` block; layers train if ``train_mode`` is true."""
    return _Set(recording=True, training=train_mode)


def pause(train_mode: bool = False) -> contextlib.AbstractContextManager[None]:
    """Keep this thread's operations off the tape inside the ``with`` block."""
    return _Set(recording=False, training=train_mode)


def train_mode() -> contextlib.AbstractContextManager[None]:
    """Let layers behave as in training inside the ``with`` block; recording stays as it is."""
    return _Set(training=True)


def predict_mode() -> contextlib.AbstractContextManager[None]:
    """Let layers behave as in prediction inside the ``with`` block; recording stays as it is."""
    return _Set(training=False)


_OF_NUMPY = (np.ndarray, np.generic)
P = ParamSpec("P")
R = TypeVar("R")

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""
Again = tuple[Any, ...] | Callable[[Array], Sequence[Call]]
"""How an operator's result is computed again from the same operands, which meanwhile hold other values.

Either the name of a function of the arrays' namespace and its operands, ``("add", x, y)``, which takes ``out`` behind
them, or a function that for an array gives the calls that compute into it.
"""


def calls_of(again: Again, value: Array) -> Sequence[Call]:
    """What computes an operator's result again, into ``value``."""
    if callable(again):
        return again(value)
    name, *operands = again
    return [(partial(getattr(array_namespace(value), name), *operands, out=value), ())]


@contextlib.contextmanager
def captured() -> Iterator[list[tuple[Any, ...]]]:
    """Operators of this thread, which records, put nothing on the tape: the list has of each its inputs, its pullback
    and how it is computed again."""
    told: list[tuple[Any, ...]] = []

    def capture(_result: object, *what: Any) -> None:
        told.append(what)

    before = modes.recording, modes.capture
    modes.recording, modes.capture = True, capture
    try:
        yield told
    finally:
        modes.recording, modes.capture = before


@dataclass(frozen=True)
class Operator:
    """What `operator` has registered."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    """The arguments that may be tensors; the others are attributes."""
    takes_many: bool
    """Whether the inputs are the positional arguments, any number of them."""
    attributes: tuple[str, ...]
    has_effect: bool
    """Whether a call does more than to give a result: it draws random numbers or changes an input."""
    signature: inspect.Signature


class Tracer(Protocol):
    """What takes the operators that its thread calls: notes them, or has them computed later."""

    def record(self, called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns."""
        ...

    def read(self) -> None:
        """The values of a tensor that is no result of a call are about to be read."""
        ...

    def catch_up(self) -> None:
        """Compute all that was taken and is to be computed later: a network is about to be changed or copied."""
        ...

    def settle(self) -> None:
        """Wait until all that was taken is computed: tensors are about to change in place."""
        ...


def catch_up() -> None:
    """Wait for this thread's calls that are computed later: they are to have a network as it was."""
    if modes.tracer is not None:
        modes.tracer.catch_up()


def first_on_gpu(*operands: Any) -> Array | None:
    """Of tensors, arrays and other operands the array of the first one that is on a GPU."""
    return next(filter(is_cupy, map(_array_of, operands)), None)


def _array_of(x: Any) -> Any:
    if isinstance(x, _OF_NUMPY) or is_cupy(x):  # their own ``data`` is memory, which NumPy denies to bfloat16
        return x
    return getattr(x, "data", None)


def on_their_gpu(called: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives, computed on the GPU of its operands, if they are on one, whatever the current one is.

    Raises:
        ArrayMixError: they are on several, or NumPy's among them are not what the operator takes beside those on a GPU.
    """
    given = [_array_of(x) for x in (*args, *kwargs.values())]
    there = [x for x in given if is_cupy(x)]
    if not there:
        return called.function(*args, **kwargs)
    home = there[0].device
    for x in there[1:]:
        if x.device.id != home.id:
            raise _mixed(called, " and ".join(sorted({repr(Device.of(each)) for each in there})))
    with home:
        try:
            return called.function(*args, **kwargs)
        except (ArrayMixError, TypeError) as error:
            if not any(isinstance(x, np.ndarray) for x in given) and not any(isinstance(x, list | tuple) for x in args):
                raise
            raise _mixed(called, f"the host and {Device.of(there[0])}") from error


def _mixed(called: Operator, where: str) -> ArrayMixError:
    return ArrayMixError(
        called.name, expected="operands on one device", got=f"some on {where}",
        remedy="bring them to one: net.to(device), device.put(x), DataLoader(..., device=...)",
    )  # fmt: skip


def does_not_fit(
    called: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], error: ValueError
) -> UnsupportedError:
    """What to raise for an error of NumPy's or CuPy's, which names no operator and may tell half of the shapes."""
    given = [x for x in (*args, *kwargs.values()) if hasattr(x, "shape") and not isinstance(x, np.dtype)]
    shapes = ", ".join(str(tuple(x.shape)) for x in given)
    if len(given) > 1:
        expected = "operands whose shapes fit each other"
        return UnsupportedError(called.name, expected=expected, got=shapes, remedy=str(error))
    return UnsupportedError(called.name, expected=f"arguments that fit an operand of shape {shapes}", got=str(error))


OPERATORS: dict[str, Operator] = {}
"""All operators by name."""
CALLS: dict[str, Callable[..., Any]] = {}
"""For each what programs call, which a tracer notes."""


def operator(
    name: str, inputs: Sequence[str] = ("x",), has_effect: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as the operator ``name``, whose arguments called ``inputs`` may be tensors.

    While this thread traces, calls go to its tracer; else straight to the function, which computes on the GPU of its
    operands, if they are on one, whatever this thread's current one is. A ValueError of it is raised as an
    `UnsupportedError` that names the operator, operands on several devices are an `ArrayMixError` that does.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        takes_many = any(each.kind is each.VAR_POSITIONAL for each in signature.parameters.values())
        attributes = tuple(each for each in signature.parameters if each not in inputs)
        own = Operator(name, function, tuple(inputs), takes_many, attributes, has_effect, signature)
        OPERATORS[name] = own

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            tracer = modes.tracer
            if tracer is not None:
                return tracer.record(own, args, kwargs)  # type: ignore[no-any-return]
            try:
                if "cupy" not in sys.modules:
                    return function(*args, **kwargs)  # all is on the host
                return on_their_gpu(own, args, kwargs)
            except HpcdpError:
                raise
            except ValueError as error:
                raise does_not_fit(own, args, kwargs, error) from error

        CALLS[name] = call
        return call

    return register


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
