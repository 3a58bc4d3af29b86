"""Data sets by name: their download, their files in the formats idx and CIFAR-10, and the digits set in the package.

Files are in ``ROOT/NAME/``, where ROOT is ``HPCDP_DATA_DIR``, else ``~/.cache/hpcdp/data``. Licenses: digits CC BY 4.0,
MNIST CC BY-SA 3.0 (LeCun, Cortes and Burges), Fashion-MNIST MIT (Zalando SE, 2017). CIFAR-10 states no license and asks
to cite Krizhevsky 2009. The plays of Shakespeare are in the public domain.

The digits are "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, CC BY 4.0: 1,438 training and 359 test images of 8 x 8 pixels.

The idx format (LeCun, Cortes and Burges, "The MNIST database", section "The IDX file format"): two zero bytes, a type
code, the number of dimensions, each dimension as a big-endian uint32, then the values, big-endian, last axis fastest.

The binary version of CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009, and its web
page): records of 3073 bytes, one label and 3 x 32 x 32 pixels, channels first. The "python version" is a pickle and is
not read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import gzip
import hashlib
import math
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

import numpy as np

from ..core.checks import one_of
from ..core.files import replaced, require_file
from ..core.hdf5 import open_hdf5, trust
from ..errors import ConfigError, DataError, MissingFileError, listed, reason
from .datasets import ArrayDataset, Dataset, ImageDataset, read_shakespeare, resize

_MAX_NBYTES = 1 << 30
_OF_DISKS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS
"""Error numbers of the local disk, for which no other address helps."""


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Create ``folder`` and hold its lock, so that only one process downloads; `DataError` if that fails.

    If the block raises an error, the lock and the folders that were created for it are removed, if they are empty.
    """
    created = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_locked(folder))
        except OSError as error:
            raise DataError(
                "data folder", where=folder, expected="a writeable folder on a file system with locks",
                got=reason(error), remedy="set HPCDP_DATA_DIR to such a folder",
            ) from error  # fmt: skip
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                (folder / _LOCK).unlink()
                for path in created:
                    path.rmdir()
            raise


_LOCK, _MAX_TRIES = ".lock", 100


def _locked(folder: Path) -> TextIO:
    """Create ``folder`` and return its locked file; lock again if another process, which failed, has removed it."""
    for _ in range(_MAX_TRIES):
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as opened:
            lock = opened.enter_context(open(folder / _LOCK, "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / _LOCK)):
                opened.pop_all()
                return lock
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / _LOCK))


def check_md5(path: Path, md5: str) -> None:
    """Raise `DataError` unless a file has the published MD5 checksum, which detects damage, not tampering."""
    try:
        with open(path, "rb") as file:
            got = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError("checksum", where=path, expected="a file that can be read", got=reason(error)) from error
    if got != md5:
        remedy = "delete the file to fetch it again"
        raise DataError("checksum", where=path, expected=f"MD5 {md5}", got=got, remedy=remedy)


def fetch(urls: tuple[str, ...], path: Path, md5: str, timeout_s: float = 30.0) -> None:
    """Download a file to ``path`` from the first of several URLs that works; do nothing if it exists.

    The file appears complete and verified, or not at all. Several processes may call this concurrently. Proxies are
    those that urllib takes from the environment.

    Args:
        urls: URLs of the same file.
        path: the destination; its folder is created.
        md5: the file's MD5 checksum.
        timeout_s: seconds without an answer after which the next URL is tried.

    Raises:
        DataError: no URL works (the error lists the reasons and where to put the file by hand), or the folder cannot be
            written or is full.
    """
    if os.path.exists(path):
        return
    import http.client  # only imported if a download is needed
    import urllib.error

    with folder_lock(path.parent):
        if os.path.exists(path):
            return
        reasons = []
        for url in urls:
            try:
                with replaced(path) as part:
                    _receive(url, part, timeout_s)
                    check_md5(part, md5)
                return
            except DataError as error:
                reasons.append(f"{_host_of(url)}: {error.operation} {error.got} instead of {error.expected}")
            except urllib.error.HTTPError as error:
                reasons.append(f"{_host_of(url)}: HTTP {error.code} {error.reason}")
            except urllib.error.URLError as error:
                why = reason(error.reason) if isinstance(error.reason, OSError) else error.reason
                reasons.append(f"{_host_of(url)}: no network ({why})")
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _OF_DISKS:
                    raise DataError(
                        "download", where=path, expected="a writeable folder with space", got=reason(error),
                        remedy="set HPCDP_DATA_DIR to such a folder",
                    ) from error  # fmt: skip
                reasons.append(f"{_host_of(url)}: {type(error).__name__} {error}")
        remedy = f"put it into {path.parent}; --data-dir or HPCDP_DATA_DIR names another folder"
        raise DataError("download", where=path.name, expected="an answer", got="; ".join(reasons), remedy=remedy)


