"""Commands on checkpoints in one process: verify, prune, show, compare and export.

- `faults`: a check of every byte of every file against the manifest.
- `prune`: removal of checkpoints that need not be kept, but never of the last good one.
- `statistics`: smallest, largest and mean element of a tensor, and numbers of NaN and infinities.
- `differences`: names, shapes, dtypes, elements and values that differ between two checkpoints.
- `export`: tensors as files of other programs: NumPy's .npz, and safetensors. `hpcdp.torch.checkpoint_adapters` writes
  PyTorch's own format. States of single ranks, such as random generators, are left out.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.state import unquoted
from ..errors import ConfigError, DataError, HpcdpError, listed, reason, shortened
from . import complete_steps, flatten, manifest
from .complete_steps import WriterLock
from .hdf5_file import PADDED, File, ShardReader, Stored, crc32_beside, failing
from .manifest import Manifest, StoredTensor, read_elements, read_whole, widened

Tell = Callable[[int], object]
"""A function that is called with numbers of bytes that were processed, for a progress bar."""


def faults(path: Path, tell: Tell = lambda nbytes: None) -> Iterator[str]:
    """Yield a line for each fault of a checkpoint, which names file and data set.

    Checks sizes, all checksums, that HDF5 finds each data set at the manifest's place, that the index shows all tensors
    through existing files, and that there are no other files.

    Args:
        path: the folder of the checkpoint.
        tell: see `Tell`.
    """
    try:
        saved = manifest.read(path)
    except DataError as error:
        yield f"{manifest.NAME}: {error.got}"
        return
    if saved.commit_file and not (path / complete_steps.COMMITTED).is_file():
        yield f"{complete_steps.COMMITTED}: no such file, so it is not complete"
    yield from complete_steps.wrong_sizes(path, saved)
    parts: dict[str, list[tuple[StoredTensor, Stored]]] = {file.name: [] for file in saved.files}
    for tensor in saved.tensors.values():
        for part in tensor.parts:
            parts[part.file].append((tensor, part))
    sound = set()
    with ShardReader(path) as reader:
        for file in saved.files:
            if (path / file.name).is_file() and (yield from _file_faults(path, file, parts[file.name], reader, tell)):
                sound.add(file.name)
    yield from _index_faults(path, saved, manifest.INDEX_NAME in sound)
    known = {file.name for file in saved.files} | {
        manifest.NAME,
        *([complete_steps.COMMITTED] if saved.commit_file else []),
    }
    with contextlib.suppress(FileNotFoundError):  # the folder was removed meanwhile
        for present in sorted(path.iterdir()):
            if present.name not in known:
                yield f"{present.name}: not a file of this checkpoint"


def _file_faults(
    path: Path, file: File, parts: list[tuple[StoredTensor, Stored]], reader: ShardReader, tell: Tell
) -> Generator[str, None, bool]:
    """Yield faults, and return whether HDF5 may open the file, which damage may send into an endless loop."""
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
    for tensor, part in sorted(parts, key=lambda run: run[1].offset or 0):
        nbytes = part.count * tensor.stored_dtype.itemsize
        elements += nbytes
        if part.offset is None and not sound:  # compressed elements, which HDF5 would have to read
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


def _beside(path: Path, parts: list[tuple[StoredTensor, Stored]]) -> int:
    covered = [(part.offset, part.offset + part.count * tensor.stored_dtype.itemsize)
               for tensor, part in parts if part.offset is not None]  # fmt: skip
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return crc32_beside(file, covered)
    finally:
        os.close(file)


def _read(reader: ShardReader, part: Stored, dtype: np.dtype, tell: Tell) -> None:
    """Read all elements, up to the first damaged ones."""
    buffer = np.empty(min(part.count, PIECE_NBYTES // dtype.itemsize), dtype)
    done = 0
    try:
        for first in range(0, part.count, max(1, buffer.size)):
            piece = buffer[: min(buffer.size, part.count - first)]
            reader.read(part, first, piece)
            tell(piece.nbytes)
            done += piece.nbytes
    except DataError:
        tell(part.count * dtype.itemsize - done)
        raise


def _layout_faults(path: Path, parts: list[tuple[StoredTensor, Stored]]) -> Iterator[str]:
    """Yield data sets in which HDF5 finds other elements than those that were checked."""
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
    """Return a data set by name; None if there is none, or something else."""
    import h5py

    dataset = file.get(name)
    return dataset if isinstance(dataset, h5py.Dataset) else None


def _layout(dataset: Any) -> tuple[Any, ...] | None:
    return None if dataset is None else (dataset.shape, dataset.dtype, dataset.id.get_offset())


def _layout_text(layout: tuple[Any, ...] | None) -> str:
    return "no such data set" if layout is None else f"{layout[0][0]} elements of {layout[1]} at byte {layout[2]}"


def _index_faults(path: Path, saved: Manifest, is_sound: bool) -> Iterator[str]:
    """Yield faults of the index, through which HDF5 reads zeros from a missing file or data set."""
    import h5py

    if manifest.INDEX_NAME not in {file.name for file in saved.files}:
        yield f"{manifest.INDEX_NAME}: not in the manifest"
    if not is_sound:
        return  # its size or checksum was reported
    try:
        with (
            failing("verify", lambda: manifest.INDEX_NAME),
            h5py.File(path / manifest.INDEX_NAME, "r", locking=False) as file,
        ):
            for name, tensor in saved.tensors.items():
                for fault in _view_faults(path, _dataset(file, name), tensor):
                    yield f"{manifest.INDEX_NAME}, {name}: {fault}"
    except DataError as error:
        yield _line(error, path)


def _view_faults(path: Path, dataset: Any, tensor: StoredTensor) -> Iterator[str]:
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
    """Return an error as the line of a fault, with file names relative to the checkpoint."""
    where = str(error.where).removeprefix(f"{path}/")
    facts = [f"expected {error.expected}"] if error.expected is not None else []
    return " ".join(f"{where}: {', '.join([*facts, f'got {error.got}' if facts else str(error.got)])}".split())


@dataclass(frozen=True)
class Pruning:
    """The result of `prune`."""

    steps: dict[int, int]
    """Bytes of removed checkpoints by step."""
    left_over: dict[Path, int]
    """Bytes of removed left-overs by path."""
    good: int | None
    """Newest undamaged step that stays; None if nothing is removed."""
    damaged: dict[int, str]
    """First fault of each newer step, by step."""


def prune(
    path: Path,
    keep: int,
    keep_every: int | None = None,
    best: str | None = None,
    dry_run: bool = False,
    tell: Callable[[int], object] = lambda nbytes: None,
) -> Pruning:
    """Remove the checkpoints of `complete_steps.dropped`, and left-overs, under the lock of the folder.

    Args:
        path: a folder of checkpoints.
        keep: see `Manager`.
        keep_every: see `Manager`.
        best: ``"metric"`` or ``"-metric"``, see `Manager`.
        dry_run: remove nothing.
        tell: see `faults`, which checks the checkpoints that stay, from the newest on, until one is good.

    Raises:
        ConfigError: ``path`` is the folder of one checkpoint, or ``best`` is not a metric.
        DataError: there are no checkpoints, another job saves here, or no checkpoint that stays is good; nothing is
            changed then. Or a file cannot be removed.
    """
    if complete_steps.is_checkpoint(path):
        raise ConfigError("prune", where=path, expected="a folder of several checkpoints", got="the folder of one")
    if not (complete_steps.find(path) or complete_steps.left_over(path) or (path / complete_steps.NAME).exists()):
        raise DataError("prune", where=path, expected="checkpoints", got="none")
    if dry_run:
        complete_steps.require_free(path)
        return _remove(path, keep, keep_every, best, True, tell)
    writer = complete_steps.WriterLock(path)
    try:
        return _remove(path, keep, keep_every, best, False, tell)
    finally:
        writer.release()


def _remove(
    path: Path, keep: int, keep_every: int | None, best: str | None, dry_run: bool, tell: Callable[[int], object]
) -> Pruning:
    saved = complete_steps.find(path)
    if best is not None and saved:
        complete_steps.best_step("prune", path, saved, best)
    dropped = complete_steps.dropped(saved, keep, keep_every, complete_steps.worth(saved, best))
    # Folders without a manifest are removed, too, if a good checkpoint stays.
    left_over = {
        folder: complete_steps.size_of(folder) for folder in complete_steps.left_over(path, atomic_rename=not saved)
    }
    good, damaged = None, dict[int, str]()
    if dropped or left_over:
        for step in sorted(set(saved) - set(dropped), reverse=True):
            fault = next(faults(saved[step], tell), None)
            if fault is None:
                good = step
                break
            damaged[step] = fault
        if saved and good is None:
            step, fault = next(iter(damaged.items()))
            raise DataError("prune", where=path, expected="a good checkpoint among those that stay",
                            got=f"step {step}, {fault}", remedy=_larger_keep(saved, dropped, tell))  # fmt: skip
    pruning = Pruning({step: complete_steps.size_of(saved[step]) for step in dropped}, left_over, good, damaged)
    if not dry_run:
        with failing("prune", lambda: path):
            complete_steps.clean(path, atomic_rename=not saved)
        for step in dropped:
            with failing("prune", lambda: saved[step]):  # noqa: B023
                complete_steps.remove(complete_steps.retire(path, step))
    return pruning


def _larger_keep(saved: Mapping[int, Path], dropped: Sequence[int], tell: Callable[[int], object]) -> str:
    """Return the remedy with the least ``keep`` that includes a good checkpoint."""
    for step in sorted(dropped, reverse=True):
        if next(faults(saved[step], tell), None) is None:
            return f"keep {sum(other >= step for other in saved)}: then step {step} stays, which is good"
    return "the others are damaged, too"


PIECE_NBYTES = 16 << 20


def pieces(reader: ShardReader, tensor: StoredTensor) -> Iterator[np.ndarray]:
    """Yield all elements in C order, at most `PIECE_NBYTES` at once, in a buffer that the next piece overwrites.

    Raises:
        DataError: a file is missing or damaged.
    """
    buffer = np.empty(min(tensor.count, PIECE_NBYTES // tensor.stored_dtype.itemsize), tensor.stored_dtype)
    for first in range(0, tensor.count, max(1, buffer.size)):
        piece = buffer[: min(buffer.size, tensor.count - first)]
        read_elements(reader, tensor, first, piece)
        yield piece


def no_such_name(operation: str, form: flatten.Form, name: str, where: str | None = None) -> ConfigError:
    """Return the error for a name that a state does not have; its remedy offers a similar one, or one in quotes."""
    tops = sorted({entry.partition("/")[0] for entry, _ in flatten.entries(form)})
    expected = f"a name of the state, which has {listed(tops)}"
    return ConfigError(operation, where=where, expected=expected, got=repr(name), remedy=_similar(form, name))


def _similar(form: flatten.Form, name: str) -> str | None:
    paths = (entry.split("/") for entry, _ in flatten.entries(form))
    known = {"/".join(prefix) for keys in paths for prefix in itertools.accumulate([key] for key in keys)}
    close = [other for other in known if unquoted(other) == name] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else None


@dataclass
class TensorStatistics:
    """The statistics of a tensor's finite elements, or of the absolute values of complex ones."""

    count: int = 0
    """Number of finite elements."""
    smallest: float = float("nan")
    largest: float = float("nan")
    mean: float = float("nan")
    deviation: float = float("nan")
    """Standard deviation."""
    zeros: int = 0
    nans: int = 0
    infinities: int = 0


