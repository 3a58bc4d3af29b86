"""The manifest of a checkpoint, and its index, an HDF5 file of virtual data sets over the shards.

The manifest is a JSON file that lists the content of the other files, and is written after them. The index shows all
tensors whole. HDF5's hyperslabs are boxes, so a run of elements that begins or ends within a row becomes several boxes.

`read_elements` reads a tensor's elements from all its files.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
import stat
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from isal.isal_zlib import crc32

from ..core.arrays import BFLOAT16
from ..errors import DataError, reason
from . import flatten
from .hdf5_file import BLOCK_NBYTES, File, ShardReader, Stored, failing, link_settings, mark_dtype, type_of

NAME = "manifest.json"
FORMAT, VERSION = "hpcdp checkpoint", 1
_FORMS = ("dict", "list", "tuple", "tensor", "ranks", "float")
_LONGEST_FILE_NAME = 255
_LONGEST_REASON = 200
_STEP = re.compile("step-([0-9]{10,18})")
_ITEMSIZES = {
    np.dtype(char).name: np.dtype(char).itemsize for char in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
}
_ITEMSIZES[BFLOAT16] = 2


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Stored, ...]
    """Runs of elements in order, which contain each element once."""

    @property
    def stored_dtype(self) -> np.dtype:
        """Dtype of the elements in the files."""
        return np.dtype(np.uint16 if self.dtype == BFLOAT16 else self.dtype)

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.count * self.stored_dtype.itemsize


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint."""

    step: int
    state: flatten.Form
    tensors: dict[str, StoredTensor]
    files: list[File]
    world: dict[str, Any] = field(default_factory=dict)
    """``size`` and ``num_nodes`` of the job that saved."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of the libraries."""
    metrics: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    written: str = ""
    """Time of the save, in ISO 8601."""
    commit_file: bool = False
    """True if the checkpoint is complete only with the file `complete_steps.COMMITTED`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to_json(self) -> bytes:
        """Return the content of the file, which ends with a checksum of itself."""
        members = {"format": FORMAT, "version": VERSION, "block_nbytes": BLOCK_NBYTES}
        members |= {name: value for name, value in vars(self).items() if name not in ("tensors", "files")}
        members["files"] = [file._asdict() for file in self.files]
        members["tensors"] = {name: _tensor_to_json(tensor) for name, tensor in self.tensors.items()}
        text = json.dumps(members, indent=None, separators=(", ", ": "), allow_nan=False)
        body = text[:-1].replace(', "tensors": {', ',\n"tensors": {', 1).encode() + b",\n"
        return body + f'"crc32": "{zlib.crc32(body):08x}"}}\n'.encode()


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    parts = []
    for part in tensor.parts:
        members = dict(vars(part))
        del members["name"], members["crc32_file"]
        parts.append(members | {"crc32": [f"{checksum:08x}" for checksum in part.crc32]})
    return {"shape": list(tensor.shape), "dtype": tensor.dtype, "parts": parts}


def join(held: Sequence[flatten.HeldTensor], stored: Sequence[Stored]) -> dict[str, StoredTensor]:
    """Join the stored runs of all ranks to tensors by name.

    Raises:
        DataError: a tensor's elements were not all stored once: parts of its `Sharded` overlap or leave some out.
    """
    parts: dict[str, list[Stored]] = {}
    for run in stored:
        parts.setdefault(run.name, []).append(run)
    tensors = {}
    for tensor in held:
        if tensor.name not in tensors:
            runs = tuple(sorted(parts.get(tensor.name, ()), key=lambda part: (part.first, part.count)))
            tensors[tensor.name] = StoredTensor(tuple(tensor.shape), tensor.dtype, runs)
            gap = _gap(tensors[tensor.name])
            if gap is not None:
                raise DataError(
                    "save", where=tensor.name, expected="each element on one rank, or on all its copies", got=gap,
                    remedy="correct `first` and `values` of the parts in its Sharded, on every rank",
                )  # fmt: skip
    return tensors


def _gap(tensor: StoredTensor) -> str | None:
    """Describe missing or repeated elements among a tensor's parts; None without any."""
    at = 0
    for part in tensor.parts:
        if part.first > at:
            return f"elements {at} to {part.first - 1} of {tensor.count} missing"
        if part.first < at:
            return f"elements {part.first} to {min(at, part.first + part.count) - 1} of {tensor.count} twice"
        at += part.count
    if at > tensor.count:
        return f"{at} elements of {tensor.count}"
    return None if at == tensor.count else f"elements {at} to {tensor.count - 1} of {tensor.count} missing"


