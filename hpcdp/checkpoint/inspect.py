"""Reading of checkpoints without a job: lists, statistics, differences.

The elements of whole tensors, whichever files they are in: some of them, or all, piece by piece.

Names of what is in a state, as those write them who ask for it.

What the elements of a tensor are like: smallest, largest, mean, how many are no numbers. Read piece by piece.

What is in a folder, at a glance: which checkpoints, whole by their sizes or not, left-overs, who writes here.

In what two checkpoints differ: names, shapes, dtypes, elements, values. Read piece by piece, from both at once.

Verification of checkpoints, and removal of old ones.

Whether a checkpoint is what was written: every byte of every file against the manifest.

Removing checkpoints that need not be kept: never the last good one.
"""

from __future__ import annotations

import bisect
import contextlib
import difflib
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.arrays import BFLOAT16
from ..core.state import unquoted
from ..errors import ConfigError, DataError, listed, shortened
from . import directory, flatten, manifest
from .hdf5_file import PADDED, File, ShardReader, Stored, crc32_beside, failing
from .manifest import Manifest, StoredTensor

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
    yield from wrong_sizes(path, found)
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
                    yield f"{path.name}, {part.dataset}: expected {_layout_text(expected)}, got {_layout_text(got)}"
    except DataError as error:
        yield _line(error, path.parent)


def _dataset(file: Any, name: str) -> Any:
    """None where there is none of that name, be there something else."""
    import h5py

    found = file.get(name)
    return found if isinstance(found, h5py.Dataset) else None


def _layout(dataset: Any) -> tuple[Any, ...] | None:
    return None if dataset is None else (dataset.shape, dataset.dtype, dataset.id.get_offset())


def _layout_text(layout: tuple[Any, ...] | None) -> str:
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
    if is_checkpoint(path):
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
    left_over = {each: size_of(each) for each in directory.left_over(path, atomic_rename=not found)}
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
    pruning = Pruning({step: size_of(found[step]) for step in dropped}, left_over, good, damaged)
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


PIECE_NBYTES = 16 << 20


def read_elements(reader: ShardReader, tensor: StoredTensor, first: int, out: np.ndarray) -> None:
    """Fill ``out``, shape ``(count,)``, of the tensor's stored dtype, with its elements from number ``first`` on.

    Raises:
        DataError: a file is missing or damaged; names file and data set.
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
    """A new array of a tensor's shape and stored dtype. Raises what `read_elements` does."""
    array = np.empty(tensor.shape, tensor.stored_dtype)
    read_elements(reader, tensor, 0, array.reshape(-1))
    return array