def statistics(
    folder: Path, tensor: StoredTensor, tell: Callable[[int], object] = lambda nbytes: None
) -> TensorStatistics:
    """Compute the statistics of a tensor of the checkpoint in ``folder``, piece by piece; ``tell``: see `Tell`.

    Raises:
        DataError: a file is missing or damaged.
    """
    of = TensorStatistics()
    spread = 0.0
    with ShardReader(folder, "show") as reader, np.errstate(over="ignore", invalid="ignore"):  # elements may be huge
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


_MOST_VALUES = 8
"""Most values of one list that are shown one by one."""


class Difference(NamedTuple):
    """An entry that differs between two states."""

    name: str
    what: str
    """The difference in words."""
    is_value: bool = False
    """True if neither entry is a tensor."""


def differences(
    first: Path, second: Path, rtol: float = 0.0, atol: float = 0.0, tell: Callable[[int], object] = lambda nbytes: None
) -> Iterator[Difference]:
    """Yield the entries that differ between two checkpoints, in the order of the first.

    Args:
        first: the folder of a checkpoint.
        second: the folder of another checkpoint.
        rtol: numbers are equal if they differ by at most ``atol + rtol * abs(second)``.
        atol: see ``rtol``; if both are 0, the bits of elements must be equal.
        tell: called with the numbers of bytes that were compared, of one of the two.

    Raises:
        DataError: a file is missing or damaged.
    """
    one, other = manifest.read(first), manifest.read(second)
    nodes = [dict(flatten.entries(saved.state)) for saved in (one, other)]
    with ShardReader(first, "diff") as a, ShardReader(second, "diff") as b:
        for name in dict.fromkeys([*nodes[0], *nodes[1]]):
            if name not in nodes[1] or name not in nodes[0]:
                place = 0 if name in nodes[0] else 1
                node = nodes[place][name]
                only = f"only in {'AB'[place]}: {_described(node, (one, other)[place])}"
                yield Difference(name, only, not _is_tensor(node))
                continue
            x, y = nodes[0][name], nodes[1][name]
            if not (_is_tensor(x) and _is_tensor(y)):
                if not _same(x, y, rtol, atol):
                    is_value = not (_is_tensor(x) or _is_tensor(y))
                    yield Difference(name, f"{_described(x, one)} and {_described(y, other)}", is_value)
                continue
            tensors = one.tensors[x["tensor"]], other.tensors[y["tensor"]]
            if tensors[0].shape != tensors[1].shape or tensors[0].dtype != tensors[1].dtype:
                yield Difference(name, f"{_described(x, one)} and {_described(y, other)}")
            else:
                what = _compared(a, b, tensors, rtol, atol, tell)
                if what is not None:
                    yield Difference(name, what)


