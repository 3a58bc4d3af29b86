"""The array that operations are recorded for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..arrays import Array, array_namespace, to_host
from ..errors import ConfigError
from . import tape

GRAD_REQS = ("write", "add", "null")
"""What backward does with a leaf's gradient: overwrite it, add to it, or nothing."""


class Tensor:
    """An array and, if `attach_grad` was called, the gradient that backward leaves for it.

    Operations make new tensors; none of them replaces ``data`` or ``grad``, so both may be views of other memory.

    Args:
        data: an array of NumPy, CuPy or a stand-in, used as it is; anything else becomes float32 NumPy.
    """

    __array_ufunc__ = None  # so that ``ndarray + tensor`` asks the tensor
    __slots__ = ("data", "grad", "grad_hook", "grad_req", "node")

    def __init__(self, data: Any) -> None:
        if isinstance(data, Tensor):
            data = data.data
        elif not (isinstance(data, np.ndarray) or hasattr(data, "__array_namespace__")):
            data = np.asarray(data, np.float32)
        self.data: Array = data
        self.grad: Array = None
        self.grad_req = "null"
        self.grad_hook: Callable[[Any], None] | None = None
        """Called with the tensor during backward, as soon as its gradient is complete."""
        self.node: tape.Node | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def dtype(self) -> Any:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return int(self.data.size)

    def attach_grad(self, grad_req: str = "write") -> None:
        """Ask backward for this tensor's gradient, in ``grad`` (zeros until then); it becomes a leaf.

        Args:
            grad_req: ``"write"``: each backward overwrites; ``"add"``: it adds; ``"null"``: no gradient.
        """
        if grad_req not in GRAD_REQS:
            raise ConfigError("attach_grad", where="grad_req", expected=" or ".join(GRAD_REQS), got=repr(grad_req))
        self.node = None
        self.grad_req = grad_req
        self.grad = None if grad_req == "null" else array_namespace(self.data).zeros(self.shape, dtype=self.dtype)

    def backward(self, head_grad: Array | None = None, retain_graph: bool = False) -> None:
        """Leave the gradient of this tensor's sum in the ``grad`` of every leaf that it was computed from.

        Args:
            head_grad: the gradient to start from, of this shape; ones where None, so gradients are sums over samples.
            retain_graph: keep the record, so that backward can be called again.

        Raises:
            GraphError: nothing was recorded, or the record is freed.
        """
        tape.backward([self], [head_grad], retain_graph)

    def detach(self) -> Tensor:
        """The same data without a record."""
        return Tensor(self.data)

    def asnumpy(self) -> np.ndarray:
        """The data as a NumPy array; no copy where it is one."""
        return to_host(self.data)

    def item(self) -> Any:
        """The only element as a Python number."""
        return self.asnumpy().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.asnumpy(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({np.array2string(self.asnumpy(), precision=4, separator=', ')})"

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        return bool(self.asnumpy())

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __add__(self, other: Any) -> Tensor:
        return operators.add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        return operators.subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return operators.subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return operators.multiply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        return operators.divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return operators.divide(other, self)

    def __pow__(self, exponent: float) -> Tensor:
        return operators.power(self, exponent)

    def __neg__(self) -> Tensor:
        return operators.multiply(self, -1.0)

    def __matmul__(self, other: Any) -> Tensor:
        return operators.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return operators.matmul(other, self)

    def __getitem__(self, key: Any) -> Tensor:
        return operators.index(self, key)

    def reshape(self, *shape: Any) -> Tensor:
        """The same elements in another shape; one length may be -1."""
        return operators.reshape(self, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)

    def transpose(self, *axes: int) -> Tensor:
        """The axes in another order, reversed where none is given."""
        return operators.transpose(self, axes or tuple(range(self.ndim))[::-1])

    @property
    def T(self) -> Tensor:
        return self.transpose()

    def sum(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """The sum over some axes, all where None."""
        return operators.sum(self, axis, keepdims)

    def mean(self, axis: int | Sequence[int] | None = None, keepdims: bool = False) -> Tensor:
        """The mean over some axes, all where None."""
        return operators.mean(self, axis, keepdims)

    def max(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """The largest element along an axis, of all where None; among equals the gradient goes to the first."""
        return operators.extremum(self, axis, keepdims, "argmax")

    def min(self, axis: int | None = None, keepdims: bool = False) -> Tensor:
        """The smallest element along an axis, of all where None; among equals the gradient goes to the first."""
        return operators.extremum(self, axis, keepdims, "argmin")

    def exp(self) -> Tensor:
        return operators.exp(self)

    def log(self) -> Tensor:
        return operators.log(self)

    def argmax(self, axis: int | None = None) -> Array:
        """Where the largest element is; an array, since it has no gradient."""
        return array_namespace(self.data).argmax(self.data, axis=axis)


from . import operators  # noqa: E402  (operators need Tensor)
