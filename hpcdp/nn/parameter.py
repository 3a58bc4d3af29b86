"""Parameters: tensors that are learnt, and what a trainer hangs on them."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import numpy as np

from ..autograd import Tensor
from ..autograd.tape import catch_up
from ..autograd.tensor import require_grad_req
from ..core.arrays import Array
from ..core.state import Cut
from .jit import tracing

_data: Any = Tensor.__dict__["data"]
"""The slot behind `Parameter.data`."""
_grad: Any = Tensor.__dict__["grad"]
_grad_req: Any = Tensor.__dict__["grad_req"]
_HOOKS = ("_data_hook", "grad_hook", "update_hook")
"""What a trainer hangs on a parameter."""


class Parameter(Tensor):
    """A tensor that is learnt: a leaf with a gradient.

    ``name`` is its path in the network, e.g. "0.weight", set by the network's `Module.parameters`.

    Args:
        data: the initial values, an array kept as it is; numbers become one.
        name: what to call it until then.
        grad_req: "write", "add" or "null".
    """

    __slots__ = ("_data_hook", "cut", "is_joint", "name", "update_hook")

    def __init__(self, data: Any, name: str = "", grad_req: str = "write") -> None:
        self._data_hook: Callable[[Parameter], None] | None = None
        self.update_hook: Callable[[Parameter], None] | None = None
        """Called before ``grad`` is read, where an update that still reads it may be under way."""
        super().__init__(data)
        self.name = name
        self.cut: Cut | None = None
        """Which part of a whole parameter this is, where ranks compute a layer together: see `hpcdp.parallel`."""
        self.is_joint = False
        """Whether it is of a layer that all ranks must run together: see `Module.needs_all_ranks`."""
        self.attach_grad(grad_req)

    @property
    def data(self) -> Array:  # type: ignore[override]
        """The values."""
        if self._data_hook is not None:
            self._data_hook(self)
        return _data.__get__(self)

    @data.setter
    def data(self, values: Array) -> None:
        catch_up()
        _data.__set__(self, np.array(values) if isinstance(values, np.generic) else values)  # a number cannot change
        tracing.in_parameters()

    @property
    def grad(self) -> Array | None:  # type: ignore[override]
        """The gradient that backward has left."""
        if self.update_hook is not None:
            self.update_hook(self)
        return _grad.__get__(self)

    @grad.setter
    def grad(self, values: Array | None) -> None:
        _grad.__set__(self, values)

    @property
    def grad_req(self) -> str:  # type: ignore[override]
        """What backward does with ``grad``; see `Tensor.attach_grad`. Another word is an HpcdpError."""
        return _grad_req.__get__(self)  # type: ignore[no-any-return]

    @grad_req.setter
    def grad_req(self, value: str) -> None:
        require_grad_req("Parameter", value)
        catch_up()
        _grad_req.__set__(self, value)

    @property
    def data_hook(self) -> Callable[[Parameter], None] | None:
        """Called before ``data`` is read, where an update of it may be under way."""
        return self._data_hook

    @data_hook.setter
    def data_hook(self, hook: Callable[[Parameter], None] | None) -> None:
        self._data_hook = hook
        tracing.in_parameters()

    def held(self) -> Array:
        """The array behind ``data``, without waiting for an update of it."""
        return _data.__get__(self)

    def __getstate__(self) -> tuple[Any, dict[str, Any]]:
        return getattr(self, "__dict__", None), self._kept(self.data)

    def _kept(self, values: Array) -> dict[str, Any]:
        """What copies and pickles have: no hooks, which are a trainer's that has this parameter alone."""
        names = [each for each in copyreg._slotnames(type(self)) if each != "data" and hasattr(self, each)]  # type: ignore[attr-defined]
        return {"data": values, **{name: getattr(self, name) for name in names}, **dict.fromkeys(_HOOKS)}
