"""Floor 3: data, the size of images. Imports: errors."""

from __future__ import annotations

import functools

import numpy as np

from ..errors import ConfigError


def resize(images: np.ndarray, image_size: int | None) -> np.ndarray:
    """Images enlarged to ``image_size``: bilinear by the largest whole factor that fits, then zeros around.

    An 8x8 image becomes 24x24 in the middle of 28x28; a 28x28 image in 32x32 is not scaled. Samples lie at pixel
    centres and the border is repeated (``align_corners=False`` of other libraries).

    Args:
        images: shape ``(..., height, width)``, square, float32.
        image_size: height and width of the result; None or the present size returns ``images`` itself.

    Returns:
        A new array of shape ``(..., image_size, image_size)``, float32.

    Raises:
        ConfigError: the images are not square, or larger than ``image_size``.
    """
    height, width = images.shape[-2:]
    if image_size is None or image_size == height == width:
        return images
    if height != width or not isinstance(image_size, int | np.integer) or image_size < height:
        raise ConfigError("image_size", expected=f"a whole number >= {max(height, width)}", got=repr(image_size))
    enlarge = _matrix(height, image_size)
    return np.matmul(np.matmul(enlarge, images), enlarge.T)


@functools.lru_cache(maxsize=16)
def _matrix(old: int, new: int) -> np.ndarray:
    """The linear map of one axis, shape ``(new, old)``: interpolation rows with rows of zeros before and after."""
    factor = new // old
    before = (new - old * factor) // 2
    matrix = np.zeros((new, old), np.float32)
    for i in range(old * factor):
        position = min(max((i + 0.5) / factor - 0.5, 0.0), old - 1.0)
        left = min(int(position), old - 2) if old > 1 else 0
        matrix[before + i, left] += 1.0 - (position - left)
        if old > 1:
            matrix[before + i, left + 1] += position - left
    return matrix
