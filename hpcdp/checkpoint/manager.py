"""`Manager`, which saves, retains and restores the checkpoints of a run.

A save is by all ranks, and may run while training goes on. The state is copied to a staging buffer. Every rank writes
its file, or shares one with its node or with all ranks. When all files are on disk, rank 0 writes the manifest and
renames the folder.
"""

from __future__ import annotations

import atexit
import datetime
import json
import math
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ..comm import Communicator, World, init
from ..comm.consistency import Outcome, on_every_rank, on_rank_0, require_same, told_to_all
from ..comm.world import WeakMethods, require_world
from ..core.checks import boolean, instance, instances, not_copied, one_of, whole_number, whole_numbers
from ..core.environment import fail_at_exit
from ..engine import Engine
from ..errors import ConfigError, DataError, HpcdpError, warn
from . import complete_steps, flatten, load, manifest
from .complete_steps import WriterLock
from .flatten import is_utf8
from .hdf5_file import (
    COMPRESSIONS,
    DatasetSpace,
    File,
    FilePiece,
    Maker,
    Stored,
    described,
    failing,
    fill,
    lay_out,
    new_file,
    own_pieces,
    place_of,
    seen,
    span,
    write_compressed,
)
from .load import Restored

_LINE_NBYTES = 64


class StagedSave:
    """The staging buffer for asynchronous saves, which each save reuses."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._memory.nbytes

    def copied(self, pieces: Iterable[FilePiece]) -> list[FilePiece]:
        """Return copies of the pieces that training may change, valid until the next call, and the others as they are.

        Raises:
            DataError: there is not enough memory.
        """
        pieces = list(pieces)
        nbytes = sum(_in_lines(piece.values.nbytes) for piece in pieces if not piece.is_copied)
        if self.nbytes < nbytes:
            with failing("save", lambda: "a copy of the state"):
                self._memory = np.empty(nbytes, np.uint8)
        copied, at = [], 0
        for piece in pieces:
            if piece.is_copied:
                copied.append(piece)
                continue
            place = self._memory[at : at + piece.values.nbytes].view(piece.values.dtype)
            np.copyto(place, piece.values)
            copied.append(piece._replace(values=place))
            at += _in_lines(piece.values.nbytes)
        return copied


def _in_lines(nbytes: int) -> int:
    return -(-nbytes // _LINE_NBYTES) * _LINE_NBYTES


Written = tuple[list[Stored], list[File]]
"""Stored runs of this rank, and the files that this rank reports."""


@dataclass(eq=False)
class Group:
    """The ranks that write, with separate communicators for a manager's saves; use `of`."""

    world: World
    comm: Communicator
    node_comm: Communicator

    @classmethod
    def of(cls, world: World) -> Group:
        """Duplicate the communicators of ``world``; every rank must call."""
        return cls(world, world.comm.duplicate(), world.node_comm.duplicate())

    def keep(self) -> None:
        """Keep the communicators as long as the world, because this rank has left a save that others may still be in.

        Otherwise a new communicator with the same number could receive their messages.
        """
        abandoned: list[Group] = self.world.keep(Group, list)
        abandoned.append(self)


def by_rank(folder: Path, pieces: Sequence[FilePiece], group: Group, compression: str | None = None) -> Written:
    """Write a file for each rank."""
    path = folder / f"shard-{group.world.rank:05d}.h5"
    offsets: Sequence[int | None]
    if compression is None:
        offsets = lay_out(path, [DatasetSpace.of(piece) for piece in pieces])
    else:
        write_compressed(path, pieces, compression)
        offsets = [None] * len(pieces)
    stored = fill(path, pieces, offsets)
    return stored, [seen(path, _spans(stored, pieces))]


