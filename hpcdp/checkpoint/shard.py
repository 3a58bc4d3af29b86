"""One HDF5 file of a checkpoint: a data set for each run of elements, with checksums by blocks.

HDF5 lays the file out; the elements go where it has put them by plain writes, and come back by plain reads, each block
with its checksum while it is in the cache. Compressed data sets are HDF5's affair altogether.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from ..errors import DataError
from .leaves import BFLOAT16
from .plan import Piece

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]

BLOCK_NBYTES = 1 << 20
"""Elements have a checksum for so many bytes: a rank that reads a part of them checks what it reads."""
COMPRESSIONS = ("gzip", "lzf")
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
        raise DataError(operation, where=where(), got=got) from error


def write_shard(path: Path, pieces: Sequence[Piece], compression: str | None = None) -> tuple[list[Stored], File]:
    """Write a new file of ``pieces``, down to the disk.

    Returns:
        What each piece has become, and what the file is.

    Raises:
        DataError: it cannot be written; names the data set that was on its way.
    """
    current: list[str] = []
    with failing("save", lambda: ", ".join([str(path), *current])):
        if compression is None:
            offsets: list[int | None] = list(lay_out(path, pieces))
        else:
            _write_compressed(path, pieces, compression)
            offsets = [None] * len(pieces)
        stored = []
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for piece, offset in zip(pieces, offsets, strict=True):
                current[:] = [piece.dataset]
                sums = write_blocks(file, offset, piece.values)
                stored.append(
                    Stored(piece.name, piece.first, piece.values.size, path.name, piece.dataset, offset, sums)
                )
            current.clear()
            whole = File(path.name, os.fstat(file).st_size, crc32_beside(file, spans(stored, pieces)))
            os.fsync(file)
        finally:
            os.close(file)
    return stored, whole


def lay_out(path: Path, pieces: Sequence[Piece]) -> list[int]:
    """Make a file of data sets without elements; where those of each piece are to go, in bytes."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(_ALIGN_FROM, _ALIGNMENT)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    plain = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plain.set_layout(h5py.h5d.CONTIGUOUS)
    plain.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    plain.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    plain.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    offsets = []
    with h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fapl=access)) as file:
        for piece in pieces:
            space = h5py.h5s.create_simple(piece.values.shape)
            kind = h5py.h5t.py_create(piece.values.dtype, logical=True)
            made = h5py.h5d.create(file.id, piece.dataset.encode(), kind, space, dcpl=plain, lcpl=links)
            mark_dtype(h5py.Dataset(made), piece.dtype)
            offsets.append(made.get_offset() if piece.values.size else 0)
    return [0 if offset is None else offset for offset in offsets]


def mark_dtype(dataset: h5py.Dataset, dtype: str) -> None:
    """Note what elements are whose dtype HDF5 does not have."""
    if dtype == BFLOAT16:
        dataset.attrs["dtype"] = dtype


def _write_compressed(path: Path, pieces: Sequence[Piece], compression: str) -> None:
    import h5py

    how: dict[str, Any] = {"compression": compression, "shuffle": True, "fletcher32": True}
    if compression == "gzip":
        how["compression_opts"] = 1
    with h5py.File(path, "x") as file:
        for piece in pieces:
            values = piece.values
            chunk = (min(values.size, BLOCK_NBYTES // values.itemsize),)
            options = how | {"chunks": chunk} if values.size else {}
            mark_dtype(file.create_dataset(piece.dataset, data=values, **options), piece.dtype)


def write_blocks(file: int, offset: int | None, values: np.ndarray) -> list[int]:
    """Write elements to their place in an open file, nowhere without one; the checksums of their blocks."""
    flat, sums = values.view(np.uint8), []
    for first in range(0, flat.size, BLOCK_NBYTES):
        block = flat[first : first + BLOCK_NBYTES]
        sums.append(crc32(block))
        written = 0
        while offset is not None and written < block.size:
            written += os.pwrite(file, block[written:].data, offset + first + written)
    return sums


def spans(stored: Sequence[Stored], pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Where elements begin and end in their file, in bytes, of pieces that are not compressed."""
    return [
        (each.offset, each.offset + piece.values.nbytes)
        for each, piece in zip(stored, pieces, strict=True)
        if each.offset is not None
    ]


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


class ShardReader:
    """Reads runs of elements from the files of one checkpoint, and checks them.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._scratch = np.empty(BLOCK_NBYTES, np.uint8)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, stored: Stored, first: int, out: np.ndarray) -> None:
        """Fill ``out``, shape ``(count,)``, with elements from number ``first`` of a run on.

        Raises:
            DataError: the file is missing, too short, or not what was written; names file and data set.
        """
        path = self._folder / stored.file
        with failing("restore", lambda: f"{path}, {stored.dataset}"):
            if stored.offset is None:
                self._read_compressed(stored, first, out)
                return
            file = self._open(stored.file)
            total, flat = stored.count * out.itemsize, out.view(np.uint8)
            begin = first * out.itemsize
            end = begin + flat.size
            for number in range(begin // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
                low, high = number * BLOCK_NBYTES, min((number + 1) * BLOCK_NBYTES, total)
                whole = begin <= low and high <= end
                block = flat[low - begin : high - begin] if whole else self._scratch[: high - low]
                self._fill(file, stored, number, block)
                if not whole:
                    wanted = max(low, begin), min(high, end)
                    flat[wanted[0] - begin : wanted[1] - begin] = block[wanted[0] - low : wanted[1] - low]

    def _fill(self, file: int, stored: Stored, number: int, block: np.ndarray) -> None:
        assert stored.offset is not None
        offset, got = stored.offset + number * BLOCK_NBYTES, 0
        while got < block.size:
            count = os.preadv(file, [block[got:].data], offset + got)
            if count == 0:
                raise DataError(
                    "restore", where=f"{self._folder / stored.file}, {stored.dataset}",
                    expected=f"{offset + block.size} bytes", got=f"a file of {os.fstat(file).st_size}",
                )  # fmt: skip
            got += count
        self._check(stored, number, block)

    def _check(self, stored: Stored, number: int, block: np.ndarray) -> None:
        found = crc32(block)
        if found != stored.crc32[number]:
            raise DataError(
                "restore", where=f"{self._folder / stored.file}, {stored.dataset}",
                expected=f"checksum {stored.crc32[number]:08x} of MiB {number}", got=f"{found:08x}",
            )  # fmt: skip

    def _read_compressed(self, stored: Stored, first: int, out: np.ndarray) -> None:
        import h5py

        with h5py.File(self._folder / stored.file, "r", locking="best-effort") as file:
            dataset = file[stored.dataset]
            if not isinstance(dataset, h5py.Dataset) or dataset.shape != (stored.count,):
                raise ValueError(f"no data set of {stored.count} elements")
            per_block = BLOCK_NBYTES // out.itemsize
            for number in range(first // per_block, -(-(first + out.size) // per_block)):
                low = number * per_block
                block = np.ascontiguousarray(dataset[low : min(low + per_block, stored.count)])
                self._check(stored, number, block.view(np.uint8))
                begin, end = max(low, first), min(low + block.size, first + out.size)
                out[begin - first : end - first] = block[begin - low : end - low]

    def _open(self, name: str) -> int:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        return file
