"""Parameters whose shape is found when their layer is first called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..arrays import is_cupy
from ..errors import ConfigError, DeviceError, type_named
from .module import Module
from .parameter import Parameter

Shape = tuple[int | None, ...]
Draw = Callable[[tuple[int, ...]], np.ndarray]


def parameter(shape: Shape, draw: Draw, initial: object = None) -> Parameter:
    """A parameter with the values of ``draw(shape)``: now, or, where a length is None, from its first `settle` on.

    Args:
        initial: the initialiser by which ``draw`` draws, if that is another one.
    """
    require_draw(draw)
    known = tuple(length for length in shape if length is not None)
    if len(known) == len(shape):
        return Parameter(drawn(draw, known))
    return Deferred(shape, draw, draw if initial is None else initial)


def require_draw(draw: object) -> None:
    """Raises `ConfigError` unless it is a function."""
    if not callable(draw):
        expected = "a function of a shape, such as nn.init.Xavier()"
        raise ConfigError("parameter", where="weight_init", expected=expected, got=repr(draw))


def drawn(draw: Draw, shape: tuple[int, ...]) -> np.ndarray:
    """``draw(shape)`` in float32, as layers begin; `ConfigError` where it gives something else than so many numbers."""
    given = draw(shape)
    try:
        values = given.astype(np.float32, copy=False) if is_cupy(given) else np.asarray(given, np.float32)
    except (TypeError, ValueError):
        got = type_named(given)
    else:
        if values.shape == shape:
            return values
        got = f"shape {values.shape}"
    raise ConfigError("parameter", where="weight_init", expected=f"numbers of shape {shape}", got=got)


def settle(param: Parameter, length: int) -> None:
    """Where ``param`` waits for the one length of its shape that is not known, draw its values with this one."""
    if isinstance(param, Deferred) and param.draw is not None:
        values = drawn(param.draw, tuple(length if each is None else each for each in param.expected))
        param.draw = param.data_hook = None
        param.data = values
        param.attach_grad(param.grad_req)


def shape_of(param: Parameter) -> Shape:
    """The shape, with None for a length that is not known yet."""
    return param.expected if isinstance(param, Deferred) and param.draw is not None else param.shape


def lacks_shapes(module: Module) -> bool:
    """Whether layers are still to find out their shapes."""
    return any(None in shape_of(param) for _, param in module.named_parameters())


class Deferred(Parameter):
    """A parameter that has no values until its layer is called.

    To look at it before that is a DeviceError, which is a RuntimeError.
    """

    __slots__ = ("draw", "expected", "initial")

    def __init__(self, expected: Shape, draw: Draw, initial: object) -> None:
        super().__init__(np.empty(0, np.float32))
        self.expected, self.initial = expected, initial
        self.draw: Draw | None = draw
        self.data_hook = _has_no_values

    def __getstate__(self) -> tuple[Any, dict[str, Any]]:
        if self.draw is None:
            return super().__getstate__()
        return getattr(self, "__dict__", None), {**self._kept(self.held()), "_data_hook": _has_no_values}


def _has_no_values(param: Any) -> None:
    raise DeviceError(
        "parameter", where=param.name or None, expected="values", got=f"none yet, its shape is {param.expected}",
        remedy="call the network once, on one sample",
    )  # fmt: skip
