"""Data sets by name: their download, and the digits set in the package.

Files are in ``ROOT/NAME/``, where ROOT is ``HPCDP_DATA_DIR``, else ``~/.cache/hpcdp/data``. Licenses: digits CC BY 4.0,
MNIST CC BY-SA 3.0 (LeCun, Cortes and Burges), Fashion-MNIST MIT (Zalando SE, 2017). CIFAR-10 states no license and asks
to cite Krizhevsky 2009. The plays of Shakespeare are in the public domain.

The digits are "Optical Recognition of Handwritten Digits", E. Alpaydin and C. Kaynak, 1998, UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, CC BY 4.0: 1,438 training and 359 test images of 8 x 8 pixels.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..core.checks import one_of
from ..core.files import replaced
from ..core.hdf5 import open_hdf5, trust
from ..errors import ConfigError, DataError, listed, reason
from . import images as data_images
from .datasets import ArrayDataset, Dataset, ImageDataset, read_shakespeare
from .images import read_idx, resize

_MAX_NBYTES = 1 << 30
_OF_DISKS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS
"""Error numbers of the local disk, for which no other address helps."""


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Create ``folder`` and hold its lock, so that only one process downloads; `DataError` if that fails."""
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(folder / ".lock", "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                "data folder", where=folder, expected="a writeable folder on a file system with locks",
                got=reason(error), remedy="set HPCDP_DATA_DIR to such a folder",
            ) from error  # fmt: skip
        yield


def check_md5(path: Path, md5: str) -> None:
    """Raise `DataError` unless a file has the published MD5 checksum, which detects damage, not tampering."""
    try:
        with open(path, "rb") as file:
            got = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise DataError("checksum", where=path, expected="a file that can be read", got=error.strerror) from error
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
                reasons.append(f"{_host_of(url)}: no network ({error.reason})")
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, OSError) and error.errno in _OF_DISKS:
                    raise DataError(
                        "download", where=path, expected="a writeable folder with space", got=error.strerror,
                        remedy="set HPCDP_DATA_DIR to such a folder",
                    ) from error  # fmt: skip
                reasons.append(f"{_host_of(url)}: {type(error).__name__} {error}")
    remedy = f"put it into {path.parent} by hand, or set HPCDP_DATA_DIR to the parent of a folder that has it"
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
    "cifar10": {data_images.ARCHIVE: "c32a1d4ab5d03f1284b67883e8d87530"},
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
        image_size: height and width to enlarge to, see `images.resize` (LeNet takes 28); None keeps the size.

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
    paths = [folder / file for file in (data_images.TRAIN if split == "train" else data_images.TEST)]
    missing = [path.name for path in paths if not os.path.isfile(path)]
    if missing:
        try:
            archive = _obtain("cifar10", folder, data_images.ARCHIVE)
        except DataError as error:
            error.expected = f"{error.expected}, since {listed(missing)} (the binary version) is missing"
            raise
        with folder_lock(folder):
            if not all(map(os.path.isfile, paths)):
                data_images.unpack_cifar10(archive)
    # The files hold equally many records, so a shorter one is truncated.
    sizes = {path: path.stat().st_size for path in paths}
    shortest, longest = min(paths, key=sizes.__getitem__), max(paths, key=sizes.__getitem__)
    if sizes[shortest] < sizes[longest]:
        raise DataError(
            "read CIFAR-10", where=shortest, expected=f"{sizes[longest]} bytes, like {longest.name}",
            got=f"{sizes[shortest]} bytes", remedy="delete the .bin files to fetch them again",
        )  # fmt: skip
    return data_images.read_cifar10(*paths)
