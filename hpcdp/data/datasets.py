"""Data sets in memory, and splitting of batches.

What a data set is.

One batch cut into parts.

HDF5 files as data sets.

CSV files and texts as data sets.

Tables of numbers as text.

Text for networks that foretell the next character.

The set "shakespeare" that ships with the package: the first 200,376 characters of the excerpt of William Shakespeare's
plays (who died in 1616, in the public domain) that "tiny Shakespeare" is, https://github.com/karpathy/char-rnn.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import gzip
import io
import itertools
import math
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..core.arrays import Array
from ..core.checks import instance, is_number, part_of, whole_number
from ..core.devices import Device, require_devices
from ..core.files import require_file
from ..core.hdf5 import damage_as_data_error, missing_source, open_to_read, require_inside, special_file
from ..errors import ConfigError, DataError, listed, shortened, type_named
from .images import resize

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]


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


class HDF5Dataset(Dataset):
    """Samples in an HDF5 file, read from it batch by batch; the file is opened read-only and stays open.

    Args:
        path: the file.
        x: name of the data set of samples, shape ``(n, ...)``.
        y: name of the data set of labels, shape ``(n, ...)``.
        external: read other files, too, where the file says so: by external links, external storage, or virtual data
            sets. Whoever has written the file chooses them; they must be regular files, no FIFOs or devices.

    Raises:
        DataError: no such file, no HDF5 file, a name that it lacks (those it has are listed), lengths that differ,
            values that are no numbers, a file that HDF5 would follow for ever; without ``external`` values in another
            file, with it values in one that is no regular file; a virtual data set of which a source, or its file, is
            missing, also of one that it shows (HDF5 gives fill values).
    """

    def __init__(self, path: str | Path, x: str = "x", y: str = "y", external: bool = False) -> None:
        self.path, self._external = Path(path), external
        self._file = open_to_read(path, (x, y), external)
        try:
            with damage_as_data_error(path):
                self._x, self._y = self._dataset(x), self._dataset(y)
                lengths = len(self._x), len(self._y)
            if lengths[0] != lengths[1]:
                raise DataError(
                    "read HDF5", where=path, expected="x and y of one length", got=f"{lengths[0]} and {lengths[1]}"
                )
        except BaseException:
            self._file.close()
            raise

    def _dataset(self, name: str) -> h5py.Dataset:
        import h5py

        if not self._external:
            require_inside(self._file, name, "HDF5Dataset(..., external=True) reads it, if you trust the file")
        elif (special := special_file(self._file, name)) is not None:
            where = f"{self.path}:{name}"
            raise DataError(
                "read HDF5", where=where, expected="elements in regular files", got=f"some in {special}, which is none"
            )
        found = self._file.get(name)
        if not isinstance(found, h5py.Dataset):
            names: list[str] = []  # a damaged name is of type bytes
            self._file.visititems(
                lambda key, item: names.append(f"{key!s}") if isinstance(item, h5py.Dataset) else None
            )
            raise DataError("read HDF5", where=self.path, expected=f"one of {', '.join(names) or 'none'}", got=name)
        if found.dtype.kind not in "biuf" or found.ndim < 1:
            raise DataError(
                "read HDF5",
                where=f"{self.path}:{name}",
                expected="an array of numbers",
                got=f"{found.dtype} of shape {found.shape}",
            )
        missing = missing_source(found, lambda path, names: open_to_read(path, names, self._external))
        if missing is not None:
            expected = f"{missing[1]} in the file {missing[0]}"
            raise DataError("read HDF5", where=f"{self.path}:{name}", expected=expected, got="none")
        return found

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
        wanted = np.asarray(index)
        if wanted.dtype == bool:
            if wanted.shape != (n,):
                raise IndexError(f"a mask of shape {wanted.shape} for {n} samples")
            wanted = np.flatnonzero(wanted)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise IndexError(f"an index of {wanted.dtype} is none of samples")
        if wanted.size == 0:
            return np.empty((0, *dataset.shape[1:]), dataset.dtype)
        if wanted.min() < -n or wanted.max() >= n:
            raise IndexError(f"indices {wanted.min()} to {wanted.max()} are out of bounds for {n} samples")
        return _gather(dataset, wanted.astype(np.int64) % n)  # small integers do not hold n

    def _require_open(self) -> None:
        if not self._file:
            raise DataError(
                "read HDF5", where=self.path, expected="an open data set", got="one that close() has closed"
            )

    def close(self) -> None:
        """Closes the file; to read from it afterwards is a `DataError`."""
        self._file.close()


def _native(x: np.ndarray) -> np.ndarray:
    """``x`` in this machine's order of bytes, as networks compute; a file may be another machine's."""
    return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))


def _gather(dataset: Any, wanted: np.ndarray) -> np.ndarray:
    """Rows in any order, with repetitions. HDF5 wants increasing rows and pays for each run of them, so close runs are
    read as one slice."""
    rows, position = np.unique(wanted, return_inverse=True)
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
    """Pieces of a text one behind the other, each with what follows every character.

    A sample is ``(x, y)`` of shape ``(context,)``, int64: ``y[i]`` is the character after ``x[i]``. What is left after
    the last whole piece is not used.

    Args:
        text: what is cut.
        context: characters of a piece.
        characters: those that are numbered, each once; None: the text's own, sorted.

    Raises:
        ConfigError: ``context`` is no integer >= 1, or the text no str.
        DataError: the text has a character that is not among ``characters``.
    """

    def __init__(self, text: str, context: int = 64, characters: str | None = None) -> None:
        whole_number("TextDataset", "context", context, 1)
        instance("TextDataset", "text", text, str, "a str")
        self.characters = "".join(sorted(set(text))) if characters is None else characters
        self.context, self.num_classes = context, len(self.characters)
        self._text = self.encode(text)

    def encode(self, text: str) -> np.ndarray:
        """The numbers of characters, int64, shape ``(len(text),)``.

        Raises:
            DataError: there is one that has no number.
        """
        numbers = {character: number for number, character in enumerate(self.characters)}
        unknown = sorted(set(text) - set(numbers))
        if unknown:
            raise DataError("encode", expected=f"characters among {self.characters!r}", got=repr(unknown[0]))
        return np.array([numbers[character] for character in text], np.int64)

    def decode(self, tokens: Iterable[int]) -> str:
        """The characters of numbers."""
        return "".join(self.characters[int(token)] for token in tokens)

    def __len__(self) -> int:
        return max(0, len(self._text) - 1) // self.context

    def __getitem__(self, index: Index) -> Batch:
        places = np.arange(len(self))[index]
        starts = np.asarray(places)[..., None] * self.context + np.arange(self.context)
        return self._text[starts], self._text[starts + 1]


def read_shakespeare(split: str) -> TextDataset:
    """One part of the text that ships, in pieces of 64 characters; both parts have the same 62 characters.

    Args:
        split: "train", the first nine tenths, or "test".

    Raises:
        DataError: the file is damaged.
    """
    try:
        text = gzip.decompress(PATH.read_bytes()).decode("ascii")
        if not text:
            raise EOFError("nothing in it")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError("read text", where=PATH, expected="an undamaged file", got=error) from error
    cut = round(_TRAIN_SHARE * len(text))
    return TextDataset(text[:cut] if split == "train" else text[cut:], characters="".join(sorted(set(text))))


try:
    from lzma import LZMAError
except ImportError:  # Python was built without it, and so NumPy reads no .xz
    LZMAError = EOFError  # type: ignore[assignment, misc]

_UNREADABLE = OSError, EOFError, ValueError, zlib.error, LZMAError
"""What NumPy and the readers of compressed files raise."""


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
    """A table with one sample a row, of which one column is the label.

    Args:
        path: the file, plain or compressed (.gz, .bz2, .xz); UTF-8, with a byte order mark or without.
        label_column: number of the column with the labels; negative numbers count from the last.
        sample_shape: the shape of a sample, whose size is the number of the other columns; None keeps them as one axis.
        skip_rows: rows to skip at the start: 1 where the first one has the names of the columns.
        delimiter: what separates two fields.
        num_parts: into how many parts of about as many bytes the file is cut, between rows; of a file that is not
            compressed. A part may have no rows.
        part_index: the one that is read, and nothing else of the file; usually the rank.
        label_dtype: int64 for labels that are whole numbers below 2**53, else float32.

    Returns:
        Samples of shape ``(n, *sample_shape)``, float32; labels of shape ``(n,)`` and ``label_dtype``; of a part those
        of its own.

    Raises:
        ConfigError: a part that there is not, or parts of a compressed file; a label's column, a count of rows or a
            length of ``sample_shape`` that is no number; a delimiter of several characters, or that ends a line;
            another ``label_dtype``.
        DataError: the file is missing, empty, has rows of different length or fields that are no numbers (names of
            columns are told from those) or are beyond float32, lacks the label's column, has labels that are not of
            ``label_dtype``, does not fit ``sample_shape``, or is read in parts and ends lines by a carriage return
            alone. Lines and columns are named by their numbers in the file, both from 1, so that skipped lines count.
            ``inf`` and ``nan`` are numbers.
    """
    whole_number("read csv", "skip_rows", skip_rows, 0)
    part_of("read csv", num_parts, part_index)
    whole_number("read csv", "label_column", label_column, expected="the number of a column")
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in "\r\n":
        expected = "one character that ends no line"
        raise ConfigError("read csv", where="delimiter", expected=expected, got=repr(delimiter))
    instance("read csv", "sample_shape", sample_shape, (tuple, list, NoneType), "a tuple of lengths")
    for length in sample_shape or ():
        whole_number("read csv", "sample_shape", length, 1)
    labels_as = _label_dtype(label_dtype)
    require_file("read csv", path)
    if num_parts > 1 and Path(path).suffix in (".gz", ".bz2", ".xz"):
        expected = "num_parts=1 for a compressed file, which can only be read from its start"
        raise ConfigError("read csv", where=path, expected=expected, got=num_parts)
    try:
        table = _table(Path(path), delimiter, skip_rows, num_parts, part_index)
    except _UNREADABLE as error:
        _refuse_damaged(Path(path))
        _refuse_rows(Path(path), delimiter, skip_rows)
        raise DataError("read csv", where=path, expected="rows of as many numbers each", got=str(error)) from error
    rows, columns = table.shape

    def place(row: int, column: int) -> str:
        line = _line_of(Path(path), skip_rows, num_parts, part_index, row)
        return f"line {line}, column {column % columns + 1}"

    if columns < 2:
        raise DataError("read csv", where=path, expected="a label and at least one other column", got="1 column")
    if not -columns <= label_column < columns:
        raise DataError(
            "read csv",
            where=path,
            expected=f"label_column from {-columns} to {columns - 1} in a table of {columns} columns",
            got=label_column,
        )
    with np.errstate(over="ignore"):
        narrow = table.astype(np.float32)
    infinite = np.isinf(narrow)
    infinite[:, label_column] &= labels_as == np.float32
    if infinite.any():
        written = _table(Path(path), delimiter, skip_rows, num_parts, part_index, str)
        for row, column in np.argwhere(infinite).tolist():
            if "inf" not in str(written[row, column]).lower():  # else it was written so
                raise DataError(
                    "read csv", where=path, expected="numbers of float32, up to 3.4e38",
                    got=f"{str(written[row, column])!r} in {place(row, column)}",
                )  # fmt: skip
    labels = table[:, label_column]
    samples = np.delete(narrow, label_column, axis=1)
    if sample_shape is not None:
        values = math.prod(sample_shape)
        if values != columns - 1:
            raise DataError(
                "read csv", where=path, expected=f"{values} values a sample for {sample_shape}", got=columns - 1
            )
        samples = samples.reshape(rows, *sample_shape)
    if labels_as == np.int64:
        (wrong,) = np.nonzero(~((labels == np.floor(labels)) & (np.abs(labels) < 2**53)))  # NaN is none of that
        if len(wrong):
            raise DataError(
                "read csv", where=path, expected="whole numbers below 2**53 as labels",
                got=f"{labels[wrong[0]]:.17g} in {place(int(wrong[0]), label_column)}",
                remedy="label_dtype=np.float32 takes labels that are other numbers",
            )  # fmt: skip
    return ArrayDataset(samples, labels.astype(labels_as))


def _label_dtype(given: npt.DTypeLike) -> np.dtype:
    try:
        found = np.dtype(given)
    except TypeError:
        found = None
    if found not in (np.int64, np.float32):
        got = given if found is None else found
        raise ConfigError("read csv", where="label_dtype", expected="int64 or float32", got=got)
    return found


def _table(
    path: Path, delimiter: str, skip_rows: int, num_parts: int, part_index: int, dtype: type = np.float64
) -> np.ndarray:
    """The numbers of a part, with the columns of the whole file also where it has no rows; `ValueError` as NumPy."""
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
    """The fields of all rows, or the first ``max_rows``, shape ``(rows, columns)``; of an empty source none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return np.loadtxt(
            source, dtype, comments=None, delimiter=delimiter, skiprows=skip_rows, max_rows=max_rows, ndmin=2,
            encoding="utf-8-sig",
        )  # fmt: skip


