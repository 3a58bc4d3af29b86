"""The tape, the modes of a thread, the registry of operators, and backward.

A node of the tape is one recorded operation. Nodes are numbered in the order of their creation. In descending order of
numbers every operation therefore comes after all users of its result, and backward needs no recursion.

The modes (recording, training) are thread-local, because ranks may be threads of one process.

Operators are registered by name. A network is traced by noting the operators that are called and their arguments
(`Tracer`). Its plan is made by calling them once more; each then says how to recompute its result in place (`Again`).
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

from ..core.arrays import Array, Device, array_namespace, is_cupy, on_device_of, to_device_of
from ..errors import ArrayMixError, HpcdpError, UnsupportedError, type_named
from ..kernels import empty, kernels_for

if TYPE_CHECKING:
    from .tensor import Tensor

TRACING = 4
"""Bit that tracing adds to the signature of a thread's modes."""
_NODES_OF_A_CALL = 1 << 20
"""Numbers reserved for the nodes of one operator call, more than any operator uses."""


class _Modes(threading.local):
    recording = False
    training = False
    signature = 0
    """The modes as one number: 1 while recording, plus 2 while training, plus 4 while tracing."""
    tracer: Tracer | None = None
    """Receives this thread's operator calls while it traces or calls operators asynchronously."""
    numbers = itertools.count(0, _NODES_OF_A_CALL)
    """Source of node numbers. An operator computed later continues from a number drawn at its call."""
    number_heads: NumberHeads | None = None
    """The heads of this thread's current backward, if each is a single number."""
    capture: Callable[..., Any] | None = None
    """Receives the recomputation of each operator, instead of the tape, while this thread plans."""


modes = _Modes()
"""The modes of the calling thread."""


def is_recording() -> bool:
    """Return whether operations of this thread are recorded on the tape."""
    return modes.recording


def is_training() -> bool:
    """Return whether layers of this thread train: dropout drops, batch normalization uses batch statistics."""
    return modes.training


class _Set(contextlib.ContextDecorator):
    """Context manager that sets the modes that are not None. A generator would cost 2 us more per step."""

    def __init__(self, recording: bool | None = None, training: bool | None = None) -> None:
        self._recording, self._training = recording, training
        self._before: list[tuple[bool, bool, int]] = []

    def _recreate_cm(self) -> Self:  # several threads may call a decorated function at once
        return type(self)(self._recording, self._training)

    def __enter__(self) -> None:
        mine = modes  # a local is faster than the global
        self._before.append((mine.recording, mine.training, mine.signature))
        if self._recording is not None:
            mine.recording = self._recording
        if self._training is not None:
            mine.training = self._training
        mine.signature = (mine.signature & TRACING) + mine.recording + 2 * mine.training

    def __exit__(self, *_: object) -> None:
        modes.recording, modes.training, modes.signature = self._before.pop()


def record(train_mode: bool = True) -> contextlib.AbstractContextManager[None]:
    """Record this thread's operations on the tape inside the ``with`` block; layers train if ``train_mode`` is true."""
    return _Set(recording=True, training=train_mode)


def pause(train_mode: bool = False) -> contextlib.AbstractContextManager[None]:
    """Stop recording this thread's operations inside the ``with`` block."""
    return _Set(recording=False, training=train_mode)


def train_mode() -> contextlib.AbstractContextManager[None]:
    """Let layers behave as in training inside the ``with`` block; recording does not change."""
    return _Set(training=True)


def predict_mode() -> contextlib.AbstractContextManager[None]:
    """Let layers behave as in prediction inside the ``with`` block; recording does not change."""
    return _Set(training=False)


_OF_NUMPY = (np.ndarray, np.generic)
P = ParamSpec("P")
R = TypeVar("R")

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""
Again = tuple[Any, ...] | Callable[[Array], Sequence[Call]]
"""The recomputation of an operator's result from the same operand arrays after their values changed.

Either the name of a function of the arrays' namespace and its operands, ``("add", x, y)``, which is called with
``out``, or a function that returns the calls that compute into a given array.
"""


