"""Data sets: arrays, images, HDF5 files, texts and CSV tables; and splitting of batches.

The set "shakespeare" in the package is the first 200,376 characters of "tiny Shakespeare"
(https://github.com/karpathy/char-rnn), an excerpt of William Shakespeare's plays. He died in 1616; the plays are in the
public domain.
"""

from __future__ import annotations

import abc
import codecs
import functools
import gzip
import io
import itertools
import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..core.arrays import Array, Device, require_devices
from ..core.checks import instance, is_number, part_of, whole_number
from ..core.files import require_file
from ..core.hdf5 import damage_as_data_error, missing_source, open_to_read, require_inside, special_file
from ..errors import ConfigError, DataError, HpcdpError, listed, shortened, type_named

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]


def piece_bounds(count: int, num_parts: int, weights: Sequence[float] | None = None) -> list[int]:
    """Return the bounds that cut ``count`` items into consecutive parts: part ``i`` is ``bounds[i]:bounds[i + 1]``.

    Args:
        count: number of items, >= 0.
        num_parts: number of parts, >= 1. Without weights their sizes differ by at most one, and may be 0.
        weights: one positive number a part; ``[3, 1]`` cuts 256 into 192 and 64. Sizes are off by less than one.

    Returns:
        ``num_parts + 1`` increasing integers from 0 to ``count``.

    Raises:
        ConfigError: ``num_parts`` below 1, or weights that are not ``num_parts`` positive numbers.
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
    """Cut ``x`` along axis 0 into ``k`` consecutive views, e.g. one for each device of this process.

    Args:
        x: shape ``(count, ...)``, any namespace; not copied.
        k: number of parts.
        even_split: whether ``k`` must divide ``count``; if False, sizes differ by at most one.

    Returns:
        ``k`` views of ``x``.

    Raises:
        ConfigError: an uneven split despite ``even_split``, ``k`` below 1, or an ``x`` without axes.
    """
    if not getattr(x, "shape", ()):
        expected = "an array of samples along axis 0"
        raise ConfigError("split_batch", where="x", expected=expected, got=f"{type(x).__name__} {x!r}")
    count = x.shape[0]
    bounds = piece_bounds(count, k)
    if even_split and count % k:
        expected, remedy = f"a number of samples divisible by {k}", "pass even_split=False, or discard the last batch"
        raise ConfigError("split_batch", expected=expected, got=count, remedy=remedy)
    return [x[start:stop] for start, stop in itertools.pairwise(bounds)]


def split_and_load(x: Array, devices: Sequence[Device], even_split: bool = True) -> list[Array]:
    """Cut ``x`` with `split_batch` and copy one part to each device.

    Args:
        x: shape ``(count, ...)``, any namespace.
        devices: at least one device.
        even_split: as in `split_batch`.

    Returns:
        One array for each device.

    Raises:
        ConfigError: as `split_batch`, or no devices.
        DeviceError: the machine lacks one of the devices; a RuntimeError.
    """
    devices = require_devices("split_and_load", devices)
    parts = split_batch(x, len(devices), even_split)
    return [device.put(part) for device, part in zip(devices, parts, strict=True)]


Batch = tuple[np.ndarray, np.ndarray]
Index = int | np.integer | slice | np.ndarray


class Dataset(abc.ABC):
    """Labeled samples, numbered from 0. Reading must be thread-safe."""

    num_classes: int | None = None
    """Number of classes if labels are 0 to ``num_classes - 1``, else None."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def __getitem__(self, index: Index) -> Batch:
        """Return the samples ``(x, y)`` at an integer, a slice or an integer array, in its order.

        An integer returns one sample without the batch axis.

        Raises:
            IndexError: an index is out of range.
        """

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one ``x``, without the batch axis."""
        return self[np.zeros(0, np.int64)][0].shape[1:]


def require_dataset(operation: str, dataset: object) -> None:
    """Raise `ConfigError` unless ``dataset`` has ``__getitem__`` and ``__len__`` and is no plain array or container."""
    is_one = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_one or isinstance(dataset, tuple | list | dict | str | np.ndarray):
        expected = "a data set, such as data.ArrayDataset(x, y)"
        raise ConfigError(operation, where="dataset", expected=expected, got=type_named(dataset))


def _count_classes(labels: np.ndarray) -> int | None:
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu" or labels.min() < 0:
        return None
    return int(labels.max()) + 1


class ArrayDataset(Dataset):
    """Samples in memory.

    Args:
        x: samples, shape ``(n, ...)``, any dtype; not copied.
        y: labels, shape ``(n, ...)``, any dtype; not copied. Non-negative integers of shape ``(n,)`` are classes.

    Raises:
        DataError: ``x`` and ``y`` differ in length, or have no axis.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = np.asarray(x), np.asarray(y)
        if self.x.ndim < 1 or self.y.ndim < 1 or len(self.x) != len(self.y):
            raise DataError(
                "ArrayDataset", expected="x and y of equal length", got=f"shapes {self.x.shape} and {self.y.shape}"
            )
        self.num_classes = _count_classes(self.y)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Index) -> Batch:
        return self.x[index], self.y[index]


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


