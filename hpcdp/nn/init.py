"""Initializers: callables that return initial values of parameters as NumPy arrays, given a shape and a dtype.

Random initializers draw from their own ``generator``. With a seed they give the same values in every run, and different
values to successive layers. If shapes are only known at the first call, a Trainer that exists by then synchronizes the
generator states of all ranks; it does so for any initializer with a ``generator`` attribute.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np


class Initialiser(Protocol):
    """Callable ``(shape, dtype) -> array``. Weights are ``(in, out)`` or ``(out, in, kernel height, kernel width)``."""

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return values of ``shape`` and ``dtype``."""
        ...


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return fan-in and fan-out: inputs per output, and outputs per input."""
    if len(shape) < 2:
        return (shape[0] if shape else 1,) * 2
    if len(shape) == 2:
        return shape[0], shape[1]
    window = math.prod(shape[2:])
    return shape[1] * window, shape[0] * window


class Constant:
    """Initializer that sets every element to ``value``."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return values of ``shape`` and ``dtype``."""
        return np.full(shape, self.value, dtype)


class Zeros(Constant):
    """Initializer that sets every element to 0."""

    def __init__(self) -> None:
        super().__init__(0.0)


class Ones(Constant):
    """Initializer that sets every element to 1."""

    def __init__(self) -> None:
        super().__init__(1.0)


class _Seeded:
    def __init__(self, seed: int | None = None) -> None:
        self.generator = np.random.default_rng(seed)


class Normal(_Seeded):
    """Initializer that draws from a normal distribution with mean 0 and standard deviation ``sigma``.

    Args:
        sigma: the standard deviation.
        seed: seed of the generator; None takes fresh entropy.
    """

    def __init__(self, sigma: float = 0.01, seed: int | None = None) -> None:
        super().__init__(seed)
        self.sigma = sigma

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return values of ``shape`` and ``dtype``."""
        return (self.sigma * self.generator.standard_normal(shape)).astype(dtype)


class Uniform(_Seeded):
    """Initializer that draws uniformly from ``[-scale, scale)``.

    Args:
        scale: the bound.
        seed: seed of the generator; None takes fresh entropy.
    """

    def __init__(self, scale: float = 0.07, seed: int | None = None) -> None:
        super().__init__(seed)
        self.scale = scale

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return values of ``shape`` and ``dtype``."""
        return self.generator.uniform(-self.scale, self.scale, shape).astype(dtype)


class Xavier(_Seeded):
    """Initializer that draws uniformly, with variance ``2 / (fan_in + fan_out)`` (Glorot and Bengio 2010, equation 16).

    Args:
        seed: seed of the generator; None takes fresh entropy.
    """

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return values of ``shape`` and ``dtype``."""
        bound = math.sqrt(6 / max(sum(fans(shape)), 1))
        return self.generator.uniform(-bound, bound, shape).astype(dtype)


class Kaiming(_Seeded):
    """Initializer that draws normally with variance ``2 / fan_in`` (He et al. 2015, equation 10), for ReLU layers.

    Args:
        seed: seed of the generator; None takes fresh entropy.
    """

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """Return values of ``shape`` and ``dtype``."""
        sigma = math.sqrt(2 / max(fans(shape)[0], 1))
        return (sigma * self.generator.standard_normal(shape)).astype(dtype)
