"""Floor 3: data, random changes of samples that do not depend on who reads them. Imports: errors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import ConfigError, type_named, whole_number

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class Augmentation:
    """Random changes of samples, which a `DataLoader` makes when it reads them: others in each epoch.

    What is drawn for a sample depends on ``seed``, the epoch and the sample's number alone, so a run sees the same on
    any number of ranks, with any number of batches read ahead, and after a restart.

    Args:
        changes: made one after the other; each is called as ``change(sample, rng)`` with a sample without the batch
            axis, and returns another one, whose shape does not depend on ``rng``. `RandomCrop`, `RandomFlip`, or
            functions of one's own, which draw from ``rng`` and nothing else.
        seed: an integer >= 0, the same on all ranks.

    Raises:
        ConfigError: a seed or a change that is none.
    """

    def __init__(self, *changes: Change, seed: int = 0) -> None:
        whole_number("Augmentation", "seed", seed, 0)
        for change in changes:
            if not callable(change):
                expected = "functions of a sample and a generator"
                raise ConfigError("Augmentation", where="changes", expected=expected, got=repr(change))
        self.changes, self.seed = changes, seed

    def __call__(self, x: np.ndarray, numbers: np.ndarray, epoch: int) -> np.ndarray:
        """The samples ``x``, shape ``(count, ...)``, as they are in ``epoch``: a new array.

        Args:
            numbers: which samples of the data set they are, shape ``(count,)``.

        Raises:
            ConfigError: a change is not for samples of this shape, or returns no array, or those of one sample another
                shape than those of the next.
        """
        generators = _Generators(self.seed, epoch)
        changed = [self._changed(each, generators.of(number)) for each, number in zip(x, numbers, strict=True)]
        if changed:
            shapes = sorted({each.shape for each in changed})
            if len(shapes) > 1:
                raise ConfigError("Augmentation", expected="samples of one shape", got=f"{shapes[0]} and {shapes[1]}")
            return np.stack(changed)
        shape = self._changed(np.zeros(x.shape[1:], x.dtype), generators.of(0)).shape
        return np.empty((0, *shape), x.dtype)

    def _changed(self, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        for change in self.changes:
            sample = change(sample, rng)
            if not isinstance(sample, np.ndarray):
                name = getattr(change, "__name__", type(change).__name__)
                raise ConfigError("Augmentation", where=name, expected="an array as its result", got=type_named(sample))
        return sample


class _Generators:
    """A generator for each sample of an epoch: one, that is put to a place of its own for each of them.

    Philox (Salmon et al. 2011) computes its numbers from a key and a counter, so any place can be gone to at once: that
    takes a tenth of the time of making a generator. Places of two samples lie 2**128 numbers apart.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._philox = np.random.Philox(key=np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64))
        self._rng = np.random.Generator(self._philox)
        self._start = self._philox.state

    def of(self, number: int) -> np.random.Generator:
        """That of a sample; until the next call."""
        self._start["state"]["counter"][2] = number
        self._philox.state = self._start
        return self._rng


class RandomCrop:
    """A window of an image, shape ``(channels, height, width)``; every place of it is equally likely.

    Args:
        size: height and width of the window; None: those of the image, which ``padding`` lets move.
        padding: rows and columns of zeros around the image first; less than its height and width.
    """

    def __init__(self, size: int | None = None, padding: int = 0) -> None:
        if size is not None:
            whole_number("RandomCrop", "size", size, 1)
        whole_number("RandomCrop", "padding", padding, 0)
        self.size, self.padding = size, padding

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A view, or a window of a copy."""
        channels, height, width = _image_shape("RandomCrop", image)
        pixels = self.padding
        if pixels >= min(height, width):
            raise ConfigError("RandomCrop", expected=f"images larger than {pixels} pixels", got=_described(image))
        rows, columns = (height, width) if self.size is None else (self.size, self.size)
        down, right = height + 2 * pixels - rows, width + 2 * pixels - columns
        if min(down, right) < 0:
            expected = f"images of at least {rows - 2 * pixels} pixels"
            raise ConfigError("RandomCrop", where="size", expected=expected, got=_described(image))
        if pixels:
            padded = np.zeros((channels, height + 2 * pixels, width + 2 * pixels), image.dtype)
            padded[:, pixels : pixels + height, pixels : pixels + width] = image
            image = padded
        top, left = rng.integers(down + 1), rng.integers(right + 1)
        return image[:, top : top + rows, left : left + columns]


class RandomFlip:
    """An image, shape ``(channels, height, width)``, or its mirror image, as likely.

    Args:
        axis: -1 changes left and right, -2 top and bottom.
    """

    def __init__(self, axis: int = -1) -> None:
        if axis not in (-1, -2):
            raise ConfigError("RandomFlip", where="axis", expected="-1 or -2", got=repr(axis))
        self.axis = axis

    def __call__(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A view."""
        _image_shape("RandomFlip", image)
        return np.flip(image, self.axis) if rng.random() < 0.5 else image


def _image_shape(operation: str, image: np.ndarray) -> tuple[int, ...]:
    if image.ndim != 3:
        raise ConfigError(operation, expected="images (channels, height, width)", got=_described(image))
    return image.shape


def _described(image: np.ndarray) -> str:
    return f"samples of shape {image.shape}"
