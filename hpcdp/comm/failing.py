"""A rank that fails alone ends the whole job, and names those whose death has made it fail."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import to_stderr
from .roles import name_of

if TYPE_CHECKING:
    from mpi4py import MPI


_OUTLIVES_RANKS = "OMPI_MCA_mpi_ft_enable"
"""What that mpirun sets."""
_LOOKS, _NAP_S = 50, 0.01
_OF_HYDRA, _HEARD_S = "PMI_RANK", 0.2
"""MPICH's mpirun ends at once and drops what a rank on another host has just written, such as why it ends the job."""


def outlives_ranks() -> bool:
    """Whether the library lets a job go on when one of its ranks dies: Open MPI under ``mpirun --with-ft ulfm``."""
    return os.environ.get(_OUTLIVES_RANKS, "0") not in ("", "0")


def end_job(comm_world: MPI.Intracomm, code: int) -> None:
    """End all processes of the job, which has this status then."""
    for _ in range(_LOOKS if outlives_ranks() else 0):
        with contextlib.suppress(Exception):  # by which it takes in who has died
            comm_world.Iprobe()
        if comm_world.Get_failed().size == comm_world.size - 1:
            os._exit(code)  # mpirun would forget the status of the only one that is left
        time.sleep(_NAP_S)
    if _OF_HYDRA in os.environ:
        time.sleep(_HEARD_S)
    comm_world.Abort(code)


def abort_when_one_fails(comm_world: MPI.Intracomm, workers: int) -> None:
    """Make an uncaught exception end the whole job: the other processes would wait for this one for ever."""
    name = name_of(comm_world.rank, workers)

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            to_stderr(f"{name}: interrupted")
            end_job(comm_world, 130)
            return  # with MPICH, which ends the process a little later
        text = "".join(traceback.format_exception(kind, error, trace))
        text += "".join(f"{name_of(rank, workers)} has died\n" for rank in _dead_by(error, comm_world))
        to_stderr(f"{name} failed:\n{text}")
        end_job(comm_world, 1)

    def abort_from_thread(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, SystemExit):  # which ends the thread alone
            abort(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)

    sys.excepthook = abort
    threading.excepthook = abort_from_thread


def _dead_by(error: BaseException | None, comm_world: MPI.Intracomm) -> list[int]:
    """Whose death an error, or what has led to it, tells of, where the library says so."""
    from .mpi import MpiCommunicator

    comm = MpiCommunicator(comm_world)
    while error is not None:
        if isinstance(error, Exception) and comm.takes_note(error):
            return sorted(comm.lost)
        error = error.__cause__ or error.__context__
    return []
