"""Tensors.

Tensors: arrays that operations on the tape are made of.

Arrays made of what is given to a tensor.

Backward through a tape that is kept, again and again: the way is looked for once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import Array, array_namespace, on_device_of, to_host
from ..core.checks import one_of
from ..core.devices import values_on_device_of
from ..core.state import refuse_change
from ..errors import HpcdpError, UnsupportedError, shortened
from .tape import Again, Gradient, GraphWalk, Node, Pullback, backward, catch_up, modes, pairs_of


def array_of(data: Any) -> np.ndarray:
    """Numbers, or nested sequences of them, as float32; an array of another library in its own dtype."""
    remedy = None
    try:
        numbers = np.asarray(data, None if hasattr(data, "dtype") else np.float32)
    except HpcdpError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = str(error) if hasattr(data, "dtype") else None  # as PyTorch says what is to be done
    else:
        if numbers.dtype.kind in "OSU":  # NumPy takes any object for an array
            pass
        elif not np.isnan(numbers).any() or not any(each is None for each in np.asarray(data, object).flat):
            return numbers
        else:
            remedy = "leave out an input that is optional"  # NumPy makes NaN of it
    raise HpcdpError("Tensor", expected="an array, or numbers", got=shortened(repr(data), 40), remedy=remedy)


GRAD_REQS = ("write", "add", "null")


def require_grad_req(operation: str, grad_req: object) -> None:
    """Raises `ConfigError` unless it says what backward does with a gradient."""
    one_of(operation, "grad_req", grad_req, GRAD_REQS)


class Tensor:
    """An array of any namespace, ``data``, that may have a gradient.

    Operators and methods work as NumPy's and make new tensors; other operands may be arrays or numbers. In-place
    operators (``w -= lr * g``) and ``w[...] = values`` change ``data`` in place outside of recording, and never
    replace it: it may be memory that other ranks see. Recorded results change only after backward freed the tape;
    nobody looks at leaves, nor at views and `detach` of results: who changes those before backward gets its gradients
    from the new values. Values that are written may be on another device; operands of operators may not.

    Args:
        data: an array, kept as it is, not copied; numbers and lists become float32 NumPy arrays, and what else NumPy
            takes for an array, as PyTorch's tensors in host memory and data sets of h5py, NumPy arrays of its dtype.

    Raises:
        HpcdpError: ``data`` is none of that.
    """

    __slots__ = ("__weakref__", "data", "grad", "grad_hook", "grad_req", "node")
    __array_ufunc__ = None  # array + tensor is the tensor's business

    def __init__(self, data: Any) -> None:
        if type(data) is not np.ndarray:
            if isinstance(data, Tensor):
                data = data.data
            elif not (hasattr(data, "__array_namespace__") or (hasattr(data, "strides") and hasattr(data, "dtype"))):
                data = array_of(data)
        self.data: Array = data
        self.grad: Array | None = None
        self.grad_req = "null"
        self.grad_hook: Callable[[Any], object] | None = None
        self.node: Node | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of ``data``."""
        return self.data.shape

    @property
    def dtype(self) -> Any:
        """That of ``data``."""
        return self.data.dtype

    @property
    def ndim(self) -> int:
        """How many axes there are."""
        return self.data.ndim

    @property
    def size(self) -> int:
        """How many elements there are."""
        return self.data.size

    @property
    def T(self) -> Tensor:
        """A view with the axes reversed."""
        return operators.transpose(self)

    def attach_grad(self, grad_req: str = "write") -> None:
        """Make this a leaf of the tape with a gradient: zeros of its shape in ``grad``, in its namespace.

        Args:
            grad_req: what backward does with ``grad``: "write" over it, "add" to it, or "null", leave it alone.

        Raises:
            HpcdpError: another ``grad_req``.
            UnsupportedError: it holds integers or booleans, which have no gradient, or complex numbers.
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
        """`autograd.backward` from this tensor; ``head_grad`` has its shape, None means ones."""
        backward(self, head_grad, retain_graph)

    @property
    def settled(self) -> Tensor:
        """The tensor that is on the tape: this one, or what its call has given, where that was asynchronous."""
        return self

    def wait_to_read(self) -> None:
        """Wait until the values are there, where they may still be computed: see `asynchronous`."""

    def __getstate__(self) -> Any:
        catch_up()  # copies and pickles are of what all calls have left, and on no tape, to which others' leaves belong
        state: Any = object.__getstate__(self)
        attributes, slots = state
        return attributes, {**slots, "node": None}

    def detach(self) -> Tensor:
        """The same ``data`` as a tensor that is on no tape."""
        return operators.detach(self)

    def _values(self) -> Array:
        """``data``, for somebody who looks at it: refused in a forward that is traced."""
        if modes.tracer is not None:
            modes.tracer.read()
        return self.data

    def asnumpy(self) -> np.ndarray:
        """A copy in host memory."""
        return np.array(to_host(self._values()))

    def item(self) -> Any:
        """The only element, as a Python number."""
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
        if not self.shape:  # else Python would find no rows: sum(loss) would be 0
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
                "in-place change",
                expected="values that are not on the tape, as nothing records a change",
                got=f"some of shape {tuple(value.shape)} that want a gradient",
                remedy="make a new tensor (autograd.stack, concatenate, where), or write value.detach()",
            )
        self._refuse_recorded()
        with on_device_of(self.data):
            place = self.changeable()
            place[operators.index(key)] = values_on_device_of(value_of(value), place)

    def _refuse_recorded(self) -> None:
        """The operation that made a tensor may need its elements until backward has freed the tape, and others until
        they are computed, where calls are asynchronous."""
        if modes.tracer is not None:
            modes.tracer.settle()
        if self.node is not None and self.node.pullback is not None:
            raise self._on_tape("that was recorded", "call backward first")
        refuse_change(self.data, getattr(self, "name", ""))

    def changeable(self) -> Array:
        """``data``, as an array that can change: a number of NumPy's, as sums over all axes are, becomes one."""
        if isinstance(self.data, np.generic):
            self.data = np.array(self.data)
        return self.data

    def _on_tape(self, state: str, way_out: str) -> HpcdpError:
        return HpcdpError(
            "in-place change",
            expected="a tensor that is not on the tape",
            got=f"one of shape {self.shape} {state}",
            remedy="make a new tensor" + f", or {way_out}" * bool(way_out),
        )

    def _in_place(self, operation: Callable[[Any, Any], Tensor], other: Any) -> Tensor:
        """``total += loss`` while recording is a new tensor, as the tape needs; a leaf may not change then."""
        if modes.recording:
            if self.grad_req != "null":
                raise self._on_tape("while recording", "use `with autograd.pause():`")
            return operation(self, other)
        self._refuse_recorded()
        result = operation(self, other).data
        if not np.can_cast(result.dtype, self.dtype, "same_kind"):
            raise UnsupportedError(
                "in-place operation",
                expected=f"a result that fits {self.dtype}",
                got=result.dtype,
                remedy="use x = ...",
            )
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
        """A copy in another dtype; the gradient comes back in the old one."""
        return operators.astype(self, dtype)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape, given as numbers or one tuple; one may be -1. A view if possible."""
        return operators.reshape(self, *shape)

    def transpose(self, *axes: Any) -> Tensor:
        """A view with the axes in another order, given as numbers or one tuple; reversed if none are given."""
        return operators.transpose(self, *axes)

    def sum(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The sum over ``axis``: a number, a tuple of them, or None, which is all of them.

        The axes that are summed over are gone, or with ``keepdims`` of length 1. The dtype is the one that NumPy gives:
        that of floats stays, integers become int64.
        """
        return operators.sum(self, axis, keepdims)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The mean over ``axis``, see `sum`; of integers in floating point."""
        return operators.mean(self, axis, keepdims)

    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The largest element over ``axis``, see `sum`; equal ones share the gradient."""
        return operators.max(self, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> Tensor:
        """The smallest element over ``axis``, see `sum`; equal ones share the gradient."""
        return operators.min(self, axis, keepdims)

    def argmax(self, axis: Any = None) -> Tensor:
        """Where the largest element is along ``axis``, a number, or if it is None among all: int64, no gradient."""
        return operators.argmax(self, axis)

    def exp(self) -> Tensor:
        """e to the power of each element."""
        return operators.exp(self)

    def log(self) -> Tensor:
        """The natural logarithm of each element."""
        return operators.log(self)

    def sqrt(self) -> Tensor:
        """The square root of each element."""
        return operators.sqrt(self)

    def tanh(self) -> Tensor:
        """The hyperbolic tangent of each element."""
        return operators.tanh(self)

    def sigmoid(self) -> Tensor:
        """``1 / (1 + exp(-x))`` of each element x."""
        return operators.sigmoid(self)


def as_tensor(x: Any) -> Tensor:
    """``x`` itself if it is a tensor, else a tensor of that array or number."""
    return x if isinstance(x, Tensor) else Tensor(x)


def value_of(x: Any) -> Any:
    """The array of a tensor; arrays and Python numbers as they are, which keeps the other operand's dtype."""
    return x.data if isinstance(x, Tensor) else x


def on_tape(value: Array, inputs: tuple[Any, ...], pullback: Pullback | None, again: Again | None = None) -> Tensor:
    """The result of an operation, recorded if this thread records and an input wants a gradient.

    Args:
        value: the result's array.
        inputs: the operation's tensors; arrays and numbers among them have no gradient.
        pullback: ``pullback(gy, *gradients)``, see `tape.Pullback`; it keeps alive what it refers to, so it should
            refer to arrays, never to the resulting tensor. None without inputs that could have a gradient.
        again: how the value is computed again, for an `operator`, which can be planned.

    Integers and booleans are constants: no gradient goes back through them.
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
        way = GraphWalk(pairs_of(head, None))
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


from . import operators  # noqa: E402  tensors and operators need each other
