"""A rank that fails alone ends the whole job, and names those whose death has made it fail."""

from __future__ import annotations

import sys
import threading
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import to_stderr
from .ending import end_job
from .roles import name_of

if TYPE_CHECKING:
    from mpi4py import MPI


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


def forget() -> None:
    """Let an exception end this process alone: a child of a rank made by fork, which may not use MPI."""
    if sys.excepthook.__module__ == __name__:
        sys.excepthook = sys.__excepthook__
    if threading.excepthook.__module__ == __name__:
        threading.excepthook = threading.__excepthook__


def _dead_by(error: BaseException | None, comm_world: MPI.Intracomm) -> list[int]:
    """Whose death an error, or what has led to it, tells of, where the library says so."""
    from .mpi import MpiCommunicator

    comm = MpiCommunicator(comm_world)
    while error is not None:
        if isinstance(error, Exception) and comm.takes_note(error):
            return sorted(comm.lost)
        error = error.__cause__ or error.__context__
    return []
