"""Multilayer perceptrons."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from ...errors import ConfigError
from ..init import Xavier
from ..layers import Dense, Flatten
from ..module import Sequential


def mlp(
    input_shape: Sequence[int] | int = (784,),
    num_classes: int = 10,
    hidden: Sequence[int] = (256, 128),
    seed: int | None = 0,
) -> Sequential:
    """Dense layers with ReLU between them, on flattened samples.

    Args:
        input_shape: of a sample, any number of axes, or its number of elements.
        hidden: widths of the hidden layers.
        seed: of the initial weights; None takes fresh entropy.

    Raises:
        ConfigError: a width is below 1.
    """
    shape = np.atleast_1d(input_shape).tolist()
    widths = [math.prod(shape), *hidden, num_classes]
    if min(widths) < 1:
        raise ConfigError("mlp", expected="widths of at least 1", got=widths)
    weights = Xavier(seed)
    net = Sequential(Flatten())
    for number, (before, after) in enumerate(itertools.pairwise(widths), start=1):
        activation = "relu" if number < len(widths) - 1 else None
        net.add(Dense(before, after, activation=activation, weight_init=weights))
    return net
