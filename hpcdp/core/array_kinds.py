"""Kinds of arrays that packages above know, such as PyTorch's tensors.

Packages that know nothing of PyTorch compute on arrays of NumPy and CuPy. A package that knows another kind registers
its conversion here. It is imported by name where the first object of that kind comes.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .arrays import Array


class ArrayKind(Protocol):
    """Conversion between the arrays of another library and those of NumPy and CuPy."""

    name: str
    """The name of the kind in messages between ranks."""

    def as_array(self, operation: str, where: str, x: Any) -> Array:
        """Return an array over the memory of ``x``; raise `UnsupportedError` if that is impossible."""
        ...

    def as_values(self, x: Any) -> np.ndarray:
        """Return the values of ``x`` in host memory, for an operation that neither changes nor differentiates it."""
        ...

    def of_array(self, x: Array) -> Any:
        """Return an object of this kind over the memory of ``x``."""
        ...

    def written(self, x: Any) -> None:
        """Record that an operation has written to the memory of ``x``."""
        ...

    def ordered_with(self, x: Any) -> AbstractContextManager[object]:
        """Return a context in which work on arrays over the memory of ``x`` follows earlier work on ``x``."""
        ...


_MODULES = {("torch", "Tensor"): "hpcdp.torch"}
"""The module that registers a kind, by the module and name of the class."""

_registered: dict[type, ArrayKind] = {}


def register(array_type: type, kind: ArrayKind) -> None:
    """Register the kind of the objects of ``array_type`` and of its subclasses."""
    _registered[array_type] = kind


class _Kinds(dict[type, ArrayKind | None]):
    """Kind by type, None for types that are of no registered kind; found at the first object of a type."""

    def __missing__(self, of: type) -> ArrayKind | None:
        found = None
        for base in of.__mro__:
            module = _MODULES.get((base.__module__, base.__name__))
            if module is not None:
                importlib.import_module(module)
                found = _registered[base]
        self[of] = found
        return found


kinds = _Kinds()
"""``kinds[type(x)]``: the kind of ``x``, None for arrays of NumPy and CuPy and whatever is no array."""


def kind_named(name: str) -> ArrayKind:
    """Return the kind that a message names; `KeyError` if there is none."""
    module = {module.rpartition(".")[2]: module for module in _MODULES.values()}[name]
    importlib.import_module(module)
    return next(kind for kind in _registered.values() if kind.name == name)
