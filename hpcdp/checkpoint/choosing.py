"""Which checkpoint of a folder is restored: the one that was asked for, or the newest that is undamaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..autograd import waitall
from ..comm import World
from ..comm.agreement import on_every_rank, on_rank_0, require_same
from ..errors import ConfigError, DataError
from . import folder, index, manifest, notice, renaming, tree
from .restoring import Filling, Restored
from .shard import failing

_MOST_REMOVED = 10
"""So many checkpoints may be removed by another job while they are read."""


def restore(path: Path, world: World, which: int | list[int], into: Any, strict: bool, rename: Any) -> Restored:
    """See `Manager.restore`.

    Args:
        path: of all checkpoints.
        which: the step, or all of which one may be taken, in order: the newest that is undamaged.
    """
    waitall()  # asynchronous calls under way may read what is filled
    asked = isinstance(which, int)
    steps = [which] if isinstance(which, int) else [*which]
    lost = [] if asked else [Path(each) for each in on_rank_0(world.comm, lambda: _lost(path, steps))]
    if not steps:
        got = f"{lost[-1].name} without {manifest.NAME}" if lost else "none"
        raise DataError("restore", where=path, expected="a complete checkpoint", got=got)
    for each in lost if world.rank == 0 else ():
        if folder.step_of(each) > steps[-1]:
            where = each / manifest.NAME
            notice.warn(f"restore [{where}]: expected a file, got none: taking step {steps[-1]} instead")
    damaged: DataError | None = None
    read, removed = set[int](), 0
    while True:
        step = steps.pop()
        try:
            return _restore(path, world, step, into, strict, rename, bool(steps))
        except DataError as error:
            if asked:
                error.remedy = on_rank_0(world.comm, lambda: _offer(path, step))  # noqa: B023
                raise
            there: list[int] = on_rank_0(world.comm, lambda: [*found("restore", path)])
            read.add(step)
            steps = [each for each in there if each not in read]
            if step not in there:  # a job that saves here does not keep it; what that has saved since is there
                removed += 1
                if steps and removed < _MOST_REMOVED:
                    continue
                error.remedy = "another job removes checkpoints here before they are read: let it keep more"
                raise
            if not steps:
                if len(read) > 1:
                    error.remedy = f"no other is left: all {len(read)} checkpoints are damaged"
                raise
            if world.rank == 0:
                notice.warn(f"{error}: taking step {steps[-1]} instead")
            damaged = error
        except ConfigError as error:
            if damaged is None:
                raise
            damaged.remedy = f"step {step} was to be taken instead: {error}"
            raise damaged from error  # of which there may be elements in ``into``, where nothing else has changed it


def found(operation: str, path: Path) -> dict[int, Path]:
    """See `folder.find`; a folder that cannot be listed is a `DataError`."""
    with failing(operation, lambda: path):
        return folder.find(path)


def best(operation: str, path: Path, metric: str) -> int:
    """See `folder.best_step`; of a folder that has no checkpoint a `DataError`, too."""
    return folder.best_step(operation, path, found(operation, path), metric)


def _lost(path: Path, complete: list[int]) -> list[str]:
    """What `folder.without_manifest` finds, the newest last."""
    with failing("restore", lambda: path):
        return [str(each) for _, each in sorted(folder.without_manifest(path, complete).items())]


def _offer(path: Path, damaged: int) -> str | None:
    """Which other checkpoint can be taken."""
    other = folder.another(found("restore", path), damaged)
    return None if other is None else f"restore(step={other}) takes another checkpoint"


def _restore(path: Path, world: World, step: int, into: Any, strict: bool, rename: Any, others: bool) -> Restored:
    comm, place = world.comm, folder.path_of(path, step)
    text, real_place = on_rank_0(comm, lambda: _read_manifest(path, step))
    saved = manifest.parse(text.encode(), place / manifest.NAME)
    names, outline = on_every_rank(
        comm, lambda: (renaming.new_names(saved.state, rename), tree.outline("restore", into))
    )
    items = [f"{strict=}", *(f"{old} is called {new}" for old, new in names.items()), *outline]
    require_same(comm, "restore", items, "restore into the same on all ranks, by the same names")
    form = renaming.renamed(saved.state, names)
    filling = on_every_rank(comm, lambda: Filling(saved, form, world, into, strict, names))
    if others and not strict:  # which may lack names, of which this one must leave nothing where it is damaged
        on_every_rank(comm, lambda: filling.check(Path(real_place)))
    on_every_rank(comm, lambda: filling.read(Path(real_place)))
    state = on_every_rank(comm, filling.finish)
    return Restored(saved.step, state, place, saved.metrics, saved.config, filling.missing, filling.left_over,
                    filling.kept)  # fmt: skip


def _read_manifest(path: Path, step: int) -> tuple[str, str]:
    """On rank 0: the manifest's text, and the folder that it lies in, where all files have the size that it says."""
    place = found("restore", path).get(step)
    if place is None:
        raise DataError("restore", where=path, expected=f"a complete checkpoint of step {step}", got="none")
    content = manifest.content_of(place)
    for file in manifest.of_folder(content, place).files:
        try:
            _check_size(place / file.name, file.nbytes)
        except DataError as error:
            if file.name != index.NAME:
                raise
            notice.warn(f"{error}: restoring all the same, which does not need it; other programs do")
    return content.decode(), str(place)


def _check_size(path: Path, nbytes: int) -> None:
    with failing("restore", lambda: path):
        size = path.stat().st_size
    if size != nbytes:
        raise DataError("restore", where=path, expected=f"{nbytes} bytes", got=size)
