"""Floor 3: data, the binary version of CIFAR-10. Imports: replacing, errors.

The format (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, and its web page): records of
3073 bytes, one label and 3 x 32 x 32 pixels, channels first. The "python version" is a pickle and is not read.
"""

from __future__ import annotations

import gzip
import os
import tarfile
import zlib
from pathlib import Path

import numpy as np

from ..errors import ConfigError, DataError
from ..replacing import replaced
from .files import require_file

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
