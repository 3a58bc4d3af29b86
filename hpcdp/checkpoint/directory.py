"""The directory of checkpoints, and the lock of its one writer.

One writer a folder: a lock that the kernel frees when its holder ends, in a file that says who that is.

The folder of a run's checkpoints: a folder for each, which gets its name when it is complete, and what is left over.

``step-0000000100`` is complete, ``step-0000000100.tmp`` is being written or removed, or was when its writer died, and
``step-0000000100.old.tmp`` is about to be replaced. Where renaming a folder is no one step of the file system, it may
have been done in part under either name: there a checkpoint is complete with the file `COMMITTED` and all others.
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
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..comm.shared_memory import is_free, lock_request
from ..errors import ConfigError, DataError, warn
from . import manifest

NAME = "writer.lock"
_LOCK, _UNLOCK = lock_request(fcntl.F_WRLCK, 0), lock_request(fcntl.F_UNLCK, 0)
_NOBODY_SAYS = "one that does not say who it is"
_TIMES = 10
"""How often a lock is taken anew, of which others remove the file, at most."""
_HELD = (errno.EAGAIN, errno.EACCES)


class WriterLock:
    """Held by one process at a time, until `release` or its end.

    Args:
        folder: exists.
        operation: what errors say was attempted.

    Raises:
        DataError: another process holds it, which is named; or the file cannot be made.
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
                if self._other_than_locked() is None:  # else its last holder has removed it before it was locked
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
            raise DataError(self._operation, where=path, got=error.strerror) from error

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
        with contextlib.suppress(OSError):  # it is locked all the same; of a full disk who writes more tells
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, text.encode(), 0)

    def require_held(self) -> None:
        """Raise `DataError` unless the file is still the one that is locked: of another one others take the lock."""
        got = self._other_than_locked()
        if got is not None:
            raise DataError(
                self._operation, where=self._path, expected="the file that this job has locked", got=got,
                remedy="nothing is saved here any more, where others may; end this job, and never remove the file",
            )  # fmt: skip

    def _other_than_locked(self) -> str | None:
        """What is there instead of the file that is locked; None where it is that."""
        own = os.fstat(self._file)
        try:
            found = os.stat(self._path)
        except OSError as error:
            return error.strerror
        return None if (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino) else "another one"

    def release(self) -> None:
        """Let others write; may be called twice."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # a child made by fork may have the file open, too
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _UNLOCK)
            os.close(self._file)
            self._file = -1


def holder(path: Path) -> str | None:
    """Who holds the lock of that file now, in words as `owner`; None if nobody does, or none can be had here."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _LOCK)
        finally:
            os.close(file)
        if not is_free(found):
            return owner(path) or _NOBODY_SAYS
    return None


def require_free(folder: Path) -> None:
    """Take no lock, but raise what `WriterLock` does where another process holds it."""
    who = holder(folder / NAME)
    if who is not None:
        raise _held("lock the checkpoints", folder / NAME, who)


def _held(operation: str, path: Path, who: str) -> DataError:
    return DataError(
        operation, where=path, expected="no other job that saves here",
        got=who or _NOBODY_SAYS, remedy="wait for it, or save to another folder",
    )  # fmt: skip


def owner(path: Path) -> str:
    """Who has written a lock's file last, in words; "" where it does not say."""
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
"""A file that makes a checkpoint complete where renaming a folder is not one step of the file system."""
_NAME = re.compile(r"step-([0-9]{10,18})(\.old\.tmp)?")
_LEFT_OVER = re.compile(r"step-[0-9]{10,18}(\.old)?\.tmp")
_MAY_WANT_COMMIT_FILE = re.compile(rb'"commit_file"\s*:\s*true')
"""In a manifest; one of thousands of parts takes tenths of a second to read as JSON."""
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""What fsync of a folder says where there is none, see fsync(2); all else means that the disk has failed."""


def path_of(folder: Path, step: int) -> Path:
    """Where the complete checkpoint of a step is."""
    return folder / f"step-{step:010d}"


def partial_path(folder: Path, step: int) -> Path:
    """Where it is while it is being written."""
    return folder / f"step-{step:010d}.tmp"


def _old_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:010d}.old.tmp"


def another(steps: Iterable[int], damaged: int) -> int | None:
    """Which step to take instead of a damaged one: the next older, or else the newest; None where there is none."""
    others = [step for step in steps if step != damaged]
    return max((step for step in others if step < damaged), default=max(others, default=None))


def find(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder that are complete, by step, oldest first; none where there is no folder.

    One that was being replaced when its writer died counts.
    """
    found: dict[int, Path] = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(folder.iterdir()):  # the new one before the old one of a step
            match = _NAME.fullmatch(path.name)
            if match is not None and int(match[1]) not in found and is_complete(path):
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def is_complete(path: Path) -> bool:
    """Whether its writer has come to the end; see `manifest.read` for whether it is undamaged."""
    try:
        if not (path / manifest.NAME).is_file():
            return False
        if not _MAY_WANT_COMMIT_FILE.search(manifest.content_of(path)):  # of all that are kept, in each save
            return True
        found = manifest.read(path)
        names = (COMMITTED, *(file.name for file in found.files)) if found.commit_file else ()
        return all((path / name).is_file() for name in names)
    except (DataError, OSError):
        return True  # damaged, or not to be looked into, which is said where it is read


def _wants_commit_file(path: Path) -> bool:
    with contextlib.suppress(OSError, DataError):
        return manifest.read(path).commit_file
    return False  # damaged, which is said where it is read


