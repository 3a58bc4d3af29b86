"""A rank that leaves by `sys.exit` with a status that tells of a failure ends the job, unless all others leave, too.

One that leaves with status 0, or with 75 since the job can go on later, or in a way that is not noted (`hpcdp.exits`)
waits for the others, which may have much to write; if they wait for it, in a collective, the watchdog misses it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from .. import exits
from ..errors import report_directly
from .ending import end_job, outlives_ranks
from .roles import name_of

if TYPE_CHECKING:
    from mpi4py import MPI

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
    exits.note()  # also where hpcdp was imported before a launcher's variables were set

    def leave(*_: object) -> None:
        if MPI.Is_finalized():
            return
        all_leave = comm.Ibarrier()
        deadline = time.monotonic() + GRACE_S
        while not all_leave.Test():
            if exits.status() not in (0, os.EX_TEMPFAIL) and time.monotonic() > deadline:
                name = name_of(comm_world.rank, workers)
                report_directly(f"{name} has left with status {exits.status()}, and others go on")
                end_job(comm_world, exits.status())
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
        os._exit(exits.status() or int(hasattr(sys, "last_value")))

    exits.note()
    atexit.register(leave)  # the first to be called of those that are there by now