def folded(items: Iterable[Difference]) -> Iterator[Difference]:
    """Join many differences in one list, such as the state of a random generator, to one."""
    for within, group in itertools.groupby(items, _list_of):
        of = list(group)
        if within is None or len(of) <= _MOST_VALUES:
            yield from of
        else:
            first = of[0].name.rpartition("/")[2]
            yield Difference(within, f"{len(of):,} values, the first is number {first}: {of[0].what}", True)


def _list_of(difference: Difference) -> str | None:
    """Return the name of the list, or the dict with numbers as keys, of a value."""
    within, _, key = difference.name.rpartition("/")
    return within if difference.is_value and key.isdecimal() else None


def _is_tensor(node: flatten.Form) -> bool:
    return isinstance(node, dict) and "tensor" in node


def _described(node: flatten.Form, of: Manifest) -> str:
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


class _DifferenceTally:
    """The number and greatest size of the differences between two tensors so far."""

    def __init__(self) -> None:
        self.count, self.absolute, self.relative = 0, 0.0, 0.0

    def add(self, x: np.ndarray, y: np.ndarray, differ: np.ndarray) -> None:
        self.count += int(np.count_nonzero(differ))
        x, y = (_as_float(values[differ]) for values in (x, y))
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
        return x.astype(np.longdouble)  # has enough digits for 64-bit integers
    return x if x.dtype.kind in "fc" and x.dtype.itemsize >= 8 else x.astype(np.float64)