def left_over(folder: Path, atomic_rename: bool = True) -> list[Path]:
    """What writers that died have left behind; without ``atomic_rename`` that may have the name of a complete one."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        complete = set(find(folder).values())
        named = [each for each in folder.iterdir() if each not in complete and is_named(each) and each.is_dir()]
        return sorted(
            each for each in named if _LEFT_OVER.fullmatch(each.name) or not atomic_rename or _wants_commit_file(each)
        )
    return []


def without_manifest(folder: Path, complete: Iterable[int]) -> dict[int, Path]:
    """What has the name of a complete checkpoint and is none, by step: it has lost its manifest.

    Where renaming a folder is no one step of the file system a writer that died may have left it so.

    Args:
        complete: the steps of `find`.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        known = set(complete)
        named = [each for each in folder.iterdir() if is_final(each) and step_of(each) not in known]
        lost = [each for each in named if each.is_dir() and not (each / manifest.NAME).is_file()]
        return {step_of(each): each for each in sorted(lost)}
    return {}


def step_of(path: Path) -> int:
    """The step that a name says, which `is_named`."""
    return int(path.name.split("-")[1].partition(".")[0])


def is_final(path: Path) -> bool:
    """Whether a folder has the name of a complete checkpoint."""
    match = _NAME.fullmatch(path.name)
    return match is not None and match[2] is None


def is_named(path: Path) -> bool:
    """Whether a folder has the name of a checkpoint, complete or not."""
    return bool(_NAME.fullmatch(path.name) or _LEFT_OVER.fullmatch(path.name))


def require_room(folder: Path, step: int) -> None:
    """Raise `DataError` where something that is no folder has a name that the checkpoint of a step needs."""
    for path in (partial_path(folder, step), path_of(folder, step), _old_path(folder, step)):
        if os.path.lexists(path) and not path.is_dir():
            raise DataError("save", where=path, expected="a folder, or nothing", got="a file", remedy="move it away")


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Remove a folder and what is in it; of a link to one, such as to a checkpoint that lies elsewhere, the link.

    With ``ignore_errors`` what cannot be removed stays, and is then left over.
    """
    if path.is_symlink():
        with contextlib.suppress(OSError) if ignore_errors else contextlib.nullcontext():
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


def clean(folder: Path, atomic_rename: bool) -> list[Path]:
    """Remove what is left over; returns what that was. An old checkpoint that was never replaced gets its name back."""
    removed = left_over(folder, atomic_rename)
    for path in removed:
        remove(path)
    for step, path in find(folder).items():
        if path != path_of(folder, step):
            path.rename(path_of(folder, step))
    return removed


def commit(folder: Path, step: int, atomic_rename: bool) -> Path:
    """Give a checkpoint whose files are all on disk its name; where it is then. One of that name is put aside."""
    partial, final, old = partial_path(folder, step), path_of(folder, step), _old_path(folder, step)
    sync_folder(partial)
    if final.exists() and is_complete(final):
        if old.exists():  # it was replaced by that one, and could not be removed
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
    """Remove what `commit` has put aside, if there is something."""
    if _old_path(folder, step).exists():
        remove(_old_path(folder, step))


def retire(folder: Path, step: int) -> Path:
    """Make a left-over of a complete checkpoint, which is to be removed; where it is then."""
    partial = partial_path(folder, step)
    for path in (_old_path(folder, step), path_of(folder, step)):
        if path.exists():
            if partial.exists():
                remove(partial)
            path.rename(partial)
    sync_folder(folder)  # before files are gone
    return partial


def sync_folder(folder: Path) -> None:
    """Have the names in a folder written to disk, where the file system can be asked to: CIFS and 9p cannot."""
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
    """Which of ``steps`` need not be kept any longer.

    Args:
        keep: the newest so many stay; None: all.
        keep_every: those stay whose number this divides.
        values: of a metric, by step; the one with the greatest stays.
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


def worth(found: Mapping[int, Path], best: str | None) -> dict[int, float]:
    """What decides which checkpoint is the best, by step, the greater the better; see `dropped`.

    Args:
        best: ``"metric"``, or ``"-metric"`` where the smallest is the best.
    """
    if best is None:
        return {}
    name, sign = best.removeprefix("-"), -1 if best.startswith("-") else 1
    values = {}
    for step, path in found.items():
        with contextlib.suppress(DataError, KeyError):  # damaged, or saved without: never the best
            values[step] = sign * manifest.read(path).metrics[name]
    return values


def metric_name(operation: str, best: object, expected: str = "'metric' or '-metric'") -> str:
    """Return the ``best`` of a `Manager`, a name of a metric, behind a minus where less is better."""
    if isinstance(best, str) and best.removeprefix("-"):
        return best
    raise ConfigError(operation, where="best", expected=expected, got=repr(best))


def best_step(operation: str, folder: Path, found: Mapping[int, Path], best: str) -> int:
    """Return the step of the checkpoint that is best; of several equal ones the newest.

    Args:
        operation: what needs it, for the error.
        folder: that of all checkpoints, for the error.
        found: the checkpoints by step.
        best: see `worth`.

    Raises:
        ConfigError: ``best`` names no metric.
        DataError: no checkpoint has the metric.
    """
    metric_name(operation, best)
    values = worth(found, best)
    if not values:
        raise DataError(
            operation, where=folder, expected=f"checkpoints with the metric {best.removeprefix('-')}", got="none"
        )
    return _best_of(values)


def _best_of(values: Mapping[int, float]) -> int:
    return max(values, key=lambda step: (values[step], step))


def wait_for(path: Path, timeout_s: float = 10.0) -> None:
    """Wait until a folder that another host has made is seen here: file systems of clusters take a moment."""
    deadline = time.monotonic() + timeout_s
    while not _is_seen(path) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_seen(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.exists()
    return False
