"""What is in a folder, at a glance: which checkpoints, whole by their sizes or not, left-overs, who writes here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DataError, listed
from . import folder, lock, manifest

RUN_SUBFOLDER = "checkpoints"
"""Where checkpoints are in the folder of a run."""


@dataclass(frozen=True)
class Seen:
    """A checkpoint as far as its manifest and the sizes of its files tell."""

    step: int
    path: Path
    manifest: manifest.Manifest | None
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
        step = folder.step_of(own) if folder.is_named(own) else manifest.read(path).step
        return Overview(path, [look_at(path, step)], {}, None)
    path = checkpoints_folder(path)
    writer = lock.holder(path / lock.NAME)  # first: what it has just completed is then no left-over
    left_over = {each: size_of(each) for each in folder.left_over(path)}
    named = {folder.step_of(each): each for each in sorted(path.iterdir(), reverse=True) if folder.is_final(each)}
    found = {step: each for step, each in named.items() if each not in left_over} | folder.find(path)
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
    return inner if inner.is_dir() and not any(map(folder.is_named, path.iterdir())) else path


def is_checkpoint(path: Path) -> bool:
    """Whether this is the folder of one checkpoint, be it damaged."""
    return path.is_dir() and (folder.is_named(path.absolute()) or (path / manifest.NAME).exists())


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
    found = folder.find(inner)
    if not found or (step is not None and step not in found):
        expected = "a complete checkpoint" if step is None else f"one of step {listed([*map(str, found)]) or step}"
        raise DataError("read checkpoints", where=inner, expected=expected, got="none" if step is None else step)
    if best is not None:
        step = folder.best_step("read checkpoints", inner, found, best)
    return found[max(found) if step is None else step]


@contextlib.contextmanager
def offering_another(path: Path, taken: Path) -> Iterator[None]:
    """What is found to be wrong with a checkpoint that `chosen` has ``taken`` of several names another one."""
    try:
        yield
    except DataError as error:
        if error.remedy is None and path != taken and str(error.where).startswith(str(taken)):
            found = folder.find(taken.parent)
            good = [step for step, each in found.items() if look_at(each, step).damage is None]
            other = folder.another(good, folder.step_of(taken))
            error.remedy = None if other is None else f"--step {other} takes another checkpoint"
        raise
