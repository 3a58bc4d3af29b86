"""HDF5 files of checkpoints: which rank writes which elements; writing, compressing and reading with checksums.

`core.hdf5` reads and writes those of data sets and exported models.

- `own_pieces`: each element is written once. Ranks with copies of a long tensor write equal parts of it.
- `lay_out`, `fill`: HDF5 lays out a data set for each run of elements, and plain writes fill it, with a checksum for
  each block while it is in the cache. `Writeback` starts the transfer to disk early.
- `write_compressed`: HDF5 writes compressed data sets in chunks with its own checksums. It must not get a write error:
  it could not close the file then, and the program would crash, at the latest at its end. So it writes to an
  `Unfailing` file, which reports an error afterwards.
- `ShardReader`: plain reads of elements, with a check of each block.
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
from ..errors import DataError, HpcdpError, reason
from .flatten import HeldTensor

if TYPE_CHECKING:
    import h5py  # type: ignore[import-untyped]


WHOLE_NBYTES = 1 << 20
"""Least bytes of a part that ranks with copies split among them, because many small data sets are slow."""
PADDED = "gG"
"""Characters of dtypes with padding bytes, whose content is undefined."""
_LINE_NBYTES = 64
_SAMPLES, _ENDS = 64, 256


class FilePiece(NamedTuple):
    """A run of a tensor's elements that this rank writes."""

    name: str
    first: int
    values: np.ndarray
    """Elements, shape ``(count,)``."""
    dtype: str
    """See `HeldTensor.dtype`."""
    is_copied: bool = False
    """See `HeldTensor.is_copied`."""

    @property
    def dataset(self) -> str:
        """Name of the run's data set in its file."""
        return self.name if self.first == 0 else f"{self.name}@{self.first}"


def own_pieces(held: Iterable[HeldTensor]) -> Iterator[FilePiece]:
    """Yield the runs of this rank's tensors that this rank writes."""
    for tensor in held:
        for part in tensor.parts:
            first, last = _own_run(tensor, part.values.size, part.values.itemsize)
            if last > first:
                values = part.values[first:last]
                yield FilePiece(tensor.name, part.first + first, values, tensor.dtype, tensor.is_copied)


def _writer(held: HeldTensor) -> int:
    """Return the copy of a short tensor that is written."""
    return zlib.crc32(held.name.encode(errors="surrogatepass")) % held.copies


