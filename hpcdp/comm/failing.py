"""A rank that fails alone ends the whole job, and names those whose death has made it fail."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from ..errors import HpcdpError, Terminated, report_directly
from .ending import end_job
from .roles import name_of

if TYPE_CHECKING:
    from mpi4py import MPI

_OF_ALL_S = 1.0
"""For so long the other ranks leave it to rank 0 to report an error that every rank raises."""


def abort_when_one_fails(comm_world: MPI.Intracomm, workers: int) -> Callable[[], None]:
    """Make an uncaught exception end the whole job: the other processes would wait for this one for ever.

    Exceptions are also passed to the hooks that were there before, such as those that write a log.

    Returns:
        A function for the end of the program: it ends the job if the program ends by an exception that a later hook
        has taken (rich's and most loggers' call no other hook).
    """
    name = name_of(comm_world.rank, workers)
    earlier, earlier_of_threads = sys.excepthook, threading.excepthook
    is_reported = False
    process = os.getpid()  # a child made by fork has these hooks, too, and must not use MPI

    def report(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> int:
        """Report the exception, and return the status of the job."""
        nonlocal is_reported
        is_reported = True
        if issubclass(kind, KeyboardInterrupt):
            terminated = issubclass(kind, Terminated)
            report_directly(f"{name}: {'ended by SIGTERM' if terminated else 'interrupted'}")
            return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
        if isinstance(error, HpcdpError) and error.is_on_every_rank and comm_world.rank:
            time.sleep(_OF_ALL_S)  # rank 0 reports it for all, and ends the job
        text = "".join(traceback.format_exception(kind, error, trace))
        text += "".join(f"{name_of(rank, workers)} has died\n" for rank in _dead_by(error, comm_world))
        report_directly(f"{name} failed:\n{text}")
        return 1

    def abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:
            earlier(kind, error, trace)
            return
        status = report(kind, error, trace)
        if earlier is not sys.__excepthook__ and status == 1:
            with contextlib.suppress(BaseException):  # of a hook that fails: the job ends all the same
                earlier(kind, error, trace)
        end_job(comm_world, status)  # with MPICH, it ends a little later

    def abort_from_thread(args: threading.ExceptHookArgs) -> None:
        if issubclass(args.exc_type, SystemExit):  # which ends the thread alone
            return
        if os.getpid() != process:
            earlier_of_threads(args)
            return
        status = report(args.exc_type, args.exc_value, args.exc_traceback)
        if earlier_of_threads is not threading.__excepthook__ and status == 1:
            with contextlib.suppress(BaseException):
                earlier_of_threads(args)
        end_job(comm_world, status)

    def abort_at_end() -> None:
        error, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
        # Others set them as well, such as pytest and IPython, of an exception that no outermost frame has raised.
        is_uncaught = trace is not None and trace.tb_frame.f_back is None and not hasattr(sys, "ps1")
        if is_uncaught and isinstance(error, BaseException) and not is_reported and os.getpid() == process:
            end_job(comm_world, report(type(error), error, trace))

    sys.excepthook = abort
    threading.excepthook = abort_from_thread
    return abort_at_end


def _dead_by(error: BaseException | None, comm_world: MPI.Intracomm) -> list[int]:
    """Whose death an error, or what has led to it, tells of, where the library says so."""
    from .mpi import MpiCommunicator

    comm = MpiCommunicator(comm_world)
    while error is not None:
        if isinstance(error, Exception) and comm.takes_note(error):
            return sorted(comm.lost)
        error = error.__cause__ or error.__context__
    return []
