"""The folders of checkpoints, one for each step: which are complete, left over or kept; the lock of their writer.

Each checkpoint has a folder, which is renamed when it is complete. ``step-0000000100`` is complete,
``step-0000000100.tmp`` is being written or removed, or its writer died, and ``step-0000000100.old.tmp`` is about to be
replaced. On a file system without atomic renames, a folder may be renamed in part; there a checkpoint is complete with
the file `COMMITTED` and all other files. The kernel releases the lock when its holder ends; the lock's file names it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..comm.shared_memory import is_free, lock_request
from ..errors import ConfigError, DataError, listed, reason, warn
from . import manifest
from .manifest import Manifest

NAME = "writer.lock"
_LOCK, _UNLOCK = lock_request(fcntl.F_WRLCK, 0), lock_request(fcntl.F_UNLCK, 0)
_UNKNOWN_OWNER = "an unknown job"
_TIMES = 10
"""Most attempts to take a lock whose file other processes remove."""
_HELD = (errno.EAGAIN, errno.EACCES)


class WriterLock:
    """A lock on a folder, held by one process at a time, until `release` or its end.

    Args:
        folder: an existing folder.
        operation: the operation that errors name.

    Raises:
        DataError: another process holds the lock, and is named; or the file cannot be made.
    """

    def __init__(self, folder: Path, operation: str = "lock the checkpoints") -> None:
        path = self._path = folder / NAME
        self._operation = operation
        self._file = -1
        try:
            for _ in range(_TIMES):
                self.release()
                self._file = self._opened(path)
                self._take(path)
                if self._other_than_locked() is None:  # otherwise its last holder removed it before it was locked
                    break
            self.require_held()
            self._sign()
        except BaseException:
            self.release()
            raise

    def _opened(self, path: Path) -> int:
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)  # as the umask has it
        except OSError as error:
            raise DataError(self._operation, where=path, got=reason(error)) from error

    def _take(self, path: Path) -> None:
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _LOCK)
        except OSError as error:
            if error.errno not in _HELD:
                warn(f"{path}: {error.strerror}: nothing keeps a second job from writing here")
                return
            raise _held(self._operation, path, owner(path)) from error

    def _sign(self) -> None:
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID") or os.environ.get("JOB_ID")
        who = {"host": socket.gethostname(), "pid": os.getpid(), "user": _user(), "job": job}
        text = json.dumps(who | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n"
        with contextlib.suppress(OSError):  # the lock is held anyway; later writes report a full disk
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text.encode(), 0)

    def require_held(self) -> None:
        """Raise `DataError` if the locked file was replaced, because another process may lock the new one."""
        got = self._other_than_locked()
        if got is not None:
            raise DataError(
                self._operation, where=self._path, expected="the file that this job has locked", got=got,
                remedy="end this job, which saves nothing here any more, and never remove the file",
            )  # fmt: skip

    def _other_than_locked(self) -> str | None:
        """Return None if the path is still the locked file, else what it is, in words."""
        own = os.fstat(self._file)
        try:
            present = os.stat(self._path)
        except OSError as error:
            return error.strerror
        return None if (present.st_dev, present.st_ino) == (own.st_dev, own.st_ino) else "another file"

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # closing alone does not suffice: a forked child may have the file open
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _UNLOCK)
            os.close(self._file)
            self._file = -1


def holder(path: Path) -> str | None:
    """Return the holder of a lock's file, as `owner`; None if it is free, or the file system has no locks."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _LOCK)
        finally:
            os.close(file)
        if not is_free(answer):
            return owner(path) or _UNKNOWN_OWNER
    return None


def require_free(folder: Path) -> None:
    """Raise the error of `WriterLock` if another process holds the lock; takes no lock."""
    who = holder(folder / NAME)
    if who is not None:
        raise _held("lock the checkpoints", folder / NAME, who)


def _held(operation: str, path: Path, who: str) -> DataError:
    return DataError(
        operation, where=path, expected="no other job that saves here",
        got=who or _UNKNOWN_OWNER, remedy="wait for it, or save to another folder",
    )  # fmt: skip


def owner(path: Path) -> str:
    """Return process, user, host and job of the last writer of a lock's file, in words; "" if unknown."""
    try:
        who = json.loads(path.read_bytes())
        job = f", job {who['job']}" if who["job"] else ""
        return f"process {who['pid']} of {who['user']} on {who['host']}{job}, since {who['since']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


