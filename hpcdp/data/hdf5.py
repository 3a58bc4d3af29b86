"""HDF5 files as data sets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.hdf5 import damage_as_data_error, missing_source, open_to_read, require_inside, special_file
from ..errors import DataError
from .datasets import Batch, Dataset, Index

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]


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
