"""Parameters: tensors that are learnt, and the hooks a trainer attaches to them."""

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
"""The slot that `Parameter.data` wraps."""
_grad: Any = Tensor.__dict__["grad"]
_grad_req: Any = Tensor.__dict__["grad_req"]
_HOOKS = ("_data_hook", "grad_hook", "update_hook")
"""Attributes that a trainer sets on a parameter."""


class Parameter(Tensor):
    """Tensor that is learnt: a leaf with a gradient.

    ``name`` is its path in the network, e.g. "0.weight", set by `Module.parameters`.

    Args:
        data: the initial values; an array is kept without a copy, a number becomes an array.
        name: the name until `Module.parameters` sets it.
        grad_req: "write", "add" or "null".
    """

    __slots__ = ("_data_hook", "cut", "is_joint", "name", "update_hook")

    def __init__(self, data: Any, name: str = "", grad_req: str = "write") -> None:
        self._data_hook: Callable[[Parameter], None] | None = None
        self.update_hook: Callable[[Parameter], None] | None = None
        """Called before ``grad`` is read, because a running update may still read it."""
        super().__init__(data)
        self.name = name
        self.cut: Cut | None = None
        """The slice of the full parameter that this rank holds, if ranks split the layer: see `hpcdp.parallel`."""
        self.is_joint = False
        """True if it belongs to a layer that all ranks must run together: see `Module.needs_all_ranks`."""
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
        """The gradient that the last backward stored."""
        if self.update_hook is not None:
            self.update_hook(self)
        return _grad.__get__(self)

    @grad.setter
    def grad(self, values: Array | None) -> None:
        _grad.__set__(self, values)

    @property
    def grad_req(self) -> str:  # type: ignore[override]
        """Treatment of ``grad`` by backward: "write", "add" or "null"; see `Tensor.attach_grad`."""
        return _grad_req.__get__(self)  # type: ignore[no-any-return]

    @grad_req.setter
    def grad_req(self, value: str) -> None:
        require_grad_req("Parameter", value)
        catch_up()
        _grad_req.__set__(self, value)

    @property
    def data_hook(self) -> Callable[[Parameter], None] | None:
        """The hook called before ``data`` is read, because an update may still be changing it."""
        return self._data_hook

    @data_hook.setter
    def data_hook(self, hook: Callable[[Parameter], None] | None) -> None:
        self._data_hook = hook
        tracing.in_parameters()

    def held(self) -> Array:
        """Return the array behind ``data`` without waiting for a running update."""
        return _data.__get__(self)

    def __getstate__(self) -> tuple[Any, dict[str, Any]]:
        return getattr(self, "__dict__", None), self._kept(self.data)

    def _kept(self, values: Array) -> dict[str, Any]:
        """Return the state for copies and pickles: without the hooks, which belong to one trainer."""
        names = [slot for slot in copyreg._slotnames(type(self)) if slot != "data" and hasattr(self, slot)]  # type: ignore[attr-defined]
        return {"data": values, **{name: getattr(self, name) for name in names}, **dict.fromkeys(_HOOKS)}
