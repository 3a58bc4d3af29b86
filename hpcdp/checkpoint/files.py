"""Whose elements lie in one file: each rank's, those of a node's ranks, or all, through parallel HDF5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from ..comm import Communicator, World
from ..comm.agreement import on_every_rank, on_rank_0
from ..errors import ConfigError
from .compressed import write_compressed
from .plan import Piece
from .shard import (
    File,
    Maker,
    Room,
    Stored,
    failing,
    fill,
    lay_out,
    new_file,
    place_of,
    seen,
    span,
)

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


def by_rank(folder: Path, pieces: Sequence[Piece], group: Group, compression: str | None = None) -> Written:
    """A file for each rank."""
    path = folder / f"shard-{group.world.rank:05d}.h5"
    offsets: Sequence[int | None]
    if compression is None:
        offsets = lay_out(path, [Room.of(piece) for piece in pieces])
    else:
        write_compressed(path, pieces, compression)
        offsets = [None] * len(pieces)
    stored = fill(path, pieces, offsets)
    return stored, [seen(path, _spans(stored, pieces))]


def by_node(folder: Path, pieces: Sequence[Piece], group: Group) -> Written:
    """A file for each node: its first rank lays it out, and all of its ranks write to it."""
    path, comm = folder / f"shard-{group.world.node:05d}.h5", group.node_comm
    rooms = _rooms_of_all(pieces, comm)
    offsets = on_rank_0(comm, lambda: lay_out(path, [room for rank in rooms for room in rank]))
    before = sum(map(len, rooms[: comm.rank]))
    stored = on_every_rank(comm, lambda: fill(path, pieces, offsets[before : before + len(pieces)]))
    return stored, _told_by_first(path, stored, pieces, comm)


def by_all(folder: Path, pieces: Sequence[Piece], group: Group) -> Written:
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
    if not isinstance(shards, str) or shards not in WRITERS:
        raise ConfigError("Manager", where="shards", expected=f"one of {', '.join(WRITERS)}", got=repr(shards))
    if shards != "rank" and compression is not None:
        raise ConfigError("Manager", where="shards", expected="'rank' with compression", got=repr(shards))
    if shards == "all":
        import h5py  # type: ignore[import-untyped]

        if not h5py.get_config().mpi or not hasattr(group.comm, "mpi"):
            raise ConfigError(
                "Manager", where="shards", expected="an h5py with parallel HDF5, for 'all'", got="one without",
                remedy="use 'rank' or 'node', or build h5py with HDF5_MPI=ON",
            )  # fmt: skip


def _rooms_of_all(pieces: Sequence[Piece], comm: Communicator) -> list[list[Room]]:
    everyone = comm.allgather_json([astuple(Room.of(piece)) for piece in pieces])
    return [[Room(*each) for each in rank] for rank in everyone]


def _told_by_first(path: Path, stored: Sequence[Stored], pieces: Sequence[Piece], comm: Communicator) -> list[File]:
    """What is known of a file that all ranks of ``comm`` have written to, on the first of them."""
    covered = [each for rank in comm.allgather_json(_spans(stored, pieces)) for each in rank]
    return [seen(path, covered)] if comm.rank == 0 else []


def _spans(stored: Sequence[Stored], pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [span(each, piece.values.itemsize) for each, piece in zip(stored, pieces, strict=True)]
