"""Saving of checkpoints while training goes on.

Where a state is copied to that is written behind training, which changes it meanwhile.

Whose elements lie in one file: each rank's, those of a node's ranks, or all, through parallel HDF5.

One save: every rank writes its file; when all are on disk rank 0 adds the manifest and gives the folder its name.
"""

from __future__ import annotations

import datetime
import os
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
    """Memory that is used for each save again."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """How much of it there is."""
        return self._memory.nbytes

    def copied(self, pieces: Iterable[FilePiece]) -> list[FilePiece]:
        """What training may change, copied, until the next call; the rest as it is.

        Raises:
            DataError: there is not so much memory.
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
"""What this rank's pieces have become, and files that it speaks for."""


@dataclass(eq=False)
class Group:
    """The ranks that write, with communicators for the saves of one manager alone. Every rank must make it."""

    world: World
    comm: Communicator
    node_comm: Communicator

    @classmethod
    def of(cls, world: World) -> Group:
        return cls(world, world.comm.duplicate(), world.node_comm.duplicate())

    def keep(self) -> None:
        """Keep the communicators as long as the world, since this rank has left a save that others may still be in.

        What they send it would otherwise be taken for messages of the next communicator of the same number.
        """
        torn: list[Group] = self.world.keep(Group, list)
        torn.append(self)


def by_rank(folder: Path, pieces: Sequence[FilePiece], group: Group, compression: str | None = None) -> Written:
    """A file for each rank."""
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
    """A file for each node: its first rank lays it out, and all of its ranks write to it."""
    path, comm = folder / f"shard-{group.world.node:05d}.h5", group.node_comm
    rooms = _rooms_of_all(pieces, comm)
    offsets = on_rank_0(comm, lambda: lay_out(path, [room for rank in rooms for room in rank]))
    before = sum(map(len, rooms[: comm.rank]))
    stored = on_every_rank(comm, lambda: fill(path, pieces, offsets[before : before + len(pieces)]))
    return stored, _told_by_first(path, stored, pieces, comm)


def by_all(folder: Path, pieces: Sequence[FilePiece], group: Group) -> Written:
    """One file, which all ranks make and write through parallel HDF5 (its driver "mpio")."""
    import h5py  # type: ignore[import-untyped]

    path, comm = folder / "shard-all.h5", group.comm
    rooms = _rooms_of_all(pieces, comm)
    library: Any = comm
    with failing("save", lambda: path), new_file(path, library.mpi) as file:
        maker = Maker(file)
        made = [maker.make(room) for rank in rooms for room in rank]
        before = sum(map(len, rooms[: comm.rank]))
        own = made[before : before + len(pieces)]
        offsets = [place_of(dataset) for dataset in own]
        for dataset, piece in zip(own, pieces, strict=True):
            if piece.values.size:
                h5py.Dataset(dataset).write_direct(piece.values)
    stored = fill(path, pieces, [None] * len(pieces))  # their checksums; they are written
    stored = [replace(each, offset=offset) for each, offset in zip(stored, offsets, strict=True)]
    return stored, _told_by_first(path, stored, pieces, comm)


WRITERS: dict[str, Callable[..., Written]] = {"rank": by_rank, "node": by_node, "all": by_all}
"""By the value of a `Manager` 's ``shards``."""


def check_shards(shards: str, compression: str | None, group: Group) -> None:
    """Raise `ConfigError` unless files can be written that way."""
    one_of("Manager", "shards", shards, WRITERS)
    if shards != "rank" and compression is not None:
        raise ConfigError("Manager", where="shards", expected="'rank' with compression", got=repr(shards))
    if shards == "all":
        import h5py  # type: ignore[import-untyped]

        if not h5py.get_config().mpi or not hasattr(group.comm, "mpi"):
            raise ConfigError(
                "Manager", where="shards", expected="an h5py with parallel HDF5, for 'all'", got="one without",
                remedy="use 'rank' or 'node', or build h5py with HDF5_MPI=ON",
            )  # fmt: skip


def _rooms_of_all(pieces: Sequence[FilePiece], comm: Communicator) -> list[list[DatasetSpace]]:
    everyone = comm.allgather_json([astuple(DatasetSpace.of(piece)) for piece in pieces])
    return [[DatasetSpace(*each) for each in rank] for rank in everyone]


