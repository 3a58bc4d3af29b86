"""Removing checkpoints that need not be kept: never the last good one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DataError
from . import folder, lock, overview, verify
from .shard import failing


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
    if overview.is_checkpoint(path):
        raise ConfigError("prune", where=path, expected="a folder of several checkpoints", got="that of one")
    if not (folder.find(path) or folder.left_over(path) or (path / lock.NAME).exists()):
        raise DataError("prune", where=path, expected="checkpoints", got="none")
    if dry_run:
        lock.require_free(path)
        return _remove(path, keep, keep_every, best, True, tell)
    writer = lock.WriterLock(path)
    try:
        return _remove(path, keep, keep_every, best, False, tell)
    finally:
        writer.release()


def _remove(
    path: Path, keep: int, keep_every: int | None, best: str | None, dry_run: bool, tell: Callable[[int], object]
) -> Pruning:
    found = folder.find(path)
    if best is not None and found:
        folder.best_step("prune", path, found, best)
    dropped = folder.dropped(found, keep, keep_every, folder.worth(found, best))
    # What has lost its manifest goes, too, where something good must stay.
    left_over = {each: overview.size_of(each) for each in folder.left_over(path, atomic_rename=not found)}
    good, damaged = None, dict[int, str]()
    if dropped or left_over:
        for step in sorted(set(found) - set(dropped), reverse=True):
            wrong = next(verify.faults(found[step], tell), None)
            if wrong is None:
                good = step
                break
            damaged[step] = wrong
        if found and good is None:
            step, wrong = next(iter(damaged.items()))
            raise DataError("prune", where=path, expected="a good checkpoint among those that stay",
                            got=f"step {step}, {wrong}", remedy=_more(found, dropped, tell))  # fmt: skip
    pruning = Pruning({step: overview.size_of(found[step]) for step in dropped}, left_over, good, damaged)
    if not dry_run:
        with failing("prune", lambda: path):
            folder.clean(path, atomic_rename=not found)
        for step in dropped:
            with failing("prune", lambda: found[step]):  # noqa: B023
                folder.remove(folder.retire(path, step))
    return pruning


def _more(found: Mapping[int, Path], dropped: Sequence[int], tell: Callable[[int], object]) -> str:
    """How many must stay so that a good one does."""
    for step in sorted(dropped, reverse=True):
        if next(verify.faults(found[step], tell), None) is None:
            return f"keep {sum(each >= step for each in found)}: then step {step} stays, which is good"
    return "the others are damaged, too"
