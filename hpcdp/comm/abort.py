"""How a rank ends: the abort of the job by a rank that fails alone, and leaving at the end of the program.

A rank that fails alone ends the whole job, in the way of each MPI library, and names the ranks whose death has made it
fail.

A rank that leaves by `sys.exit` with a status that tells of a failure ends the job, unless all others leave, too.

One that leaves with status 0, or with 75 since the job can go on later, or in a way that is not noted
(`hpcdp.comm.abort`) waits for the others, which may have much to write; if they wait for it, in a collective, the
watchdog misses it.
"""

from __future__ import annotations

import atexit
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

from ..core.environment import exit_status, record_exit_status
from ..errors import HpcdpError, Terminated, report_directly
from .communicator import name_of

if TYPE_CHECKING:
    from mpi4py import MPI


_OUTLIVES_RANKS = "OMPI_MCA_mpi_ft_enable"
"""What that mpirun sets."""
_PID = os.getpid()
_LOOKS, _ENDING_NAP_S = 50, 0.01
_OF_HYDRA, _HEARD_S = "PMI_RANK", 0.2
"""MPICH's mpirun ends at once and drops what a rank on another host has just written, such as why it ends the job."""


def outlives_ranks() -> bool:
    """Whether the library lets a job go on when one of its ranks dies: Open MPI under ``mpirun --with-ft ulfm``."""
    return os.environ.get(_OUTLIVES_RANKS, "0") not in ("", "0")


def end_job(comm_world: MPI.Intracomm, code: int) -> None:
    """End all processes of the job, which has this status then; of a child made by fork, this process alone."""
    if os.getpid() != _PID:
        os._exit(code)
    for _ in range(_LOOKS if outlives_ranks() else 0):
        with contextlib.suppress(Exception):  # by which it takes in who has died
            comm_world.Iprobe()
        if comm_world.Get_failed().size == comm_world.size - 1:
            os._exit(code)  # mpirun would forget the status of the only one that is left
        time.sleep(_ENDING_NAP_S)
    if _OF_HYDRA in os.environ:
        time.sleep(_HEARD_S)
    comm_world.Abort(code)


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


GRACE_S = 2.0
"""How much later than the first rank that leaves so the last one may come to its end; then the watchdog has not yet
ended the job for those that wait for it, with a status of its own."""
_NAP_S = 0.001


def wait_for_all_to_leave(comm_world: MPI.Intracomm, workers: int) -> None:
    """Make this process wait for all others when it ends, as MPI_Finalize does, but not Open MPI's under srun; or end
    the job as an uncaught exception does, where its status tells of a failure. All processes must call.

    Before that this rank ends what it has under way, such as a checkpoint, and others have `GRACE_S` to end, too: those
    that have all failed alike end as they would.
    """
    if outlives_ranks():  # a barrier of all never ends when one has died, and who survives decides
        return
    from mpi4py import MPI

    comm = comm_world.Dup()
    record_exit_status()  # also where hpcdp was imported before a launcher's variables were set

    def leave(*_: object) -> None:
        if MPI.Is_finalized():
            return
        all_leave = comm.Ibarrier()
        deadline = time.monotonic() + GRACE_S
        while not all_leave.Test():
            if exit_status() not in (0, os.EX_TEMPFAIL) and time.monotonic() > deadline:
                name = name_of(comm_world.rank, workers)
                report_directly(f"{name} has left with status {exit_status()}, and others go on")
                end_job(comm_world, exit_status())
                return  # with MPICH, which ends the process a little later
            time.sleep(_NAP_S)

    atexit.register(leave)  # before what a world registers, and so called after that; engines end later still
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=leave), None)  # see `starting`


def leave_as_child() -> None:
    """In a child of a rank made by fork: end it without what the rank has registered for its end, and without MPI.

    MPI_Finalize in the child would wait for the other ranks on the connections of its rank.
    """

    def leave() -> None:
        if "logging" in sys.modules:
            sys.modules["logging"].shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or replaced
                stream.flush()
        os._exit(exit_status() or int(hasattr(sys, "last_value")))

    record_exit_status()
    atexit.register(leave)  # the first to be called of those that are there by now
