"""Compressed data sets of a shard: HDF5's affair, in chunks that it gives checksums of its own.

HDF5 must not meet an error while it writes them: it could not close the file any more, and the program would crash, at
the latest when it ends. So it writes through an object that never fails, and says afterwards what has.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from .plan import Piece
from .shard import BLOCK_NBYTES, failing, mark_dtype

COMPRESSIONS = ("gzip", "lzf")


def write_compressed(path: Path, pieces: Sequence[Piece], compression: str) -> None:
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
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work, stop)
        try:
            done.result()
        except BaseException:
            stop.set()
            raise


def _write(path: Path, pieces: Sequence[Piece], compression: str, stop: threading.Event) -> None:
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


def _chunks(file: Any, pieces: Sequence[Piece], compression: str) -> Iterator[tuple[Any, int, np.ndarray]]:
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