def _host_of(url: str) -> str:
    return url.split("/")[2]


def _receive(url: str, part: Path, timeout_s: float) -> None:
    import urllib.request

    with urllib.request.urlopen(url, timeout=timeout_s) as answer, open(part, "wb") as file:
        nbytes = 0
        while block := answer.read(1 << 20):
            nbytes += len(block)
            if nbytes > _MAX_NBYTES:
                raise DataError("length", expected=f"at most {_MAX_NBYTES} bytes", got="more")
            file.write(block)
        announced = answer.headers.get("Content-Length")
        if announced is not None and announced.isdigit() and nbytes != int(announced):
            raise DataError("length", expected=f"{announced} bytes", got=f"{nbytes} bytes")


PATH = Path(__file__).parent / "sets" / "digits.h5"
_SPLITS = {"train": 0, "test": 1}


def read_digits(split: str, image_size: int | None = None) -> ArrayDataset:
    """Read one part of the digits set, 8 x 8 or enlarged to ``image_size``; see `load`."""
    trust(PATH)  # part of the package
    with open_hdf5(PATH, ("split", "images", "labels")) as file:
        members = file["split"][:] == _SPLITS[split]
        images, labels = file["images"][:][members], file["labels"][:][members]
    pixels = np.divide(images[:, None], np.float32(16), dtype=np.float32)
    return ArrayDataset(resize(pixels, image_size), labels.astype(np.int64))


NAMES = ("cifar10", "digits", "fashion_mnist", "mnist", "shakespeare")
SPLITS = ("train", "test")
_NUM_CLASSES = 10
_RECORD_NBYTES = 1 + 3 * 32 * 32
CIFAR10_ARCHIVE = "cifar-10-binary.tar.gz"
CIFAR10_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST = ("test_batch.bin",)

