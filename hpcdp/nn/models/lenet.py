"""LeNet as in "Dive into Deep Learning", section 12.5."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError
from ..init import Xavier
from ..layers import AvgPool2D, Conv2D, Dense, Flatten
from ..module import Sequential

_SMALLEST, _INTENDED = 4, 28


def lenet(input_shape: Sequence[int] = (1, 28, 28), num_classes: int = 10, seed: int | None = 0) -> Sequential:
    """Two convolutions with average pooling, two dense layers; 129,068 parameters for ``(1, 28, 28)`` and 10 classes.

    Smaller images are padded with zeros, as far as 28 x 28 asks, by the first convolution.

    Args:
        input_shape: (channels, height, width) of a sample, at least 4 x 4.
        seed: of the initial weights; None takes fresh entropy.

    Raises:
        ConfigError: the images are too small or no images.
    """
    shape = tuple(input_shape)
    if len(shape) != 3 or min(shape) < 1 or min(shape[1:]) < _SMALLEST or num_classes < 1:
        raise ConfigError(
            "lenet",
            expected=f"input_shape (channels, height, width) from {_SMALLEST} x {_SMALLEST} on, num_classes from 1 on",
            got=f"{shape} and {num_classes}",
        )
    channels, height, width = shape
    top, left = (max(0, (_INTENDED - size + 1) // 2) for size in (height, width))
    features = 50 * _pooled(height + 2 * top) * _pooled(width + 2 * left)
    weights = Xavier(seed)
    return Sequential(
        Conv2D(channels, 20, 3, padding=(top, left), activation="relu", weight_init=weights),
        AvgPool2D(2),
        Conv2D(20, 50, 5, activation="relu", weight_init=weights),
        AvgPool2D(2),
        Flatten(),
        Dense(features, 128, activation="relu", weight_init=weights),
        Dense(128, num_classes, weight_init=weights),
    )


def _pooled(size: int) -> int:
    """What both convolutions and both poolings leave of a height or width."""
    return ((size - 2) // 2 - 4) // 2
