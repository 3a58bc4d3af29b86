"""A rank that fails alone ends the whole job, and names those whose death has made it fail."""

from __future__ import annotations

import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import HpcdpError, Terminated, to_stderr
from .ending import end_job
from .roles import name_of

if TYPE_CHECKING:
    from mpi4py import MPI

_OF_ALL_S = 1.0
"""For so long the other ranks leave it to rank 0 to report an error that every rank raises."""


def abort_when_one_fails(comm_world: MPI.Intracomm, workers: int) -> None:
    """Make an uncaught exception end the whole job: the other processes would wait for this one for ever."""
    name = name_of(comm_world.rank, workers)

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            terminated = issubclass(kind, Terminated)
            to_stderr(f"{name}: {'ended by SIGTERM' if terminated else 'interrupted'}")
            end_job(comm_world, 128 + (signal.SIGTERM if terminated else signal.SIGINT))
            return  # with MPICH, which ends the process a little later
        if isinstance(error, HpcdpError) and error.is_on_every_rank and comm_world.rank:
            time.sleep(_OF_ALL_S)  # rank 0 reports it for all, and ends the job
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