COMMITTED = "committed"
"""Name of the file that marks a checkpoint as complete on a file system without atomic renames."""
_NAME = re.compile(r"step-([0-9]{10,18})(\.old\.tmp)?")
_LEFT_OVER = re.compile(r"step-[0-9]{10,18}(\.old)?\.tmp")
_MAY_WANT_COMMIT_FILE = re.compile(rb'"commit_file"\s*:\s*true')
"""Pattern in a manifest's text, because parsing a manifest of thousands of parts takes tenths of a second."""
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors of fsync for a folder that cannot be synchronized, see fsync(2); others mean that the disk has failed."""


def path_of(folder: Path, step: int) -> Path:
    """Return the path of a step's complete checkpoint."""
    return folder / f"step-{step:010d}"


def partial_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint while it is being written."""
    return folder / f"step-{step:010d}.tmp"


def _old_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}.old.tmp"


def another(steps: Iterable[int], damaged: int) -> int | None:
    """Return the step to use instead of a damaged one: the next older, else the newest; None without another."""
    other_steps = [step for step in steps if step != damaged]
    return max((step for step in other_steps if step < damaged), default=max(other_steps, default=None))


def find(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a folder by step, oldest first; empty without a folder.

    A checkpoint that was being replaced when its writer died counts.
    """
    complete: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(folder.iterdir()):  # a step's new folder sorts before its old one
            match = _NAME.fullmatch(path.name)
            if match is not None and int(match[1]) not in complete and is_complete(path):
                complete[int(match[1])] = path
    return dict(sorted(complete.items()))


def is_complete(path: Path) -> bool:
    """Return whether a checkpoint was written to the end; `manifest.read` finds damage."""
    try:
        if not (path / manifest.NAME).is_file():
            return False
        if not _MAY_WANT_COMMIT_FILE.search(manifest.content_of(path)):  # fast: each save checks all checkpoints
            return True
        saved = manifest.read(path)
        names = (COMMITTED, *(file.name for file in saved.files)) if saved.commit_file else ()
        return all((path / name).is_file() for name in names)
    except (DataError, OSError):
        return True  # damaged or unreadable, which reading it reports


def _wants_commit_file(path: Path) -> bool:
    with contextlib.suppress(OSError, DataError):
        return manifest.read(path).commit_file
    return False  # damaged, which reading it reports


def left_over(folder: Path, atomic_rename: bool = True) -> list[Path]:
    """Return the folders of dead writers, which without ``atomic_rename`` may have the name of a checkpoint."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        complete = set(find(folder).values())
        named = [path for path in folder.iterdir() if path not in complete and is_named(path) and path.is_dir()]
        return sorted(
            path for path in named if _LEFT_OVER.fullmatch(path.name) or not atomic_rename or _wants_commit_file(path)
        )
    return []


def without_manifest(folder: Path, complete: Iterable[int]) -> dict[int, Path]:
    """Return the folders by step that have the name of a complete checkpoint, but no manifest.

    On a file system without atomic renames a dead writer may leave such a folder. ``complete`` are the steps of `find`.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        known = set(complete)
        named = [path for path in folder.iterdir() if is_final(path) and step_of(path) not in known]
        lost = [path for path in named if path.is_dir() and not (path / manifest.NAME).is_file()]
        return {step_of(path): path for path in sorted(lost)}
    return {}


def step_of(path: Path) -> int:
    """Return the step of a checkpoint's name, which `is_named`."""
    return int(path.name.split("-")[1].partition(".")[0])


def is_final(path: Path) -> bool:
    """Return whether a folder has the name of a complete checkpoint."""
    match = _NAME.fullmatch(path.name)
    return match is not None and match[2] is None


def is_named(path: Path) -> bool:
    """Return whether a folder has the name of a checkpoint, complete or not."""
    return bool(_NAME.fullmatch(path.name) or _LEFT_OVER.fullmatch(path.name))


