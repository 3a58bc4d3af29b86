"""A stand-in for PyTorch, with which Sphinx imports `hpcdp.torch`.

The site needs no PyTorch then, and is the same where it is installed. Sphinx's own stand-in has no classes, for which
`hpcdp.torch` registers functions.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Anything(types.ModuleType):
    """A module in which each capitalized name is a class, and each other one a module, or a decorator."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.lstrip("_")[:1].isupper():
            methods = {"__class_getitem__": classmethod(lambda cls, item: cls), "__module__": self.__name__}
            value: Any = type(name, (), methods)
        else:
            value = _Anything(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, decorated: Any) -> Any:
        return decorated


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_of_torch = name.partition(".")[0] == "torch"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_of_torch else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    """From now on let ``import torch`` give the stand-in."""
    sys.meta_path.insert(0, _Finder())