def _own_run(held: HeldTensor, count: int, itemsize: int) -> tuple[int, int]:
    if count * itemsize < WHOLE_NBYTES:
        return (0, count) if _writer(held) == held.copy else (0, 0)
    per_line = max(1, _LINE_NBYTES // itemsize)
    lines = -(-count // per_line)
    first, last = (lines * part // held.copies * per_line for part in (held.copy, held.copy + 1))
    return first, min(last, count)


def described(held: Iterable[HeldTensor], copies: int) -> list[str]:
    """Return a line for each tensor, which ranks compare before a save.

    It has a checksum of a sample of elements if all ``copies`` ranks should hold the same.
    """
    lines = []
    for tensor in held:
        line = f"{tensor.name} {tensor.shape} {tensor.dtype}"
        if tensor.copies == copies > 1 and len(tensor.parts) == 1 and tensor.stored.char not in PADDED:
            line += f" crc32 {_sample(tensor.parts[0].values):08x}"
        if not tensor.is_own:
            lines.append(line)
    return lines


def _sample(flat: np.ndarray) -> int:
    if flat.size > 4 * _ENDS:
        flat = np.concatenate([flat[:_ENDS], flat[:: flat.size // _SAMPLES], flat[-_ENDS:]])
    return zlib.crc32(np.ascontiguousarray(flat).view(np.uint8).data)


_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start writing dirty pages, without waiting."""
EVERY_NBYTES = 8 << 20


class Writeback:
    """The early transfer of a file's written bytes to disk, every few MiB; `os.fsync` is still needed.

    Otherwise the disk idles until the fsync, which then takes longer. Without Linux's ``sync_file_range``, nothing
    happens.

    Args:
        file: a descriptor that is open for writing.
    """

    def __init__(self, file: int) -> None:
        self._file, self._start = file, _sync_file_range()
        self._first = self._last = 0

    def wrote(self, first: int, nbytes: int) -> None:
        """Note that ``nbytes`` were written at byte ``first``."""
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


BLOCK_NBYTES = 1 << 20
"""Bytes of elements with one checksum, so that a rank can check the part that it reads."""
HDF5_ERRNO = re.compile("errno = ([0-9]+), error message = ")
"""Pattern of the system's error in a message of HDF5, which also has file names, addresses and the time."""
_ALIGN_FROM, _ALIGNMENT = 64 << 10, 4096


@dataclass(frozen=True)
class Stored:
    """A run of a tensor's elements in a file."""

    name: str
    """Name of the tensor."""
    first: int
    """Number of the first element in the whole tensor."""
    count: int
    file: str
    dataset: str
    offset: int | None
    """First byte in the file; None for compressed elements."""
    crc32: list[int]
    """Checksums of each `BLOCK_NBYTES` of the elements."""
    crc32_file: int | None = None
    """Checksum of a compressed file from the manifest; None before there is one."""


class File(NamedTuple):
    """A file of a checkpoint."""

    name: str
    nbytes: int
    crc32_beside: int
    """Checksum of all bytes that are not elements, which HDF5 itself reads."""


@contextlib.contextmanager
def failing(operation: str, where: Callable[[], object]) -> Iterator[None]:
    """Raise errors of the file system in this context as a `DataError` that names the place."""
    try:
        yield
    except HpcdpError:
        raise
    except (OSError, RuntimeError, ValueError, KeyError, OverflowError, MemoryError) as error:
        got = reason(error) if isinstance(error, OSError) else error
        errno = HDF5_ERRNO.search(str(got))
        if errno is not None:
            got = reason(OSError(int(errno[1]), os.strerror(int(errno[1]))))
        raise DataError(operation, where=where(), got=got) from error


@dataclass(frozen=True)
class DatasetSpace:
    """The layout of a data set."""

    dataset: str
    count: int
    stored: str
    """NumPy dtype of the stored elements."""
    dtype: str
    """See `HeldTensor.dtype`."""

    @classmethod
    def of(cls, piece: FilePiece) -> DatasetSpace:
        """Return the layout of a run of elements."""
        return cls(piece.dataset, piece.values.size, piece.values.dtype.str, piece.dtype)


def lay_out(path: Path, spaces: Sequence[DatasetSpace]) -> list[int]:
    """Make a file of data sets without elements, and return the first byte of each data set's elements.

    Raises:
        DataError: the file cannot be written.
    """
    with failing("save", lambda: path), new_file(path) as file:
        maker = Maker(file)
        return [place_of(maker.make(space)) for space in spaces]


def place_of(dataset: h5py.h5d.DatasetID) -> int:
    """Return the first byte of a contiguous data set's elements in its file; 0 without elements."""
    offset = dataset.get_offset()
    return 0 if offset is None else int(offset)


def new_file(path: Path, comm: Any = None) -> h5py.File:
    """Open a new HDF5 file, which the ranks of an MPI communicator share, if it is given; they must all call."""
    import h5py

    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_alignment(_ALIGN_FROM, _ALIGNMENT)
    access.set_file_locking(False, True)  # the folder is locked, and some file systems do not support HDF5's locks
    if comm is None:
        access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    else:
        access.set_fapl_mpio(comm, comm.info)
    return h5py.File(h5py.h5f.create(os.fsencode(path), h5py.h5f.ACC_EXCL, fapl=access))


class Maker:
    """A maker of contiguous data sets without values in an open file, whose elements are allocated at once.

    It makes HDF5's property lists once for each file, because they take longer than a data set.
    """

    def __init__(self, file: h5py.File) -> None:
        from h5py import h5d, h5p

        self._file, self._links = file, link_settings()
        self._plain = h5p.create(h5p.DATASET_CREATE)
        self._plain.set_layout(h5d.CONTIGUOUS)
        self._plain.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._plain.set_fill_time(h5d.FILL_TIME_NEVER)
        self._plain.set_obj_track_times(False)

    def make(self, space: DatasetSpace) -> h5py.h5d.DatasetID:
        """Make a data set."""
        from h5py import h5d, h5s

        kind, extent = type_of(space.stored), h5s.create_simple((space.count,))
        made = h5d.create(self._file.id, space.dataset.encode(), kind, extent, dcpl=self._plain, lcpl=self._links)
        mark_dtype(made, space.dtype)
        return made


def link_settings() -> h5py.h5p.PropLCID:
    """Return link properties with names in UTF-8, which make the groups of a name."""
    from h5py import h5p, h5t

    links = h5p.create(h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5t.CSET_UTF8)
    return links


@functools.cache
def type_of(stored: str) -> h5py.h5t.TypeID:
    """Return HDF5's type of a NumPy dtype."""
    from h5py import h5t

    return h5t.py_create(np.dtype(stored), logical=True)


def fill(path: Path, pieces: Sequence[FilePiece], offsets: Sequence[int | None]) -> list[Stored]:
    """Write the elements of ``pieces`` to a file and to disk, and return the stored runs.

    Args:
        path: the file.
        pieces: the runs of elements.
        offsets: the first byte of each run; None: the elements are in the file already.

    Raises:
        DataError: the file cannot be written; the error names the data set.
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
    """Return the entry of a file whose elements are in the spans ``covered``, in bytes."""
    with failing("save", lambda: path):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return File(path.name, os.fstat(file).st_size, crc32_beside(file, covered))
        finally:
            os.close(file)


def mark_dtype(dataset: h5py.h5d.DatasetID, dtype: str) -> None:
    """Set the attribute ``dtype`` of a data set for bfloat16, which HDF5 does not have."""
    if dtype == BFLOAT16:
        import h5py

        h5py.Dataset(dataset).attrs["dtype"] = dtype


def _write_blocks(file: int, offset: int | None, values: np.ndarray, writeback: Writeback) -> list[int]:
    """Write elements at a byte of an open file, if it is given, and return the checksums of their blocks."""
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
    """Return the bytes in the file at which elements begin and end; (0, 0) for compressed ones."""
    return (0, 0) if stored.offset is None else (stored.offset, stored.offset + stored.count * itemsize)


def crc32_beside(file: int, covered: Sequence[tuple[int, int]]) -> int:
    """Return the checksum of all bytes of an open file outside of the spans."""
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
    """Write a file of compressed data sets.

    Raises:
        DataError: the file cannot be written.
    """
    with failing("save", lambda: path):
        if threading.current_thread() is threading.main_thread():
            _beside_signals(lambda stop: _write(path, pieces, compression, stop))
        else:
            _write(path, pieces, compression, threading.Event())


def _beside_signals(work: Callable[[threading.Event], None]) -> None:
    """Run ``work`` in another thread, because a KeyboardInterrupt in the main thread would reach HDF5."""
    stop = threading.Event()
    with Engine(lanes=(_LANE,), synchronous=False) as engine:
        try:
            engine.push(lambda: work(stop), lane=_LANE)
            engine.waitall()
        except BaseException:
            stop.set()
            raise


def _write(path: Path, pieces: Sequence[FilePiece], compression: str, stop: threading.Event) -> None:
    """Write until an error, or until ``stop`` is set."""
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
    """Make data sets in an open file, and yield each with the number of a chunk's first element, and the chunk."""
    filters: dict[str, Any] = {"compression": compression, "shuffle": True, "fletcher32": True}
    if compression == "gzip":
        filters["compression_opts"] = 1
    for piece in pieces:
        values, count = piece.values, min(piece.values.size, BLOCK_NBYTES // piece.values.itemsize)
        options = filters | {"chunks": (count,)} if count else {}
        dataset = file.create_dataset(piece.dataset, values.shape, values.dtype, **options).id
        mark_dtype(dataset, piece.dtype)
        for first in range(0, values.size, count or 1):
            yield dataset, first, values[first : first + count]


class Unfailing(io.RawIOBase):
    """An open file that accepts all writes: after an error they go to memory, and are read from there.

    Args:
        descriptor: the descriptor of the file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._at = descriptor, 0
        self._beside: list[tuple[int, bytes]] = []
        self.error: OSError | None = None
        """The first error of a write to the file."""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position, from the beginning or the end of the file."""
        self._at = offset + (self._end() if whence == os.SEEK_END else 0)
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def write(self, data: Any) -> int:
        """Write all of ``data``, and return its number of bytes."""
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
        """Fill ``buffer`` with written bytes, and zeros where none were written."""
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
        """Set the length of the file."""
        assert size is not None
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            self.error = self.error or error
        return size

    def _end(self) -> int:
        return max([os.fstat(self._descriptor).st_size, *(at + len(data) for at, data in self._beside)])


_CACHED_NBYTES = 256 << 10
"""Bytes of one direct read, which are still in the core's cache when they are checked."""
_TRIED = 8
"""Blocks that are read in either way, in turn, before the faster way is chosen."""


class ShardReader:
    """A reader of elements from the files of one checkpoint, with checks; a context manager.

    Thousands of ranks may have written the files, of which it keeps at most a quarter of the process's limit open.

    Args:
        folder: the folder of the checkpoint.
        operation: the operation that errors name.
    """

    def __init__(self, folder: Path, operation: str = "restore") -> None:
        self._folder, self._operation = folder, operation
        self._files: dict[str, int] = {}
        self._most_open = _most_open()
        self._sound: set[str] = set()
        """Compressed files with a correct checksum."""
        self._scratch = np.empty(BLOCK_NBYTES, np.uint8)
        self._took_s: tuple[list[float], list[float]] = [], []
        """Seconds of the first blocks, direct and by the scratch buffer."""
        self._is_by_cache: bool | None = None
        """True if further blocks are read by the scratch buffer; None before that is decided."""

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(self, stored: Stored, first: int, out: np.ndarray) -> None:
        """Fill ``out``, shape ``(count,)``, with elements of a run from number ``first`` on.

        Raises:
            DataError: the file is missing or too short, or elements are damaged, which are 0 in ``out`` then. The error
                names file and data set.
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
                else:  # a part of the block: read all of it, for the checksum
                    block = np.empty(high - low, np.uint8)
                    self._read_block(stored, number, block)
                    at, last = max(low, begin), min(high, end)
                    flat[at - begin : last - begin] = block[at - low : last - low]

    def _where(self, stored: Stored) -> str:
        return f"{self._folder / stored.file}, {stored.dataset}"

    def _read_block(self, stored: Stored, number: int, out: np.ndarray) -> None:
        """Fill ``out`` with block ``number`` of a run, and check it; a damaged block becomes zeros.

        The block is read directly, in pieces that are checked while they are in the core's cache, or to a scratch
        buffer that stays in that cache, and copied, which need not read the lines that it overwrites. The faster way
        depends on the processor, so the first blocks are read in both ways, in turn.
        """
        by_cache, begin_s = self._next_way(), time.perf_counter()
        try:
            place = self._scratch[: out.size] if by_cache else out
            checksum = self._read_and_sum(stored, number, place, BLOCK_NBYTES if by_cache else _CACHED_NBYTES)
            self._check(stored, number, checksum)
        except BaseException:
            out[:] = 0
            raise
        if by_cache:
            np.copyto(out, place)
        if self._is_by_cache is None and out.size == BLOCK_NBYTES:
            self._took_s[by_cache].append(time.perf_counter() - begin_s)

    def _next_way(self) -> bool:
        """Return whether the next block is read by the scratch buffer."""
        to_place_s, by_cache_s = self._took_s
        if self._is_by_cache is None and len(by_cache_s) == _TRIED:
            self._is_by_cache = statistics.median(by_cache_s) < statistics.median(to_place_s)
        return len(by_cache_s) < len(to_place_s) if self._is_by_cache is None else self._is_by_cache

    def _read_and_sum(self, stored: Stored, number: int, out: np.ndarray, nbytes: int) -> int:
        """Fill ``out`` with block ``number`` of a run, ``nbytes`` at once, and return its checksum."""
        assert stored.offset is not None
        file, place, got, checksum = self._open(stored.file), stored.offset + number * BLOCK_NBYTES, 0, 0
        while got < out.size:
            piece = out[got : got + nbytes]
            count = os.preadv(file, [piece.data], place + got)
            if count == 0:
                raise DataError(
                    self._operation, where=self._where(stored), expected=f"at least {place + out.size} bytes",
                    got=f"a file of {os.fstat(file).st_size}",
                )  # fmt: skip
            checksum = crc32(piece[:count], checksum)
            got += count
        return checksum

    def _check(self, stored: Stored, number: int, checksum: int) -> None:
        """Raise `DataError` unless ``checksum`` is that of block ``number`` of a run."""
        expected = stored.crc32[number]
        if checksum != expected:
            raise DataError(
                self._operation, where=self._where(stored), got=f"{checksum:08x}",
                expected=f"checksum {expected:08x} of MiB {number}",
            )  # fmt: skip

    def _read_compressed(self, stored: Stored, first: int, out: np.ndarray) -> None:
        self._require_sound(stored)
        try:
            self._read_through_hdf5(stored, first, out)
        except HpcdpError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            text = str(error.args[0]) if len(error.args) == 1 else None
            if text is None or HDF5_ERRNO.search(text):
                raise  # an error of the system, not of the file's content
            raise DataError(
                self._operation, where=self._where(stored), expected="an undamaged data set",
                got=f"an error of HDF5: {text}",
            ) from error  # fmt: skip

    def _require_sound(self, stored: Stored) -> None:
        """Check a file's checksum before HDF5 opens it, because damage may send HDF5 into an endless loop."""
        file = self._open(stored.file)  # refuses a pipe, for which HDF5 would wait
        if stored.crc32_file is None or stored.file in self._sound:
            return
        checksum = crc32_beside(file, ())
        if checksum != stored.crc32_file:
            raise DataError(
                self._operation, where=self._where(stored), got=f"{checksum:08x}",
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
            file = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # do not wait for a pipe
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                raise OSError("no regular file")
            if len(self._files) >= self._most_open:  # close the last one: the next tensor needs the others first
                os.close(self._files.popitem()[1])
            self._files[name] = file
        return file


def _most_open() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if most == resource.RLIM_INFINITY else max(1, most // 4)