class ImageDataset(Dataset):
    """Images stored as uint8 and converted to float32 in [0, 1] when read.

    Args:
        images: shape ``(n, channels, height, width)``, uint8; not copied.
        labels: shape ``(n,)``, integers; read as int64.
        image_size: height and width to enlarge to when reading, see `resize`; None keeps the size.

    Raises:
        DataError: the numbers of images and labels differ, or the shapes or dtypes are others.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, image_size: int | None = None) -> None:
        images, labels = np.asarray(images), np.asarray(labels)
        if images.ndim != 4 or labels.ndim != 1 or len(images) != len(labels):
            expected, got = "images (n, channels, height, width), labels (n,)", f"{images.shape} and {labels.shape}"
            raise DataError("ImageDataset", expected=expected, got=f"shapes {got}")
        if images.dtype != np.uint8 or labels.dtype.kind not in "biu":
            raise DataError(
                "ImageDataset", expected="images of uint8 and labels of integers",
                got=f"{images.dtype} and {labels.dtype}", remedy="use data.ArrayDataset(x, y) for other dtypes",
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


class HDF5Dataset(Dataset):
    """Samples in an HDF5 file, read batch by batch. The file stays open, read-only.

    Args:
        path: the file.
        x: name of the HDF5 data set of samples, shape ``(n, ...)``.
        y: name of the HDF5 data set of labels, shape ``(n, ...)``.
        external: whether the file may refer to other files, by external links, external storage or virtual data sets.
            The file's author chooses them, so enable this only for trusted files. They must be regular files, not FIFOs
            or devices.

    Raises:
        DataError: the file is missing, is not HDF5, or would make HDF5 follow links forever; a name is missing (the
            existing ones are listed); lengths differ; values are not numbers. Without ``external``: values are in
            another file. With it: values are in a file that is not regular, or a source of a virtual data set is
            missing, at any depth (HDF5 itself would return fill values).
    """

    def __init__(self, path: str | Path, x: str = "x", y: str = "y", external: bool = False) -> None:
        self.path, self._external = Path(path), external
        self._file = open_to_read(path, (x, y), external)
        try:
            with damage_as_data_error(path):
                self._x, self._y = self._dataset(x), self._dataset(y)
                n, num_labels = len(self._x), len(self._y)
            if n != num_labels:
                got = f"{n} and {num_labels}"
                raise DataError("read HDF5", where=path, expected="x and y of equal length", got=got)
        except BaseException:
            self._file.close()
            raise

    def _dataset(self, name: str) -> h5py.Dataset:
        import h5py

        fault = partial(DataError, "read HDF5", where=f"{self.path}:{name}")
        if not self._external:
            require_inside(self._file, name, "HDF5Dataset(..., external=True) reads it, if you trust the file")
        elif (special := special_file(self._file, name)) is not None:
            raise fault(expected="elements in regular files", got=f"elements in {special}")
        dataset = self._file.get(name)
        if not isinstance(dataset, h5py.Dataset):
            names: list[str] = []  # damaged names are bytes
            self._file.visititems(
                lambda key, item: names.append(f"{key!s}") if isinstance(item, h5py.Dataset) else None
            )
            raise DataError("read HDF5", where=self.path, expected=f"one of {', '.join(names) or 'none'}", got=name)
        if dataset.dtype.kind not in "biuf" or dataset.ndim < 1:
            raise fault(expected="an array of numbers", got=f"{dataset.dtype} of shape {dataset.shape}")
        missing = missing_source(dataset, lambda path, names: open_to_read(path, names, self._external))
        if missing is not None:
            raise fault(expected=f"{missing[1]} in the file {missing[0]}", got="none")
        return dataset

    def __len__(self) -> int:
        self._require_open()
        return len(self._x)

    def __getitem__(self, index: Index) -> Batch:
        self._require_open()
        with damage_as_data_error(self.path):
            return _native(self._read(self._x, index)), _native(self._read(self._y, index))

    def _read(self, dataset: Any, index: Index) -> np.ndarray:
        n = len(self)
        if isinstance(index, slice):
            start, stop, stride = index.indices(n)
            if stride > 0:
                return dataset[start : max(start, stop) : stride]
            index = np.arange(start, stop, stride)
        if isinstance(index, (int, np.integer)):
            if not -n <= index < n:
                raise IndexError(f"index {index} is out of bounds for {n} samples")
            return dataset[int(index) % n]
        rows = np.asarray(index)
        if rows.dtype == bool:
            if rows.shape != (n,):
                raise IndexError(f"a mask of shape {rows.shape} for {n} samples")
            rows = np.flatnonzero(rows)
        if rows.size and rows.dtype.kind not in "iu":
            raise IndexError(f"an index of {rows.dtype} instead of integers")
        if rows.size == 0:
            return np.empty((0, *dataset.shape[1:]), dataset.dtype)
        if rows.min() < -n or rows.max() >= n:
            raise IndexError(f"indices {rows.min()} to {rows.max()} are out of bounds for {n} samples")
        return _gather(dataset, rows.astype(np.int64) % n)  # small integer dtypes may overflow at n

    def _require_open(self) -> None:
        if not self._file:
            raise DataError("read HDF5", where=self.path, expected="an open data set", got="a closed data set")

    def close(self) -> None:
        """Close the file; reading afterwards raises a `DataError`."""
        self._file.close()


def _native(x: np.ndarray) -> np.ndarray:
    """Return ``x`` in native byte order, which networks require; a file may have another."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _gather(dataset: Any, index: np.ndarray) -> np.ndarray:
    """Read rows in any order, with repetitions.

    HDF5 requires increasing rows and has a cost for each run, so runs less than 9 rows apart are read as one slice.
    """
    rows, position = np.unique(index, return_inverse=True)
    if len(rows) == rows[-1] - rows[0] + 1:
        return dataset[int(rows[0]) : int(rows[-1]) + 1][position]
    out = np.empty((len(rows), *dataset.shape[1:]), dataset.dtype)
    cuts = np.flatnonzero(np.diff(rows) > 8) + 1
    start = 0
    for run in np.split(rows, cuts):
        first = int(run[0])
        out[start : start + len(run)] = dataset[first : int(run[-1]) + 1][run - first]
        start += len(run)
    return out[position]


