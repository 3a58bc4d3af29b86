"""Initial values of parameters. An initialiser is called with a shape and a dtype and gives a NumPy array.

Random ones draw from a ``generator`` of their own, so that one made with a seed gives the same values in every run, and
successive layers different ones. Where shapes are found at the first call, a Trainer that is made before gives the
generators of all ranks the same state; so it does with initialisers of a program's own that have one.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np


class Initialiser(Protocol):
    """``(shape, dtype) -> array``; weights are ``(in, out)`` or ``(out, in, kernel height, kernel width)``."""

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray: ...


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many inputs an output sees, and how many outputs an input."""
    if len(shape) < 2:
        return (shape[0] if shape else 1,) * 2
    if len(shape) == 2:
        return shape[0], shape[1]
    window = math.prod(shape[2:])
    return shape[1] * window, shape[0] * window


class Constant:
    """Every element is ``value``."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return np.full(shape, self.value, dtype)


class Zeros(Constant):
    """Every element is 0."""

    def __init__(self) -> None:
        super().__init__(0.0)


class Ones(Constant):
    """Every element is 1."""

    def __init__(self) -> None:
        super().__init__(1.0)


class Normal:
    """Normally distributed with mean 0 and standard deviation ``sigma``.

    Args:
        seed: of the generator; None takes fresh entropy.
    """

    def __init__(self, sigma: float = 0.01, seed: int | None = None) -> None:
        self.sigma = sigma
        self.generator = np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return (self.sigma * self.generator.standard_normal(shape)).astype(dtype)


class Uniform:
    """Uniform in ``[-scale, scale)``.

    Args:
        seed: of the generator; None takes fresh entropy.
    """

    def __init__(self, scale: float = 0.07, seed: int | None = None) -> None:
        self.scale = scale
        self.generator = np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return self.generator.uniform(-self.scale, self.scale, shape).astype(dtype)


class Xavier:
    """Uniform with variance ``2 / (fan_in + fan_out)`` (Glorot and Bengio 2010, equation 16).

    Args:
        seed: of the generator; None takes fresh entropy.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        bound = math.sqrt(6 / max(sum(fans(shape)), 1))
        return self.generator.uniform(-bound, bound, shape).astype(dtype)


class Kaiming:
    """Normal with variance ``2 / fan_in``, for layers before ReLU (He et al. 2015, equation 10).

    Args:
        seed: of the generator; None takes fresh entropy.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        sigma = math.sqrt(2 / max(fans(shape)[0], 1))
        return (sigma * self.generator.standard_normal(shape)).astype(dtype)
