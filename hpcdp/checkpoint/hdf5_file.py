"""HDF5 files of shards: planned, written, compressed, read, and verified by checksums.

Which rank writes what of a state: all of it once, the long tensors of which several have copies in equal parts.

Bringing a file to disk while it is still being written, where the system can be asked to.

One HDF5 file of a checkpoint: a data set for each run of elements, with checksums by blocks.

HDF5 lays the file out; the elements go where it has put them by plain writes, and come back by plain reads
(`shard_reader`), each block with its checksum while it is in the cache. Compressed data sets are HDF5's affair, see
`compressed`.

Compressed data sets of a shard: HDF5's affair, in chunks that it gives checksums of its own.

HDF5 must not meet an error while it writes them: it could not close the file any more, and the program would crash, at
the latest when it ends. So it writes through an object that never fails, and says afterwards what has.

Elements come back from the files of one checkpoint, each block checked, in the way that is faster here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import re
import resource
import stat
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from isal.isal_zlib import crc32

from ..core.arrays import BFLOAT16
from ..engine import Engine
from ..errors import DataError, HpcdpError
from .flatten import HeldTensor

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]


WHOLE_NBYTES = 1 << 20
"""Below so many bytes one rank writes all of a part of which several have copies: files of many slivers help nobody."""
PADDED = "gG"
"""Characters of dtypes of whose bytes some are no part of the value, and may be anything."""
_LINE_NBYTES = 64
_SAMPLES, _ENDS = 64, 256


class FilePiece(NamedTuple):
    """A run of a tensor's elements that this rank writes."""

    name: str
    first: int
    values: np.ndarray
    """Shape ``(count,)``."""
    dtype: str
    """See `Held.dtype`."""
    is_copied: bool = False
    """See `Held.is_copied`."""

    @property
    def dataset(self) -> str:
        """What the run is called in its file."""
        return self.name if self.first == 0 else f"{self.name}@{self.first}"


def own_pieces(held: Iterable[HeldTensor]) -> Iterator[FilePiece]:
    """What this rank writes of what it holds."""
    for each in held:
        for part in each.parts:
            first, last = _own_run(each, part.values.size, part.values.itemsize)
            if last > first:
                yield FilePiece(each.name, part.first + first, part.values[first:last], each.dtype, each.is_copied)


def _writer(held: HeldTensor) -> int:
    """Which copy of a short tensor is written."""
    return zlib.crc32(held.name.encode(errors="surrogatepass")) % held.copies