def require_room(folder: Path, step: int) -> None:
    """Raise `DataError` if a file has a name that the checkpoint of a step needs."""
    for path in (partial_path(folder, step), path_of(folder, step), _old_path(folder, step)):
        if os.path.lexists(path) and not path.is_dir():
            raise DataError("save", where=path, expected="a folder, or nothing", got="a file", remedy="move it away")


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Remove a folder and its content, or a symbolic link to one, such as to a checkpoint elsewhere.

    With ``ignore_errors`` files that cannot be removed stay as left-overs.
    """
    if path.is_symlink():
        with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


def clean(folder: Path, atomic_rename: bool) -> list[Path]:
    """Remove and return the left-overs; an old checkpoint that was never replaced gets its name back."""
    removed = left_over(folder, atomic_rename)
    for path in removed:
        remove(path)
    for step, path in find(folder).items():
        if path != path_of(folder, step):
            path.rename(path_of(folder, step))
    return removed


def commit(folder: Path, step: int, atomic_rename: bool) -> Path:
    """Rename a checkpoint whose files are all on disk to its final path, and return it.

    A complete checkpoint of the same step gets its old path; see `remove_old`.
    """
    partial, final, old = partial_path(folder, step), path_of(folder, step), _old_path(folder, step)
    sync_folder(partial)
    if final.exists() and is_complete(final):
        if old.exists():  # replaced by `final`, but it could not be removed
            remove(old)
        final.rename(old)
    elif final.exists():
        remove(final)
    partial.rename(final)
    if not atomic_rename:
        with open(final / COMMITTED, "xb") as file:
            os.fsync(file.fileno())
        sync_folder(final)
    sync_folder(folder)
    return final


def remove_old(folder: Path, step: int) -> None:
    """Remove the old checkpoint that `commit` has renamed, if any."""
    if _old_path(folder, step).exists():
        remove(_old_path(folder, step))


def retire(folder: Path, step: int) -> Path:
    """Rename a complete checkpoint to the path of a left-over, to be removed, and return this path."""
    partial = partial_path(folder, step)
    for path in (_old_path(folder, step), path_of(folder, step)):
        if path.exists():
            if partial.exists():
                remove(partial)
            path.rename(partial)
    sync_folder(folder)  # before any file is removed
    return partial


def sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk, where the file system supports it: CIFS and 9p do not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)


def dropped(
    steps: Iterable[int], keep: int | None, keep_every: int | None, values: Mapping[int, float] | None = None
) -> list[int]:
    """Return the steps that need not be kept.

    Args:
        steps: steps of all checkpoints.
        keep: number of the newest ones to keep; None: all.
        keep_every: steps divisible by this are kept, too.
        values: values of a metric by step; the greatest one is kept, too.
    """
    ordered = sorted(steps)
    if keep is None or len(ordered) <= keep:
        return []
    stay: set[int] = set(ordered[-keep:])
    if keep_every is not None:
        stay |= {step for step in ordered if step % keep_every == 0}
    if values:
        stay.add(_best_of(values))
    return [step for step in ordered if step not in stay]


def worth(folders: Mapping[int, Path], best: str | None) -> dict[int, float]:
    """Return the values of the metric ``best`` by step, negated for ``"-metric"``, so that the greatest is the best."""
    if best is None:
        return {}
    name, sign = best.removeprefix("-"), -1 if best.startswith("-") else 1
    values = {}
    for step, path in folders.items():
        with contextlib.suppress(DataError, KeyError):  # damaged, or saved without: never the best
            values[step] = sign * manifest.read(path).metrics[name]
    return values


def metric_name(operation: str, best: object, expected: str = "'metric' or '-metric'") -> str:
    """Return ``best`` of a `Manager`, which names a metric, with a minus if less is better; `ConfigError` otherwise."""
    if isinstance(best, str) and best.removeprefix("-"):
        return best
    raise ConfigError(operation, where="best", expected=expected, got=repr(best))


def best_step(operation: str, folder: Path, folders: Mapping[int, Path], best: str) -> int:
    """Return the step of the best checkpoint, the newest of several equal ones.

    Args:
        operation: the operation that errors name.
        folder: the folder of all checkpoints, which errors name.
        folders: the checkpoints by step.
        best: the metric, see `worth`.

    Raises:
        ConfigError: ``best`` names no metric.
        DataError: no checkpoint has the metric.
    """
    metric_name(operation, best)
    values = worth(folders, best)
    if not values:
        raise DataError(
            operation, where=folder, expected=f"checkpoints with the metric {best.removeprefix('-')}", got="none"
        )
    return _best_of(values)


def _best_of(values: Mapping[int, float]) -> int:
    return max(values, key=lambda step: (values[step], step))


def wait_for(path: Path, timeout_s: float = 10.0) -> None:
    """Wait until a folder that another host has made is visible here, which takes a moment on cluster file systems."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if path.exists():
                return
        time.sleep(0.01)


