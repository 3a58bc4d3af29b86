"""Floor 3: data, the idx format of MNIST and Fashion-MNIST. Imports: errors.

The format (LeCun, Cortes and Burges, "The MNIST database", section "The IDX file format"): two zero bytes, a type code,
the number of dimensions, each dimension as a big-endian uint32, then the values, big-endian, last axis fastest.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..errors import DataError

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 32
# The largest factor by which deflate can shrink data (zlib's technical notes, "Maximum Compression Factor").
_MAX_INFLATION = 1032


def read_idx(path: str | Path) -> np.ndarray:
    """The array in an idx file, plain or compressed by gzip (told by the content, not by the name).

    Returns:
        An array of the file's shape, in the machine's byte order: uint8, int8, int16, int32, float32 or float64.

    Raises:
        DataError: the file is missing, no idx file, truncated, longer than its header says, or damaged. Nothing is
            allocated for dimensions that the file cannot hold.
    """
    path = Path(path)
    try:
        with open(path, "rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            nbytes = os.fstat(raw.fileno()).st_size
            if compressed:
                with gzip.GzipFile(fileobj=raw) as stream:
                    return _read(stream, path, nbytes * _MAX_INFLATION, exact=False)  # type: ignore[arg-type]
            return _read(raw, path, nbytes, exact=True)
    except FileNotFoundError as error:
        raise DataError("read idx", where=path, expected="a file", got="none") from error
    except (EOFError, zlib.error, OSError, MemoryError) as error:
        raise DataError("read idx", where=path, expected="an undamaged file", got=error) from error


def _read(stream: BinaryIO, path: Path, max_nbytes: int, exact: bool) -> np.ndarray:
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] not in _TYPES or not 1 <= start[3] <= _MAX_DIMS:
        codes = ", ".join(f"{code:02x}" for code in _TYPES)
        raise DataError(
            "read idx",
            where=path,
            expected=f"a header 00 00, a type of {codes}, 1 to {_MAX_DIMS} dimensions",
            got=start.hex(" ") or "an empty file",
        )
    header = stream.read(4 * start[3])
    if len(header) < 4 * start[3]:
        raise DataError("read idx", where=path, expected=f"{start[3]} dimensions", got="a truncated header")
    shape = struct.unpack(f">{start[3]}I", header)
    dtype = np.dtype(_TYPES[start[2]])
    nbytes = math.prod(shape) * dtype.itemsize
    total = 4 + len(header) + nbytes
    if total > max_nbytes or (exact and total < max_nbytes):
        size = f"{max_nbytes} bytes" if exact else f"at most {max_nbytes} bytes"
        raise DataError("read idx", where=path, expected=f"{total} bytes for shape {shape} of {dtype.name}", got=size)
    if math.prod(max(length, 1) for length in shape) * dtype.itemsize > np.iinfo(np.intp).max:
        raise DataError("read idx", where=path, expected="a shape that fits the address space", got=shape)
    values = np.empty(nbytes, np.uint8)
    filled = 0
    while filled < nbytes and (count := stream.readinto(memoryview(values)[filled:])):  # type: ignore[attr-defined, arg-type]
        filled += count
    if filled < nbytes or stream.read(1):
        got = f"{filled} bytes" if filled < nbytes else "more"
        raise DataError("read idx", where=path, expected=f"{nbytes} bytes of values", got=got)
    return values.view(dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