def pieces(reader: ShardReader, tensor: StoredTensor) -> Iterator[np.ndarray]:
    """All elements in C order, at most `PIECE_NBYTES` at once, in memory that the next piece takes, too.

    Raises:
        DataError: a file is missing or damaged, or elements are not those that were written.
    """
    buffer = np.empty(min(tensor.count, PIECE_NBYTES // tensor.stored_dtype.itemsize), tensor.stored_dtype)
    for first in range(0, tensor.count, max(1, buffer.size)):
        piece = buffer[: min(buffer.size, tensor.count - first)]
        read_elements(reader, tensor, first, piece)
        yield piece


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """Elements as numbers that NumPy itself has: bfloat16, whose bits come as uint16, as float32, which is exact."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == BFLOAT16 else values


def remedy(form: flatten.Form, name: str) -> str | None:
    """What to say of a name that a state does not have: which is meant, the same but for quoted keys, or alike."""
    keys = (each.split("/") for each, _ in flatten.entries(form))
    known = {"/".join(prefix) for each in keys for prefix in itertools.accumulate([key] for key in each)}
    close = [each for each in known if unquoted(each) == name] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else None


@dataclass
class TensorStatistics:
    """Of the elements that are finite, if not said otherwise; of complex ones, of their absolute values."""

    count: int = 0
    """Finite ones."""
    smallest: float = float("nan")
    largest: float = float("nan")
    mean: float = float("nan")
    deviation: float = float("nan")
    """The standard deviation."""
    zeros: int = 0
    nans: int = 0
    infinities: int = 0


def statistics(
    folder: Path, tensor: StoredTensor, tell: Callable[[int], object] = lambda nbytes: None
) -> TensorStatistics:
    """The statistics of a tensor of the checkpoint in ``folder``; ``tell`` is called with bytes that have been read.

    Raises:
        DataError: a file is missing or damaged.
    """
    of = TensorStatistics()
    spread = 0.0
    with ShardReader(folder, "show") as reader, np.errstate(over="ignore", invalid="ignore"):  # a run may have diverged
        for piece in pieces(reader, tensor):
            tell(piece.nbytes)
            values = widened(piece, tensor.dtype)
            values = np.abs(values) if values.dtype.kind == "c" else values
            if values.dtype.kind == "f":
                of.nans += int(np.count_nonzero(np.isnan(values)))
                of.infinities += int(np.count_nonzero(np.isinf(values)))
                values = values[np.isfinite(values)]
            if values.size == 0:
                continue
            of.zeros += values.size - int(np.count_nonzero(values))
            of.smallest = float(np.fmin(of.smallest, values.min()))
            of.largest = float(np.fmax(of.largest, values.max()))
            mean, deviation, count = float(np.mean(values, dtype="f8")), float(np.std(values, dtype="f8")), values.size
            both = of.count + count
            away = mean - of.mean if of.count else 0.0
            spread += deviation * deviation * count + away * away * of.count * count / both
            of.mean = of.mean + away * count / both if of.count else mean
            of.count = both
    if of.count:
        of.deviation = (spread / of.count) ** 0.5
    return of


RUN_SUBFOLDER = "checkpoints"
"""Where checkpoints are in the folder of a run."""


@dataclass(frozen=True)
class Seen:
    """A checkpoint as far as its manifest and the sizes of its files tell."""

    step: int
    path: Path
    manifest: Manifest | None
    """None where it cannot be read."""
    damage: str | None
    """What is wrong, None where nothing is seen to be."""
    nbytes: int
    """Of its files."""


@dataclass(frozen=True)
class Overview:
    """What is in a folder of checkpoints."""

    path: Path
    checkpoints: list[Seen]
    """Oldest first."""
    left_over: dict[Path, int]
    """What does not count as a checkpoint, with its bytes; while `writer` is somebody, one may be being written."""
    writer: str | None
    """Who saves here now."""


def overview(path: Path) -> Overview:
    """What is in a folder of checkpoints, or of a run; of the folder of one checkpoint, that one.

    Raises:
        DataError: there is no such folder, or nothing in it.
    """
    if is_checkpoint(path):
        own = path.absolute()  # "." has a name, too
        step = directory.step_of(own) if directory.is_named(own) else manifest.read(path).step
        return Overview(path, [look_at(path, step)], {}, None)
    path = checkpoints_folder(path)
    writer = directory.holder(path / directory.NAME)  # first: what it has just completed is then no left-over
    left_over = {each: size_of(each) for each in directory.left_over(path)}
    named = {directory.step_of(each): each for each in sorted(path.iterdir(), reverse=True) if directory.is_final(each)}
    found = {step: each for step, each in named.items() if each not in left_over} | directory.find(path)
    if not (found or left_over or writer):
        raise DataError("read checkpoints", where=path, expected="checkpoints", got="none")
    seen = [look_at(found[step], step) for step in sorted(found)]
    there = [each for each in seen if os.path.lexists(each.path)]  # the job that saves here removes some
    return Overview(path, there, left_over, writer)


def look_at(path: Path, step: int) -> Seen:
    """One checkpoint; reads its manifest alone."""
    try:
        found = manifest.read(path)
    except DataError as error:
        return Seen(step, path, None, f"{manifest.NAME}: {error.got}", size_of(path))
    return Seen(step, path, found, next(wrong_sizes(path, found), None), size_of(path))


def wrong_sizes(path: Path, found: manifest.Manifest) -> Iterator[str]:
    """Which files are missing or have other sizes than the manifest says."""
    for file in found.files:
        try:
            nbytes = (path / file.name).stat().st_size
        except OSError as error:
            yield f"{file.name}: {error.strerror}"
            continue
        if nbytes != file.nbytes:
            yield f"{file.name}: expected {file.nbytes:,} bytes, got {nbytes:,}"


def size_of(path: Path) -> int:
    """Bytes of all files in a folder, as far as they are there: a job may remove it meanwhile."""
    total = 0
    for within, _, files in os.walk(path):
        for each in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(within, each)).st_size
    return total


def checkpoints_folder(path: Path) -> Path:
    """Where checkpoints are: ``path``, or its subfolder of a run.

    Raises:
        DataError: there is no such folder.
    """
    if not path.is_dir():
        got = "a file" if path.exists() else "no such folder"
        raise DataError("read checkpoints", where=path, expected="a folder of checkpoints, or of a run", got=got)
    inner = path / RUN_SUBFOLDER
    return inner if inner.is_dir() and not any(map(directory.is_named, path.iterdir())) else path


def is_checkpoint(path: Path) -> bool:
    """Whether this is the folder of one checkpoint, be it damaged."""
    return path.is_dir() and (directory.is_named(path.absolute()) or (path / manifest.NAME).exists())


def chosen(path: Path, step: int | None = None, best: str | None = None) -> Path:
    """One checkpoint.

    Args:
        path: of it; or of a folder of checkpoints, or of a run, of which it is the newest that is complete.
        step: which one of a folder, instead of the newest.
        best: that with the greatest value of this metric instead, or of ``"-metric"`` the smallest.

    Raises:
        ConfigError: ``path`` is one, and ``step`` or ``best`` says another; both are said.
        DataError: there is none, or none with that metric.
    """
    if is_checkpoint(path):
        if step is not None or best is not None:
            option = "--best" if step is None else "--step"
            raise ConfigError(option, expected="a folder of several checkpoints", got=f"{path}, which is one")
        return path
    if step is not None and best is not None:
        raise ConfigError("--best", expected="none with --step", got=best)
    inner = checkpoints_folder(path)
    found = directory.find(inner)
    if not found or (step is not None and step not in found):
        expected = "a complete checkpoint" if step is None else f"one of step {listed([*map(str, found)]) or step}"
        raise DataError("read checkpoints", where=inner, expected=expected, got="none" if step is None else step)
    if best is not None:
        step = directory.best_step("read checkpoints", inner, found, best)
    return found[max(found) if step is None else step]


@contextlib.contextmanager
def offering_another(path: Path, taken: Path) -> Iterator[None]:
    """What is found to be wrong with a checkpoint that `chosen` has ``taken`` of several names another one."""
    try:
        yield
    except DataError as error:
        if error.remedy is None and path != taken and str(error.where).startswith(str(taken)):
            found = directory.find(taken.parent)
            good = [step for step, each in found.items() if look_at(each, step).damage is None]
            other = directory.another(good, directory.step_of(taken))
            error.remedy = None if other is None else f"--step {other} takes another checkpoint"
        raise


_MOST_VALUES = 8
"""So many of one list are told one by one."""


class Difference(NamedTuple):
    """One entry of a state that is not the same."""

    name: str
    what: str
    """In words."""
    is_value: bool = False
    """Whether neither is a tensor."""


def differences(
    first: Path, second: Path, rtol: float = 0.0, atol: float = 0.0, tell: Callable[[int], object] = lambda nbytes: None
) -> Iterator[Difference]:
    """In what the states of two checkpoints differ, in the order of the first.

    Args:
        rtol, atol: numbers that are no further apart than ``atol + rtol * abs(that of the second)`` are the same. If
            both are 0 the bits of elements must be the same.
        tell: is called with the number of bytes that have been compared, of one of the two.

    Raises:
        DataError: a file is missing or damaged.
    """
    one, other = manifest.read(first), manifest.read(second)
    nodes = [dict(flatten.entries(each.state)) for each in (one, other)]
    with ShardReader(first, "diff") as a, ShardReader(second, "diff") as b:
        for name in dict.fromkeys([*nodes[0], *nodes[1]]):
            if name not in nodes[1] or name not in nodes[0]:
                place = 0 if name in nodes[0] else 1
                node = nodes[place][name]
                only = f"only in {'AB'[place]}: {_told(node, (one, other)[place])}"
                yield Difference(name, only, not _is_tensor(node))
                continue
            x, y = nodes[0][name], nodes[1][name]
            if not (_is_tensor(x) and _is_tensor(y)):
                if not _same(x, y, rtol, atol):
                    is_value = not (_is_tensor(x) or _is_tensor(y))
                    yield Difference(name, f"{_told(x, one)} and {_told(y, other)}", is_value)
                continue
            tensors = one.tensors[x["tensor"]], other.tensors[y["tensor"]]
            if tensors[0].shape != tensors[1].shape or tensors[0].dtype != tensors[1].dtype:
                yield Difference(name, f"{_told(x, one)} and {_told(y, other)}")
            else:
                what = _compared(a, b, tensors, rtol, atol, tell)
                if what is not None:
                    yield Difference(name, what)


def folded(found: Iterable[Difference]) -> Iterator[Difference]:
    """Those of many values of one list as one: the state of a random generator has hundreds."""
    for within, group in itertools.groupby(found, _list_of):
        of = list(group)
        if within is None or len(of) <= _MOST_VALUES:
            yield from of
        else:
            first = of[0].name.rpartition("/")[2]
            yield Difference(within, f"{len(of):,} values, the first is number {first}: {of[0].what}", True)


def _list_of(each: Difference) -> str | None:
    """The name of the list, or the dict of numbers, that a value is in."""
    within, _, key = each.name.rpartition("/")
    return within if each.is_value and key.isdecimal() else None


def _is_tensor(node: flatten.Form) -> bool:
    return isinstance(node, dict) and "tensor" in node


def _told(node: flatten.Form, of: manifest.Manifest) -> str:
    if _is_tensor(node):
        tensor = of.tensors[node["tensor"]]
        return f"shape {tensor.shape} {tensor.dtype}"
    return shortened(repr(flatten.value_of(node)), 40)


def _same(x: flatten.Form, y: flatten.Form, rtol: float, atol: float) -> bool:
    if _is_tensor(x) or _is_tensor(y):
        return False
    a, b = flatten.value_of(x), flatten.value_of(y)
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= atol + rtol * abs(b) < math.inf
    return type(a) is type(b) and bool(a == b)


class _Apart:
    """How far two tensors are apart, of what has been seen of them."""

    def __init__(self) -> None:
        self.count, self.absolute, self.relative = 0, 0.0, 0.0

    def add(self, x: np.ndarray, y: np.ndarray, differ: np.ndarray) -> None:
        self.count += int(np.count_nonzero(differ))
        x, y = (_as_float(each[differ]) for each in (x, y))
        with np.errstate(all="ignore"):
            delta = np.abs(x - y)
            delta[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
            delta[np.isnan(delta)] = np.inf
            largest = np.maximum(np.abs(x), np.abs(y))
            relative = np.where(delta == 0, 0, delta / largest)
            relative[np.isnan(relative)] = np.inf
        self.absolute = max(self.absolute, float(delta.max()))
        self.relative = max(self.relative, float(relative.max()))


def _as_float(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind in "iu":
        return x.astype(np.longdouble)  # whose digits are enough for 64 bits
    return x if x.dtype.kind in "fc" and x.dtype.itemsize >= 8 else x.astype(np.float64)


def _compared(
    a: ShardReader,
    b: ShardReader,
    tensors: tuple[StoredTensor, StoredTensor],
    rtol: float,
    atol: float,
    tell: Callable[[int], Any],
) -> str | None:
    apart = _Apart()
    for x, y in zip(pieces(a, tensors[0]), pieces(b, tensors[1]), strict=True):
        tell(x.nbytes)
        if np.array_equal(x.view(np.uint8), y.view(np.uint8)):
            continue
        differ = _bits_differ(x, y)
        x, y = (widened(each, tensors[0].dtype) for each in (x, y))
        if rtol or atol:
            with np.errstate(over="ignore"):
                differ &= ~np.isclose(_as_float(x), _as_float(y), rtol, atol, equal_nan=True)
        if differ.any():
            apart.add(x, y, differ)
    if not apart.count:
        return None
    told = f"{apart.count:,} of {tensors[0].count:,} elements differ"
    if not apart.absolute:
        return f"{told}, in bits alone (signs of zeros, kinds of NaN)"
    return f"{told}, by at most {apart.absolute:.3g} (relative {apart.relative:.3g})"


def _bits_differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which elements are not the same, bit by bit."""
    if x.dtype.char in PADDED:
        return (x != y) & ~(np.isnan(x) & np.isnan(y))
    bits = [each.view(np.uint8).reshape(each.size, each.itemsize) for each in (x, y)]
    return np.any(bits[0] != bits[1], axis=1)