def read(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        DataError: it is missing, damaged, of another format, or of another step than the folder's name.
    """
    return of_folder(content_of(folder), folder)


def of_folder(content: bytes, folder: Path) -> Manifest:
    """As `read`, from the result of `content_of`."""
    parsed = parse(content, folder / NAME)
    named = _STEP.match(os.path.basename(os.path.abspath(folder)))  # absolute, because the folder may be "."
    if named is not None and int(named[1]) != parsed.step:
        got = f"step {parsed.step} in a folder of step {int(named[1])}"
        raise DataError("read the checkpoint", where=folder / NAME, got=got)
    return parsed


def content_of(folder: Path) -> bytes:
    """Return the bytes of the manifest of a checkpoint.

    Raises:
        DataError: it is missing, or not a regular file, reading which might not end.
    """
    path = folder / NAME
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
    except OSError as error:
        raise DataError("read the checkpoint", where=path, expected="a file", got=reason(error)) from error
    raise DataError("read the checkpoint", where=path, expected="a file", got="a folder, pipe or device")


def parse(content: bytes, where: object) -> Manifest:
    """Parse the content of a manifest's file.

    Raises:
        DataError: it is damaged, or of another format; the error names ``where``.
    """
    body, _, line = content.rpartition(b'"crc32": "')
    if not body or f'{zlib.crc32(body):08x}"}}\n'.encode() != line:
        expected = "an undamaged manifest"
        raise DataError("read the checkpoint", where=where, expected=expected, got="a checksum that does not fit")
    try:
        members = json.loads(content, parse_constant=_refuse_constant)
        if members["format"] != FORMAT or members["version"] != VERSION or members["block_nbytes"] != BLOCK_NBYTES:
            raise ValueError(f"format {members['format']!r}, version {members['version']!r}")
        return _built(members)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        expected = f"a manifest of format version {VERSION}"
        got = str(error)[:_LONGEST_REASON]
        raise DataError("read the checkpoint", where=where, expected=expected, got=got) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _built(members: Mapping[str, Any]) -> Manifest:
    files = [File(_name(entry["name"]), _count(entry["nbytes"]), _count(entry["crc32_beside"]))
             for entry in members["files"]]  # fmt: skip
    known = {file.name: file for file in files}
    tensors = {name: _built_tensor(name, entry, known) for name, entry in members["tensors"].items()}
    _check_form(members["state"], tensors, 0)
    for name, kind in (("world", dict), ("versions", dict), ("metrics", dict), ("config", dict), ("written", str),
                       ("commit_file", bool)):  # fmt: skip
        if type(members[name]) is not kind:
            raise ValueError(f"{name}: {members[name]!r}")
    for name, kinds in (("versions", (str,)), ("metrics", (int, float))):
        if any(type(value) not in kinds for value in members[name].values()):
            raise ValueError(f"{name}: {members[name]!r}")
    return Manifest(
        _count(members["step"]), members["state"], tensors, files, members["world"], members["versions"],
        members["metrics"], members["config"], members["written"], members["commit_file"],
    )  # fmt: skip


def _built_tensor(name: str, members: Mapping[str, Any], files: Mapping[str, File]) -> StoredTensor:
    dtype = members["dtype"]
    if dtype not in _ITEMSIZES:
        raise ValueError(f"dtype {dtype!r} of {name}")
    shape = tuple(_count(size) for size in members["shape"])
    itemsize = _ITEMSIZES[dtype]
    if len(shape) > flatten.MOST_AXES or math.prod(max(1, size) for size in shape) * itemsize >= 1 << 63:
        raise ValueError(f"shape {str(shape)[:60]} of {name}")
    parts = []
    for run in members["parts"]:
        offset = None if run["offset"] is None else _count(run["offset"])
        sums = [int(text, 16) for text in run["crc32"]]
        if run["file"] not in files or type(run["dataset"]) is not str:
            raise ValueError(f"file {run['file']!r} of {name}")
        file, first, count = files[run["file"]], _count(run["first"]), _count(run["count"])
        crc32_file = file.crc32_beside if offset is None else None
        part = Stored(name, first, count, file.name, run["dataset"], offset, sums, crc32_file)
        if len(sums) != -(-part.count * itemsize // BLOCK_NBYTES):
            raise ValueError(f"{len(sums)} checksums of {part.count} elements of {name}")
        if offset is not None and offset + part.count * itemsize > file.nbytes:
            raise ValueError(f"elements of {name} behind the end of {part.file}")
        parts.append(part)
    tensor = StoredTensor(shape, dtype, tuple(parts))
    gap = _gap(tensor)
    if gap is not None:
        raise ValueError(f"{name}: {gap}")
    return tensor


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} where a number was expected")
    return value


def _name(value: Any) -> str:
    if type(value) is not str or os.path.basename(value) != value or value in ("", ".", ".."):
        raise ValueError(f"file name {value!r}")
    if "\0" in value or not flatten.is_utf8(value) or len(value.encode()) > _LONGEST_FILE_NAME:
        raise ValueError(f"file name {value!r}")
    return value


def _check_form(form: Any, tensors: Mapping[str, StoredTensor], depth: int) -> None:
    if depth > flatten.DEEPEST:
        raise ValueError("a state nested too deeply")
    if form is None or isinstance(form, bool | int | float | str):
        return
    if not isinstance(form, dict) or not form or next(iter(form)) not in _FORMS:
        raise ValueError(f"{str(form)[:60]} in the state")
    (tag, content), *more = form.items()
    if tag == "tensor":
        if content not in tensors or any(name != "kind" or type(kind) is not str for name, kind in more):
            raise ValueError(f"no tensor {str(form)[:60]}")
    elif more:
        raise ValueError(f"{str(form)[:60]} in the state")
    elif tag == "float":
        if content not in ("nan", "inf", "-inf"):
            raise ValueError(f"float {content!r}")
    else:
        if type(content) is not list:
            raise ValueError(f"{tag} {str(content)[:60]}")
        for node in content:
            if tag == "dict":
                key, node = node
                if type(key) not in (str, int):
                    raise ValueError(f"key {key!r}")
            _check_form(node, tensors, depth + 1)


def check_config(config: object) -> None:
    """Raise TypeError, ValueError or RecursionError unless ``config`` is a dict that JSON represents exactly."""
    if not isinstance(config, Mapping):
        raise TypeError(f"{config!r}")
    json.dumps(dict(config), allow_nan=False)
    _check_keys(config)


def _check_keys(value: object) -> None:
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise TypeError(f"the key {odd[0]!r}")
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        _check_keys(item)


INDEX_NAME = "index.h5"
STATE = "%state"
"""Name of the data set of the state's form, which no tensor has, see `flatten.quoted`."""


def boxes(shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[slice, ...]]:
    """Yield the boxes of a tensor that contain its elements ``first`` to ``last - 1`` in C order, in that order."""
    if first >= last:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    begin, end = -(-first // row), last // row
    if begin > end:  # within one row
        for inner in boxes(shape[1:], first - end * row, last - end * row):
            yield (slice(end, end + 1), *inner)
        return
    for inner in boxes(shape[1:], first - (begin - 1) * row, row) if first < begin * row else ():
        yield (slice(begin - 1, begin), *inner)
    if begin < end:
        yield (slice(begin, end), *(slice(0, size) for size in shape[1:]))
    for inner in boxes(shape[1:], 0, last - end * row) if end * row < last else ():
        yield (slice(end, end + 1), *inner)


def write(
    path: Path, tensors: Mapping[str, StoredTensor], state: Any, attributes: Mapping[str, int | str]
) -> tuple[int, int]:
    """Write the index to disk, and return its size in bytes and its checksum.

    Args:
        path: the new file.
        tensors: the tensors by name.
        state: the form of the state, see `flatten`, which has all values.
        attributes: attributes of the root group.

    Raises:
        DataError: the file cannot be written.
    """
    with failing("save", lambda: path):
        # In memory, because a file that HDF5 cannot finish on a full disk crashes the program at its end.
        content = _index_image(tensors, state, attributes)
        write_file(path, content)
        return len(content), crc32(content)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file to disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _index_image(tensors: Mapping[str, StoredTensor], state: Any, attributes: Mapping[str, int | str]) -> bytes:
    import h5py  # type: ignore[import-untyped]

    name = f"index-{uuid.uuid4()}.h5"  # HDF5 requires a name that no other open file has
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
    """Return a source data set's name with ``%`` escaped, because HDF5 replaces ``%b`` by block numbers."""
    return name.replace("%", "%%")


def _virtual(file: Any, name: str, tensor: StoredTensor, links: Any) -> Any:
    from h5py import h5d, h5p, h5s  # the low-level API: h5py's VirtualLayout takes ten times as long

    how, space = h5p.create(h5p.DATASET_CREATE), h5s.create_simple(tensor.shape)
    for part in tensor.parts if tensor.count else ():
        where, dataset = os.fsencode(part.file), as_pattern(part.dataset).encode()
        at, source = 0, h5s.create_simple((part.count,))
        if part.count == tensor.count:
            how.set_virtual(space, where, dataset, source)
            continue
        for box in boxes(tensor.shape, part.first, part.first + part.count):
            sizes = tuple(axis.stop - axis.start for axis in box)
            whole = h5s.create_simple(tensor.shape)
            whole.select_hyperslab(tuple(axis.start for axis in box), (1,) * len(box), block=sizes)
            source.select_hyperslab((at,), (1,), block=(math.prod(sizes),))
            how.set_virtual(whole, where, dataset, source)
            at += math.prod(sizes)
    return h5d.create(file.id, name.encode(), type_of(tensor.stored_dtype.str), space, dcpl=how, lcpl=links)


def read_elements(reader: ShardReader, tensor: StoredTensor, first: int, out: np.ndarray) -> None:
    """Fill ``out``, shape ``(count,)``, of the tensor's stored dtype, with its elements from number ``first`` on.

    Raises:
        DataError: a file is missing or damaged; the error names file and data set.
    """
    last = first + out.size
    holds_first = bisect.bisect_right(tensor.parts, first, key=lambda part: part.first) - 1
    for number in range(max(0, holds_first), len(tensor.parts)):
        part = tensor.parts[number]
        if part.first >= last:
            break
        begin, end = max(first, part.first), min(last, part.first + part.count)
        if begin < end:
            reader.read(part, begin - part.first, out[begin - first : end - first])


def read_whole(reader: ShardReader, tensor: StoredTensor) -> np.ndarray:
    """Return a new array of a tensor's shape and stored dtype; raises as `read_elements`."""
    array = np.empty(tensor.shape, tensor.stored_dtype)
    read_elements(reader, tensor, 0, array.reshape(-1))
    return array


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return elements as numbers of NumPy: bfloat16, whose bits are uint16, becomes float32, which is exact."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16 else values
