"""A save by all ranks, which may run while training goes on.

The state is copied to a staging buffer. Every rank writes its file, or shares one with its node or with all ranks.
When all files are on disk, rank 0 writes the manifest and renames the folder.
"""

from __future__ import annotations

import datetime
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import Communicator, World
from ..comm.consistency import Outcome, on_every_rank, on_rank_0, told_to_all
from ..core.checks import one_of
from ..errors import ConfigError, DataError, HpcdpError
from . import directory, flatten, manifest
from .hdf5_file import (
    DatasetSpace,
    File,
    FilePiece,
    Maker,
    Stored,
    failing,
    fill,
    lay_out,
    new_file,
    place_of,
    seen,
    span,
    write_compressed,
)

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
                got="an h5py without it", remedy="use 'rank' or 'node', or build h5py with HDF5_MPI=ON",
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
        directory.wait_for(self._path)
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
