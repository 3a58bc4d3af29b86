"""Layers, and dropout with masks that repeat from run to run.

Layers without state of their own beside parameters.

Layers that behave differently in training and in prediction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..autograd import Tensor, is_training
from ..core.checks import number, whole_numbers
from ..core.environment import replica_number
from ..errors import ConfigError, UnsupportedError, whole_number
from . import functional, module
from .functional import Pair, Size
from .init import Initialiser, Ones, Xavier, Zeros
from .microbatch import KeepsStatistics, entered_shard
from .module import Module
from .parameter import Parameter


def refused_input(layer: Module, expected: str, x: Tensor) -> UnsupportedError:
    return UnsupportedError("forward", where=repr(layer), expected=f"input of shape {expected}", got=tuple(x.shape))


def require_channels(layer: Module, **numbers: int | None) -> None:
    """Raises `ConfigError` unless the numbers of inputs, which may be None, and of outputs are at least 1."""
    checked = {where: number for where, number in numbers.items() if number is not None or not where.startswith("in_")}
    whole_numbers(type(layer).__name__, 1, **checked)


def window(layer: Module, where: str, size: Size, least: int) -> Pair:
    """(vertical, horizontal); `ConfigError` unless they are at least ``least``."""
    sizes = size if isinstance(size, Sequence) and len(size) == 2 else (size, size)
    expected = f"an integer >= {least}, or two of them"
    first, last = (
        whole_number(type(layer).__name__, where, each, least, expected=expected, shown=size) for each in sizes
    )
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
        self.weight = module.parameter((in_features, out_features), weight_init or Xavier())
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
            module.settle(self.weight, shape[-1])
        if len(shape) < 2 or shape[-1] != self.weight.shape[0]:
            raise refused_input(self, f"(batch, {self.weight.shape[0]})", x)

    def describe(self) -> str:
        return ", ".join(str(n) for n in module.shape_of(self.weight)) + _options(self)


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
        self.weight = module.parameter((out_channels, in_channels, *kernel), weight_init or Xavier())
        self.bias = Parameter(Zeros()((out_channels,))) if bias else None
        self.activation = activation
        functional.is_relu(activation)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return functional.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.activation)

    def check(self, x: Tensor) -> None:
        """Refuse inputs of other shapes; the first one settles what was left open."""
        if x.ndim == 4:
            module.settle(self.weight, x.shape[1])
        _, channels, height, width = self.weight.shape
        if x.ndim != 4 or x.shape[1] != channels:
            raise refused_input(self, f"(batch, {channels}, height, width)", x)
        top, left = self.padding
        if x.shape[2] + 2 * top < height or x.shape[3] + 2 * left < width:
            raise refused_input(self, f"(batch, {channels}, >= {height - 2 * top}, >= {width - 2 * left})", x)

    def describe(self) -> str:
        out, channels, *kernel = module.shape_of(self.weight)
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
            raise refused_input(self, f"(batch, channels, >= {least[0]}, >= {least[1]})", x)

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
            raise refused_input(self, "(batch, channels, height, width)", x)
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


class BatchNorm(KeepsStatistics, Module):
    """Batch normalisation of each channel (Ioffe and Szegedy 2015).

    In training by the batch's mean and biased variance, which also move ``running_mean`` and ``running_var`` (buffers):
    ``running = momentum * running + (1 - momentum) * batch``; in prediction by those. Under a reproducible
    `Trainer` the batch is a virtual shard, and running statistics move once a step, by the mean over all its samples
    and calls.

    Args:
        channels: the input is ``(batch, channels, ...)``; None: those of the first one.
        momentum: how much of the running statistics stays.
        eps: added to the variance.

    Raises:
        ConfigError: ``channels`` below 1, ``momentum`` outside of [0, 1], ``eps`` not above 0.
    """

    keeps_float32 = True

    def __init__(self, channels: int | None, momentum: float = 0.9, eps: float = 1e-5) -> None:
        whole_numbers("BatchNorm", 1, channels=1 if channels is None else channels)
        self.momentum = number("BatchNorm", "momentum", momentum, least=0, most=1)
        self.eps = number("BatchNorm", "eps", eps, above=0)
        self.gamma, self.beta = module.parameter((channels,), Ones()), module.parameter((channels,), Zeros())
        self.running_mean, self.running_var = Tensor(Zeros()((channels or 0,))), Tensor(Ones()((channels or 0,)))

    def statistics(self) -> tuple[Tensor, ...]:
        """The running statistics."""
        return self.running_mean, self.running_var

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim >= 2 and not self.running_mean.shape[0]:  # a Trainer may know the other shapes from other ranks
            channels = x.shape[1]
            self.running_mean, self.running_var = Tensor(Zeros()((channels,))), Tensor(Ones()((channels,)))
            module.settle(self.gamma, channels)
            module.settle(self.beta, channels)
        channels = self.gamma.shape[0]
        if x.ndim < 2 or x.shape[1] != channels:
            raise refused_input(self, f"(batch, {channels}, ...)", x)
        if is_training():
            return self.by_batch(x)
        return self.by_running(x)

    def by_batch(self, x: Tensor) -> Tensor:
        """``x`` by its own statistics, which move the running ones; those of an empty batch are none."""
        if not x.size:
            return self.by_running(x)
        shard = entered_shard()
        if shard is None:
            moved = self.running_mean, self.running_var, self.momentum
            return functional.batch_norm(x, self.gamma, self.beta, self.eps, *moved)[0]
        y, mean, variance = functional.batch_norm(x, self.gamma, self.beta, self.eps)
        shard.note(self.running_mean, mean)
        shard.note(self.running_var, variance)
        return y

    def by_running(self, x: Tensor) -> Tensor:
        """``x`` by the running statistics."""
        return functional.batch_norm_by_running(x, self.gamma, self.beta, self.running_mean, self.running_var, self.eps)

    def describe(self) -> str:
        return f"{module.shape_of(self.gamma)[0]}, momentum={self.momentum}, eps={self.eps}"


class Dropout(Module):
    """In training each element is zero with probability ``p``, else divided by ``1 - p``; in prediction it stays.

    Args:
        p: in [0, 1).
        seed: an integer >= 0, of this layer's own generator. It is mixed with the number of the replica when the layer
            draws first: ranks drop different elements, and the same ones in every run on as many ranks. Ranks that hold
            one replica together, by tensor or pipeline parallelism, drop the same ones; replica 0 draws as one process
            does. A layer that has drawn before `hpcdp.init` goes on as it has begun. None takes fresh entropy on each
            rank. Under a reproducible `Trainer` a seed must be given: what is dropped then depends on it, the step and
            the place of the sample in the global batch alone.

    Raises:
        ConfigError: ``p`` or ``seed`` is outside of that; later no seed under a reproducible trainer.
    """

    def __init__(self, p: float = 0.5, seed: int | None = None) -> None:
        self.p = number("Dropout", "p", p, least=0, below=1)
        self.seed = None if seed is None else whole_number("Dropout", "seed", seed, 0)
        self.generator = np.random.default_rng(seed)
        """The layer's own; what it gives next is part of a run's state."""
        self._beginning = _Beginning(seed, self.generator)

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not is_training():
            return x
        return functional.dropout(x, self.p, self._drawn_from())

    def _drawn_from(self) -> np.random.Generator:
        shard = entered_shard()
        if shard is None:
            self._beginning.enter(self.generator)
            return self.generator
        if self.seed is None:
            raise ConfigError(
                "Dropout", where="seed", expected="a number, since the trainer is reproducible", got=None,
                remedy=f"Dropout({self.p:g}, seed=...)",
            )  # fmt: skip
        return shard.generator(self.seed)

    def describe(self) -> str:
        return str(self.p)


class _Beginning:
    """The state in which a seeded generator begins, which depends on the replica that draws first.

    Networks are often made before the world is, so the replica is looked up when a layer draws. A generator that has
    drawn, or was restored from a checkpoint, goes on as it is. An object of its own: a forward that is traced may not
    assign attributes of a layer.
    """

    def __init__(self, seed: int | None, generator: np.random.Generator) -> None:
        self._seed, self._replica = seed, 0
        self._state = None if seed is None else generator.bit_generator.state

    def enter(self, generator: np.random.Generator) -> None:
        """Seed a generator that has not drawn yet by the seed and the replica; replica 0 by the seed alone."""
        replica = replica_number()
        if replica == self._replica or self._state is None:
            return
        self._replica = replica
        if generator.bit_generator.state == self._state:
            sequence = np.random.SeedSequence(self._seed, spawn_key=(replica,) if replica else ())
            generator.bit_generator.state = self._state = np.random.PCG64(sequence).state