def _numbered(path: Path, skip_rows: int) -> Iterator[tuple[int, str]]:
    """All rows, and from 1 the numbers of their lines; an empty line is no row."""
    with np.lib.npyio.DataSource().open(str(path), "rb") as file:
        for number, line in enumerate(io.TextIOWrapper(file, "utf-8-sig", "replace"), 1):
            if number > skip_rows and line != "\n":
                yield number, line.rstrip("\n")


def _line_of(path: Path, skip_rows: int, num_parts: int, part_index: int, row: int) -> int:
    """The line of a part's ``row``, which is counted from 0."""
    for part in range(part_index):
        row += sum(map(bool, _rows_of_part(path, skip_rows, num_parts, part)))
    return next(itertools.islice(_numbered(path, skip_rows), row, None))[0]


def _refuse_damaged(path: Path) -> None:
    """Raises `DataError` for a compressed file that is damaged: rows are anything from there on."""
    try:
        with np.lib.npyio.DataSource().open(str(path), "rb") as file:
            while file.read(1 << 20):
                pass
    except _UNREADABLE as error:
        raise DataError("read csv", where=path, expected="an undamaged file", got=error) from error


def _refuse_rows(path: Path, delimiter: str, skip_rows: int) -> None:
    """Raises `DataError` for the first row that is none of as many numbers as the first one, in a file that can be
    read: NumPy names rows, counted among those that it was given, from 0 or from 1."""
    columns = 0
    with contextlib.suppress(*_UNREADABLE):
        for line, row in _numbered(path, skip_rows):
            fields = row.split(delimiter)
            if columns == 0 and len(fields) > 1 and not any(map(_is_number, fields)):
                raise DataError(
                    "read csv", where=path, expected=f"numbers in line {line}, the first row",
                    got=listed([repr(each) for each in fields]),
                    remedy=f"if they are names of columns, skip_rows={line} leaves them out",
                )  # fmt: skip
            columns = columns or len(fields)
            wrong = next((column for column, field in enumerate(fields) if not _is_number(field)), None)
            if len(fields) != columns:
                got = f"a row of {len(fields)} in line {line}"
            elif wrong is not None:
                got = f"{shortened(repr(fields[wrong]), 40)}, which is not a number, in line {line}, column {wrong + 1}"
            else:
                continue
            raise DataError("read csv", where=path, expected=f"rows of {columns} numbers, as the first one", got=got)