def by_node(folder: Path, pieces: Sequence[FilePiece], group: Group) -> Written:
    """Write a file for each node, which its first rank lays out."""
    path, comm = folder / f"shard-{group.world.node:05d}.h5", group.node_comm
    spaces = _spaces_of_all(pieces, comm)
    offsets = on_rank_0(comm, lambda: lay_out(path, [space for rank in spaces for space in rank]))
    before = sum(map(len, spaces[: comm.rank]))
    stored = on_every_rank(comm, lambda: fill(path, pieces, offsets[before : before + len(pieces)]))
    return stored, _shared_file(path, stored, pieces, comm)


def by_all(folder: Path, pieces: Sequence[FilePiece], group: Group) -> Written:
    """Write one file for all ranks through parallel HDF5 (its driver "mpio")."""
    import h5py  # type: ignore[import-untyped]

    path, comm = folder / "shard-all.h5", group.comm
    spaces = _spaces_of_all(pieces, comm)
    library: Any = comm
    with failing("save", lambda: path), new_file(path, library.mpi) as file:
        maker = Maker(file)
        datasets = [maker.make(space) for rank in spaces for space in rank]
        before = sum(map(len, spaces[: comm.rank]))
        own = datasets[before : before + len(pieces)]
        offsets = [place_of(dataset) for dataset in own]
        for dataset, piece in zip(own, pieces, strict=True):
            if piece.values.size:
                h5py.Dataset(dataset).write_direct(piece.values)
    stored = fill(path, pieces, [None] * len(pieces))  # computes checksums alone: the elements are written
    stored = [replace(run, offset=offset) for run, offset in zip(stored, offsets, strict=True)]
    return stored, _shared_file(path, stored, pieces, comm)


WRITERS: dict[str, Callable[..., Written]] = {"rank": by_rank, "node": by_node, "all": by_all}
"""Functions that write files, by a manager's ``shards``."""


def check_shards(shards: str, compression: str | None, group: Group) -> None:
    """Raise `ConfigError` unless ``shards`` is valid, and supported here."""
    one_of("Manager", "shards", shards, WRITERS)
    if shards != "rank" and compression is not None:
        raise ConfigError("Manager", where="shards", expected="'rank' with compression", got=repr(shards))
    if shards == "all":
        import h5py  # type: ignore[import-untyped]

        if not h5py.get_config().mpi or not hasattr(group.comm, "mpi"):
            raise ConfigError(
                "Manager", where="shards", expected="an h5py with parallel HDF5, for 'all'",
                got="an h5py with serial HDF5", remedy="use 'rank' or 'node', or build h5py with HDF5_MPI=ON",
            )  # fmt: skip


def _spaces_of_all(pieces: Sequence[FilePiece], comm: Communicator) -> list[list[DatasetSpace]]:
    by_rank = comm.allgather_json([astuple(DatasetSpace.of(piece)) for piece in pieces])
    return [[DatasetSpace(*fields) for fields in rank] for rank in by_rank]


def _shared_file(path: Path, stored: Sequence[Stored], pieces: Sequence[FilePiece], comm: Communicator) -> list[File]:
    """Return the entry of a file that all ranks of ``comm`` have written, on the first of them."""
    covered = [run for rank in comm.allgather_json(_spans(stored, pieces)) for run in rank]
    return [seen(path, covered)] if comm.rank == 0 else []


def _spans(stored: Sequence[Stored], pieces: Sequence[FilePiece]) -> list[tuple[int, int]]:
    return [span(run, piece.values.itemsize) for run, piece in zip(stored, pieces, strict=True)]


_NAP_S = 0.002


