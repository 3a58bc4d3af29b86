"""Tensors, recording of results on the tape, and repeated backward through a retained tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, array_namespace, on_device_of, to_host, values_on_device_of
from ..core.checks import one_of
from ..core.state import refuse_change
from ..errors import HpcdpError, UnsupportedError, shortened
from .tape import Again, Gradient, GraphWalk, Node, Pullback, backward, catch_up, modes, pairs_of


def array_of(data: Any) -> np.ndarray:
    """Return numbers, or nested sequences of them, as float32, and an array of another library in its own dtype."""
    remedy = None
    try:
        numbers = np.asarray(data, None if hasattr(data, "dtype") else np.float32)
    except HpcdpError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = str(error) if hasattr(data, "dtype") else None  # PyTorch's message says what to do
    else:
        if numbers.dtype.kind not in "OSU":  # NumPy makes an array of any object
            if not np.isnan(numbers).any() or not any(x is None for x in np.asarray(data, object).flat):
                return numbers
            remedy = "omit an optional input instead of passing None"  # NumPy converts None to NaN
    raise HpcdpError("Tensor", expected="an array or numbers", got=shortened(repr(data), 40), remedy=remedy)


GRAD_REQS = ("write", "add", "null")


def require_grad_req(operation: str, grad_req: object) -> None:
    """Raise `ConfigError` unless ``grad_req`` is one of `GRAD_REQS`."""
    one_of(operation, "grad_req", grad_req, GRAD_REQS)


class Tensor:
    """An array of any namespace, ``data``, that may have a gradient.

    Operators and methods follow NumPy and return new tensors; other operands may be arrays or numbers. In-place
    operators (``w -= lr * g``) and ``w[...] = values`` change ``data`` outside of recording. They never replace it,
    because other ranks may share its memory. Operands must be on one device; assigned values may be on another.

    A recorded result cannot change before backward has freed the tape. Leaves, and views or `detach` of results, are
    not checked: changing them before backward gives gradients of the new values.

    Args:
        data: an array, which is not copied. Numbers and lists become float32 NumPy arrays. Other objects that NumPy
            converts, such as PyTorch tensors in host memory and h5py data sets, become NumPy arrays of their dtype.

    Raises:
        HpcdpError: ``data`` is none of these.
    """

    __slots__ = ("__weakref__", "data", "grad", "grad_hook", "grad_req", "node")
    __array_ufunc__ = None  # so that array + tensor calls Tensor.__radd__

    def __init__(self, data: Any) -> None:
        if type(data) is not np.ndarray:
            if isinstance(data, Tensor):
                data = data.data
            elif not (hasattr(data, "__array_namespace__") or (hasattr(data, "strides") and hasattr(data, "dtype"))):
                data = array_of(data)
        self.data: np.ndarray = data  # or CuPy's, which has no type hints but the same methods
        self.grad: np.ndarray | None = None
        self.grad_req = "null"
        self.grad_hook: Callable[[Any], object] | None = None
        self.node: Node | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of ``data``."""
        return self.data.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of ``data``."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.data.size

    @property
    def T(self) -> Tensor:
        """A view with the axes reversed."""
        return operators.transpose(self)

    def attach_grad(self, grad_req: str = "write") -> None:
        """Make this a leaf of the tape, and allocate its gradient ``grad``: zeros of its shape and namespace.

        Args:
            grad_req: how backward changes ``grad``: "write" overwrites it, "add" adds to it, "null" ignores it.

        Raises:
            HpcdpError: another ``grad_req``.
            UnsupportedError: integers and booleans, which have no gradient, or complex numbers.
        """
        require_grad_req("attach_grad", grad_req)
        if grad_req != "null" and self.dtype.kind in "biuc":
            raise UnsupportedError("attach_grad", where="dtype", expected="floats", got=self.dtype)
        catch_up()
        self.node = None
        self.grad_req = grad_req
        with on_device_of(self.data):
            self.grad = None if grad_req == "null" else array_namespace(self.data).zeros(self.shape, dtype=self.dtype)

    def backward(self, head_grad: Any = None, retain_graph: bool = False) -> None:
        """Run `autograd.backward` from this tensor; ``head_grad`` has its shape, None means ones."""
        backward(self, head_grad, retain_graph)

    @property
    def settled(self) -> Tensor:
        """The tensor on the tape: this one, or the computed result of an asynchronous call."""
        return self

    def wait_to_read(self) -> None:
        """Wait until the values of an asynchronous result are computed, see `asynchronous`."""

    def __getstate__(self) -> Any:
        catch_up()  # a copy sees the effects of all calls, and is on no tape, whose leaves are not copied
        state: Any = object.__getstate__(self)
        attributes, slots = state
        return attributes, {**slots, "node": None}

    def detach(self) -> Tensor:
        """Return a tensor with the same ``data`` that is on no tape."""
        return operators.detach(self)

    def _values(self) -> Array:
        """Return ``data`` for reading; a forward that is traced refuses it."""
        if modes.tracer is not None:
            modes.tracer.read()
        return self.data

    def asnumpy(self) -> np.ndarray:
        """Return a copy in host memory."""
        return np.array(to_host(self._values()))

    def item(self) -> Any:
        """Return the only element as a Python number."""
        return self._values().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = to_host(self._values())
        if dtype is not None and host.dtype != dtype:
            return host.astype(dtype)
        return np.array(host) if copy else host

    def __float__(self) -> float:
        return float(self._values())

    def __int__(self) -> int:
        return int(self._values())

    def __bool__(self) -> bool:
        return bool(self._values())

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape:  # without it Python would iterate over no rows, and sum(loss) would be 0
            raise TypeError("iteration over a tensor without axes")
        return map(self.__getitem__, range(self.shape[0]))

    def __repr__(self) -> str:
        body = np.array2string(to_host(self._values()), separator=", ", prefix="Tensor(", threshold=100)
        tape = ", recorded" if self.node is not None else f", grad_req={self.grad_req!r}" * (self.grad_req != "null")
        return f"{type(self).__name__}({body}, shape={tuple(self.shape)}, dtype={self.dtype}{tape})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        if modes.recording and (self.node is not None or self.grad_req != "null"):
            raise self._on_tape("while recording", "use `with autograd.pause():`" * (self.node is None))
        if modes.recording and isinstance(value, Tensor) and (value.node is not None or value.grad_req != "null"):
            raise HpcdpError(
                "in-place change", expected="values without a gradient, because in-place changes are not recorded",
                got=f"values of shape {tuple(value.shape)} with a gradient",
                remedy="make a new tensor (autograd.stack, concatenate, where), or write value.detach()",
            )  # fmt: skip
        self._refuse_recorded()
        with on_device_of(self.data):
            place = self.changeable()
            place[operators.index(key)] = values_on_device_of(value_of(value), place)

    def _refuse_recorded(self) -> None:
        """Raise unless no recorded operation and no asynchronous call still needs the elements."""
        if modes.tracer is not None:
            modes.tracer.settle()
        if self.node is not None and self.node.pullback is not None:
            raise self._on_tape("that was recorded", "call backward first")
        refuse_change(self.data, getattr(self, "name", ""))

    def changeable(self) -> Array:
        """Return ``data`` as a mutable array; replaces a NumPy scalar, as a sum over all axes returns, by an array."""
        if isinstance(self.data, np.generic):
            self.data = np.array(self.data)
        return self.data

    def _on_tape(self, state: str, alternative: str) -> HpcdpError:
        got = f"a tensor of shape {self.shape} {state}"
        remedy = "make a new tensor" + f", or {alternative}" * bool(alternative)
        return HpcdpError("in-place change", expected="a tensor that is not on the tape", got=got, remedy=remedy)

    def _in_place(self, operation: Callable[[Any, Any], Tensor], other: Any) -> Tensor:
        """Change this tensor in place; while recording return a new tensor instead, and refuse a leaf."""
        if modes.recording:
            if self.grad_req != "null":
                raise self._on_tape("while recording", "use `with autograd.pause():`")
            return operation(self, other)
        self._refuse_recorded()
        result = operation(self, other).data
        if not np.can_cast(result.dtype, self.dtype, "same_kind"):
            expected = f"a result that can be cast to {self.dtype}"
            raise UnsupportedError("in-place operation", expected=expected, got=result.dtype, remedy="use x = ...")
        with on_device_of(self.data):
            self.changeable()[...] = result
        return self

    def __getitem__(self, key: Any) -> Tensor:
        return operators.getitem(self, key)

    def __neg__(self) -> Tensor:
        return operators.negative(self)

    def __abs__(self) -> Tensor:
        return operators.abs(self)

    def __add__(self, other: Any) -> Tensor:
        return operators.add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return operators.add(other, self)

    def __iadd__(self, other: Any) -> Tensor:
        return self._in_place(operators.add, other)

    def __sub__(self, other: Any) -> Tensor:
        return operators.subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return operators.subtract(other, self)

    def __isub__(self, other: Any) -> Tensor:
        return self._in_place(operators.subtract, other)

    def __mul__(self, other: Any) -> Tensor:
        return operators.multiply(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return operators.multiply(other, self)

    def __imul__(self, other: Any) -> Tensor:
        return self._in_place(operators.multiply, other)

    def __truediv__(self, other: Any) -> Tensor:
        return operators.divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return operators.divide(other, self)

    def __itruediv__(self, other: Any) -> Tensor:
        return self._in_place(operators.divide, other)

    def __pow__(self, exponent: Any) -> Tensor:
        return operators.power(self, exponent)

    def __ipow__(self, exponent: Any) -> Tensor:  # type: ignore[misc]
        return self._in_place(operators.power, exponent)

    def __rpow__(self, base: Any) -> Tensor:
        return operators.power(base, self)

    def __matmul__(self, other: Any) -> Tensor:
        return operators.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return operators.matmul(other, self)

    def __eq__(self, other: object) -> Tensor:  # type: ignore[override]
        return operators.compare("equal", self, other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return operators.compare("not_equal", self, other)

    def __lt__(self, other: Any) -> Tensor:
        return operators.compare("less", self, other)

    def __le__(self, other: Any) -> Tensor:
        return operators.compare("less_equal", self, other)

    def __gt__(self, other: Any) -> Tensor:
        return operators.compare("greater", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return operators.compare("greater_equal", self, other)

    __hash__ = object.__hash__

    def astype(self, dtype: Any) -> Tensor:
        """Return a copy in another dtype; the gradient is converted back."""
        return operators.astype(self, dtype)

    def reshape(self, *shape: Any) -> Tensor:
        """Return the elements in another shape, given as numbers or one tuple; one may be -1. A view if possible."""
        return operators.reshape(self, *shape)

    def transpose(self, *axes: Any) -> Tensor:
        """Return a view with permuted axes, given as numbers or one tuple; reversed by default."""
        return operators.transpose(self, *axes)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return the sum over ``axis``: a number, a tuple of numbers, or None for all axes.

        The summed axes are dropped, or kept with length 1 by ``keepdims``. The dtype is NumPy's: floats keep theirs,
        integers become int64.
        """
        return operators.sum(self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return the mean over ``axis``, see `sum`; the mean of integers is a float."""
        return operators.mean(self, axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return the largest element over ``axis``, see `sum`; equal elements share the gradient."""
        return operators.max(self, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """Return the smallest element over ``axis``, see `sum`; equal elements share the gradient."""
        return operators.min(self, axis, keepdims)

    def argmax(self, axis: Any = None) -> Tensor:
        """Return the index of the largest element along ``axis``, or among all for None: int64, without gradient."""
        return operators.argmax(self, axis)

    def exp(self) -> Tensor:
        """Return e to the power of each element."""
        return operators.exp(self)

    def log(self) -> Tensor:
        """Return the natural logarithm of each element."""
        return operators.log(self)

    def sqrt(self) -> Tensor:
        """Return the square root of each element."""
        return operators.sqrt(self)

    def tanh(self) -> Tensor:
        """Return the hyperbolic tangent of each element."""
        return operators.tanh(self)

    def sigmoid(self) -> Tensor:
        """Return ``1 / (1 + exp(-x))`` for each element x."""
        return operators.sigmoid(self)


def as_tensor(x: Any) -> Tensor:
    """Return ``x`` itself if it is a tensor, else a tensor of that array or number."""
    return x if isinstance(x, Tensor) else Tensor(x)


def value_of(x: Any) -> Any:
    """Return a tensor's array; other operands unchanged, because Python numbers adopt the other operand's dtype."""
    return x.data if isinstance(x, Tensor) else x


def on_tape(value: Array, inputs: tuple[Any, ...], pullback: Pullback | None, again: Again | None = None) -> Tensor:
    """Return the result of an operation, recorded if this thread records and an input needs a gradient.

    Integers and booleans are constants: no gradient passes through them.

    Args:
        value: the result's array.
        inputs: the operation's tensors; arrays and numbers among them have no gradient.
        pullback: ``pullback(gy, *gradients)``, see `tape.Pullback`. It should refer to arrays, never to the resulting
            tensor, because it keeps them alive. None if no input can have a gradient.
        again: how to recompute the value, for an `operator` that can be planned.
    """
    result = Tensor(value)
    if modes.recording:
        if value.dtype.kind in "biu":
            inputs, pullback = (), None
        if modes.capture is not None:
            modes.capture(result, inputs, pullback, again)
            return result
        sources: list[Node | Tensor | None] = []
        is_wanted = False
        for x in inputs:
            source: Node | Tensor | None = None
            if isinstance(x, Tensor):
                source = x.node
                if source is None and x.grad_req != "null":
                    source = x
                is_wanted = is_wanted or source is not None
            sources.append(source)
        if is_wanted:
            assert pullback is not None
            result.node = Node(value, tuple(sources), pullback)
    return result


class _Turn(NamedTuple):
    """One operation in the order of backward."""

    pullback: Pullback
    result: Gradient
    inputs: tuple[Gradient | None, ...]
    completed: tuple[tuple[Tensor, Gradient], ...]
    """Leaves that no later operation uses."""


class RepeatedBackward:
    """A repeatable ``backward(head, None, retain_graph=True)`` that caches the traversal order of the tape.

    Gradients have the same bits, and hooks are called at the same points.

    Args:
        head: computed on the host by recorded operations, whose pullbacks can be called again after their operands
            changed. Leaves with ``grad_req="null"`` get no gradient, even if that changes later.

    Raises:
        HpcdpError: as `backward`.
    """

    def __init__(self, head: Tensor) -> None:
        walk = GraphWalk(pairs_of(head, None))
        gradients = {node: Gradient(node, np) for node in walk.nodes}
        self._leaves = {leaf: Gradient(leaf, np) for leaf in walk.uses if leaf.grad_req != "null"}
        by_source = gradients | self._leaves
        assert head.node is not None
        self._head = gradients[head.node]
        self._turns: list[_Turn] = []
        for node, completed in walk.turns():
            assert node.pullback is not None
            inputs = tuple(by_source.get(source) for source in node.inputs)
            done = tuple((leaf, self._leaves[leaf]) for leaf in completed if leaf in self._leaves)
            self._turns.append(_Turn(node.pullback, gradients[node], inputs, done))

    def run(self, head_grad: np.ndarray) -> None:
        """Recompute the gradients of all leaves; ``head_grad`` has the head's shape and dtype."""
        for leaf, gradient in self._leaves.items():
            home = leaf.grad
            if home is None:
                home = leaf.grad = np.zeros(leaf.shape, leaf.dtype)
            gradient.begin(home, leaf.grad_req == "add")
        self._head.add(head_grad)
        try:
            for pullback, result, inputs, completed in self._turns:
                gy = result.finish()
                result.begin()
                pullback(gy, *inputs)
                for leaf, gradient in completed:
                    gradient.finish()
                    if leaf.grad_hook is not None:
                        leaf.grad_hook(leaf)
        finally:  # a hook may have raised
            for turn in self._turns:
                turn.result.begin()


from . import operators  # noqa: E402  tensors and operators import each other