def _is_number(field: str) -> bool:
    """Whether NumPy takes it for one, which knows neither the underscores nor the digits beyond ASCII of Python's."""
    try:
        float(field)
    except ValueError:
        return False
    return "_" not in field and field.strip().isascii()


def _rows_of_part(path: Path, skip_rows: int, num_parts: int, part_index: int) -> list[str]:
    """The rows that begin in one of ``num_parts`` runs of bytes; every row begins in one of them alone."""
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
    return [line.rstrip("\n") for line in text]  # by splitlines() other characters would end rows, too


def _refuse_other_ends(path: Path, file: BinaryIO) -> None:
    """Raises `DataError` where a line ends with ``\\r`` alone, which is not looked for; the place in ``file`` stays."""
    start = file.tell()
    if b"\r" in file.readline().rstrip(b"\r\n"):
        raise DataError(
            "read csv", where=path, expected=r"lines that end with \n or \r\n, in a file that is read in parts",
            got=r"lines that end with \r alone", remedy="read it whole, or convert it",
        )  # fmt: skip
    file.seek(start)


def _next_row(file: BinaryIO, place: int, start: int) -> int:
    """Where the first row begins that does not begin before ``place``."""
    if place <= start:
        return start
    file.seek(place - 1)
    file.readline()
    return file.tell()
