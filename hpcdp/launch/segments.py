"""What a job leaves in /dev/shm, which is memory: ranks that a signal ends do not remove their own segments."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import machine

_FOLDER = Path("/dev/shm")
FOLDER_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
_FOLDER_VARIABLES = (
    FOLDER_VARIABLE,
    "OMPI_MCA_osc_sm_backing_directory",
    # An mpirun does not start where one of the same process number, which was killed, has left its files.
    "PRTE_MCA_prte_tmpdir_base",
)
_PREFIX, _OF_MPICH = "hpcdp-segments-", "mpich_shm_*"


@contextlib.contextmanager
def own_folder(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """``environ`` with a folder of the job's own for the files of Open MPI 5, removed with all that is in it.

    Those of launchers that were killed are removed as well: nobody has their locks any more.
    """
    unset = [name for name in _FOLDER_VARIABLES if name not in environ]
    with contextlib.ExitStack() as stack:
        folder = None
        if unset:
            with contextlib.suppress(OSError):  # a site may forbid it; Open MPI then says what it needs itself
                _remove_left_behind()
                folder = _make_locked(stack)
        yield {**environ, **(dict.fromkeys(unset, folder) if folder else {})}


def _make_locked(stack: contextlib.ExitStack) -> str:
    """A new folder, locked as long as this process lives; ``stack`` removes it."""
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=_FOLDER)
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another launcher has come before the lock
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(folder):
            stack.callback(os.close, lock)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            return folder
        os.close(lock)


def _remove_left_behind() -> None:
    for folder in _FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or one that is removed at this moment
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def new_ones_removed() -> Iterator[None]:
    """Removes the segments of MPICH, which takes no folder for them, that were made meanwhile and nobody uses.

    Those of jobs that run beside this one are mapped or held open from their making on.
    """
    before = set(_FOLDER.glob(_OF_MPICH))
    try:
        yield
    finally:
        new = set(_FOLDER.glob(_OF_MPICH)) - before  # before who uses them is asked: no later one is taken for unused
        used = machine.files_in_use(f"{_FOLDER}/") if new else set()
        for path in new:
            with contextlib.suppress(OSError):
                if str(path) not in used and path.stat().st_uid == os.getuid():
                    path.unlink()
