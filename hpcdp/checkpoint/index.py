"""One HDF5 file through which all tensors of a checkpoint are seen whole: virtual data sets over the other files.

Hyperslabs are boxes, runs of elements are not: a run that begins or ends within a row becomes several boxes.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from .manifest import Tensor
from .shard import failing, link_settings, mark_dtype, type_of

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
    with failing("save", lambda: path):
        # In memory: a file that HDF5 cannot finish, on a full disk, crashes the program when that ends.
        content = memoryview(_made(tensors, state, attributes))
        with open(path, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return len(content), crc32(content)


def _made(tensors: Mapping[str, Tensor], state: Any, attributes: Mapping[str, int | str]) -> bytes:
    import h5py  # type: ignore[import-untyped]

    name = f"index-{uuid.uuid4()}.h5"  # HDF5 wants one, and no other open file may have it
    with h5py.File(name, "w", driver="core", backing_store=False, libver=("earliest", "latest")) as file:
        for key, value in attributes.items():
            file.attrs[key] = value
        file[STATE] = json.dumps(state)
        links = link_settings()
        for key, tensor in tensors.items():
            mark_dtype(_virtual(file, key, tensor, links), tensor.dtype)
        file.flush()
        image: bytes = file.id.get_file_image()
        return image


def as_pattern(name: str) -> str:
    """How HDF5 wants the name of a data set that a virtual one shows: it puts numbers of blocks for ``%b``."""
    return name.replace("%", "%%")


def _virtual(file: Any, name: str, tensor: Tensor, links: Any) -> Any:
    from h5py import h5d, h5p, h5s  # h5py's VirtualLayout takes ten times as long

    how, space = h5p.create(h5p.DATASET_CREATE), h5s.create_simple(tensor.shape)
    for part in tensor.parts if tensor.count else ():
        where, dataset = os.fsencode(part.file), as_pattern(part.dataset).encode()
        at, source = 0, h5s.create_simple((part.count,))
        if part.count == tensor.count:
            how.set_virtual(space, where, dataset, source)
            continue
        for box in boxes(tensor.shape, part.first, part.first + part.count):
            sizes = tuple(each.stop - each.start for each in box)
            whole = h5s.create_simple(tensor.shape)
            whole.select_hyperslab(tuple(each.start for each in box), (1,) * len(box), block=sizes)
            source.select_hyperslab((at,), (1,), block=(math.prod(sizes),))
            how.set_virtual(whole, where, dataset, source)
            at += math.prod(sizes)
    return h5d.create(file.id, name.encode(), type_of(tensor.stored_dtype.str), space, dcpl=how, lcpl=links)