_ADDRESSES = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "fashion_mnist": ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/",),
}
_MD5 = {
    "mnist": {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
    "fashion_mnist": {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
    "cifar10": {CIFAR10_ARCHIVE: "c32a1d4ab5d03f1284b67883e8d87530"},
}


def load(name: str, split: str = "train", root: str | Path | None = None, image_size: int | None = None) -> Dataset:
    """Return a data set by its name, downloading it if necessary.

    Several processes may call it concurrently: one downloads, the others wait. If nodes share no file system, have one
    process a node call it first.

    Args:
        name: "digits" (in the package, 8 x 8), "mnist", "fashion_mnist" (28 x 28), "cifar10" (3 x 32 x 32), or
            "shakespeare" (in the package), a text.
        split: "train" or "test".
        root: the folder of all data sets; None for ``HPCDP_DATA_DIR``, else ``~/.cache/hpcdp/data``.
        image_size: height and width to enlarge to, see `datasets.resize` (LeNet takes 28); None keeps the size.

    Returns:
        A data set of images ``(n, channels, height, width)``, float32 in [0, 1], and labels ``(n,)``, int64, with
        ``num_classes`` 10; or a `TextDataset` whose ``num_classes`` is its vocabulary's size.

    Raises:
        ConfigError: an unknown name or split (the valid ones are listed); an ``image_size`` that is too small or given
            for a text; no folder set, for a user without a home.
        DataError: a file cannot be downloaded, is damaged, or differs from the published checksum.
    """
    one_of("data set", None, name, NAMES)
    one_of("data set", name, split, SPLITS, expected=f"a split, {' or '.join(SPLITS)}")
    if name == "shakespeare":
        if image_size is not None:
            raise ConfigError("data set", where=name, expected="no image_size for a text", got=image_size)
        return read_shakespeare(split)
    dataset: Dataset
    if name == "digits":
        dataset = read_digits(split, image_size)
    else:
        folder = _root(root) / name
        images, labels = _cifar10(folder, split) if name == "cifar10" else _idx_pair(name, folder, split)
        dataset = ImageDataset(images, labels, image_size)
    dataset.num_classes = _NUM_CLASSES
    return dataset


def _root(root: str | Path | None) -> Path:
    if root is not None:
        return Path(root)
    chosen = os.environ.get("HPCDP_DATA_DIR")
    try:
        return Path(chosen) if chosen else Path.home() / ".cache" / "hpcdp" / "data"
    except RuntimeError as error:  # e.g. in a container without a passwd entry
        expected = "a folder for data sets, since this user has no home folder"
        raise ConfigError("HPCDP_DATA_DIR", expected=expected, got="none") from error


def _obtain(name: str, folder: Path, file: str) -> Path:
    path, md5 = folder / file, _MD5[name][file]
    fetch(tuple(address + file for address in _ADDRESSES[name]), path, md5)
    check_md5(path, md5)
    return path


def _idx_pair(name: str, folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    start = "train" if split == "train" else "t10k"
    arrays, paths = [], []
    for kind, ndim in (("images-idx3", 3), ("labels-idx1", 1)):
        unpacked = folder / f"{start}-{kind}-ubyte"
        path = unpacked if os.path.isfile(unpacked) else _obtain(name, folder, f"{unpacked.name}.gz")
        array = read_idx(path)
        if array.ndim != ndim or array.dtype != np.uint8:
            raise DataError("read idx", where=path, expected=f"{ndim}-D uint8", got=f"{array.ndim}-D {array.dtype}")
        arrays.append(array)
        paths.append(path)
    images, labels = arrays
    if len(images) != len(labels):
        raise DataError("read idx", where=folder, expected=f"{len(images)} labels", got=len(labels))
    if len(images) == 0:
        raise DataError("read idx", where=paths[0], expected="at least one image", got=f"shape {images.shape}")
    if labels.max() >= _NUM_CLASSES:
        expected = f"labels from 0 to {_NUM_CLASSES - 1}"
        raise DataError("read idx", where=paths[1], expected=expected, got=f"a label {labels.max()}")
    return images[:, None], labels


def _cifar10(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    paths = [folder / file for file in (CIFAR10_TRAIN if split == "train" else CIFAR10_TEST)]
    missing = [path.name for path in paths if not os.path.isfile(path)]
    if missing:
        try:
            archive = _obtain("cifar10", folder, CIFAR10_ARCHIVE)
        except DataError as error:
            error.expected = f"{error.expected}, or {listed(missing)} in the folder"
            raise
        with folder_lock(folder):
            if not all(map(os.path.isfile, paths)):
                unpack_cifar10(archive)
    # The files hold equally many records, so a shorter one is truncated.
    sizes = {path: path.stat().st_size for path in paths}
    shortest, longest = min(paths, key=sizes.__getitem__), max(paths, key=sizes.__getitem__)
    if sizes[shortest] < sizes[longest]:
        raise DataError(
            "read CIFAR-10", where=shortest, expected=f"{sizes[longest]} bytes, like {longest.name}",
            got=f"{sizes[shortest]} bytes", remedy="delete the .bin files to fetch them again",
        )  # fmt: skip
    return read_cifar10(*paths)


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
        if nbytes == 0 or nbytes % _RECORD_NBYTES:
            expected = f"a multiple of {_RECORD_NBYTES} bytes (the binary version)"
            raise DataError("read CIFAR-10", where=path, expected=expected, got=f"{nbytes} bytes")
        counts.append(nbytes // _RECORD_NBYTES)
    images = np.empty((sum(counts), 3, 32, 32), np.uint8)
    labels = np.empty(sum(counts), np.uint8)
    start = 0
    for path, count in zip(paths, counts, strict=True):
        try:
            read = np.fromfile(path, np.uint8, count * _RECORD_NBYTES)
        except OSError as error:
            raise DataError("read CIFAR-10", where=path, expected="a file that can be read", got=error) from error
        if read.size != count * _RECORD_NBYTES:
            raise DataError(
                "read CIFAR-10", where=path, expected=f"{count * _RECORD_NBYTES} bytes", got=f"{read.size} bytes"
            )
        records = read.reshape(count, _RECORD_NBYTES)
        labels[start : start + count] = records[:, 0]
        images[start : start + count] = records[:, 1:].reshape(count, 3, 32, 32)
        if records[:, 0].max() >= _NUM_CLASSES:
            raise DataError("read CIFAR-10", where=path, expected="labels 0 to 9", got=records[:, 0].max())
        start += count
    return images, labels


def unpack_cifar10(archive: Path) -> None:
    """Extract the six batch files of the archive into its folder, each atomically.

    Only members of these names are extracted, so an archive cannot write elsewhere. The caller holds the folder's lock.

    Raises:
        DataError: the archive is damaged or lacks a file, or its files cannot be written.
    """
    missing = set(CIFAR10_TRAIN + CIFAR10_TEST)
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
        raise DataError("unpack CIFAR-10", where=archive.parent, expected=expected, got=reason(error)) from error
    if missing:
        raise DataError("unpack CIFAR-10", where=archive, expected=", ".join(sorted(missing)), got="no such member")
