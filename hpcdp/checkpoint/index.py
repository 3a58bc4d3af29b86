"""One HDF5 file through which all tensors of a checkpoint are seen whole: virtual data sets over the other files.

Hyperslabs are boxes, runs of elements are not: a run that begins or ends within a row becomes several boxes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .manifest import Tensor
from .shard import crc32_beside, failing, mark_dtype

NAME = "index.h5"
STATE = "%state"
"""The data set of what is no tensor; no tensor has such a name, see `tree.quoted`."""


def boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[slice, ...]]:
    """The boxes of a tensor that hold its elements ``first`` to ``last - 1`` in C order, in that order."""
    if first >= last:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row
    if begin > end:  # within one row
        for rest in boxes(shape[1:], first - end * row, last - end * row):
            yield (slice(end, end + 1), *rest)
        return
    for rest in boxes(shape[1:], first - (begin - 1) * row, row) if first < begin * row else ():
        yield (slice(begin - 1, begin), *rest)
    if begin < end:
        yield (slice(begin, end), *(slice(0, size) for size in shape[1:]))
    for rest in boxes(shape[1:], 0, last - end * row) if end * row < last else ():
        yield (slice(end, end + 1), *rest)


def write(
    path: Path, tensors: Mapping[str, Tensor], state: Any, attributes: Mapping[str, int | str]
) -> tuple[int, int]:
    """Write the index, down to the disk; its size in bytes, and its checksum.

    Args:
        state: the form of the state, see `tree`, which has all that is no tensor.
        attributes: of the root.

    Raises:
        DataError: it cannot be written.
    """
    import h5py  # type: ignore[import-untyped]

    with failing("save", lambda: path):
        with h5py.File(path, "x", libver=("v110", "latest")) as file:
            for name, value in attributes.items():
                file.attrs[name] = value
            file[STATE] = json.dumps(state)
            for name, tensor in tensors.items():
                mark_dtype(_virtual(file, name, tensor), tensor.dtype)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            return os.fstat(descriptor).st_size, crc32_beside(descriptor, ())
        finally:
            os.close(descriptor)


def as_pattern(name: str) -> str:
    """How HDF5 wants the name of a data set that a virtual one shows: it puts numbers of blocks for ``%b``."""
    return name.replace("%", "%%")


def _virtual(file: Any, name: str, tensor: Tensor) -> Any:
    from h5py import Dataset, h5d, h5p, h5s, h5t  # h5py's VirtualLayout takes ten times as long

    links, how = h5p.create(h5p.LINK_CREATE), h5p.create(h5p.DATASET_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5t.CSET_UTF8)
    for part in tensor.parts if tensor.count else ():
        at, source = 0, h5s.create_simple((part.count,))
        dataset = as_pattern(part.dataset).encode()
        for box in boxes(tensor.shape, part.first, part.first + part.count):
            sizes = tuple(each.stop - each.start for each in box)
            whole = h5s.create_simple(tensor.shape)
            if box:
                whole.select_hyperslab(tuple(each.start for each in box), (1,) * len(box), block=sizes)
            source.select_hyperslab((at,), (1,), block=(math.prod(sizes),))
            how.set_virtual(whole, os.fsencode(part.file), dataset, source)
            at += math.prod(sizes)
    space, kind = h5s.create_simple(tensor.shape), h5t.py_create(tensor.stored_dtype, logical=True)
    return Dataset(h5d.create(file.id, name.encode(), kind, space, dcpl=how, lcpl=links))
