"""Image files (idx and CIFAR-10), image resizing, and random augmentation of samples.

The idx format (LeCun, Cortes and Burges, "The MNIST database", section "The IDX file format"): two zero bytes, a type
code, the number of dimensions, each dimension as a big-endian uint32, then the values, big-endian, last axis fastest.

The binary version of CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, and its web
page): records of 3073 bytes, one label and 3 x 32 x 32 pixels, channels first. The "python version" is a pickle and is
not read.
"""

from __future__ import annotations

import abc
import functools
import gzip
import math
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..core.checks import whole_number
from ..core.files import replaced, require_file
from ..errors import ConfigError, DataError, MissingFileError, type_named
from ..kernels import empty


def resize(images: np.ndarray, image_size: int | None) -> np.ndarray:
    """Enlarge images to ``image_size``: bilinearly by the largest integer factor that fits, then by zero padding.

    An 8x8 image becomes 24x24 in the middle of 28x28; a 28x28 image in 32x32 is not scaled. Samples are at pixel
    centers and the border is repeated (``align_corners=False`` of other libraries).

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
    if height != width:
        raise ConfigError("resize", where="images", expected="square images", got=f"{height} x {width} pixels")
    whole_number("resize", "image_size", image_size, height)
    enlarge = _matrix(height, image_size)
    return np.matmul(np.matmul(enlarge, images), enlarge.T)


@functools.lru_cache(maxsize=16)
def _matrix(old: int, new: int) -> np.ndarray:
    """Return the linear map of one axis, shape ``(new, old)``: interpolation rows between rows of zeros."""
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


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 32
# The largest factor by which deflate can shrink data (zlib's technical notes, "Maximum Compression Factor").
_MAX_INFLATION = 1032


def read_idx(path: str | Path) -> np.ndarray:
    """Read the array in an idx file, plain or gzip-compressed (detected by content, not by name).

    Args:
        path: the file.

    Returns:
        An array of the file's shape, in native byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        DataError: the file is missing, not an idx file, truncated, longer than its header says, or damaged. No memory
            is allocated for dimensions that the file cannot hold.
    """
    fault = functools.partial(DataError, "read idx", where=Path(path))
    try:
        with open(path, "rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            nbytes = os.fstat(raw.fileno()).st_size
            if compressed:
                with gzip.GzipFile(fileobj=raw) as stream:
                    return _read(stream, fault, nbytes * _MAX_INFLATION, exact=False)  # type: ignore[arg-type]
            return _read(raw, fault, nbytes, exact=True)
    except FileNotFoundError as error:
        raise MissingFileError("read idx", where=path, expected="a file", got="none") from error
    except (EOFError, zlib.error, OSError, MemoryError) as error:
        raise fault(expected="an undamaged file", got=error) from error


def _read(stream: BinaryIO, fault: Callable[..., DataError], max_nbytes: int, exact: bool) -> np.ndarray:
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _TYPES or not 1 <= start[3] <= _MAX_DIMS:
        codes = ", ".join(f"{code:02x}" for code in _TYPES)
        expected = f"a header 00 00, a type of {codes}, 1 to {_MAX_DIMS} dimensions"
        raise fault(expected=expected, got=start.hex(" ") or "an empty file")
    header = stream.read(4 * start[3])
    if len(header) < 4 * start[3]:
        raise fault(expected=f"{start[3]} dimensions", got="a truncated header")
    shape = struct.unpack(f">{start[3]}I", header)
    dtype = np.dtype(_TYPES[start[2]])
    nbytes = math.prod(shape) * dtype.itemsize
    total = 4 + len(header) + nbytes
    if total > max_nbytes or (exact and total < max_nbytes):
        size = f"{max_nbytes} bytes" if exact else f"at most {max_nbytes} bytes"
        raise fault(expected=f"{total} bytes for shape {shape} of {dtype.name}", got=size)
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize > np.iinfo(np.intp).max:
        raise fault(expected="a shape that fits the address space", got=shape)
    values = np.empty(nbytes, np.uint8)
    filled = 0
    while filled < nbytes and (count := stream.readinto(memoryview(values)[filled:])):  # type: ignore[attr-defined, arg-type]
        filled += count
    if filled < nbytes or stream.read(1):
        got = f"{filled} bytes" if filled < nbytes else "more"
        raise fault(expected=f"{nbytes} bytes of values", got=got)
    return values.view(dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


RECORD = 1 + 3 * 32 * 32
CLASSES = 10
ARCHIVE = "cifar-10-binary.tar.gz"
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = ("test_batch.bin",)


def read_cifar10(*paths: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Read and concatenate the records of files in the binary version.

    Args:
        paths: the files.

    Returns:
        Images of shape ``(n, 3, 32, 32)`` and labels of shape ``(n,)``, both uint8.

    Raises:
        ConfigError: no file is named.
        DataError: a file is missing, its size is not a multiple of 3073 bytes, or a label is above 9.
    """
    if not paths:
        raise ConfigError("read CIFAR-10", where="paths", expected="at least one file", got="none")
    counts = []
    for path in paths:
        require_file("read CIFAR-10", path)
        nbytes = os.path.getsize(path)
        if nbytes == 0 or nbytes % RECORD:
            expected = f"a multiple of {RECORD} bytes (the binary version)"
            raise DataError("read CIFAR-10", where=path, expected=expected, got=f"{nbytes} bytes")
        counts.append(nbytes // RECORD)
    images = np.empty((sum(counts), 3, 32, 32), np.uint8)
    labels = np.empty(sum(counts), np.uint8)
    start = 0
    for path, count in zip(paths, counts, strict=True):
        try:
            read = np.fromfile(path, np.uint8, count * RECORD)
        except OSError as error:
            raise DataError("read CIFAR-10", where=path, expected="a file that can be read", got=error) from error
        if read.size != count * RECORD:
            raise DataError("read CIFAR-10", where=path, expected=f"{count * RECORD} bytes", got=f"{read.size} bytes")
        records = read.reshape(count, RECORD)
        labels[start : start + count] = records[:, 0]
        images[start : start + count] = records[:, 1:].reshape(count, 3, 32, 32)
        if records[:, 0].max() >= CLASSES:
            raise DataError("read CIFAR-10", where=path, expected="labels 0 to 9", got=records[:, 0].max())
        start += count
    return images, labels


def unpack_cifar10(archive: Path) -> None:
    """Extract the six batch files of the archive into its folder, each atomically.

    Only members of these names are extracted, so an archive cannot write elsewhere. The caller holds the folder's lock.

    Raises:
        DataError: the archive is damaged or lacks a file, or its files cannot be written.
    """
    missing = set(TRAIN + TEST)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = Path(member.name).name
                source = tar.extractfile(member) if name in missing and member.isfile() else None
                if source is None:
                    continue
                with source, replaced(archive.with_name(name)) as part, open(part, "wb") as target:
                    while block := source.read(1 << 20):
                        target.write(block)
                missing.remove(name)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError("unpack CIFAR-10", where=archive, expected="an undamaged tar.gz file", got=error) from error
    except OSError as error:
        expected = "a writeable folder with space for its files"
        raise DataError("unpack CIFAR-10", where=archive.parent, expected=expected, got=error.strerror) from error
    if missing:
        raise DataError("unpack CIFAR-10", where=archive, expected=", ".join(sorted(missing)), got="no such member")


Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
_BLOCK = 4096
"""Samples for which random numbers are drawn at once."""


class Augmentation:
    """Random changes that a `DataLoader` applies to samples as it reads them, different in each epoch.

    The random numbers of a sample depend only on ``seed``, the epoch and the sample's index. A run therefore sees the
    same samples on any number of ranks, with any prefetch depth, and after a restart.

    Args:
        changes: applied in order: `RandomCrop` and `RandomFlip`, which change batches, or user functions. A function is
            called as ``change(sample, rng)`` with a sample without batch axis. It draws only from ``rng`` and returns a
            new sample. The final shape must not depend on ``rng``.
        seed: an integer >= 0, the same on all ranks.

    Raises:
        ConfigError: the seed is not an integer >= 0, or a change is not callable.
    """

    def __init__(self, *changes: Change, seed: int = 0) -> None:
        whole_number("Augmentation", "seed", seed, 0)
        for change in changes:
            if not callable(change) or isinstance(change, type):
                expected = "functions of a sample and a generator"
                raise ConfigError("Augmentation", where="changes", expected=expected, got=repr(change))
        self.changes, self.seed = changes, seed
        self._draws: dict[int, _Draws] = {}
        """Random numbers by epoch, for the last two epochs, since a loop may still be in the previous one."""

    def __call__(self, x: np.ndarray, numbers: np.ndarray, epoch: int) -> np.ndarray:
        """Return the samples as changed in ``epoch``, in a new array.

        Args:
            x: samples, shape ``(count, ...)``.
            numbers: their indices in the data set, shape ``(count,)``.
            epoch: number of the epoch.

        Raises:
            ConfigError: a change does not support this shape, does not return an array, or returns shapes that differ
                between samples.
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
                pairs = zip(samples, draws.generators(place, numbers), strict=True)
                samples = _together([_changed(change, sample, rng) for sample, rng in pairs])
        if isinstance(samples, list):
            shapes = sorted({sample.shape for sample in samples})
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
    """Change of whole batches that needs at most 64 random bits a sample."""

    @abc.abstractmethod
    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return the samples ``x``, shape ``(count, ...)``, changed by ``words``, uint64 of shape ``(count,)``."""

    def __call__(self, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return one changed sample, shape ``(channels, height, width)``."""
        return self.of_batch(sample[None], rng.integers(1 << 64, size=1, dtype=np.uint64))[0]


def _in_batches(
    change: _OfBatch, samples: np.ndarray | list[np.ndarray], words: np.ndarray
) -> np.ndarray | list[np.ndarray]:
    if isinstance(samples, np.ndarray):
        return change.of_batch(samples, words)
    return _together([change.of_batch(sample[None], words[i : i + 1])[0] for i, sample in enumerate(samples)])


def _changed(change: Change, sample: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    sample = change(sample, rng)
    if not isinstance(sample, np.ndarray):
        name = getattr(change, "__name__", type(change).__name__)
        raise ConfigError("Augmentation", where=name, expected="an array as its result", got=type_named(sample))
    return sample


def _together(samples: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
    """Stack the samples if they have the same shape."""
    return np.stack(samples) if len({sample.shape for sample in samples}) == 1 else samples


class _Draws:
    """Random numbers of an epoch, by change and sample.

    Philox (Salmon et al. 2011) computes its numbers from a key and a counter, so it can start anywhere. Samples are
    2**128 numbers apart, as are blocks of samples; the last counter word of blocks is odd.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._key = np.random.SeedSequence([seed, epoch]).generate_state(2, np.uint64)
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def generators(self, place: int, numbers: np.ndarray) -> Iterator[np.random.Generator]:
        """Yield one generator, repositioned for each sample: ten times faster than creating another."""
        philox = np.random.Philox(key=self._key)
        rng, start = np.random.Generator(philox), philox.state
        for number in numbers:
            start["state"]["counter"][2:] = number, 2 * place
            philox.state = start
            yield rng

    def words(self, place: int, numbers: np.ndarray) -> np.ndarray:
        """Return 64 random bits for each of these samples."""
        blocks, within = np.divmod(numbers, _BLOCK)
        words = np.empty(len(numbers), np.uint64)
        for block in set(blocks.tolist()):
            members = blocks == block
            words[members] = self._block(place, block)[within[members]]
        return words

    def _block(self, place: int, block: int) -> np.ndarray:
        words = self._blocks.get((place, block))
        if words is None:
            philox = np.random.Philox(key=self._key, counter=[0, 0, block, 2 * place + 1])
            words = self._blocks[place, block] = philox.random_raw(_BLOCK)
        return words


def _below(bits: np.ndarray, count: int) -> np.ndarray:
    """Return a number below ``count`` for 32 random bits each, uniform up to one in 2**32 / ``count``."""
    return (bits * np.uint64(count)) >> np.uint64(32)


class RandomCrop(_OfBatch):
    """Random crop of images, shape ``(channels, height, width)``, uniform over all positions.

    Args:
        size: height and width of the crop; None keeps those of the image, which ``padding`` then shifts.
        padding: rows and columns of zeros added around the image first; less than its height and width.

    Raises:
        ConfigError: ``size`` below 1 or ``padding`` below 0; in a call, images that are too small.
    """

    def __init__(self, size: int | None = None, padding: int = 0) -> None:
        self.size = None if size is None else whole_number("RandomCrop", "size", size, 1)
        self.padding = whole_number("RandomCrop", "padding", padding, 0)

    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return crops of images ``(count, channels, height, width)``, in a new array."""
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
    """Random flip of images, shape ``(channels, height, width)``, with probability 1/2.

    Args:
        axis: -1 flips left and right, -2 top and bottom.

    Raises:
        ConfigError: another axis.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = whole_number("RandomFlip", "axis", axis, -2, -1, expected="-1 or -2")

    def of_batch(self, x: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Return images ``(count, channels, height, width)``, randomly flipped, in a new array."""
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
