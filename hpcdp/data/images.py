"""Files of images: idx and CIFAR-10.

The size of images.

The idx format of MNIST and Fashion-MNIST.

The format (LeCun, Cortes and Burges, "The MNIST database", section "The IDX file format"): two zero bytes, a type code,
the number of dimensions, each dimension as a big-endian uint32, then the values, big-endian, last axis fastest.

The binary version of CIFAR-10.

The format (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, and its web page): records of
3073 bytes, one label and 3 x 32 x 32 pixels, channels first. The "python version" is a pickle and is not read.
"""

from __future__ import annotations

import functools
import gzip
import math
import os
import struct
import tarfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..core.files import replaced, require_file
from ..errors import ConfigError, DataError, whole_number


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
    if height != width:
        raise ConfigError("resize", where="images", expected="square images", got=f"{height} x {width} pixels")
    whole_number("resize", "image_size", image_size, height)
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


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 32
# The largest factor by which deflate can shrink data (zlib's technical notes, "Maximum Compression Factor").
_MAX_INFLATION = 1032


def read_idx(path: str | Path) -> np.ndarray:
    """The array in an idx file, plain or compressed by gzip (told by the content, not by the name).

    Returns:
        An array of the file's shape, in the machine's byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        DataError: the file is missing, no idx file, truncated, longer than its header says, or damaged. Nothing is
            allocated for dimensions that the file cannot hold.
    """
    path = Path(path)
    try:
        with open(path, "rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            nbytes = os.fstat(raw.fileno()).st_size
            if compressed:
                with gzip.GzipFile(fileobj=raw) as stream:
                    return _read(stream, path, nbytes * _MAX_INFLATION, exact=False)  # type: ignore[arg-type]
            return _read(raw, path, nbytes, exact=True)
    except FileNotFoundError as error:
        raise DataError("read idx", where=path, expected="a file", got="none") from error
    except (EOFError, zlib.error, OSError, MemoryError) as error:
        raise DataError("read idx", where=path, expected="an undamaged file", got=error) from error


def _read(stream: BinaryIO, path: Path, max_nbytes: int, exact: bool) -> np.ndarray:
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _TYPES or not 1 <= start[3] <= _MAX_DIMS:
        codes = ", ".join(f"{code:02x}" for code in _TYPES)
        raise DataError(
            "read idx",
            where=path,
            expected=f"a header 00 00, a type of {codes}, 1 to {_MAX_DIMS} dimensions",
            got=start.hex(" ") or "an empty file",
        )
    header = stream.read(4 * start[3])
    if len(header) < 4 * start[3]:
        raise DataError("read idx", where=path, expected=f"{start[3]} dimensions", got="a truncated header")
    shape = struct.unpack(f">{start[3]}I", header)
    dtype = np.dtype(_TYPES[start[2]])
    nbytes = math.prod(shape) * dtype.itemsize
    total = 4 + len(header) + nbytes
    if total > max_nbytes or (exact and total < max_nbytes):
        size = f"{max_nbytes} bytes" if exact else f"at most {max_nbytes} bytes"
        raise DataError("read idx", where=path, expected=f"{total} bytes for shape {shape} of {dtype.name}", got=size)
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize > np.iinfo(np.intp).max:
        raise DataError("read idx", where=path, expected="a shape that fits the address space", got=shape)
    values = np.empty(nbytes, np.uint8)
    filled = 0
    while filled < nbytes and (count := stream.readinto(memoryview(values)[filled:])):  # type: ignore[attr-defined, arg-type]
        filled += count
    if filled < nbytes or stream.read(1):
        got = f"{filled} bytes" if filled < nbytes else "more"
        raise DataError("read idx", where=path, expected=f"{nbytes} bytes of values", got=got)
    return values.view(dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)


RECORD = 1 + 3 * 32 * 32
CLASSES = 10
ARCHIVE = "cifar-10-binary.tar.gz"
TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST = ("test_batch.bin",)


def read_cifar10(*paths: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """The records of files in the binary version, one after the other.

    Returns:
        Images of shape ``(n, 3, 32, 32)`` and labels of shape ``(n,)``, both uint8.

    Raises:
        ConfigError: no file is named.
        DataError: a file is missing, its size is no multiple of 3073 bytes, a label is above 9.
    """
    if not paths:
        raise ConfigError("read CIFAR-10", where="paths", expected="at least one file", got="none")
    counts = []
    for path in paths:
        require_file("read CIFAR-10", path)
        nbytes = os.path.getsize(path)
        if nbytes == 0 or nbytes % RECORD:
            raise DataError(
                "read CIFAR-10",
                where=path,
                expected=f"a multiple of {RECORD} bytes (the binary version)",
                got=f"{nbytes} bytes",
            )
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
        if labels[start : start + count].max() >= CLASSES:
            raise DataError(
                "read CIFAR-10", where=path, expected="labels 0 to 9", got=labels[start : start + count].max()
            )
        start += count
    return images, labels


def unpack_cifar10(archive: Path) -> None:
    """Writes the six batch files of the archive beside it; each appears whole or not at all.

    Only members of these names are read and nothing else is unpacked, so an archive cannot write elsewhere. The caller
    holds the folder's lock.

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
        expected = "a folder with room for its files"
        raise DataError("unpack CIFAR-10", where=archive.parent, expected=expected, got=error.strerror) from error
    if missing:
        raise DataError("unpack CIFAR-10", where=archive, expected=", ".join(sorted(missing)), got="none of that name")
