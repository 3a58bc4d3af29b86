"""What a job leaves in /dev/shm, which is memory: ranks that a signal ends do not remove their own segments."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import folders, machine

_FOLDER = Path("/dev/shm")
_FOLDER_VARIABLES = (
    "OMPI_MCA_btl_sm_backing_directory",
    "OMPI_MCA_osc_sm_backing_directory",
    # An mpirun does not start where one of the same process number, which was killed, has left its files.
    "PRTE_MCA_prte_tmpdir_base",
)
_PREFIX, _OF_MPICH = "hpcdp-segments-", "mpich_shm_*"


@contextlib.contextmanager
def own_folder(environ: Mapping[str, str]) -> Iterator[tuple[dict[str, str], Path | None]]:
    """``environ`` with a folder of the job's own for the files of Open MPI 5, and that folder, which is removed with
    all that is in it; None where the user has named others for all of them."""
    unset = [name for name in _FOLDER_VARIABLES if name not in environ]
    with contextlib.ExitStack() as stack:
        folder = None
        if unset:
            with contextlib.suppress(OSError):  # a site may forbid it; Open MPI then says what it needs itself
                folder = stack.enter_context(folders.new(_FOLDER, _PREFIX))
        yield {**environ, **(dict.fromkeys(unset, str(folder)) if folder else {})}, folder


def same_folder(name: str) -> contextlib.AbstractContextManager[None]:
    """On another host the folder that `own_folder` has made on the launcher's."""
    return folders.named(Path(name), _PREFIX)


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