RUN_SUBFOLDER = "checkpoints"
"""Name of the folder of checkpoints in the folder of a run."""


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint by its manifest and the sizes of its files."""

    step: int
    path: Path
    manifest: Manifest | None
    """The manifest; None if it cannot be read."""
    damage: str | None
    """First fault that manifest and sizes show; None without one."""
    nbytes: int
    """Bytes of its files."""


@dataclass(frozen=True)
class Overview:
    """The content of a folder of checkpoints."""

    path: Path
    checkpoints: list[CheckpointSummary]
    """Checkpoints, oldest first."""
    left_over: dict[Path, int]
    """Bytes of other folders by path, one of which ``writer`` may be writing."""
    writer: str | None
    """Job that saves here now, in words."""


def overview(path: Path) -> Overview:
    """Return the content of a folder of checkpoints, of a run, or of one checkpoint.

    Raises:
        DataError: there is no such folder, or it is empty.
    """
    if is_checkpoint(path):
        own = path.absolute()  # the path may be "."
        step = step_of(own) if is_named(own) else manifest.read(path).step
        return Overview(path, [summary_of(path, step)], {}, None)
    path = checkpoints_folder(path)
    writer = holder(path / NAME)  # first: a checkpoint completed meanwhile is not a left-over
    remains = {folder: size_of(folder) for folder in left_over(path)}
    final = [folder for folder in sorted(path.iterdir(), reverse=True) if is_final(folder)]
    named = {step_of(folder): folder for folder in final if folder not in remains}
    saved = named | find(path)
    if not (saved or remains or writer):
        raise DataError("read checkpoints", where=path, expected="checkpoints", got="none")
    summaries = [summary_of(saved[step], step) for step in sorted(saved)]
    present = [summary for summary in summaries if os.path.lexists(summary.path)]  # a job may have removed some
    return Overview(path, present, remains, writer)


def summary_of(path: Path, step: int) -> CheckpointSummary:
    """Examine a checkpoint by its manifest and the sizes of its files."""
    try:
        saved = manifest.read(path)
    except DataError as error:
        return CheckpointSummary(step, path, None, f"{manifest.NAME}: {error.got}", size_of(path))
    return CheckpointSummary(step, path, saved, next(wrong_sizes(path, saved), None), size_of(path))


def wrong_sizes(path: Path, saved: Manifest) -> Iterator[str]:
    """Yield the files that are missing or have another size than in the manifest."""
    for file in saved.files:
        try:
            nbytes = (path / file.name).stat().st_size
        except OSError as error:
            yield f"{file.name}: {reason(error)}"
            continue
        if nbytes != file.nbytes:
            yield f"{file.name}: expected {file.nbytes:,} bytes, got {nbytes:,}"


def size_of(path: Path) -> int:
    """Return the bytes of all files in a folder, which a job may remove meanwhile."""
    total = 0
    for within, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(within, name)).st_size
    return total


def checkpoints_folder(path: Path) -> Path:
    """Return the folder of checkpoints: ``path``, or the subfolder of a run.

    Raises:
        DataError: there is no such folder.
    """
    if not path.is_dir():
        got = "a file" if path.exists() else "no such folder"
        raise DataError("read checkpoints", where=path, expected="a folder of checkpoints, or of a run", got=got)
    inner = path / RUN_SUBFOLDER
    return inner if inner.is_dir() and not any(map(is_named, path.iterdir())) else path


def is_checkpoint(path: Path) -> bool:
    """Return whether this is the folder of one checkpoint, maybe a damaged one."""
    return path.is_dir() and (is_named(path.absolute()) or (path / manifest.NAME).exists())


def chosen(path: Path, step: int | None = None, best: str | None = None) -> Path:
    """Return the folder of one checkpoint.

    Args:
        path: the folder of the checkpoint, or of checkpoints or a run, in which the newest complete one is chosen.
        step: the step to choose instead of the newest.
        best: ``"metric"`` or ``"-metric"``: choose the greatest or smallest value of the metric instead.

    Raises:
        ConfigError: ``step`` or ``best`` come with the folder of one checkpoint, or both are given.
        DataError: there is no such checkpoint, or none with that metric.
    """
    if is_checkpoint(path):
        if step is not None or best is not None:
            option = "--best" if step is None else "--step"
            raise ConfigError(option, expected="a folder of several checkpoints", got=f"{path}, a single checkpoint")
        return path
    if step is not None and best is not None:
        raise ConfigError("--best", expected="none with --step", got=best)
    inner = checkpoints_folder(path)
    saved = find(inner)
    if not saved or (step is not None and step not in saved):
        expected = "a complete checkpoint" if step is None else f"one of step {listed([*map(str, saved)]) or step}"
        raise DataError("read checkpoints", where=inner, expected=expected, got="none" if step is None else step)
    if best is not None:
        step = best_step("read checkpoints", inner, saved, best)
    return saved[max(saved) if step is None else step]


@contextlib.contextmanager
def offering_another(path: Path, used: Path) -> Iterator[None]:
    """Add another checkpoint as a remedy to errors in this context about the one that `chosen` has ``used``."""
    try:
        yield
    except DataError as error:
        if error.remedy is None and path != used and str(error.where).startswith(str(used)):
            saved = find(used.parent)
            good = [step for step, folder in saved.items() if summary_of(folder, step).damage is None]
            other = another(good, step_of(used))
            error.remedy = None if other is None else f"pass --step {other} for another checkpoint"
        raise
