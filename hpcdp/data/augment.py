"""Random changes of samples that do not depend on who reads them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..errors import ConfigError, type_named, whole_number
from ..kernels.buffers import empty

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
_BLOCK = 4096
"""Samples for which is drawn at once."""


class Augmentation:
    """Random changes of samples, which a `DataLoader` makes when it reads them: others in each epoch.

    What is drawn for a sample depends on ``seed``, the epoch and the sample's number alone, so a run sees the same on
    any number of ranks, with any number of batches read ahead, and after a restart.

    Args:
        changes: made one after the other: `RandomCrop`, `RandomFlip`, which change whole batches at once, or functions
            of one's own. Those are called as ``change(sample, rng)`` with a sample without the batch axis, draw from
            ``rng`` and nothing else, and return another one, whose shape does not depend on ``rng`` when all changes
            are made.
        seed: an integer >= 0, the same on all ranks.

    Raises:
        ConfigError: a seed or a change that is none.
    """

    def __init__(self, *changes: Change, seed: int = 0) -> None:
        whole_number("Augmentation", "seed", seed, 0)
        for change in changes:
            if not callable(change) or isinstance(change, type):
                expected = "functions of a sample and a generator"
                raise ConfigError("Augmentation", where="changes", expected=expected, got=repr(change))
        self.changes, self.seed = changes, seed
        self._draws: dict[int, _Draws] = {}
        """By epoch, those of the last two: a loop may still be in the one before."""

    def __call__(self, x: np.ndarray, numbers: np.ndarray, epoch: int) -> np.ndarray:
        """The samples ``x``, shape ``(count, ...)``, as they are in ``epoch``: a new array.

        Args:
            numbers: which samples of the data set they are, shape ``(count,)``.

        Raises:
            ConfigError: a change is not for samples of this shape, or returns no array, or those of one sample another
                shape than those of the next.
        """
        if not len(x):
            zeros = np.zeros((1, *x.shape[1:]), x.dtype)
            return self(zeros, np.zeros(1, np.int64), epoch)[:0]
        draws = self._of_epoch(epoch)
        samples: np.ndarray | list[np.ndarray] = np.array(x) if not self.changes else x
        for place, change in enumerate(self.changes):
            if isinstance(change, _OfBatch):
                samples = _in_batches(change, samples, draws.words(place, numbers))
            else:
                own = zip(samples, draws.generators(place, numbers), strict=True)
                samples = _together([_changed(change, each, rng) for each, rng in own])
        if isinstance(samples, list):
            shapes = sorted({each.shape for each in samples})
            raise ConfigError("Augmentation", expected="samples of one shape", got=f"{shapes[0]} and {shapes[1]}")
        return samples

    def _of_epoch(self, epoch: int) -> _Draws:
        draws = self._draws.get(epoch)
        if draws is None:
            kept = list(self._draws.items())[-1:]
            draws = _Draws(self.seed, epoch)
            self._draws = {**dict(kept), epoch: draws}
        return draws


class _OfBatch(abc.ABC):
    """A change of whole batches at once, for which 64 random bits a sample are enough."""

    @abc.abstractmethod
    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """The samples ``x``, shape ``(count, ...)``, changed by ``words``, uint64 of shape ``(count,)``."""

    def __call__(self, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One sample, shape ``(channels, height, width)``, changed."""
        return self.of_batch(sample[None], rng.integers(1 << 64, size=1, dtype=np.uint64))[0]


def _in_batches(
    change: _OfBatch, samples: np.ndarray | list[np.ndarray], words: np.ndarray
) -> np.ndarray | list[np.ndarray]:
    if isinstance(samples, np.ndarray):
        return change.of_batch(samples, words)
    return _together([change.of_batch(each[None], words[i : i + 1])[0] for i, each in enumerate(samples)])


