"""Layers without state of their own beside parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..autograd import Tensor
from ..errors import ConfigError, UnsupportedError, whole_number
from . import deferred, functional
from .functional import Pair, Size
from .init import Initialiser, Xavier, Zeros
from .module import Module
from .parameter import Parameter


def _refuse(layer: Module, expected: str, x: Tensor) -> UnsupportedError:
    return UnsupportedError("forward", where=repr(layer), expected=f"input of shape {expected}", got=tuple(x.shape))


def require_channels(layer: Module, **numbers: int | None) -> None:
    """Raises `ConfigError` unless the numbers of inputs, which may be None, and of outputs are at least 1."""
    for where, number in numbers.items():
        if number is not None or not where.startswith("in_"):
            whole_number(type(layer).__name__, where, number, 1)


def window(layer: Module, where: str, size: Size, least: int) -> Pair:
    """(vertical, horizontal); `ConfigError` unless they are at least ``least``."""
    sizes = size if isinstance(size, Sequence) and len(size) == 2 else (size, size)
    try:
        first, last = (whole_number(type(layer).__name__, where, each, least) for each in sizes)
    except ConfigError as error:
        expected = f"an integer >= {least}, or two of them"
        raise ConfigError(type(layer).__name__, where=where, expected=expected, got=repr(size)) from error
    return first, last


class Dense(Module):
    """``activation(x @ weight + bias)`` with ``weight`` of shape ``(in_features, out_features)``.

    Args:
        in_features: the input is ``(batch, ..., in_features)``; None: that of the first one.
        bias: whether there is one.
        activation: "relu" or None.
        weight_init: None is `init.Xavier()`; the bias starts at 0.
    """

    def __init__(
        self,
        in_features: int | None,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
    ) -> None:
        require_channels(self, in_features=in_features, out_features=out_features)
        self.weight = deferred.parameter((in_features, out_features), weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_features,))) if bias else None
        self.activation = activation
        functional.is_relu(activation)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return functional.dense(x, self.weight, self.bias, self.activation)

    def check(self, x: Tensor) -> None:
        """Refuse inputs of other shapes; the first one settles what was left open."""
        shape = x.shape
        if len(shape) >= 2:
            deferred.settle(self.weight, shape[-1])
        if len(shape) < 2 or shape[-1] != self.weight.shape[0]:
            raise _refuse(self, f"(batch, {self.weight.shape[0]})", x)

    def describe(self) -> str:
        return ", ".join(str(n) for n in deferred.shape_of(self.weight)) + _options(self)


class Conv2D(Module):
    """``activation(weight * x + bias)``, cross-correlation, with ``weight`` of shape ``(out, in, kernel h, kernel w)``.

    Args:
        in_channels: the input is ``(batch, in_channels, height, width)``; None: that of the first one.
        kernel_size: one number or (vertical, horizontal), as ``stride`` and ``padding``.
        padding: zeros added on both sides.
        bias: whether there is one.
        activation: "relu" or None.
        weight_init: None is `init.Xavier()`; the bias starts at 0.
    """

    def __init__(
        self,
        in_channels: int | None,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        bias: bool = True,
        activation: str | None = None,
        weight_init: Initialiser | None = None,
    ) -> None:
        require_channels(self, in_channels=in_channels, out_channels=out_channels)
        kernel = window(self, "kernel_size", kernel_size, 1)
        self.stride, self.padding = window(self, "stride", stride, 1), window(self, "padding", padding, 0)
        self.weight = deferred.parameter((out_channels, in_channels, *kernel), weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_channels,))) if bias else None
        self.activation = activation
        functional.is_relu(activation)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.activation)

    def check(self, x: Tensor) -> None:
        """Refuse inputs of other shapes; the first one settles what was left open."""
        if x.ndim == 4:
            deferred.settle(self.weight, x.shape[1])
        _, channels, height, width = self.weight.shape
        if x.ndim != 4 or x.shape[1] != channels:
            raise _refuse(self, f"(batch, {channels}, height, width)", x)
        top, left = self.padding
        if x.shape[2] + 2 * top < height or x.shape[3] + 2 * left < width:
            raise _refuse(self, f"(batch, {channels}, >= {height - 2 * top}, >= {width - 2 * left})", x)

    def describe(self) -> str:
        out, channels, *kernel = deferred.shape_of(self.weight)
        return (
            f"{channels}, {out}, kernel_size={tuple(kernel)}, stride={self.stride}, padding={self.padding}"
            + _options(self)
        )


def _options(layer: Dense | Conv2D) -> str:
    text = "" if layer.bias is not None else ", bias=False"
    return text if layer.activation is None else f"{text}, activation={layer.activation!r}"


class _Pool(Module):
    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        self.kernel_size = window(self, "kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else window(self, "stride", stride, 1)
        self.padding = window(self, "padding", padding, 0)

    def check(self, x: Tensor) -> None:
        least = tuple(k - 2 * p for k, p in zip(self.kernel_size, self.padding, strict=True))
        if x.ndim != 4 or x.shape[2] < least[0] or x.shape[3] < least[1]:
            raise _refuse(self, f"(batch, channels, >= {least[0]}, >= {least[1]})", x)

    def describe(self) -> str:
        return f"{self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool2D(_Pool):
    """The largest element of each window of ``(batch, channels, height, width)``.

    Args:
        stride: None is ``kernel_size``.
        padding: on both sides, at most half of the window; never chosen.
    """

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return functional.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class AvgPool2D(_Pool):
    """The mean of each window of ``(batch, channels, height, width)``.

    Args:
        stride: None is ``kernel_size``.
        padding: zeros on both sides, which count.
    """

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return functional.avg_pool2d(x, self.kernel_size, self.stride, self.padding)


class GlobalAvgPool2D(Module):
    """The mean over height and width: ``(batch, channels, height, width)`` to ``(batch, channels, 1, 1)``."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:
            raise _refuse(self, "(batch, channels, height, width)", x)
        return x.mean(axis=(2, 3), keepdims=True)


class Flatten(Module):
    """``(batch, ...)`` to ``(batch, elements of a sample)``; what has two axes is given back as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.ndim == 2 else x.reshape(x.shape[0], math.prod(x.shape[1:]))


class ReLU(Module):
    """``max(x, 0)``."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x)


class Sigmoid(Module):
    """``1 / (1 + exp(-x))``."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.sigmoid(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.tanh(x)
