"""What a job leaves in /dev/shm, which is memory, and in /tmp: ranks and daemons that a signal ends do not remove their
own files."""

from __future__ import annotations

import contextlib
import os
import time
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
# hydra's daemon writes the machine's topology there, wherever TMPDIR is, for its ranks to read.
_TOPOLOGIES, _DAEMON = (Path("/tmp"), "hydra_hwloc_xmlfile_*"), "hydra_pmi_proxy"
_CLOCKS_DIFFER_S, _OLD_S = 2.0, 60.0


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
def files_of_mpich_removed() -> Iterator[None]:
    """Removes what MPICH, which takes no folder for it, has left behind: segments that were made meanwhile, or by jobs
    whose launcher was killed, and that nobody uses, and files of daemons that have gone.

    Segments of jobs that run beside this one are mapped or held open from their making on; those of a job that starts
    in another container, whose processes are not seen, are young.
    """
    before = set(_FOLDER.glob(_OF_MPICH))
    try:
        yield
    finally:
        there = set(_FOLDER.glob(_OF_MPICH))  # before who uses them is asked: no later one is taken for unused
        used = machine.files_in_use(f"{_FOLDER}/") if there else set()
        old_s = time.time() - _OLD_S
        for path in there:
            with contextlib.suppress(OSError):
                found = path.stat()
                if str(path) in used or found.st_uid != os.getuid():
                    continue
                if path not in before or found.st_mtime < old_s:
                    path.unlink()
        _remove_topologies()


def _remove_topologies() -> None:
    """Those of this user that are older than every daemon that runs."""
    folder, names = _TOPOLOGIES
    oldest_s = min(machine.started_at_s(_DAEMON), default=float("inf")) - _CLOCKS_DIFFER_S
    for path in folder.glob(names):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if found.st_uid == os.getuid() and found.st_mtime < oldest_s:
                path.unlink()
