"""Data sets in memory, and splitting of batches.

What a data set is.

One batch cut into parts.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ..core.arrays import Array
from ..core.devices import Device, require_devices
from ..errors import ConfigError, DataError, is_number, type_named, whole_number
from .images import resize


def piece_bounds(count: int, num_parts: int, weights: Sequence[float] | None = None) -> list[int]:
    """Where ``count`` items are cut into consecutive parts; part ``i`` is ``bounds[i]:bounds[i + 1]``.

    Args:
        count: number of items, >= 0.
        num_parts: number of parts, >= 1; without weights their sizes differ by at most one, and may be 0.
        weights: one positive number a part; ``[3, 1]`` cuts 256 into 192 and 64. Sizes are off by less than one.

    Returns:
        ``num_parts + 1`` increasing numbers from 0 to ``count``.

    Raises:
        ConfigError: a number of parts below 1, weights of another number or not positive.
    """
    whole_number("split", "num_parts", num_parts, 1)
    if weights is None:
        return [count * i // num_parts for i in range(num_parts + 1)]
    if not isinstance(weights, Sequence | np.ndarray) or len(weights) != num_parts or not all(map(_is_share, weights)):
        raise ConfigError("split", where="weights", expected=f"{num_parts} positive numbers", got=repr(weights))
    ends = list(itertools.accumulate((Fraction(float(weight)) for weight in weights), initial=Fraction(0)))
    return [math.floor(count * end / ends[-1]) for end in ends]


def _is_share(weight: object) -> bool:
    return is_number(weight) and 0 < float(weight) < math.inf


def split_batch(x: Array, k: int, even_split: bool = True) -> list[Array]:
    """``x`` cut along axis 0 into ``k`` consecutive views, e.g. one for each device of this process.

    Args:
        x: shape ``(count, ...)``, any namespace; not copied.
        k: number of parts.
        even_split: refuse a count that ``k`` does not divide; if False, sizes differ by at most one.

    Raises:
        ConfigError: uneven although ``even_split``, ``k`` below 1, or ``x`` has no axis.
    """
    if not getattr(x, "shape", ()):
        expected = "an array of samples along axis 0"
        raise ConfigError("split_batch", where="x", expected=expected, got=f"{type(x).__name__} {x!r}")
    count = x.shape[0]
    bounds = piece_bounds(count, k)
    if even_split and count % k:
        raise ConfigError(
            "split_batch",
            expected=f"a number of samples that {k} divides",
            got=count,
            remedy="pass even_split=False, or discard the last batch",
        )
    return [x[start:stop] for start, stop in itertools.pairwise(bounds)]


def split_and_load(x: Array, devices: Sequence[Device], even_split: bool = True) -> list[Array]:
    """`split_batch` into a part for each device, and each part copied there.

    Args:
        devices: at least one.

    Raises:
        ConfigError: as `split_batch`, or ``devices`` are none.
        DeviceError: the machine does not have one of the devices; a RuntimeError.
    """
    devices = require_devices("split_and_load", devices)
    parts = split_batch(x, len(devices), even_split)
    return [device.put(part) for device, part in zip(devices, parts, strict=True)]


Batch = tuple[np.ndarray, np.ndarray]
Index = int | np.integer | slice | np.ndarray


class Dataset(abc.ABC):
    """Samples with labels, numbered from 0. Reading must be safe from several threads at a time."""

    num_classes: int | None = None
    """Labels are 0 to ``num_classes - 1``; None where they are no classes, or nobody has said how many."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abc.abstractmethod
    def __getitem__(self, index: Index) -> Batch:
        """The samples ``(x, y)`` at an index, a slice or an integer array, in its order; an integer drops axis 0.

        Raises:
            IndexError: a number outside of the data set.
        """

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one ``x``, without the batch axis."""
        return self[np.zeros(0, np.int64)][0].shape[1:]


def require_dataset(operation: str, given: object) -> None:
    """Raises `ConfigError` for what is no data set, such as arrays alone; one need not be a `Dataset`."""
    is_one = hasattr(given, "__getitem__") and hasattr(given, "__len__")
    if not is_one or isinstance(given, tuple | list | dict | str | np.ndarray):
        expected = "a data set, such as data.ArrayDataset(x, y)"
        raise ConfigError(operation, where="dataset", expected=expected, got=type_named(given))


def _count_classes(labels: np.ndarray) -> int | None:
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu" or labels.min() < 0:
        return None
    return int(labels.max()) + 1


class ArrayDataset(Dataset):
    """Samples that lie in memory.

    Args:
        x: shape ``(n, ...)``, any dtype; kept, not copied.
        y: shape ``(n, ...)``, any dtype; kept, not copied. Whole numbers from 0 on, of shape ``(n,)``, are classes.

    Raises:
        DataError: ``x`` and ``y`` differ in length or have no axis.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = np.asarray(x), np.asarray(y)
        if self.x.ndim < 1 or self.y.ndim < 1 or len(self.x) != len(self.y):
            raise DataError(
                "ArrayDataset", expected="x and y with one axis 0", got=f"shapes {self.x.shape} and {self.y.shape}"
            )
        self.num_classes = _count_classes(self.y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Index) -> Batch:
        return self.x[index], self.y[index]


class ImageDataset(Dataset):
    """Images kept as they are stored and turned into float32 of [0, 1] when they are read.

    Args:
        images: shape ``(n, channels, height, width)``, uint8; kept, not copied.
        labels: shape ``(n,)``, integers; read as int64.
        image_size: enlarge to this height and width when reading, see `images.resize`; None leaves the size.

    Raises:
        DataError: there are not as many labels as images, or they are of other dtypes.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, image_size: int | None = None) -> None:
        images, labels = np.asarray(images), np.asarray(labels)
        if images.ndim != 4 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(
                "ImageDataset",
                expected="images (n, channels, height, width) and labels (n,)",
                got=f"shapes {images.shape} and {labels.shape}",
            )
        if images.dtype != np.uint8 or labels.dtype.kind not in "biu":
            raise DataError(
                "ImageDataset", expected="images of uint8 and labels of integers",
                got=f"{images.dtype} and {labels.dtype}", remedy="data.ArrayDataset(x, y) takes others as they are",
            )  # fmt: skip
        self.images, self.labels, self.image_size = images, labels.astype(np.int64), image_size
        self.num_classes = _count_classes(self.labels)
        resize(np.zeros((0, *images.shape[1:]), np.float32), image_size)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: Index) -> Batch:
        stored = self.images[index]
        x = np.multiply(stored, np.float32(1 / 255), dtype=np.float32)
        return resize(x, self.image_size), self.labels[index]
