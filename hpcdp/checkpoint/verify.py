"""Verification of checkpoints, and removal of old ones.

Whether a checkpoint is what was written: every byte of every file against the manifest.

Removing checkpoints that need not be kept: never the last good one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, DataError
from . import directory, inspect, manifest
from .hdf5_file import File, ShardReader, Stored, crc32_beside, failing
from .inspect import PIECE_NBYTES

Tell = Callable[[int], object]
"""Is told of so many bytes more that have been looked at."""


def faults(path: Path, tell: Tell = lambda nbytes: None) -> Iterator[str]:
    """What is wrong with a checkpoint, a line each that names file and data set; nothing where it is good.

    Checks sizes, all checksums, that HDF5 finds each data set where the manifest says, that the index shows all
    tensors through files that are there, and that there are no other files.

    Args:
        path: of the checkpoint.
    """
    try:
        found = manifest.read(path)
    except DataError as error:
        yield f"{manifest.NAME}: {error.got}"
        return
    if found.commit_file and not (path / directory.COMMITTED).is_file():
        yield f"{directory.COMMITTED}: No such file, so it is not complete"
    yield from inspect.wrong_sizes(path, found)
    parts: dict[str, list[tuple[manifest.StoredTensor, Stored]]] = {file.name: [] for file in found.files}
    for tensor in found.tensors.values():
        for part in tensor.parts:
            parts[part.file].append((tensor, part))
    sound = set()
    with ShardReader(path) as reader:
        for file in found.files:
            if (path / file.name).is_file() and (yield from _file_faults(path, file, parts[file.name], reader, tell)):
                sound.add(file.name)
    yield from _index_faults(path, found, manifest.INDEX_NAME in sound)
    known = {file.name for file in found.files} | {manifest.NAME, *([directory.COMMITTED] if found.commit_file else [])}
    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
        for each in sorted(path.iterdir()):
            if each.name not in known:
                yield f"{each.name}: not a file of this checkpoint"


def _file_faults(
    path: Path, file: File, parts: list[tuple[manifest.StoredTensor, Stored]], reader: ShardReader, tell: Tell
) -> Generator[str, None, bool]:
    """Yield what is wrong; return whether HDF5 may open the file: it may follow damage for ever."""
    sound = False
    try:
        with failing("verify", lambda: file.name):
            beside = _beside(path / file.name, parts)
        sound = beside == file.crc32_beside
        if not sound:
            yield f"{file.name}: checksum of what is not elements: expected {file.crc32_beside:08x}, got {beside:08x}"
    except DataError as error:
        yield _line(error, path)
    elements = 0
    for tensor, part in sorted(parts, key=lambda each: each[1].offset or 0):
        nbytes = part.count * tensor.stored_dtype.itemsize
        elements += nbytes
        if part.offset is None and not sound:  # elements that HDF5 would have to read
            tell(nbytes)
            continue
        try:
            _read(reader, part, tensor.stored_dtype, tell)
        except DataError as error:
            yield _line(error, path)
    tell(max(0, file.nbytes - elements))
    if sound and parts:
        yield from _layout_faults(path / file.name, parts)
    return sound


def _beside(path: Path, parts: list[tuple[manifest.StoredTensor, Stored]]) -> int:
    covered = [(part.offset, part.offset + part.count * tensor.stored_dtype.itemsize)
               for tensor, part in parts if part.offset is not None]  # fmt: skip
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return crc32_beside(file, covered)
    finally:
        os.close(file)


def _read(reader: ShardReader, part: Stored, dtype: np.dtype, tell: Tell) -> None:
    """Read all elements; stops at the first that are wrong."""
    buffer = np.empty(min(part.count, PIECE_NBYTES // dtype.itemsize), dtype)
    told = 0
    try:
        for first in range(0, part.count, max(1, buffer.size)):
            piece = buffer[: min(buffer.size, part.count - first)]
            reader.read(part, first, piece)
            tell(piece.nbytes)
            told += piece.nbytes
    except DataError:
        tell(part.count * dtype.itemsize - told)
        raise


def _layout_faults(path: Path, parts: list[tuple[manifest.StoredTensor, Stored]]) -> Iterator[str]:
    """Whether those who read through HDF5 get the elements that have been checked."""
    import h5py  # type: ignore[import-untyped]

    try:
        with failing("verify", lambda: path.name), h5py.File(path, "r", locking=False) as file:
            for tensor, part in parts:
                dataset = _dataset(file, part.dataset)
                expected = (part.count,), tensor.stored_dtype, part.offset if part.count else None
                got = _layout(dataset)
                if got != expected:
                    yield f"{path.name}, {part.dataset}: expected {_told(expected)}, got {_told(got)}"
    except DataError as error:
        yield _line(error, path.parent)


def _dataset(file: Any, name: str) -> Any:
    """None where there is none of that name, be there something else."""
    import h5py

    found = file.get(name)
    return found if isinstance(found, h5py.Dataset) else None


def _layout(dataset: Any) -> tuple[Any, ...] | None:
    return None if dataset is None else (dataset.shape, dataset.dtype, dataset.id.get_offset())


def _told(layout: tuple[Any, ...] | None) -> str:
    return "no such data set" if layout is None else f"{layout[0][0]} elements of {layout[1]} at byte {layout[2]}"


def _index_faults(path: Path, found: manifest.Manifest, is_sound: bool) -> Iterator[str]:
    """HDF5 reads zeros through an index where a file or a data set is missing."""
    import h5py

    if manifest.INDEX_NAME not in {file.name for file in found.files}:
        yield f"{manifest.INDEX_NAME}: not in the manifest"
    if not is_sound:
        return  # which the sizes of files, or its checksum, have said
    try:
        with (
            failing("verify", lambda: manifest.INDEX_NAME),
            h5py.File(path / manifest.INDEX_NAME, "r", locking=False) as file,
        ):
            for name, tensor in found.tensors.items():
                found_faults = _view_faults(path, _dataset(file, name), tensor)
                yield from (f"{manifest.INDEX_NAME}, {name}: {what}" for what in found_faults)
    except DataError as error:
        yield _line(error, path)


def _view_faults(path: Path, dataset: Any, tensor: manifest.StoredTensor) -> Iterator[str]:
    if dataset is None:
        yield "no such data set"
        return
    if (dataset.shape, dataset.dtype) != (tensor.shape, tensor.stored_dtype):
        expected = f"expected shape {tensor.shape} {tensor.stored_dtype}"
        yield f"{expected}, got {dataset.shape} {dataset.dtype}"
        return
    if not tensor.count:
        return
    sources = dataset.virtual_sources() if dataset.is_virtual else []
    for name in sorted({source.file_name for source in sources}):
        if not (path / name).is_file():
            yield f"shows elements of {name}, which is not there: they read as zeros"
    pointed = {(source.file_name, source.dset_name) for source in sources}
    count = sum(source.vspace.get_select_npoints() for source in sources)
    if (
        pointed != {(part.file, manifest.as_pattern(part.dataset)) for part in tensor.parts if part.count}
        or count != tensor.count
    ):
        yield f"expected {tensor.count} elements of the manifest's files, got {count} of {len(pointed)} data sets"


def _line(error: DataError, path: Path) -> str:
    """An error as a fault: its files are those of the checkpoint."""
    where = str(error.where).removeprefix(f"{path}/")
    facts = [f"expected {error.expected}"] if error.expected is not None else []
    return " ".join(f"{where}: {', '.join([*facts, f'got {error.got}' if facts else str(error.got)])}".split())


@dataclass(frozen=True)
class Pruning:
    """What is to be removed from a folder."""

    steps: dict[int, int]
    """Bytes by step."""
    left_over: dict[Path, int]
    """Bytes by path."""
    good: int | None
    """The newest step that stays and is undamaged; None where nothing is removed."""
    damaged: dict[int, str]
    """Newer ones that stay, and the first thing that is wrong with each."""


def prune(
    path: Path,
    keep: int,
    keep_every: int | None = None,
    best: str | None = None,
    dry_run: bool = False,
    tell: Callable[[int], object] = lambda nbytes: None,
) -> Pruning:
    """Remove what `folder.dropped` says, and left-overs; holds the lock of the folder meanwhile.

    Args:
        path: of a folder of checkpoints.
        best: ``"metric"`` or ``"-metric"``, see `Manager`.
        dry_run: remove nothing.
        tell: see `verify.faults`, which is called for what stays, from the newest on, until one is good.

    Raises:
        ConfigError: ``path`` is the folder of one checkpoint, or ``best`` names no metric.
        DataError: there are no checkpoints, another job saves here, or nothing that stays is good: nothing is changed
            then. Or something cannot be removed.
    """
    if inspect.is_checkpoint(path):
        raise ConfigError("prune", where=path, expected="a folder of several checkpoints", got="that of one")
    if not (directory.find(path) or directory.left_over(path) or (path / directory.NAME).exists()):
        raise DataError("prune", where=path, expected="checkpoints", got="none")
    if dry_run:
        directory.require_free(path)
        return _remove(path, keep, keep_every, best, True, tell)
    writer = directory.WriterLock(path)
    try:
        return _remove(path, keep, keep_every, best, False, tell)
    finally:
        writer.release()


def _remove(
    path: Path, keep: int, keep_every: int | None, best: str | None, dry_run: bool, tell: Callable[[int], object]
) -> Pruning:
    found = directory.find(path)
    if best is not None and found:
        directory.best_step("prune", path, found, best)
    dropped = directory.dropped(found, keep, keep_every, directory.worth(found, best))
    # What has lost its manifest goes, too, where something good must stay.
    left_over = {each: inspect.size_of(each) for each in directory.left_over(path, atomic_rename=not found)}
    good, damaged = None, dict[int, str]()
    if dropped or left_over:
        for step in sorted(set(found) - set(dropped), reverse=True):
            wrong = next(faults(found[step], tell), None)
            if wrong is None:
                good = step
                break
            damaged[step] = wrong
        if found and good is None:
            step, wrong = next(iter(damaged.items()))
            raise DataError("prune", where=path, expected="a good checkpoint among those that stay",
                            got=f"step {step}, {wrong}", remedy=_more(found, dropped, tell))  # fmt: skip
    pruning = Pruning({step: inspect.size_of(found[step]) for step in dropped}, left_over, good, damaged)
    if not dry_run:
        with failing("prune", lambda: path):
            directory.clean(path, atomic_rename=not found)
        for step in dropped:
            with failing("prune", lambda: found[step]):  # noqa: B023
                directory.remove(directory.retire(path, step))
    return pruning


def _more(found: Mapping[int, Path], dropped: Sequence[int], tell: Callable[[int], object]) -> str:
    """How many must stay so that a good one does."""
    for step in sorted(dropped, reverse=True):
        if next(faults(found[step], tell), None) is None:
            return f"keep {sum(each >= step for each in found)}: then step {step} stays, which is good"
    return "the others are damaged, too"
