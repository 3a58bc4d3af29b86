"""What a job leaves in /dev/shm, which is memory: ranks that a signal ends do not remove their own segments."""

from __future__ import annotations

import contextlib
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
_OF_MPICH = "mpich_shm_*"


@contextlib.contextmanager
def own_folder(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """``environ`` with a folder of the job's own for the files of Open MPI 5, removed with all that is in it."""
    folder = None
    unset = [name for name in _FOLDER_VARIABLES if name not in environ]
    if unset:
        with contextlib.suppress(OSError):  # a site may forbid it; Open MPI then says what it needs itself
            folder = tempfile.mkdtemp(prefix="hpcdp-", dir=_FOLDER)
    try:
        yield {**environ, **(dict.fromkeys(unset, folder) if folder else {})}
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


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