def _own_run(held: HeldTensor, count: int, itemsize: int) -> tuple[int, int]:
    if count * itemsize < WHOLE_NBYTES:
        return (0, count) if _writer(held) == held.copy else (0, 0)
    per_line = max(1, _LINE_NBYTES // itemsize)
    lines = -(-count // per_line)
    first, last = (lines * part // held.copies * per_line for part in (held.copy, held.copy + 1))
    return first, min(last, count)


def described(held: Iterable[HeldTensor], copies: int) -> list[str]:
    """What ranks compare before they save: a line a tensor, with a checksum of a sample where all should hold the same.

    Args:
        copies: how many ranks there are.
    """
    lines = []
    for each in held:
        line = f"{each.name} {each.shape} {each.dtype}"
        if each.copies == copies > 1 and len(each.parts) == 1 and each.stored.char not in PADDED:
            line += f" crc32 {_sample(each.parts[0].values):08x}"
        if not each.is_own:
            lines.append(line)
    return lines


def _sample(flat: np.ndarray) -> int:
    if flat.size > 4 * _ENDS:
        flat = np.concatenate([flat[:_ENDS], flat[:: flat.size // _SAMPLES], flat[-_ENDS:]])
    return zlib.crc32(np.ascontiguousarray(flat).view(np.uint8).data)


_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start writing what is not on its way yet; return without waiting for it."""
EVERY_NBYTES = 8 << 20


class Writeback:
    """Sends what has been written to a file on its way to disk, some MiB at a time; `os.fsync` is needed all the same.

    Otherwise the disk idles until the fsync, and then everything waits for it. Where a system or a file system does
    not know the call (``sync_file_range`` of Linux), nothing happens.

    Args:
        file: open for writing.
    """

    def __init__(self, file: int) -> None:
        self._file, self._start = file, _sync_file_range()
        self._first = self._last = 0

    def wrote(self, first: int, nbytes: int) -> None:
        """So many bytes have been written to the place ``first``, in bytes."""
        if first != self._last:
            self._send()
            self._first = first
        self._last = first + nbytes
        if self._last - self._first >= EVERY_NBYTES:
            self._send()

    def _send(self) -> None:
        if self._start is not None and self._last > self._first:
            self._start(self._file, self._first, self._last - self._first, _WRITE)
        self._first = self._last


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function  # type: ignore[no-any-return]


if TYPE_CHECKING:
    pass  # type: ignore[import-untyped]

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
    except HpcdpError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, OverflowError, MemoryError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else error
        told = HDF5_TOLD.search(str(got))
        if told is not None:
            got = os.strerror(int(told[1]))
        raise DataError(operation, where=where(), got=got) from error


@dataclass(frozen=True)
class DatasetSpace:
    """A data set of a file that is to be laid out."""

    dataset: str
    count: int
    stored: str
    """The NumPy dtype of its elements."""
    dtype: str
    """See `Piece.dtype`."""

    @classmethod
    def of(cls, piece: FilePiece) -> DatasetSpace:
        return cls(piece.dataset, piece.values.size, piece.values.dtype.str, piece.dtype)


def lay_out(path: Path, rooms: Sequence[DatasetSpace]) -> list[int]:
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

    def make(self, room: DatasetSpace) -> h5py.h5d.DatasetID:
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


def fill(path: Path, pieces: Sequence[FilePiece], offsets: Sequence[int | None]) -> list[Stored]:
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


COMPRESSIONS = ("gzip", "lzf")
_LANE = "compress"


def write_compressed(path: Path, pieces: Sequence[FilePiece], compression: str) -> None:
    """Make a file of compressed data sets.

    Raises:
        DataError: it cannot be written.
    """
    with failing("save", lambda: path):
        if threading.current_thread() is threading.main_thread():
            _beside_signals(lambda stop: _write(path, pieces, compression, stop))
        else:
            _write(path, pieces, compression, threading.Event())


def _beside_signals(work: Callable[[threading.Event], None]) -> None:
    """Python raises KeyboardInterrupt in the main thread: there it would come out of the object that never fails."""
    stop = threading.Event()
    with Engine(lanes=(_LANE,), synchronous=False) as engine:
        try:
            engine.push(lambda: work(stop), lane=_LANE)
            engine.waitall()
        except BaseException:
            stop.set()
            raise


def _write(path: Path, pieces: Sequence[FilePiece], compression: str, stop: threading.Event) -> None:
    """Write until something has failed, or ``stop`` is set."""
    import h5py  # type: ignore[import-untyped]
    from h5py import h5s

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        disk = Unfailing(descriptor)
        with h5py.File(disk, "w", locking=False) as file:
            for dataset, first, values in _chunks(file, pieces, compression):
                if disk.error is not None or stop.is_set():
                    break
                where = dataset.get_space()
                where.select_hyperslab((first,), values.shape)
                dataset.write(h5s.create_simple(values.shape), where, values)
        if disk.error is not None:
            raise disk.error
    finally:
        os.close(descriptor)


def _chunks(file: Any, pieces: Sequence[FilePiece], compression: str) -> Iterator[tuple[Any, int, np.ndarray]]:
    """What is to be written to an open file: data set, number of the first element, elements."""
    how: dict[str, Any] = {"compression": compression, "shuffle": True, "fletcher32": True}
    if compression == "gzip":
        how["compression_opts"] = 1
    for piece in pieces:
        values, count = piece.values, min(piece.values.size, BLOCK_NBYTES // piece.values.itemsize)
        options = how | {"chunks": (count,)} if count else {}
        dataset = file.create_dataset(piece.dataset, values.shape, values.dtype, **options).id
        mark_dtype(dataset, piece.dtype)
        for first in range(0, values.size, count or 1):
            yield dataset, first, values[first : first + count]


class Unfailing(io.RawIOBase):
    """An open file that takes all that is written: once it could not, in memory, where it is read, too.

    Args:
        descriptor: of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at = descriptor, 0
        self._beside: list[tuple[int, bytes]] = []
        self.error: OSError | None = None
        """Why not all of it is in the file."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Where the next call reads or writes; from the beginning, or the end."""
        self._at = offset + (self._end() if whence == os.SEEK_END else 0)
        return self._at

    def tell(self) -> int:
        """Where that is."""
        return self._at

    def write(self, data: Any) -> int:
        """Take all of it."""
        view, done = memoryview(data).cast("B"), 0
        try:
            while self.error is None and done < len(view):
                done += os.pwrite(self._descriptor, view[done:], self._at + done)
        except OSError as error:
            self.error = error
        if done < len(view):
            self._beside.append((self._at + done, bytes(view[done:])))
        self._at += len(view)
        return len(view)

    def readinto(self, buffer: Any) -> int:
        """Read what was written; zeros where nothing was."""
        view = memoryview(buffer).cast("B")
        got = os.preadv(self._descriptor, [view], self._at)
        view[got:] = bytes(len(view) - got)
        for at, data in self._beside:
            first, last = max(at, self._at), min(at + len(data), self._at + len(view))
            if first < last:
                view[first - self._at : last - self._at] = data[first - at : last - at]
        self._at += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Make it so long."""
        assert size is not None
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self.error = self.error or error
        return size

    def _end(self) -> int:
        return max([os.fstat(self._descriptor).st_size, *(at + len(data) for at, data in self._beside)])


_CACHED_NBYTES = 256 << 10
"""So many bytes are read to their place at once: they are still in the core's cache when they are checked."""
_TRIED = 8
"""Blocks that are read in either way, in turn, before the faster one is taken."""


class ShardReader:
    """Reads runs of elements from the files of one checkpoint, and checks them. A context.

    Thousands of ranks may have written it: of its files a quarter of what this process may have open stays open.

    Args:
        folder: of the checkpoint.
        operation: what errors say was attempted.
    """

    def __init__(self, folder: Path, operation: str = "restore") -> None:
        self._folder, self._operation = folder, operation
        self._files: dict[str, int] = {}
        self._most_open = _most_open()
        self._sound: set[str] = set()
        """Compressed files whose checksum is right."""
        self._scratch = np.empty(BLOCK_NBYTES, np.uint8)
        self._took_s: tuple[list[float], list[float]] = [], []
        """Of the first blocks, to their place and by the cache."""
        self._is_by_cache: bool | None = None
        """Which way the others go, once that is known."""

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, stored: Stored, first: int, out: np.ndarray) -> None:
        """Fill ``out``, shape ``(count,)``, with elements from number ``first`` of a run on.

        Raises:
            DataError: the file is missing or too short, or elements are not those that were written; names file and
                data set. What is damaged is 0 in ``out``.
        """
        with failing(self._operation, lambda: self._where(stored)):
            if stored.offset is None:
                self._read_compressed(stored, first, out)
                return
            flat, begin = out.view(np.uint8), first * out.itemsize
            end, total = begin + flat.size, stored.count * out.itemsize
            for number in range(begin // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
                low = number * BLOCK_NBYTES
                high = min(low + BLOCK_NBYTES, total)
                if begin <= low and high <= end:
                    self._read_block(stored, number, flat[low - begin : high - begin])
                else:  # of which a part is wanted, and the checksum is of all of it
                    block = np.empty(high - low, np.uint8)
                    self._read_block(stored, number, block)
                    at, last = max(low, begin), min(high, end)
                    flat[at - begin : last - begin] = block[at - low : last - low]

    def _where(self, stored: Stored) -> str:
        return f"{self._folder / stored.file}, {stored.dataset}"

    def _read_block(self, stored: Stored, number: int, out: np.ndarray) -> None:
        """Fill ``out`` with block ``number`` of a run, and check it; with zeros where it is damaged.

        To its place, in pieces that are checked while the core's cache has them, or to memory that stays in that cache,
        and by a copy to its place, which need not read the lines that it overwrites: it is the processor that decides
        which takes less, so the first blocks are read in both ways, in turn.
        """
        by_cache, begin_s = self._next_way(), time.perf_counter()
        try:
            place = self._scratch[: out.size] if by_cache else out
            found = self._read_and_sum(stored, number, place, BLOCK_NBYTES if by_cache else _CACHED_NBYTES)
            self._check(stored, number, found)
        except BaseException:
            out[:] = 0
            raise
        if by_cache:
            np.copyto(out, place)
        if self._is_by_cache is None and out.size == BLOCK_NBYTES:
            self._took_s[by_cache].append(time.perf_counter() - begin_s)

    def _next_way(self) -> bool:
        """Whether the next block goes by the cache."""
        to_place_s, by_cache_s = self._took_s
        if self._is_by_cache is None and len(by_cache_s) == _TRIED:
            self._is_by_cache = statistics.median(by_cache_s) < statistics.median(to_place_s)
        return len(by_cache_s) < len(to_place_s) if self._is_by_cache is None else self._is_by_cache

    def _read_and_sum(self, stored: Stored, number: int, out: np.ndarray, nbytes: int) -> int:
        """Fill ``out`` with block ``number`` of a run, ``nbytes`` at once; the checksum of what has come."""
        assert stored.offset is not None
        file, place, got, found = self._open(stored.file), stored.offset + number * BLOCK_NBYTES, 0, 0
        while got < out.size:
            piece = out[got : got + nbytes]
            count = os.preadv(file, [piece.data], place + got)
            if count == 0:
                raise DataError(
                    self._operation, where=self._where(stored), expected=f"at least {place + out.size} bytes",
                    got=f"a file of {os.fstat(file).st_size}",
                )  # fmt: skip
            found = crc32(piece[:count], found)
            got += count
        return found

    def _check(self, stored: Stored, number: int, found: int) -> None:
        """Compare the checksum of block ``number`` of a run."""
        expected = stored.crc32[number]
        if found != expected:
            raise DataError(
                self._operation, where=self._where(stored), got=f"{found:08x}",
                expected=f"checksum {expected:08x} of MiB {number}",
            )  # fmt: skip

    def _read_compressed(self, stored: Stored, first: int, out: np.ndarray) -> None:
        self._require_sound(stored)
        try:
            self._read_through_hdf5(stored, first, out)
        except HpcdpError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            said = str(error.args[0]) if len(error.args) == 1 else None
            if said is None or HDF5_TOLD.search(said):
                raise  # the system's, which says nothing of what is in the file
            raise DataError(
                self._operation, where=self._where(stored), expected="an undamaged data set",
                got=f"one of which HDF5 says: {said}",
            ) from error  # fmt: skip

    def _require_sound(self, stored: Stored) -> None:
        """Refuse a file that is not as it was written before HDF5 opens it: HDF5 may follow damage for ever."""
        file = self._open(stored.file)  # which refuses a pipe; HDF5 would wait for it
        if stored.crc32_file is None or stored.file in self._sound:
            return
        found = crc32_beside(file, ())
        if found != stored.crc32_file:
            raise DataError(
                self._operation, where=self._where(stored), got=f"{found:08x}",
                expected=f"checksum {stored.crc32_file:08x} of the file",
            )  # fmt: skip
        self._sound.add(stored.file)

    def _read_through_hdf5(self, stored: Stored, first: int, out: np.ndarray) -> None:
        import h5py  # type: ignore[import-untyped]

        with h5py.File(self._folder / stored.file, "r", locking=False) as file:
            dataset = file[stored.dataset]
            if not isinstance(dataset, h5py.Dataset) or dataset.shape != (stored.count,):
                raise ValueError(f"no data set of {stored.count} elements")
            per_block = BLOCK_NBYTES // out.itemsize
            for number in range(first // per_block, -(-(first + out.size) // per_block)):
                low = number * per_block
                block = np.ascontiguousarray(dataset[low : min(low + per_block, stored.count)])
                self._check(stored, number, crc32(block.view(np.uint8)))
                begin, end = max(low, first), min(low + block.size, first + out.size)
                out[begin - first : end - first] = block[begin - low : end - low]

    def _open(self, name: str) -> int:
        file = self._files.get(name)
        if file is None:
            file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # no waiting for a pipe
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                raise OSError("no regular file")
            if len(self._files) >= self._most_open:  # the others come before it when the next tensor is read
                os.close(self._files.popitem()[1])
            self._files[name] = file
        return file


def _most_open() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if most == resource.RLIM_INFINITY else max(1, most // 4)