class Saving:
    """A save under way; all ranks make it, and call `run`, in any thread.

    Args:
        group: the ranks, with communicators for saves alone, so that other messages may be sent at the same time.
        path: the folder to write.
        flat: the state.
        prepared: the outcome of making the folder, on rank 0.
        pieces: this rank's pieces of the state, which must not change any more, or the error of copying them.
        header: members of the manifest: ``step``, ``metrics``, ``config``, ``commit_file``.
        write: a function of `WRITERS`.
        commit: called on rank 0 when all is written; returns the path of the checkpoint.
    """

    def __init__(
        self,
        group: Group,
        path: Path,
        flat: flatten.Flattened,
        prepared: Outcome[None],
        pieces: Outcome[list[FilePiece]],
        header: Mapping[str, Any],
        write: Callable[..., Written],
        commit: Callable[[], Path],
    ) -> None:
        self._group, self._path, self._flat, self._prepared, self._pieces = group, path, flat, prepared, pieces
        self._header, self._write_files, self._commit = header, write, commit
        self._world, self._comm = group.world, group.comm
        self._over = threading.Event()
        self.error: BaseException | None = None
        """Error of a failed save; an `HpcdpError` is the same on all ranks."""

    @property
    def is_over(self) -> bool:
        """True when the save has ended on this rank; other ranks may end a little later."""
        return self._over.is_set()

    def run(self) -> None:
        """Save, and store an error in ``error``."""
        try:
            self._run()
        except BaseException as error:
            self.error = error
            if not isinstance(error, HpcdpError):
                self._group.keep()
        finally:
            self._over.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the save has ended on this rank, at most ``timeout_s`` seconds."""
        self._over.wait(timeout_s)

    def _run(self) -> None:
        on_rank_0(self._comm, self._prepared.get)
        try:
            pieces = told_to_all(self._comm, self._pieces)
            outcome = Outcome.of(lambda: self._write(pieces))
            meet(self._comm)
            stored, files = told_to_all(self._comm, outcome)
            own = [[tensor.name, tensor.shape, tensor.dtype] for tensor in self._flat.held if tensor.is_own]
            mine = {
                "nodes": flatten.own_nodes(self._flat.form), "own": own, "files": files,
                "stored": [[*vars(run).values()] for run in stored],
            }  # fmt: skip
            everyone = self._comm.allgather_json(mine if self._world.rank else None)
            everyone[0] = mine
            on_rank_0(self._comm, lambda: self._finish(everyone))
        except HpcdpError:
            if self._world.rank == 0:
                shutil.rmtree(self._path, ignore_errors=True)
            raise

    def _write(self, pieces: Sequence[FilePiece]) -> Written:
        complete_steps.wait_for(self._path)
        return self._write_files(self._path, pieces, self._group)

    def _finish(self, everyone: list[dict[str, Any]]) -> None:
        """Write index and manifest, and rename the folder; on rank 0."""
        stored = [Stored(*fields) for rank in everyone for fields in rank["stored"]]
        held = [*self._flat.held]
        for rank in everyone[1:]:
            held += [
                flatten.HeldTensor(name, tuple(shape), dtype, np.dtype("u1"), (), 1, 0)
                for name, shape, dtype in rank["own"]
            ]
        tensors = manifest.join(held, stored)
        form = flatten.with_ranks(self._flat.form, [iter(rank["nodes"]) for rank in everyone])
        step = self._header["step"]
        with failing("save", lambda: self._path):
            self._path.joinpath(manifest.NAME).unlink(missing_ok=True)
            index = manifest.write(
                self._path / manifest.INDEX_NAME, tensors, form, {"format": manifest.FORMAT, "step": step}
            )
            files = [File(*fields) for rank in everyone for fields in rank["files"]]
            world = {"size": self._world.size, "num_nodes": self._world.num_nodes}
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            content = manifest.Manifest(
                state=form, tensors=tensors, files=[*files, File(manifest.INDEX_NAME, *index)], world=world,
                versions=versions(self._world), written=now, **self._header,
            ).to_json()  # fmt: skip
            _require_readable(content)
            manifest.write_file(self._path / manifest.NAME, content)
            self._commit()


def _require_readable(content: bytes) -> None:
    """Raise `DataError` for a manifest that cannot be restored, before older checkpoints are removed."""
    try:
        manifest.parse(content, manifest.NAME)
    except DataError as error:
        raise DataError("save", where="the state", expected="a state that can be read back", got=error.got) from error


def meet(comm: Communicator) -> None:
    """Wait for all ranks without using a core, because training goes on while they write."""
    request = comm.native_iallreduce(np.zeros(1, np.int32), "sum")
    while not request.test():
        time.sleep(_NAP_S)


def versions(world: World) -> dict[str, str]:
    """Return the versions of the libraries that write a checkpoint."""
    import h5py  # type: ignore[import-untyped]

    from .. import __version__

    return {
        "hpcdp": __version__, "python": platform.python_version(), "numpy": np.__version__, "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version, "mpi": world.library,
    }  # fmt: skip


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder, which stays valid when the program changes its working directory.

    Raises:
        ConfigError: ``path`` is not a path.
        DataError: the working directory was removed.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise ConfigError("Manager", where="path", expected="a folder, as a str or a Path", got=repr(path))
    with failing("Manager", lambda: path):
        return Path(os.path.abspath(text))


def check_retention(keep: object, keep_every: object, best: object) -> None:
    """Raise `ConfigError` for invalid arguments of retention, see `Manager`."""
    whole_numbers("Manager", 1, keep=1 if keep is None else keep, keep_every=1 if keep_every is None else keep_every)
    if best is not None:
        complete_steps.metric_name("Manager", best, "'metric', '-metric', or None")
    if keep is None and (keep_every is not None or best is not None):
        raise ConfigError("Manager", where="keep", expected="a number with keep_every or best", got=None)


def step_number(operation: str, step: object) -> int:
    """Return a step as an int; `ConfigError` for anything else."""
    return whole_number(operation, "step", step, 0, 10**18 - 1, expected="an integer from 0 to 10**18 - 1")


def metric_to_restore(best: object, own: str | None, step: object) -> str | None:
    """Return the metric by which `Manager.restore` chooses a checkpoint; None without one.

    Args:
        best: ``best`` of `Manager.restore`.
        own: ``best`` of the manager.
        step: ``step`` of `Manager.restore`.

    Raises:
        ConfigError: ``best`` is not a metric, or is True for a manager without one, or comes with a step.
    """
    if best is False or best is None:
        return None
    if step is not None:
        raise ConfigError("restore", where="best", expected="False with a step", got=repr(best),
                          remedy="pass step or best, not both")  # fmt: skip
    if best is True and own is None:
        raise ConfigError("restore", where="best", expected="a Manager made with best=...", got="True",
                          remedy="name the metric: best='test_accuracy', best='-test_loss'")  # fmt: skip
    return complete_steps.metric_name("restore", own if best is True else best, "True, 'metric' or '-metric'")


def numbers(metrics: object, best: str | None) -> dict[str, float]:
    """Return metrics as floats by name; empty for None.

    Args:
        metrics: ``metrics`` of `Manager.save`.
        best: ``best`` of the manager.

    Raises:
        ConfigError: ``metrics`` is not a dict of numbers, or lacks that of ``best``.
    """
    if metrics is None:
        return {}
    expected = "a dict of numbers by name"
    metrics = instance("save", "metrics", metrics, Mapping, expected)
    instances("save", "metrics", metrics, str, expected)
    odd = next((name for name in metrics if not is_utf8(name)), None)
    if odd is not None:
        raise ConfigError("save", where="metrics", expected="names in Unicode", got=ascii(odd))
    values = {name: _number(name, value) for name, value in metrics.items()}
    decisive = None if best is None else best.removeprefix("-")
    if decisive is not None and decisive not in values:
        raise ConfigError(
            "save", where="metrics", expected=f"{decisive!r}, which the Manager's best={best!r} needs", got=values
        )
    return values


def _number(name: str, value: Any) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except Exception:  # a number class of another library may raise anything
        pass
    text = type(value).__name__ if isinstance(value, int) else repr(value)  # the int is too long to be shown
    raise ConfigError("save", where=f"metric {name}", expected="a number in the range of float", got=text)


def settings(config: object) -> dict[str, Any]:
    """Return a copy of a configuration as JSON restores it; a copy, because an asynchronous save takes a while.

    Raises:
        ConfigError: JSON cannot represent it.
    """
    try:
        manifest.check_config(config)
        copied: dict[str, Any] = json.loads(json.dumps(dict(config)))  # type: ignore[call-overload]
    except (TypeError, ValueError, RecursionError) as error:
        expected = "a dict of JSON values, with keys that are str"
        raise ConfigError("save", where="config", expected=expected, got=error) from error
    return copied


def told_alike(metrics: Mapping[str, float], config: Mapping[str, Any]) -> list[str]:
    """Return metrics and config as sorted lines, which must be the same on all ranks."""
    values = [f"metric {name} = {value!r}" for name, value in metrics.items()]
    entries = [f"config {name} = {json.dumps(value, sort_keys=True)}" for name, value in config.items()]
    return sorted(values) + sorted(entries)


_SAVES, _REMOVALS = "save", "remove"
_PATIENCE_S = 8.0
"""Most seconds that `Manager` waits for a save under way after an exception."""
_ALIKE = "put states that differ between ranks into a PerRank"


class Manager:
    """The checkpoints of a run in a folder; every rank must make it, and call its collective methods.

    A checkpoint is complete on disk, or does not exist: files are written and synchronized in a temporary folder, which
    is renamed when all ranks have finished. Only one job at a time saves in a folder. As a context manager it calls
    `close`.

    Args:
        path: the folder, which the first `save` makes with its parents. A relative path refers to the working directory
            of now, which must be the same on all ranks.
        world: the ranks; default `hpcdp.init()`.
        keep: number of the newest checkpoints to keep, at least one; None: all.
        keep_every: checkpoints whose step is divisible by this are kept, too.
        best: ``"metric"`` or ``"-metric"``: the checkpoint whose `save` got the greatest (smallest) value of this
            metric is kept, too. One without metrics, or with a value that is not finite, is never the best.
        shards: ``"rank"``: every rank writes a file; ``"node"``: the ranks of a node share a file; ``"all"``: all ranks
            share a file through parallel HDF5, for which h5py must be built.
        compression: ``"gzip"`` or ``"lzf"``, by HDF5 in chunks with checksums, at a fraction of the speed; None: none.
        atomic_rename: whether the file system renames folders atomically. If not, a file ``committed`` in a folder
            marks it as complete.

    Raises:
        ConfigError: an argument is invalid.
        MismatchError: the ranks' folders or settings differ; on every rank.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        world: World | None = None,
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        best: str | None = None,
        shards: str = "rank",
        compression: str | None = None,
        atomic_rename: bool = True,
    ) -> None:
        require_world("Manager", world)
        self.world = init() if world is None else world

        def checked() -> Path:
            check_retention(keep, keep_every, best)
            if compression is not None:
                one_of("Manager", "compression", compression, COMPRESSIONS)
            boolean("Manager", "atomic_rename", atomic_rename)
            return absolute(path)

        self.path = on_every_rank(self.world.comm, checked)
        self.keep, self.keep_every, self.best = keep, keep_every, best
        self._atomic_rename = atomic_rename
        settings = [
            os.fspath(self.path),
            f"{keep=} {keep_every=} {best=}",
            f"{shards=} {compression=} {atomic_rename=}",
        ]
        require_same(self.world.comm, "Manager", settings, "pass the same on all ranks")
        self._group = Group.of(self.world)
        check_shards(shards, compression, self._group)
        self._write = partial(by_rank, compression=compression) if shards == "rank" else WRITERS[shards]
        self._lock: WriterLock | None = None
        self._engine = Engine(lanes=(_SAVES, _REMOVALS))
        self._saving: Saving | None = None
        self._is_registered = self._is_claimed = self._is_closed = self._is_left = False
        self._staging = StagedSave()
        self.world.endings.add(self._let_end)

    __reduce__ = not_copied("Manager", "the manager", "make another by checkpoint.Manager(manager.path)")

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        if error is None:
            self.close()
        else:  # other ranks may be elsewhere: call no collective, and limit the wait
            self._is_left = True
            if self._saving is not None:
                self._saving.wait(_PATIENCE_S)
            self._release(_PATIENCE_S)

    def close(self) -> None:
        """Wait for the save under way, and release the folder's lock; every rank must call.

        The manager neither saves nor restores after that.

        Raises:
            DataError: the save failed, see `wait`.
        """
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._release()

    def _require_open(self, operation: str) -> None:
        if self._is_closed:
            raise ConfigError(operation, where=self.path, expected="an open Manager", got="a closed Manager",
                              remedy="make another Manager")  # fmt: skip

    def _release(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self._engine.waitall()
        is_over, self._saving = self._engine.shutdown(timeout_s), None
        if self._lock is not None and is_over:  # otherwise another job would clean the folder that is still written
            self._lock.release()
            self._lock = None

    def _let_end(self) -> None:
        """Wait for a save under way at the program's end, except after an exception.

        Raises:
            DataError: the save failed, see `wait`.
        """
        if self._is_left:
            return
        try:
            self.wait()
        finally:
            self._release()

    @property
    def pending(self) -> bool:
        """True while a save is under way, until `wait` or `poll` finds its end; the same on all ranks."""
        return self._saving is not None

    @property
    def over(self) -> bool:
        """True when no save is under way on this rank; other ranks may end a little later."""
        return self._saving is None or self._saving.is_over

    def poll(self) -> bool:
        """Return whether the save under way has ended on all ranks; every rank must call.

        Raises:
            HpcdpError: the save failed, see `wait`.
        """
        if self._saving is None:
            return True
        if self._saving.is_over and not isinstance(self._saving.error, HpcdpError | None):
            self.wait()  # raises an error of this rank alone, which ends the job
        over = np.array([self._saving.is_over], np.int32)
        self.world.comm.native_allreduce(over, "min")
        if over[0]:
            self.wait()
        return bool(over[0])

    def wait(self) -> None:
        """Wait until the save under way is complete on disk; every rank must call.

        Raises:
            DataError: the save failed; on every rank. The state and older checkpoints are unchanged.
        """
        if self._saving is None:
            return
        self._saving.wait()
        saving, self._saving = self._saving, None  # after the wait, because Ctrl-C interrupts it, but not the save
        if saving.error is not None:
            raise saving.error

    def claim(self) -> None:
        """Make and lock the folder until `close`; every rank must call. The first `save` calls it.

        Folders of interrupted saves are removed.

        Raises:
            DataError: another job saves here, and is named, or the folder cannot be written; on every rank.
        """
        self._require_open("claim")
        on_rank_0(self.world.comm, self._claim)
        self._is_claimed = True

    def save(
        self,
        step: int,
        state: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        config: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> None:
        """Save ``state`` as the checkpoint of a step, after an earlier save has ended; every rank must call.

        Args:
            step: the step's number, at least 0; a checkpoint of the same number is replaced.
            state: dicts (with keys str or int), lists, tuples, arrays, numbers, texts, None, `Sharded`, `PerRank`, and
                objects with ``state_dict()`` and ``load_state_dict()``: networks, trainers, stores, loaders, random
                generators, and those of PyTorch. Except in a `Sharded` or `PerRank` it must be equal on all ranks.
                Running statistics of networks are saved for each rank, and averaged.
            metrics: numbers by name, with that of ``best``; equal on all ranks. NaN and infinities are left out. None:
                the step was not evaluated.
            config: a dict of JSON values that `restore` returns; equal on all ranks.
            wait: True: return when the checkpoint is complete on disk. False: return when the state is copied; a thread
                writes it, and the next `wait`, `poll` or `save` raises its errors.

        Raises:
            MismatchError: the ranks' states or arguments differ; on every rank, with ranks and the first difference.
            ConfigError: step, metrics or config are invalid; the manager is closed.
            UnsupportedError: the state has an object that cannot be saved, or whose ``state_dict()`` has raised.
            DataError: a file cannot be written, or another job saves here; on every rank. Nothing is changed.
        """
        self._require_open("save")
        self.wait()
        comm = self.world.comm
        header = self._agreed_header(step, state, metrics, config, wait)
        flat = flatten.flatten(state, self.world)
        items = [] if flat.error else [*flatten.alike(flat.form), *described(flat.held, self.world.size)]
        told_to_all(comm, Outcome(error=flat.error), "save", [(items, _ALIKE)])
        if not self._is_claimed:
            self.claim()
        path = complete_steps.partial_path(self.path, header["step"])
        prepared = Outcome.of(lambda: self._prepare(path)) if self.world.rank == 0 else Outcome[None]()
        behind = not wait and self.world.concurrent
        own = list(own_pieces(flat.held))
        pieces = Outcome.of(lambda: self._staging.copied(own)) if behind else Outcome(own)
        commit = partial(self._commit, header["step"])
        saving = Saving(self._group, path, flat, prepared, pieces, header, self._write, commit)
        self._saving = saving
        if behind:
            self._end_before_h5py()

            def run() -> None:
                self.world.use_gpu_of_messages()
                saving.run()

            self._engine.push(run, lane=_SAVES, name="save")
        else:
            saving.run()
        if wait:
            self.wait()

    def _end_before_h5py(self) -> None:
        """Register the end of saves after h5py's, so that it runs first: h5py's end makes writing impossible."""
        if not self._is_registered:
            import h5py  # type: ignore[import-untyped]  # noqa: F401

            if not _let_end:
                atexit.register(_let_all_end)
            _let_end.add(self._let_end)
            self._is_registered = True

    def _agreed_header(
        self, step: int, state: Any, metrics: Mapping[str, float] | None, config: Mapping[str, Any] | None, wait: bool
    ) -> dict[str, Any]:
        """Return members of the manifest, after checks that all ranks have called with the same arguments."""
        header: dict[str, Any] = {"commit_file": not self._atomic_rename}

        def checked() -> list[tuple[list[str], str]]:
            header["step"] = step_number("save", step)
            header["metrics"] = numbers(metrics, self.best)
            header["config"] = settings({} if config is None else config)
            arguments = [f"step {header['step']}", f"wait={wait}", *told_alike(header["metrics"], header["config"])]
            return [(arguments, "pass the same on all ranks"), (flatten.outline("save", state), _ALIKE)]

        outcome = Outcome.of(checked)
        told_to_all(self.world.comm, outcome, "save", outcome.value or ())
        header["metrics"] = {name: value for name, value in header["metrics"].items() if math.isfinite(value)}
        return header

    def _claim(self) -> None:
        """Make the folder and take its lock; on rank 0."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            got = "a dangling symbolic link" if self.path.is_symlink() and not self.path.exists() else "a file"
            raise DataError("save", where=self.path, expected="a folder, or nothing yet", got=got)
        with failing("save", lambda: self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            if self._lock is None:
                self._lock = WriterLock(self.path)
                for path in complete_steps.clean(self.path, self._atomic_rename):
                    warn(f"{path}: removed the folder of an interrupted save")
            else:
                self._lock.require_held()

    def _prepare(self, partial: Path) -> None:
        """Make an empty folder to write to, while the lock is held; on rank 0."""
        assert self._lock is not None
        with failing("save", lambda: self.path):
            self._lock.require_held()
            complete_steps.require_room(self.path, complete_steps.step_of(partial))
            if partial.exists():  # being removed, or of a failed save
                self._engine.waitall()
                complete_steps.remove(partial, ignore_errors=True)
            partial.mkdir()

    def _commit(self, step: int) -> Path:
        """Rename the folder whose files are all on disk, and remove old checkpoints; on rank 0."""
        path = complete_steps.commit(self.path, step, self._atomic_rename)
        try:
            complete_steps.remove_old(self.path, step)
            if self.keep is not None:
                self._remove_older(step, self.keep)
        except OSError as error:  # the new checkpoint is complete
            warn(f"{error.filename or self.path}: {error.strerror}: an older checkpoint stays")
        return path

    def _remove_older(self, step: int, keep: int) -> None:
        """Remove checkpoints that need not be kept, and those without a manifest before the newest ``keep``."""
        complete = complete_steps.find(self.path)
        dropped = complete_steps.dropped(complete, keep, self.keep_every, complete_steps.worth(complete, self.best))
        lost = complete_steps.without_manifest(self.path, complete)
        for old in [*dropped, *(old for old in lost if sum(newer > old for newer in complete) >= keep)]:
            if old != step:
                self._remove_behind(complete_steps.retire(self.path, old))

    def _remove_behind(self, path: Path) -> None:
        """Remove a folder in an engine task, because it may take as long as a save."""
        remove = partial(complete_steps.remove, path, ignore_errors=True)
        if self._is_left:  # the engine is shut down
            remove()
        else:
            self._engine.push(remove, lane=_REMOVALS, name="remove")

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints in order, the same on all ranks; every rank must call."""
        return on_rank_0(self.world.comm, lambda: list(load.found("list the checkpoints", self.path)))

    def latest(self) -> int | None:
        """Return the greatest of `steps`, of any run in the folder, or None; every rank must call."""
        return max(self.steps(), default=None)

    def restore(
        self,
        step: int | None = None,
        into: Any = None,
        *,
        best: bool | str = False,
        strict: bool = True,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> Restored:
        """Restore a checkpoint on any number of ranks; every rank must call, and reads the parts that it holds.

        Args:
            step: the step. None: the newest undamaged checkpoint; a warning reports damaged ones.
            best: True: the checkpoint with the best value of the manager's ``best``. ``"metric"`` or ``"-metric"``:
                that with the best value of this metric. Not with ``step``.
            into: a state as for `save`. Its arrays and `Sharded` parts are filled in place, and its objects load their
                states; numbers are only in the result. None: the whole state as new arrays, on every rank.
            strict: True: the names in the checkpoint and in ``into`` must be the same. False: common names are
                restored; `Restored.missing` and `Restored.left_over` list the others.
            rename: new names by old ones, for an entry and all entries below it (the longest old name wins), or a
                function from an old name to a new one. Entries of lists keep their places.

        Returns:
            The restored state, with metrics and config of the checkpoint.

        Raises:
            ConfigError: step or ``best`` are invalid; the manager is closed; names, shapes or dtypes do not fit. On
                every rank, and nothing is changed.
            MismatchError: the ranks' arguments differ; on every rank, and nothing is changed.
            UnsupportedError: an object of ``into`` has raised, e.g. its ``load_state_dict()``; on every rank. ``into``
                may then be restored in part.
            DataError: there is no such checkpoint, or none with the metric, or it is damaged. The error names file and
                data set, and an older checkpoint that can be restored, or the reason why the next older one does not
                fit. ``into`` may then be restored in part.
        """
        self._require_open("restore")
        self.wait()
        comm = self.world.comm
        metric = on_every_rank(comm, lambda: metric_to_restore(best, self.best, step))
        step = on_every_rank(comm, lambda: None if step is None else step_number("restore", step))
        require_same(comm, "restore", [f"step {step}", f"best {metric}"], "pass the same on all ranks")
        if metric is not None:
            step = on_rank_0(comm, lambda: load.best("restore", self.path, metric))
        return load.restore(self.path, self.world, self.steps() if step is None else step, into, strict, rename)


_let_end: WeakMethods[None] = WeakMethods()
"""The `_let_end` methods of all managers with asynchronous saves."""


def _let_all_end() -> None:
    for end in reversed(_let_end.living()):
        try:
            end()
        except Exception as error:
            fail_at_exit(error)