def _told_by_first(path: Path, stored: Sequence[Stored], pieces: Sequence[FilePiece], comm: Communicator) -> list[File]:
    """What is known of a file that all ranks of ``comm`` have written to, on the first of them."""
    covered = [each for rank in comm.allgather_json(_spans(stored, pieces)) for each in rank]
    return [seen(path, covered)] if comm.rank == 0 else []


def _spans(stored: Sequence[Stored], pieces: Sequence[FilePiece]) -> list[tuple[int, int]]:
    return [span(each, piece.values.itemsize) for each, piece in zip(stored, pieces, strict=True)]


_NAP_S = 0.002
Keep = Callable[[int, Path], None]


class Saving:
    """A save under way. All ranks make it, and call `run`, in whichever thread.

    Args:
        group: the ranks, and communicators for saves alone, whose messages may be sent beside those of others.
        path: of the folder that is written.
        flat: the state.
        prepared: whether the folder could be made, on rank 0, where it is told from.
        pieces: what this rank writes of the state, which must not change any more; or why it could not be copied.
        header: members of the manifest: ``step``, ``metrics``, ``config``, ``commit_file``.
        write: this rank's part: see `files.WRITERS`.
        commit: called on rank 0 when all is written; where the checkpoint is then.
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
        """Why it has failed; an `HpcdpError` is the same on all ranks."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended on this rank; on others it may last a little longer."""
        return self._over.is_set()

    def run(self) -> None:
        """Save; keeps the error."""
        try:
            self._run()
        except BaseException as error:
            self.error = error
            if not isinstance(error, HpcdpError):
                self._group.keep()
        finally:
            self._over.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it has ended on this rank, or so long."""
        self._over.wait(timeout_s)

    def _run(self) -> None:
        on_rank_0(self._comm, self._prepared.get)
        try:
            pieces = told_to_all(self._comm, self._pieces)
            outcome = Outcome.of(lambda: self._write(pieces))
            meet(self._comm)
            stored, files = told_to_all(self._comm, outcome)
            own = [[each.name, each.shape, each.dtype] for each in self._flat.held if each.is_own]
            mine = {
                "nodes": flatten.own_nodes(self._flat.form), "own": own, "files": files,
                "stored": [[*vars(each).values()] for each in stored],
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
        """On rank 0: index and manifest, then the name."""
        stored = [Stored(*each) for rank in everyone for each in rank["stored"]]
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
            seen = manifest.write(
                self._path / manifest.INDEX_NAME, tensors, form, {"format": manifest.FORMAT, "step": step}
            )
            files = [*(File(*each) for rank in everyone for each in rank["files"]), File(manifest.INDEX_NAME, *seen)]
            world = {"size": self._world.size, "num_nodes": self._world.num_nodes}
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            whole = manifest.Manifest(
                state=form, tensors=tensors, files=files, world=world, versions=versions(self._world), written=now,
                **self._header,
            )  # fmt: skip
            content = whole.to_json()
            _require_readable(content)
            write_file(self._path / manifest.NAME, content)
            self._commit()


def _require_readable(content: bytes) -> None:
    """A manifest that no restore takes must not lead to the removal of older ones."""
    try:
        manifest.parse(content, manifest.NAME)
    except DataError as error:
        raise DataError("save", where="the state", expected="what can be read back", got=error.got) from error


def meet(comm: Communicator) -> None:
    """Wait for all ranks without taking a core: they may have much to write, and training goes on meanwhile."""
    request = comm.native_iallreduce(np.zeros(1, np.int32), "sum")
    while not request.test():
        time.sleep(_NAP_S)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file, down to the disk."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def versions(world: World) -> dict[str, str]:
    """Of what has written a checkpoint."""
    import h5py  # type: ignore[import-untyped]

    from .. import __version__

    return {
        "hpcdp": __version__, "python": platform.python_version(), "numpy": np.__version__, "h5py": h5py.__version__,
        "hdf5": h5py.version.hdf5_version, "mpi": world.library,
    }  # fmt: skip
