"""Bringing a file to disk while it is still being written, where the system can be asked to."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

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