def _compared(
    a: ShardReader,
    b: ShardReader,
    tensors: tuple[StoredTensor, StoredTensor],
    rtol: float,
    atol: float,
    tell: Callable[[int], Any],
) -> str | None:
    apart = _DifferenceTally()
    for x, y in zip(pieces(a, tensors[0]), pieces(b, tensors[1]), strict=True):
        tell(x.nbytes)
        if np.array_equal(x.view(np.uint8), y.view(np.uint8)):
            continue
        differ = _bits_differ(x, y)
        x, y = (widened(piece, tensors[0].dtype) for piece in (x, y))
        if rtol or atol:
            with np.errstate(over="ignore"):
                differ &= ~np.isclose(_as_float(x), _as_float(y), rtol, atol, equal_nan=True)
        if differ.any():
            apart.add(x, y, differ)
    if not apart.count:
        return None
    counts = f"{apart.count:,} of {tensors[0].count:,} elements differ"
    if not apart.absolute:
        return f"{counts}, in bits alone (signs of zeros, kinds of NaN)"
    return f"{counts}, by at most {apart.absolute:.3g} (relative {apart.relative:.3g})"


def _bits_differ(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return a mask of the elements that differ in a bit."""
    if x.dtype.char in PADDED:
        return (x != y) & ~(np.isnan(x) & np.isnan(y))
    bits = [values.view(np.uint8).reshape(values.size, values.itemsize) for values in (x, y)]
    return np.any(bits[0] != bits[1], axis=1)


Writer = Callable[["ExportSelection", Path, Tell], None]
"""A function that writes the chosen tensors to a new file."""


@dataclass(frozen=True)
class ExportSelection:
    """The part of a checkpoint to export."""

    folder: Path
    step: int
    form: flatten.Form
    """Form of the state, without entries per rank."""
    tensors: dict[str, StoredTensor]
    """Tensors by their names in the export."""
    manifest: Manifest
    others: list[str]
    """Names of entries that are not tensors."""
    per_rank: list[str]
    """Names of entries per rank, which are left out."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def choose_tensors(folder: Path, prefix: str = "") -> ExportSelection:
    """Choose the tensors to export from the checkpoint in a folder.

    Args:
        folder: the folder of the checkpoint.
        prefix: export only entries below this name, which is removed from their names; "" exports all.

    Raises:
        ConfigError: there is no such name.
        DataError: the manifest is damaged.
    """
    saved = manifest.read(folder)
    prefix = prefix.strip("/")
    form = saved.state if not prefix else flatten.below(saved.state, prefix)
    if form is None:
        raise no_such_name("export", saved.state, prefix, where="--name")
    per_rank = [name for name, node in flatten.leaves(form, prefix) if isinstance(node, dict) and "ranks" in node]
    form = flatten.without_ranks(form)
    tensors: dict[str, StoredTensor] = {}
    others = []
    for name, node in flatten.leaves(form):
        if isinstance(node, dict) and "tensor" in node:
            new = unquoted(name or prefix.rpartition("/")[2] or "state")
            if new in tensors:
                raise ConfigError("export", expected="names that differ", got=f"{new!r} twice")
            tensors[new] = saved.tensors[node["tensor"]]
        else:
            others.append(name)
    if not tensors:
        raise ConfigError("export", where=f"--name {prefix}" if prefix else folder, expected="tensors", got="none")
    return ExportSelection(folder, saved.step, form, tensors, saved, others, per_rank)


def export(
    chosen: ExportSelection, path: Path, writer: Writer, overwrite: bool = False, tell: Tell = lambda nbytes: None
) -> int:
    """Write a temporary file, rename it to ``path`` when it is complete, and return its bytes.

    Raises:
        ConfigError: the file exists, and not ``overwrite``; it would be in a checkpoint; its format does not support
            a name or dtype.
        DataError: a file cannot be read or written, or another export writes this one; an old file is unchanged.
    """
    if path.is_symlink():  # replace the link's target
        path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():  # a device, too, which the rename would replace
        got = "a folder" if path.is_dir() else "something that is not a regular file"
        raise ConfigError("export", where=path, expected="a new file", got=got)
    if path.exists() and not overwrite:
        raise _exists(path)
    if complete_steps.is_checkpoint(path.absolute().parent):
        raise ConfigError(
            "export", where=path, expected="a path outside of checkpoints", got="a path inside a checkpoint"
        )
    try:
        with _folder_beside(path) as own:
            if path.exists() and not overwrite:  # made meanwhile
                raise _exists(path)
            partial = own / path.name
            with open(partial, "wb") as file:
                mode = os.fstat(file.fileno()).st_mode
            writer(chosen, partial, tell)
            with open(partial, "rb") as file:
                os.fchmod(file.fileno(), mode)  # that of the umask, which some writers ignore
                os.fsync(file.fileno())
            os.replace(partial, path)
    except HpcdpError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise DataError("export", where=path, expected="a file that can be written", got=why) from error
    return path.stat().st_size


def _exists(path: Path) -> ConfigError:
    return ConfigError("export", where=path, expected="a new file", got="a file that exists",
                       remedy="pass --overwrite to replace it")  # fmt: skip


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Make and lock a temporary folder beside ``path``, and remove it at the end.

    Files of a killed export are removed.

    Raises:
        DataError: another export holds the lock, and is named; or a file has the folder's name.
    """
    folder = path.with_name(path.name + ".part")
    if folder.exists() and not folder.is_dir():
        raise DataError("export", where=folder, expected="a folder, or nothing", got="a file", remedy="move it away")
    folder.mkdir(exist_ok=True)
    own = WriterLock(folder, "export")
    try:
        for left in folder.iterdir():
            if left.name != complete_steps.NAME:
                left.unlink()
        own.require_held()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        own.release()


def write_npz(chosen: ExportSelection, path: Path, tell: Tell) -> None:
    """Write a file as NumPy's `savez`, piece by piece, with bfloat16 as float32, because NumPy does not have it.

    Raises:
        ConfigError: a name has a NUL, which an archive's names cannot.
    """
    odd = next((name for name in chosen.tensors if "\0" in name), None)
    if odd is not None:
        raise ConfigError("export", where=repr(odd), expected="names without NUL, for an archive",
                          got="a name with NUL", remedy="pass --format safetensors or --format pt")  # fmt: skip
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive, ShardReader(chosen.folder, "export") as reader:
        for name, tensor in chosen.tensors.items():
            dtype = widened(np.empty(0, tensor.stored_dtype), tensor.dtype).dtype
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tensor.shape}
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for piece in pieces(reader, tensor):
                    file.write(widened(piece, tensor.dtype).view(np.uint8).data)
                    tell(piece.nbytes)


_SAFETENSORS_DTYPES = {
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64",
}  # fmt: skip

_SAFETENSORS_OWN = "__metadata__"


def write_safetensors(chosen: ExportSelection, path: Path, tell: Tell) -> None:
    """Write a file by the package safetensors, for which all elements must fit in memory.

    Raises:
        ConfigError: the package is missing, or the format does not support a dtype or name.
        OSError: the file cannot be written.
    """
    try:
        import safetensors
    except ImportError as error:
        raise ConfigError(
            "export", expected="the package safetensors", got=f"{error}", remedy="pip install 'hpcdp[safetensors]'"
        ) from error
    odd = next((name for name, tensor in chosen.tensors.items() if tensor.dtype not in _SAFETENSORS_DTYPES), None)
    if odd is not None:
        raise ConfigError("export", where=odd, expected="a dtype that safetensors supports",
                          got=chosen.tensors[odd].dtype, remedy="pass --format npz")  # fmt: skip
    if _SAFETENSORS_OWN in chosen.tensors:
        raise ConfigError("export", where=_SAFETENSORS_OWN, expected="names that safetensors does not reserve",
                          got="that of its metadata", remedy="pass --format npz or --format pt")  # fmt: skip
    arrays = dict(read_tensors(chosen.folder, chosen.tensors, tell))
    specs = {name: safetensors.TensorSpec(dtype=chosen.tensors[name].dtype, shape=list(array.shape),
                                          data_ptr=array.ctypes.data, data_len=array.nbytes)
             for name, array in arrays.items()}  # fmt: skip
    try:
        safetensors.serialize_file(specs, path, {"format": "pt", "step": json.dumps(chosen.step)})
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from error  # `export` reports it with the final path


def read_tensors(folder: Path, tensors: Mapping[str, StoredTensor], tell: Tell) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor's name and a new array of its stored dtype.

    Raises:
        DataError: a file is missing or damaged.
    """
    with ShardReader(folder, "export") as reader:
        for name, tensor in tensors.items():
            yield name, read_whole(reader, tensor)
            tell(tensor.nbytes)


WRITERS: dict[str, Writer] = {"npz": write_npz, "safetensors": write_safetensors}
"""Writers by format."""
