"""Training images that move a little each epoch, alike for any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcdp.data import DataLoader, Dataset
from hpcdp.data.datasets import Batch, Index
from hpcdp.data.samplers import BatchIndices
from hpcdp.errors import ConfigError


class ShiftedImages(Dataset):
    """Each image of another data set, shifted up, down, left or right, with zeros where nothing was.

    The shift of a sample depends on ``seed``, the epoch and the sample's number alone, so a run sees the same
    images on any number of ranks.

    Args:
        dataset: gives images of shape ``(n, channels, height, width)``.
        pixels: the largest shift along each axis, at least 0; every whole number up to it is equally likely.
        seed: an integer >= 0, the same on all ranks.
    """

    def __init__(self, dataset: Dataset, pixels: int, seed: int = 0) -> None:
        if len(dataset.sample_shape) != 3 or pixels >= min(dataset.sample_shape[1:]):
            raise ConfigError(
                "shift images", expected=f"images larger than {pixels} pixels", got=f"samples {dataset.sample_shape}"
            )
        self._dataset, self._pixels, self._seed = dataset, pixels, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Other shifts, for what is read from now on."""
        drawn = np.random.Generator(np.random.PCG64([self._seed, epoch, 1]))
        self._starts = drawn.integers(0, 2 * self._pixels + 1, size=(len(self), 2))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Index) -> Batch:
        x, y = self._dataset[index]
        if x.ndim == 3:
            shifted, _ = self[np.array([index])]
            return shifted[0], y
        down, right = self._starts[index].T
        margin = (self._pixels, self._pixels)
        padded = np.pad(x, ((0, 0), (0, 0), margin, margin))
        windows = np.lib.stride_tricks.sliding_window_view(padded, x.shape[2:], axis=(2, 3))
        return windows[np.arange(len(x)), :, down, right], y


class ShiftedLoader(DataLoader):
    """A loader of `ShiftedImages` that tells them the epoch too."""

    def __init__(self, images: ShiftedImages, sampler: BatchIndices, prefetch: int = 2) -> None:
        super().__init__(images, sampler, prefetch)
        self._images = images

    def set_epoch(self, epoch: int) -> None:
        """Another order and other shifts, from the next iteration on."""
        super().set_epoch(epoch)
        self._images.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `DataLoader.load_state_dict`; with the shifts of that epoch."""
        super().load_state_dict(state)
        self._images.set_epoch(self.epoch)
