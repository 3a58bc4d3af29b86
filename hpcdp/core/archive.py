"""NumPy archives with a header, written whole or not at all, read without pickles.

A .npz file of named arrays, and one entry more that is text: the header in JSON. It names those that are the bits of
bfloat16, which NumPy's files have not.
"""

from __future__ import annotations

import json
import math
import os
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .arrays import BFLOAT16, bits, is_bfloat16, of_bits
from .files import replaced

# NumPy parses an array's header with ast, whose count of its depth the threads of a process share in CPython 3.11
# (python/cpython#106905): two that read at once may end with a SystemError.
_reading = threading.Lock()
_READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def write(operation: str, path: Path, name: str, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write ``arrays`` and a ``header`` called ``name`` to a file that replaces ``path`` when it is complete.

    Raises:
        DataError: it cannot be written; what was there stays.
    """
    of_16_bits = [each for each, array in arrays.items() if is_bfloat16(array)]
    text = json.dumps({**header, BFLOAT16: of_16_bits} if of_16_bits else header)
    kept = {each: bits(array) for each, array in arrays.items()}
    try:
        with replaced(path) as part, open(part, "wb") as file:
            np.savez(file, **{name: np.array(text)}, **kept)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DataError(operation, where=path, expected="a file that can be written", got=error) from error


def read(
    operation: str, path: Path, name: str, fields: Mapping[str, type], writer: str
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header called ``name``, an object that has ``fields`` of these types, and the arrays of a file.

    Raises:
        DataError: it is missing, damaged, or none of ``writer``'s.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # who opens a FIFO waits for a writer
            raise ValueError("no regular file")
        with _reading, open(path, "rb") as opened:
            if not zipfile.is_zipfile(opened):
                raise ValueError("a file of another kind")
            opened.seek(0)
            with np.load(opened, allow_pickle=False) as file:
                _require_as_written(file.zip, os.fstat(opened.fileno()).st_size)
                header = json.loads(str(file[name][()]))
                of_16_bits = header.pop(BFLOAT16, ()) if isinstance(header, dict) else ()
                names = [each for each in file.files if each != name]
                arrays = {each: of_bits(file[each], BFLOAT16 if each in of_16_bits else "") for each in names}
        if not all(type(header[field]) is kind for field, kind in fields.items()):
            raise ValueError(f"the header {header!r}")
    except Exception as error:  # of a damaged file zipfile, ast, tokenize, json and NumPy raise a dozen kinds
        got = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DataError(operation, where=path, expected=f"a file of {writer}", got=got) from error
    return header, arrays


def _require_as_written(file: zipfile.ZipFile, nbytes: int) -> None:
    """Raise ValueError unless arrays have as many bytes as their headers say, none compressed: memory for them is
    allocated before they are read.

    Args:
        nbytes: of the whole file.
    """
    members = file.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in members):
        raise ValueError("compressed arrays")
    if sum(each.file_size for each in members) > nbytes:
        raise ValueError(f"arrays of more bytes than the {nbytes} of the file")
    for each in members:
        with file.open(each) as stream:
            try:  # what NumPy says advises to read files of others with allow_pickle=True
                shape, _, dtype = _READ_HEADER[np.lib.format.read_magic(stream)](stream)
            except Exception as error:
                raise ValueError(f"a damaged NumPy header of {each.filename!r}") from error
            if dtype.hasobject or min(shape, default=0) < 0:
                raise ValueError(f"{each.filename!r} of shape {shape} and dtype {dtype}")
            expected, found = math.prod(shape) * dtype.itemsize, each.file_size - stream.tell()
            if expected != found:
                raise ValueError(f"{found} bytes for {each.filename!r} of shape {shape} and dtype {dtype}")