def _changed(change: Change, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    sample = change(sample, rng)
    if not isinstance(sample, np.ndarray):
        name = getattr(change, "__name__", type(change).__name__)
        raise ConfigError("Augmentation", where=name, expected="an array as its result", got=type_named(sample))
    return sample


def _together(samples: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    """One array, if all have one shape."""
    return np.stack(samples) if len({each.shape for each in samples}) == 1 else samples


class _Draws:
    """The random numbers of an epoch, by change and sample.

    Philox (Salmon et al. 2011) computes its numbers from a key and a counter, so any place can be gone to at once.
    Those of samples lie 2**128 numbers apart, as do those of blocks of samples; of these the last word is odd.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._key = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64)
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def generators(self, place: int, numbers: np.ndarray) -> Iterator[np.random.Generator]:
        """That of each sample, until the next: one that is put there, in a tenth of the time of making another."""
        philox = np.random.Philox(key=self._key)
        rng, start = np.random.Generator(philox), philox.state
        for number in numbers:
            start["state"]["counter"][2:] = number, 2 * place
            philox.state = start
            yield rng

    def words(self, place: int, numbers: np.ndarray) -> np.ndarray:
        """64 random bits for each of these samples."""
        blocks, within = np.divmod(numbers, _BLOCK)
        found = np.empty(len(numbers), np.uint64)
        for block in set(blocks.tolist()):
            mine = blocks == block
            found[mine] = self._block(place, block)[within[mine]]
        return found

    def _block(self, place: int, block: int) -> np.ndarray:
        made = self._blocks.get((place, block))
        if made is None:
            philox = np.random.Philox(key=self._key, counter=[0, 0, block, 2 * place + 1])
            made = self._blocks[place, block] = philox.random_raw(_BLOCK)
        return made


def _below(bits: np.ndarray, count: int) -> np.ndarray:
    """Of 32 random bits each a number below ``count``, all of them as likely, but for one in 2**32 / ``count``."""
    return (bits * np.uint64(count)) >> np.uint64(32)


class RandomCrop(_OfBatch):
    """A window of an image, shape ``(channels, height, width)``; every place of it is equally likely.

    Args:
        size: height and width of the window; None: those of the image, which ``padding`` lets move.
        padding: rows and columns of zeros around the image first; less than its height and width.
    """

    def __init__(self, size: int | None = None, padding: int = 0) -> None:
        self.size = None if size is None else whole_number("RandomCrop", "size", size, 1)
        self.padding = whole_number("RandomCrop", "padding", padding, 0)

    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Windows of images ``(count, channels, height, width)``, in a new array."""
        channels, height, width = _image_shape("RandomCrop", x)
        pixels = self.padding
        if pixels >= min(height, width):
            raise ConfigError("RandomCrop", expected=f"images larger than {pixels} pixels", got=_described(x))
        rows, columns = (height, width) if self.size is None else (self.size, self.size)
        down, right = height + 2 * pixels - rows, width + 2 * pixels - columns
        if min(down, right) < 0:
            expected = f"images of at least {rows - 2 * pixels} pixels"
            raise ConfigError("RandomCrop", where="size", expected=expected, got=_described(x))
        if pixels:
            padded = empty((len(x), channels, height + 2 * pixels, width + 2 * pixels), x.dtype)
            padded[...] = 0
            padded[:, :, pixels : pixels + height, pixels : pixels + width] = x
            x = padded
        top, left = _below(words & _LOW, down + 1), _below(words >> np.uint64(32), right + 1)
        shape = (len(x), channels, down + 1, right + 1, rows, columns)
        windows = as_strided(x, shape, (*x.strides, *x.strides[2:]), writeable=False)
        return windows[np.arange(len(x)), :, top, left]


class RandomFlip(_OfBatch):
    """An image, shape ``(channels, height, width)``, or its mirror image, as likely.

    Args:
        axis: -1 changes left and right, -2 top and bottom.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = whole_number("RandomFlip", "axis", axis, -2, -1, expected="-1 or -2")

    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Images ``(count, channels, height, width)``, of which some are mirrored, in a new array."""
        _image_shape("RandomFlip", x)
        mirrored = _below(words & _LOW, 2).astype(bool)
        x = np.array(x)
        x[mirrored] = np.flip(x[mirrored], self.axis)
        return x


_LOW = np.uint64(0xFFFFFFFF)


def _image_shape(operation: str, x: np.ndarray) -> tuple[int, ...]:
    if x.ndim != 4:
        raise ConfigError(operation, expected="images (channels, height, width)", got=_described(x))
    return x.shape[1:]


def _described(x: np.ndarray) -> str:
    return f"samples of shape {x.shape[1:]}"
