"""One save: every rank writes its file; when all are on disk rank 0 adds the manifest and gives the folder its name."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..comm import Communicator, World
from ..comm.agreement import Outcome, on_rank_0, told_to_all
from ..errors import DataError, HpcdpError
from . import folder, index, manifest, tree
from .files import Group, Written
from .plan import Piece
from .shard import File, Stored, failing

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
        flat: tree.Flattened,
        prepared: Outcome[None],
        pieces: Outcome[list[Piece]],
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
                "nodes": tree.own_nodes(self._flat.form), "own": own, "files": files,
                "stored": [[*vars(each).values()] for each in stored],
            }  # fmt: skip
            everyone = self._comm.allgather_json(mine if self._world.rank else None)
            everyone[0] = mine
            on_rank_0(self._comm, lambda: self._finish(everyone))
        except HpcdpError:
            if self._world.rank == 0:
                shutil.rmtree(self._path, ignore_errors=True)
            raise

    def _write(self, pieces: Sequence[Piece]) -> Written:
        folder.wait_for(self._path)
        return self._write_files(self._path, pieces, self._group)

    def _finish(self, everyone: list[dict[str, Any]]) -> None:
        """On rank 0: index and manifest, then the name."""
        stored = [Stored(*each) for rank in everyone for each in rank["stored"]]
        held = [*self._flat.held]
        for rank in everyone[1:]:
            held += [
                tree.Held(name, tuple(shape), dtype, np.dtype("u1"), (), 1, 0) for name, shape, dtype in rank["own"]
            ]
        tensors = manifest.join(held, stored)
        form = tree.with_ranks(self._flat.form, [iter(rank["nodes"]) for rank in everyone])
        step = self._header["step"]
        with failing("save", lambda: self._path):
            self._path.joinpath(manifest.NAME).unlink(missing_ok=True)
            seen = index.write(self._path / index.NAME, tensors, form, {"format": manifest.FORMAT, "step": step})
            files = [*(File(*each) for rank in everyone for each in rank["files"]), File(index.NAME, *seen)]
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