def calls_of(again: Again, value: Array) -> Sequence[Call]:
    """Return the calls that recompute an operator's result into ``value``."""
    if callable(again):
        return again(value)
    name, *operands = again
    return [(partial(getattr(array_namespace(value), name), *operands, out=value), ())]


@contextlib.contextmanager
def captured() -> Iterator[list[tuple[Any, ...]]]:
    """Capture this thread's operators instead of recording them on the tape.

    Yields:
        A list that receives the inputs, the pullback and the recomputation of each operator.
    """
    calls: list[tuple[Any, ...]] = []
    before = modes.recording, modes.capture
    modes.recording, modes.capture = True, lambda _result, *call: calls.append(call)
    try:
        yield calls
    finally:
        modes.recording, modes.capture = before


@dataclass(frozen=True)
class Operator:
    """A function registered by `operator`."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[str, ...]
    """Names of the arguments that may be tensors; the others are attributes."""
    takes_many: bool
    """True if the inputs are any number of positional arguments."""
    attributes: tuple[str, ...]
    has_effect: bool
    """True if a call draws random numbers or changes an input."""
    signature: inspect.Signature


class Tracer(Protocol):
    """Interface of a receiver of this thread's operator calls, which notes or defers them."""

    def record(self, called: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a call and return its result."""
        ...

    def read(self) -> None:
        """Prepare for reading the values of a tensor that is no result of a call."""
        ...

    def catch_up(self) -> None:
        """Compute all deferred calls, before a network is changed or copied."""
        ...

    def settle(self) -> None:
        """Wait until all calls are computed, before tensors change in place."""
        ...


def catch_up() -> None:
    """Wait for this thread's deferred calls, which need the network as it was."""
    if modes.tracer is not None:
        modes.tracer.catch_up()


def first_on_gpu(*operands: Any) -> Array | None:
    """Return the array of the first operand, a tensor or an array, on a GPU; None if there is none."""
    return next(filter(is_cupy, map(_array_of, operands)), None)


def _array_of(x: Any) -> Any:
    if isinstance(x, _OF_NUMPY) or is_cupy(x):  # their ``data`` is a buffer, which NumPy has not for bfloat16
        return x
    return getattr(x, "data", None)


def on_their_gpu(called: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator on the GPU of its operands, if any, whatever GPU is current.

    Raises:
        ArrayMixError: the operands are on several devices, or the operator does not take host arrays beside GPU arrays.
    """
    arrays = [_array_of(x) for x in (*args, *kwargs.values())]
    on_gpus = [x for x in arrays if is_cupy(x)]
    if not on_gpus:
        return called.function(*args, **kwargs)
    device = on_gpus[0].device
    for x in on_gpus[1:]:
        if x.device.id != device.id:
            raise _mixed(called, " and ".join(sorted({repr(Device.of(x)) for x in on_gpus})))
    with device:
        try:
            return called.function(*args, **kwargs)
        except (ArrayMixError, TypeError) as error:
            on_host = any(isinstance(x, np.ndarray) for x in arrays) or any(isinstance(x, list | tuple) for x in args)
            if not on_host:
                raise
            raise _mixed(called, f"the host and {Device.of(on_gpus[0])}") from error


def _mixed(called: Operator, where: str) -> ArrayMixError:
    return ArrayMixError(
        called.name, expected="operands on one device", got=f"operands on {where}",
        remedy="copy them to one device: net.to(device), device.put(x), DataLoader(..., device=...)",
    )  # fmt: skip


def does_not_fit(
    called: Operator, args: Sequence[Any], kwargs: Mapping[str, Any], error: ValueError
) -> UnsupportedError:
    """Return the error that replaces a ValueError of NumPy or CuPy, which names neither the operator nor all shapes."""
    arrays = [x for x in (*args, *kwargs.values()) if hasattr(x, "shape") and not isinstance(x, np.dtype)]
    shapes = ", ".join(str(tuple(x.shape)) for x in arrays)
    if len(arrays) > 1:
        expected = "operands of compatible shapes"
        details = "" if "broadcast together" in str(error) else f": {error}"  # that text repeats the shapes
        return UnsupportedError(called.name, expected=expected, got=f"shapes {shapes}{details}")
    return UnsupportedError(called.name, expected=f"arguments valid for an operand of shape {shapes}", got=str(error))


OPERATORS: dict[str, Operator] = {}
"""All operators by name."""
CALLS: dict[str, Callable[..., Any]] = {}
"""The public function of each operator, whose calls a tracer receives."""


def operator(
    name: str, inputs: Sequence[str] = ("x",), has_effect: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function as the operator ``name``.

    While this thread traces, calls go to its tracer. Otherwise the function runs, on the GPU of its operands if they
    are on one. A ValueError becomes an `UnsupportedError` with the operator's name, operands on several devices an
    `ArrayMixError`.

    Args:
        name: the operator's name.
        inputs: names of the arguments that may be tensors.
        has_effect: whether a call draws random numbers or changes an input.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        takes_many = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
        attributes = tuple(parameter for parameter in signature.parameters if parameter not in inputs)
        registered = Operator(name, function, tuple(inputs), takes_many, attributes, has_effect, signature)
        OPERATORS[name] = registered

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            tracer = modes.tracer
            if tracer is not None:
                return tracer.record(registered, args, kwargs)  # type: ignore[no-any-return]
            try:
                if "cupy" not in sys.modules:
                    return function(*args, **kwargs)  # without CuPy all operands are on the host
                return on_their_gpu(registered, args, kwargs)
            except HpcdpError:
                raise
            except ValueError as error:
                raise does_not_fit(registered, args, kwargs, error) from error

        CALLS[name] = call
        return call

    return register


Pullback = Callable[..., None]
"""``pullback(gy, *gradients)``: add to the gradient of each input, given the gradient ``gy`` of the result.

There is one `Gradient` for every input, or None where no gradient is needed. ``gy`` must not be changed.
"""


class Node:
    """One recorded operation.

    ``inputs`` holds for every input the node that computed it, the leaf tensor, or None where no gradient is needed.
    Freeing the tape drops ``inputs`` and ``pullback``, and with it the saved arrays.
    """

    __slots__ = ("dtype", "inputs", "number", "pullback", "shape")

    def __init__(self, value: Array, inputs: tuple[Node | Tensor | None, ...], pullback: Pullback) -> None:
        self.shape: tuple[int, ...] = value.shape
        self.dtype = value.dtype
        self.inputs = inputs
        self.pullback: Pullback | None = pullback
        self.number = next(modes.numbers)

    def free(self) -> None:
        """Drop the inputs and the pullback."""
        self.inputs = ()
        self.pullback = None


class Gradient:
    """The gradient of one tensor while backward sums its contributions.

    A leaf's gradient is summed in ``leaf.grad`` from the first contribution on, without a copy.
    """

    __slots__ = ("_handed_out", "_home", "_private", "_xp", "dtype", "shape", "value")

    def __init__(self, of: Node | Tensor, xp: Any, home: Array | None = None, adds: bool = False) -> None:
        like = of if home is None else home  # alike, but reading a parameter's shape waits for its update
        self.shape: tuple[int, ...] = like.shape
        self.dtype = like.dtype
        self._xp = xp
        self.value: Array = home if adds else None
        self._home: Array = home
        self._private = adds
        self._handed_out: Array = None

    def begin(self, home: Array | None = None, adds: bool = False) -> None:
        """Reset the gradient, to be summed in ``home``, starting from its values if ``adds``."""
        self._home, self.value = home, home if adds else None
        self._private, self._handed_out = adds, None

    def empty(self) -> Array:
        """Return a contiguous array of the gradient's shape and dtype, to be filled and passed to `add`.

        The home array is returned at most once, because an operation may use a leaf twice.
        """
        fresh = self.value is None and self._handed_out is None
        at_home = fresh and self._home is not None and self._home.flags.c_contiguous
        self._handed_out = self._home if at_home else empty(self.shape, self.dtype, self._xp)
        return self._handed_out

    def add(self, contribution: Array) -> None:
        """Add an array of the tensor's shape. It may be kept, so it must not be changed afterwards."""
        if self.value is None:
            if self._home is None:
                self.value = contribution if contribution.dtype == self.dtype else contribution.astype(self.dtype)
                self._private = contribution is self._handed_out
            else:
                if contribution is not self._home:
                    self._home[...] = contribution
                self.value = self._home
                self._private = True
        else:
            first, kernels = self.value, kernels_for("networks", self.value, plain_on_host=True)
            if not self._private:  # the first contribution may have other users
                self.value, self._private = empty(self.shape, self.dtype, self._xp), True
            kernels.add(first, contribution, self.value)

    @property
    def home(self) -> Array | None:
        """The array ``leaf.grad`` in which the gradient is summed; None for results and for `grad`."""
        return self._home

    def replace(self, value: Array) -> None:
        """Replace the sum by ``value``: the home array if there is one, else an array without other users."""
        self.value, self._private = value, True

    def finish(self) -> Array:
        """Return the sum; zeros if nothing was added."""
        if self.value is None:
            zeros = self.empty()
            zeros[...] = 0
            self.add(zeros)
        return self.value

    def take(self) -> Array:
        """Return the sum as an array without other users."""
        value = self.finish()
        with on_device_of(value):
            return value if self._private else self._xp.asarray(value).copy()


class NumberHeads:
    """The reductions to a single number that a backward from single numbers passes.

    Args:
        count: number of heads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.reductions: list[tuple[Array, tuple[int, ...]]] = []
        """Gradient of the result and shape of the operand of each reduction.

        Omits reductions whose operand was itself reduced over the first axis, that of the samples.
        """

    def note(self, node: Node, gy: Array) -> None:
        """Note a node that reduced an array to a single number, whose gradient is ``gy``."""
        if gy.size != 1:
            return
        for source in node.inputs:
            if isinstance(source, Node) and math.prod(source.shape) > 1:
                below = (node for node in source.inputs if isinstance(node, Node))
                # The last axis of a square operand was reduced, as by the losses of as many samples as classes.
                if not any(node.shape[1:] == source.shape != node.shape[:-1] for node in below):
                    self.reductions.append((gy, source.shape))


def backward(
    heads: Tensor | Sequence[Tensor],
    head_grads: Array | Tensor | Sequence[Any] | None = None,
    retain_graph: bool = False,
) -> None:
    """Compute the gradients of the sum of ``heads`` with respect to all leaves and store them in ``leaf.grad``.

    ``leaf.grad_req`` decides whether a leaf's gradient is overwritten ("write"), added to ("add") or ignored ("null");
    it changes in place. ``leaf.grad_hook(leaf)`` is called in this thread as soon as the gradient is complete. Waits
    first for all asynchronous calls of this thread, which may read gradients.

    Args:
        heads: tensors computed while recording.
        head_grads: for each head an array of its shape, or None for ones. The gradients of a loss of shape ``(batch,)``
            are then sums over the batch.
        retain_graph: keep the tape, so that backward can run again.

    Raises:
        HpcdpError: a head was not recorded, its tape was freed, or a head gradient has another shape.
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
    """Return the gradients of the sum of ``heads`` with respect to ``variables`` as new arrays; no ``.grad`` changes.

    Args:
        heads: as in `backward`.
        variables: leaves with a gradient attached, or results of recorded operations.
        head_grads: as in `backward`.
        retain_graph: as in `backward`.

    Returns:
        One array for a single variable, else a list; zeros where the heads do not depend on a variable.

    Raises:
        HpcdpError: as `backward`.
    """
    settled = _settled("grad", variables if isinstance(variables, Sequence) else [variables])
    for variable in settled:
        if variable.node is None and variable.grad_req == "null":
            raise HpcdpError(
                "grad",
                where="variables",
                expected="tensors with a gradient attached, or recorded tensors",
                got=f"a tensor of shape {tuple(variable.shape)} that is neither",
                remedy="call its attach_grad() before recording",
            )
    pairs = pairs_of(heads, head_grads)
    walk = _Pass(pairs, [variable.node or variable for variable in settled])
    walk.run(pairs, retain_graph)
    gradients: list[Array] = []
    for variable in settled:  # a variable that is listed twice gets two arrays
        gradient = walk.gradient_for(variable)
        with on_device_of(gradient):
            gradients.append(gradient + 0 if any(gradient is other for other in gradients) else gradient)
    return gradients if isinstance(variables, Sequence) else gradients[0]


def leaves_below(heads: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves that recorded ``heads`` depend on, in the order in which `backward` completes them."""
    return [leaf for _, completed in GraphWalk([(head, head.data) for head in heads]).turns() for leaf in completed]


def add_gradients(
    heads: Sequence[Tensor],
    head_grads: Sequence[Array],
    into: dict[Tensor, Gradient],
    completed: Callable[[Tensor], None] | None = None,
) -> None:
    """Add the gradients that `backward` computes to those in ``into``; keeps the tape and calls no hooks.

    Args:
        heads: as in `backward`.
        head_grads: an array of its shape for each head.
        into: the gradient to add to, for each leaf.
        completed: called with each leaf when its gradient is complete.
    """
    pairs = list(zip(heads, head_grads, strict=True))
    walk = _Pass(pairs, list(into))
    walk.gradients.update(into)
    walk.completed = completed
    walk.run(pairs, retain_graph=True)


def _settled(operation: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the computed tensors; raise `HpcdpError` for objects that are no tensors, such as gradients."""
    try:
        return [x.settled for x in tensors]
    except AttributeError as error:
        wrong = next((x for x in tensors if not hasattr(x, "settled")), None)
        if wrong is None:
            raise
        raise HpcdpError(
            operation, expected="tensors", got=type_named(wrong),
            remedy="pass tensors: gradients are arrays, and second derivatives are not supported",
        ) from error  # fmt: skip


def pairs_of(heads: Any, head_grads: Any) -> list[tuple[Tensor, Array]]:
    """Return each head with its gradient, ones by default; raises as `backward`."""
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
                expected="a tensor computed from parameters or tensors with attach_grad(), while recording",
                got=f"a tensor of shape {head.shape} that was not recorded",
                remedy="compute it inside `with autograd.record():`",
            )
        with on_device_of(head.data):
            pairs.append((head, _seed_of(head.data, seed)))
    return pairs


def _seed_of(value: Array, head_grad: Any) -> Array:
    """Return the gradient of a head on the device of its ``value``; see `backward` for ``head_grad``."""
    xp = array_namespace(value)
    if hasattr(head_grad, "grad_req"):
        head_grad = getattr(head_grad, "data", head_grad)
    if head_grad is None:  # in CuPy `ones` takes half the time of `full`
        return xp.ones(value.shape, dtype=value.dtype)
    if isinstance(head_grad, int | float):
        return xp.full(value.shape, head_grad, dtype=value.dtype)
    seed = head_grad if hasattr(head_grad, "shape") else np.full(value.shape, head_grad, dtype=value.dtype)
    if tuple(seed.shape) != value.shape:
        raise HpcdpError("backward", where="head_grads", expected=f"shape {value.shape}", got=tuple(seed.shape))
    return to_device_of(seed, value) if is_cupy(seed) or is_cupy(value) else seed


class GraphWalk:
    """The recorded operations and leaves that the heads of ``pairs`` depend on."""

    def __init__(self, pairs: list[tuple[Tensor, Array]]) -> None:
        self.uses: dict[Any, int] = {}
        """Number of uses of each leaf."""
        self.nodes: list[Node] = []
        """The nodes in the order of recording."""
        stack: list[Any] = [head.node or head for head, _ in pairs]
        visited = set()
        while stack:
            source = stack.pop()
            if not isinstance(source, Node):
                self.uses[source] = self.uses.get(source, 0) + 1
            elif source not in visited:
                if source.pullback is None:
                    raise HpcdpError(
                        "backward", expected="a complete tape", got="a tape that an earlier backward has freed",
                        remedy="call the earlier backward with retain_graph=True",
                    )  # fmt: skip
                visited.add(source)
                self.nodes.append(source)
                stack.extend(below for below in source.inputs if below is not None)
        self.nodes.sort(key=lambda node: node.number)

    def turns(self) -> Iterator[tuple[Node, list[Tensor]]]:
        """Yield the nodes in the order of backward, each with the leaves of which it is the last use."""
        left = dict(self.uses)
        for node in reversed(self.nodes):
            completed = []
            for source in node.inputs:
                if source is not None and not isinstance(source, Node):
                    left[source] -= 1
                    if not left[source]:
                        completed.append(source)
            yield node, completed


class _Pass(GraphWalk):
    """One traversal of the tape, for the nodes and leaves in ``sources``; None means backward."""

    def __init__(self, pairs: list[tuple[Tensor, Array]], sources: list[Any] | None) -> None:
        super().__init__(pairs)
        self._sources = None if sources is None else set(sources)
        self._xp = array_namespace(*(seed for _, seed in pairs)) if pairs else np
        self.gradients: dict[Any, Gradient] = {}
        self.completed: Callable[[Tensor], None] | None = None
        """Called with each wanted leaf when its gradient is complete."""
        self.number_heads: NumberHeads | None = None
        self._results: dict[Any, Array] = {}

    def run(self, pairs: list[tuple[Tensor, Array]], retain_graph: bool) -> None:
        for head, seed in pairs:
            start: Node | Tensor = head.node or head
            gradient = self._gradient(start)
            if gradient is not None:
                with on_device_of(seed):  # where the seeds of a repeated head, or of a leaf, are summed
                    gradient.add(seed)
            if start is head:
                self._used(head)
        number_heads = self.number_heads
        while self.nodes:
            node = self.nodes.pop()
            gradient = self.gradients.pop(node, None)
            if gradient is not None:
                gy = gradient.finish()
                if self._sources is not None and node in self._sources:
                    self._results[node] = gradient.take()
                if number_heads is not None:
                    number_heads.note(node, gy)
                assert node.pullback is not None
                if type(gy) is np.ndarray:  # host arrays skip the device check
                    node.pullback(gy, *[self._gradient(source) for source in node.inputs])
                else:
                    with on_device_of(gy):
                        node.pullback(gy, *[self._gradient(source) for source in node.inputs])
            for source in node.inputs:
                if source is not None and not isinstance(source, Node):
                    self._used(source)
            if not retain_graph:
                node.free()

    def gradient_for(self, variable: Tensor) -> Array:
        """Return the result of `grad` for one variable."""
        source = variable.node or variable
        if source not in self._results:
            xp = array_namespace(variable.data)
            with on_device_of(variable.data):
                self._results[source] = xp.zeros(variable.shape, dtype=variable.dtype)
        return self._results[source]

    def _gradient(self, source: Any) -> Gradient | None:
        """Return the gradient that collects contributions to ``source``; None where it is not needed."""
        if source is None:
            return None
        gradient = self.gradients.get(source)
        if gradient is None:
            if isinstance(source, Node):
                gradient = Gradient(source, self._xp)
            elif self._sources is not None:
                if source not in self._sources:
                    return None
                gradient = Gradient(source, self._xp)
            elif source.grad_req == "null":
                return None
            else:
                home = source.grad
                if home is None:
                    with on_device_of(source.data):  # may differ from the operation's device
                        home = source.grad = self._xp.zeros(source.shape, dtype=source.dtype)
                gradient = Gradient(source, self._xp, home=home, adds=source.grad_req == "add")
            self.gradients[source] = gradient
        return gradient

    def _used(self, leaf: Any) -> None:
        """Count one use of ``leaf`` as done; the gradient is complete after the last one."""
        self.uses[leaf] = uses = self.uses[leaf] - 1
        if uses:
            return
        gradient = self.gradients.pop(leaf, None) or self._gradient(leaf)
        if gradient is None:
            return
        if self._sources is not None:
            self._results[leaf] = gradient.take()
            if self.completed is not None:
                self.completed(leaf)
            return
        gradient.finish()
        if leaf.grad_hook is not None:
            leaf.grad_hook(leaf)
