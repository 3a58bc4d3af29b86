"""Elements come back from the files of one checkpoint, each block checked, in the way that is faster here."""

from __future__ import annotations

import os
import resource
import stat
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from ..errors import DataError
from .shard import BLOCK_NBYTES, HDF5_TOLD, Stored, crc32_beside, failing

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