PATH = Path(__file__).parent / "sets" / "shakespeare.txt.gz"
_TRAIN_SHARE = 0.9


class TextDataset(Dataset):
    """Consecutive pieces of a text, for predicting the next character.

    A sample is ``(x, y)``, both int64 of shape ``(context,)``: ``y[i]`` is the character after ``x[i]``. An incomplete
    last piece is dropped.

    Args:
        text: the text.
        context: characters of a piece.
        characters: the vocabulary, each character once; None uses the text's own characters, sorted.

    Raises:
        ConfigError: ``context`` is not an integer >= 1, or ``text`` is not a str.
        DataError: the text has a character outside ``characters``.
    """

    def __init__(self, text: str, context: int = 64, characters: str | None = None) -> None:
        whole_number("TextDataset", "context", context, 1)
        instance("TextDataset", "text", text, str, "a str")
        self.characters = "".join(sorted(set(text))) if characters is None else characters
        self.context, self.num_classes = context, len(self.characters)
        self._text = self.encode(text)

    def encode(self, text: str) -> np.ndarray:
        """Return the token numbers of ``text``, int64 of shape ``(len(text),)``.

        Raises:
            DataError: a character is outside the vocabulary.
        """
        numbers = {character: number for number, character in enumerate(self.characters)}
        unknown = sorted(set(text) - set(numbers))
        if unknown:
            raise DataError("encode", expected=f"characters among {self.characters!r}", got=repr(unknown[0]))
        return np.array([numbers[character] for character in text], np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of token numbers."""
        return "".join(self.characters[int(token)] for token in tokens)

    def __len__(self) -> int:
        return max(0, len(self._text) - 1) // self.context

    def __getitem__(self, index: Index) -> Batch:
        places = np.arange(len(self))[index]
        starts = np.asarray(places)[..., None] * self.context + np.arange(self.context)
        return self._text[starts], self._text[starts + 1]


def read_shakespeare(split: str) -> TextDataset:
    """Read one part of the packaged text, in pieces of 64 characters. Both parts share a vocabulary of 62 characters.

    Args:
        split: "train", the first nine tenths, or "test".

    Raises:
        DataError: the file is damaged.
    """
    try:
        text = gzip.decompress(PATH.read_bytes()).decode("ascii")
        if not text:
            raise EOFError("an empty file")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError("read text", where=PATH, expected="an undamaged file", got=error) from error
    cut = round(_TRAIN_SHARE * len(text))
    return TextDataset(text[:cut] if split == "train" else text[cut:], characters="".join(sorted(set(text))))


try:
    from lzma import LZMAError
except ImportError:  # Python was built without lzma, so NumPy cannot read .xz
    LZMAError = EOFError  # type: ignore[assignment, misc]

_UNREADABLE = OSError, EOFError, ValueError, zlib.error, LZMAError
"""Exceptions of NumPy and the decompressors for unreadable files."""


def read_csv(
    path: str | Path,
    label_column: int = -1,
    sample_shape: tuple[int, ...] | None = None,
    skip_rows: int = 0,
    delimiter: str = ",",
    num_parts: int = 1,
    part_index: int = 0,
    label_dtype: npt.DTypeLike = np.int64,
) -> ArrayDataset:
    """Read a table with one sample a row, one column of which is the label.

    Args:
        path: the file, plain or compressed (.gz, .bz2, .xz), UTF-8 with or without a byte order mark.
        label_column: index of the label column; negative indices count from the last.
        sample_shape: shape of a sample, with as many elements as there are other columns; None keeps one axis.
        skip_rows: number of rows to skip, e.g. 1 for a header row.
        delimiter: the character between fields.
        num_parts: number of parts of about equal size in bytes, cut between rows, for uncompressed files. A part may
            have no rows.
        part_index: index of the part to read, usually the rank; only this part of the file is read.
        label_dtype: int64 for integer labels below 2**53, or float32.

    Returns:
        Samples of shape ``(n, *sample_shape)``, float32, and labels of shape ``(n,)`` and ``label_dtype``, of this
        part.

    Raises:
        ConfigError: an argument is out of range, or a compressed file is to be read in parts.
        DataError: the file is missing, empty or damaged; rows differ in length; a field is not a number or overflows
            float32 (``inf`` and ``nan`` are numbers); the label column does not exist, or labels do not fit
            ``label_dtype``; ``sample_shape`` does not fit; or a file read in parts ends lines with a carriage return
            alone. The error names line and column in the file, both counted from 1. It recognizes header rows.
    """
    whole_number("read csv", "skip_rows", skip_rows, 0)
    part_of("read csv", num_parts, part_index)
    whole_number("read csv", "label_column", label_column, expected="the number of a column")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in "\r\n":
        expected = "one character other than a line end"
        raise ConfigError("read csv", where="delimiter", expected=expected, got=repr(delimiter))
    instance("read csv", "sample_shape", sample_shape, (tuple, list, NoneType), "a tuple of lengths")
    for length in sample_shape or ():
        whole_number("read csv", "sample_shape", length, 1)
    labels_as = _label_dtype(label_dtype)
    require_file("read csv", path)
    if num_parts > 1 and Path(path).suffix in (".gz", ".bz2", ".xz"):
        expected = "num_parts=1, since compressed files can only be read from the start"
        raise ConfigError("read csv", where=path, expected=expected, got=num_parts)
    path, fault = Path(path), partial(DataError, "read csv", where=path)
    try:
        table = _table(path, delimiter, skip_rows, num_parts, part_index)
    except HpcdpError:
        raise
    except _UNREADABLE as error:
        _refuse_damaged(path, fault)
        _refuse_rows(path, delimiter, skip_rows, fault)
        raise fault(expected="rows of equally many numbers", got=str(error)) from error
    rows, columns = table.shape

    def place(row: int, column: int) -> str:
        line = _line_of(path, skip_rows, num_parts, part_index, row)
        return f"line {line}, column {column % columns + 1}"

    if columns < 2:
        raise fault(expected="a label and at least one other column", got="1 column")
    if not -columns <= label_column < columns:
        expected = f"label_column from {-columns} to {columns - 1} in a table of {columns} columns"
        raise fault(expected=expected, got=label_column)
    with np.errstate(over="ignore"):
        narrow = table.astype(np.float32)
    infinite = np.isinf(narrow)
    infinite[:, label_column] &= labels_as == np.float32
    if infinite.any():
        written = _table(path, delimiter, skip_rows, num_parts, part_index, str)
        for row, column in np.argwhere(infinite).tolist():
            if "inf" not in str(written[row, column]).lower():  # an overflow, not a written infinity
                got = f"{str(written[row, column])!r} in {place(row, column)}"
                raise fault(expected="numbers of float32, up to 3.4e38", got=got)
    labels = table[:, label_column]
    samples = np.delete(narrow, label_column, axis=1)
    if sample_shape is not None:
        values = math.prod(sample_shape)
        if values != columns - 1:
            raise fault(expected=f"{values} values a sample for {sample_shape}", got=columns - 1)
        samples = samples.reshape(rows, *sample_shape)
    if labels_as == np.int64:
        (wrong,) = np.nonzero(~((labels == np.floor(labels)) & (np.abs(labels) < 2**53)))  # also finds NaN
        if len(wrong):
            got = f"{labels[wrong[0]]:.17g} in {place(int(wrong[0]), label_column)}"
            remedy = "pass label_dtype=np.float32 for other labels"
            raise fault(expected="whole numbers below 2**53 as labels", got=got, remedy=remedy)
    return ArrayDataset(samples, labels.astype(labels_as))


def _label_dtype(requested: npt.DTypeLike) -> np.dtype:
    try:
        dtype = np.dtype(requested)
    except TypeError:
        dtype = None
    if dtype not in (np.int64, np.float32):
        got = requested if dtype is None else dtype
        raise ConfigError("read csv", where="label_dtype", expected="int64 or float32", got=got)
    return dtype


def _table(
    path: Path, delimiter: str, skip_rows: int, num_parts: int, part_index: int, dtype: type = np.float64
) -> np.ndarray:
    """Return the numbers of a part; a part without rows has the file's columns. Raises `ValueError` like NumPy."""
    if num_parts == 1:
        table = _fields(path, dtype, delimiter, skip_rows)
        if len(table):
            return table
    else:
        table = _fields(_rows_of_part(path, skip_rows, num_parts, part_index), dtype, delimiter, 0)
    first = _fields(path, str, delimiter, skip_rows, 1)
    if len(first) == 0:
        raise DataError("read csv", where=path, expected="at least one row", got="none")
    columns = first.shape[1]
    if len(table) and table.shape[1] != columns:
        raise ValueError(f"{table.shape[1]} in part {part_index}, and {columns} in the first row")
    return table if len(table) else np.empty((0, columns))


def _fields(
    source: Path | list[str], dtype: type, delimiter: str, skip_rows: int, max_rows: int | None = None
) -> np.ndarray:
    """Return the fields of all rows, or the first ``max_rows``, shape ``(rows, columns)``; none for an empty source."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return np.loadtxt(
            source, dtype, comments=None, delimiter=delimiter, skiprows=skip_rows, max_rows=max_rows, ndmin=2,
            encoding="utf-8-sig",
        )  # fmt: skip


def _numbered(path: Path, skip_rows: int) -> Iterator[tuple[int, str]]:
    """Yield all non-empty rows with their line numbers, from 1."""
    with np.lib.npyio.DataSource().open(str(path), "rb") as file:
        for number, line in enumerate(io.TextIOWrapper(file, "utf-8-sig", "replace"), 1):
            if number > skip_rows and line != "\n":
                yield number, line.rstrip("\n")


def _line_of(path: Path, skip_rows: int, num_parts: int, part_index: int, row: int) -> int:
    """Return the line number of a part's ``row``, which counts from 0."""
    for part in range(part_index):
        row += sum(map(bool, _rows_of_part(path, skip_rows, num_parts, part)))
    return next(itertools.islice(_numbered(path, skip_rows), row, None))[0]


def _refuse_damaged(path: Path, fault: Callable[..., DataError]) -> None:
    """Raise `DataError` if a compressed file is damaged, since rows after the damage are garbage."""
    try:
        with np.lib.npyio.DataSource().open(str(path), "rb") as file:
            while file.read(1 << 20):
                pass
    except _UNREADABLE as error:
        raise fault(expected="an undamaged file", got=error) from error


def _refuse_rows(path: Path, delimiter: str, skip_rows: int, fault: Callable[..., DataError]) -> None:
    """Raise `DataError` for the first row that is not as many numbers as the first row.

    NumPy's own message counts rows of the part, from 0 or from 1, so it cannot name the line.
    """
    columns = 0
    try:
        for line, row in _numbered(path, skip_rows):
            fields = row.split(delimiter)
            if columns == 0 and len(fields) > 1 and not any(map(_is_number, fields)):
                got, remedy = listed(list(map(repr, fields))), f"if they are column names, pass skip_rows={line}"
                raise fault(expected=f"numbers in line {line}, the first row", got=got, remedy=remedy)
            columns = columns or len(fields)
            wrong = next((column for column, field in enumerate(fields) if not _is_number(field)), None)
            if len(fields) != columns:
                got = f"a row of {len(fields)} in line {line}"
            elif wrong is not None:
                got = f"{shortened(repr(fields[wrong]), 40)}, which is not a number, in line {line}, column {wrong + 1}"
            else:
                continue
            raise fault(expected=f"rows of {columns} numbers, as the first one", got=got)
    except HpcdpError:
        raise
    except _UNREADABLE:
        return


def _is_number(field: str) -> bool:
    """Return whether NumPy parses ``field``: unlike ``float()``, it accepts no underscores or non-ASCII digits."""
    try:
        float(field)
    except ValueError:
        return False
    return "_" not in field and field.strip().isascii()


def _rows_of_part(path: Path, skip_rows: int, num_parts: int, part_index: int) -> list[str]:
    """Return the rows that begin in one of ``num_parts`` byte ranges; each row begins in exactly one."""
    with open(path, "rb") as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        _refuse_other_ends(path, file)
        for _ in range(skip_rows):
            file.readline()
        start, end = file.tell(), os.fstat(file.fileno()).st_size
        first, last = (
            _next_row(file, start + (end - start) * part // num_parts, start) for part in (part_index, part_index + 1)
        )
        file.seek(first)
        text = io.StringIO(file.read(last - first).decode("utf-8"), newline=None)
    return [line.rstrip("\n") for line in text]  # splitlines() would also split at other characters


def _refuse_other_ends(path: Path, file: BinaryIO) -> None:
    """Raise `DataError` if a line ends with a carriage return alone; the file position is kept."""
    start = file.tell()
    if b"\r" in file.readline().rstrip(b"\r\n"):
        raise DataError(
            "read csv", where=path, expected=r"lines that end with \n or \r\n, in a file that is read in parts",
            got=r"lines that end with \r alone", remedy="pass num_parts=1, or convert the line ends",
        )  # fmt: skip
    file.seek(start)


def _next_row(file: BinaryIO, place: int, start: int) -> int:
    """Return the offset of the first row that begins at or after ``place``."""
    if place <= start:
        return start
    file.seek(place - 1)
    file.readline()
    return file.tell()
