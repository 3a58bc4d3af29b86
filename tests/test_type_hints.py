"""Every public call has type hints, whose names are there: at run time, or for type checkers (``if TYPE_CHECKING``)."""

import ast
import functools
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PACKAGES = (
    "hpcdp", "hpcdp.autograd", "hpcdp.checkpoint", "hpcdp.collectives", "hpcdp.compression", "hpcdp.data",
    "hpcdp.engine", "hpcdp.kvstore", "hpcdp.nn", "hpcdp.nn.functional", "hpcdp.nn.models", "hpcdp.optim",
    "hpcdp.parallel", "hpcdp.torch", "hpcdp.train",
)  # fmt: skip


def public_calls(package: types.ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield names and functions, without those that dataclasses make of the hints of their fields."""
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            for method, function in inspect.getmembers(value, inspect.isfunction):
                is_public = not method.startswith("_") or method in ("__init__", "__call__")
                is_written = function.__module__.startswith("hpcdp") and function.__code__.co_filename != "<string>"
                if is_public and is_written:
                    yield f"{name}.{method}", function


@functools.cache
def names_for_checkers(module: types.ModuleType) -> dict[str, Any]:
    """Return what the module imports ``if TYPE_CHECKING``."""
    names: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), module.__name__, "exec"), names)
    return names


@pytest.mark.parametrize("name", PACKAGES)
def test_hints_of_public_calls_are_complete_and_resolve(name: str) -> None:
    if name == "hpcdp.torch":
        pytest.importorskip("torch", reason="PyTorch is not installed")
    missing = []
    for call, function in public_calls(importlib.import_module(name)):
        plain = inspect.unwrap(function)
        hints = typing.get_type_hints(plain, localns={**names_for_checkers(sys.modules[plain.__module__])})
        wanted = {*inspect.signature(plain).parameters, "return"} - {"self", "cls"}
        missing += [f"{call}: {argument}" for argument in sorted(wanted - hints.keys())]
    assert missing == []
