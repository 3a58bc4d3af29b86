"""One HDF5 file of a checkpoint: a data set for each run of elements, with checksums by blocks.

HDF5 lays the file out; the elements go where it has put them by plain writes, and come back by plain reads
(`shard_reader`), each block with its checksum while it is in the cache. Compressed data sets are HDF5's affair, see
`compressed`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from ..arrays import BFLOAT16
from ..errors import DataError
from .plan import Piece
from .writeback import Writeback

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]

BLOCK_NBYTES = 1 << 20
"""Elements have a checksum for so many bytes: a rank that reads a part of them checks what it reads."""
HDF5_TOLD = re.compile("errno = ([0-9]+), error message = ")
"""What the system said, among file names, addresses, and the time."""
_ALIGN_FROM, _ALIGNMENT = 64 << 10, 4096


@dataclass(frozen=True)
class Stored:
    """A run of a tensor's elements in a file."""

    name: str
    """Of the tensor."""
    first: int
    """The number of its first element in the whole tensor."""
    count: int
    file: str
    dataset: str
    offset: int | None
    """Where it begins in the file, in bytes; None where it is compressed."""
    crc32: list[int]
    """Of every `BLOCK_NBYTES` of the elements."""
    crc32_file: int | None = None
    """Of the whole file where it is compressed, as its manifest says; None before there is one."""


class File(NamedTuple):
    """What is known of a whole file."""

    name: str
    nbytes: int
    crc32_beside: int
    """Of all bytes that are not elements: what HDF5 itself reads."""


@contextlib.contextmanager
def failing(operation: str, where: Callable[[], object]) -> Iterator[None]:
    """What the file system refuses becomes a `DataError` that names the place."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, KeyError, OverflowError, MemoryError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else error
        told = HDF5_TOLD.search(str(got))
        if told is not None:
            got = os.strerror(int(told[1]))
        raise DataError(operation, where=where(), got=got) from error


@dataclass(frozen=True)
class Room:
    """A data set of a file that is to be laid out."""

    dataset: str
    count: int
    stored: str
    """The NumPy dtype of its elements."""
    dtype: str
    """See `Piece.dtype`."""

    @classmethod
    def of(cls, piece: Piece) -> Room:
        return cls(piece.dataset, piece.values.size, piece.values.dtype.str, piece.dtype)


def lay_out(path: Path, rooms: Sequence[Room]) -> list[int]:
    """Make a file of data sets without elements; where those of each are to go, in bytes.

    Raises:
        DataError: it cannot be written.
    """
    with failing("save", lambda: path), new_file(path) as file:
        maker = Maker(file)
        return [place_of(maker.make(room)) for room in rooms]


def place_of(dataset: h5py.h5d.DatasetID) -> int:
    """Where the elements of a contiguous data set begin in its file, in bytes; 0 where there are none."""
    offset = dataset.get_offset()
    return 0 if offset is None else int(offset)


def new_file(path: Path, comm: Any = None) -> h5py.File:
    """An open HDF5 file that was not there before; with an MPI communicator, all whose ranks call, they share it."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(_ALIGN_FROM, _ALIGNMENT)
    access.set_file_locking(False, True)  # the folder's lock is enough, and some file systems refuse those of HDF5
    if comm is None:
        access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    else:
        access.set_fapl_mpio(comm, comm.info)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fapl=access))


class Maker:
    """Makes contiguous data sets of an open file, whose elements have their place at once, and no values.

    What describes them is made once a file: for each data set it takes longer than the data set.
    """

    def __init__(self, file: h5py.File) -> None:
        from h5py import h5d, h5p

        self._file, self._links = file, link_settings()
        self._plain = h5p.create(h5p.DATASET_CREATE)
        self._plain.set_layout(h5d.CONTIGUOUS)
        self._plain.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._plain.set_fill_time(h5d.FILL_TIME_NEVER)
        self._plain.set_obj_track_times(False)

    def make(self, room: Room) -> h5py.h5d.DatasetID:
        """One more."""
        from h5py import h5d, h5s

        kind, space = type_of(room.stored), h5s.create_simple((room.count,))
        made = h5d.create(self._file.id, room.dataset.encode(), kind, space, dcpl=self._plain, lcpl=self._links)
        mark_dtype(made, room.dtype)
        return made


def link_settings() -> h5py.h5p.PropLCID:
    """Names in UTF-8, with the groups above them."""
    from h5py import h5p, h5t

    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5t.CSET_UTF8)
    return links


@functools.cache
def type_of(stored: str) -> h5py.h5t.TypeID:
    """HDF5's type of a NumPy dtype."""
    from h5py import h5t

    return h5t.py_create(np.dtype(stored), logical=True)


def fill(path: Path, pieces: Sequence[Piece], offsets: Sequence[int | None]) -> list[Stored]:
    """Write the elements of ``pieces`` to their places in a file, down to the disk; what each has become.

    Args:
        offsets: where in the file, in bytes; None: they are there already.

    Raises:
        DataError: it cannot be written; names the data set that was on its way.
    """
    current: list[str] = []
    stored = []
    with failing("save", lambda: ", ".join([str(path), *current])):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        writeback = Writeback(file)
        try:
            for piece, offset in zip(pieces, offsets, strict=True):
                current[:] = [piece.dataset]
                sums = _write_blocks(file, offset, piece.values, writeback)
                count = piece.values.size
                stored.append(Stored(piece.name, piece.first, count, path.name, piece.dataset, offset, sums))
            current.clear()
            os.fsync(file)
        finally:
            os.close(file)
    return stored


def seen(path: Path, covered: Sequence[tuple[int, int]]) -> File:
    """What is known of a file, whose elements lie in the spans ``covered``, in bytes."""
    with failing("save", lambda: path):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return File(path.name, os.fstat(file).st_size, crc32_beside(file, covered))
        finally:
            os.close(file)


def mark_dtype(dataset: h5py.h5d.DatasetID, dtype: str) -> None:
    """Note what elements are whose dtype HDF5 does not have."""
    if dtype == BFLOAT16:
        import h5py

        h5py.Dataset(dataset).attrs["dtype"] = dtype


def _write_blocks(file: int, offset: int | None, values: np.ndarray, writeback: Writeback) -> list[int]:
    """Write elements to their place in an open file, nowhere without one; the checksums of their blocks."""
    flat, sums = values.view(np.uint8), []
    for first in range(0, flat.size, BLOCK_NBYTES):
        block = flat[first : first + BLOCK_NBYTES]
        sums.append(crc32(block))
        written = 0
        while offset is not None and written < block.size:
            written += os.pwrite(file, block[written:].data, offset + first + written)
        if offset is not None:
            writeback.wrote(offset + first, block.size)
    return sums


def span(stored: Stored, itemsize: int) -> tuple[int, int]:
    """Where elements begin and end in their file, in bytes; nowhere where they are compressed."""
    return (0, 0) if stored.offset is None else (stored.offset, stored.offset + stored.count * itemsize)


def crc32_beside(file: int, covered: Sequence[tuple[int, int]]) -> int:
    """The checksum of all bytes of an open file that lie in none of the spans."""
    total, at = 0, 0
    for first, last in [*sorted(covered), (os.fstat(file).st_size, 0)]:
        while at < first:
            block = os.pread(file, min(BLOCK_NBYTES, first - at), at)
            if not block:
                break
            total, at = crc32(block, total), at + len(block)
        at = max(at, last)
    return total
