"""A rank that leaves by `sys.exit` with a status that is not 0 ends the whole job, unless all others come to their end.

Python calls no hook for SystemExit. But when nobody has caught it, the interpreter asks it for its code: so `sys.exit`
raises one here that notes being asked. The one that a program makes itself, ``raise SystemExit(3)``, is not seen; the
watchdog then misses the rank.
"""

from __future__ import annotations

import atexit
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from .failing import end_job, outlives_ranks
from .roles import name_of

if TYPE_CHECKING:
    from mpi4py import MPI

GRACE_S = 3.0
"""How much later than the first rank that leaves so the last one may come to its end."""
_NAP_S = 0.001

_status = 0


class _Exit(SystemExit):
    __module__ = "builtins"

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = vars(SystemExit)["code"].__get__(self)
        if sys._getframe().f_back is None:  # no function asks, so that the program has ended
            global _status
            _status = code & 0xFF if isinstance(code, int) else int(code is not None)
        return code


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__  # in tracebacks


def _exit(status: object = None, /) -> NoReturn:
    """As `sys.exit`."""
    raise _Exit(status)


def end_job_when_one_leaves(comm_world: MPI.Intracomm, workers: int) -> None:
    """Make `sys.exit` with a status that is not 0 end the job as an uncaught exception does; all processes must call.

    Before that this rank ends what it has under way, such as a checkpoint, and others have `GRACE_S` to end, too: those
    that have all failed alike, or all stop early, end as they would.
    """
    if outlives_ranks():  # a barrier of all never ends when one has died, and who survives decides
        return
    from mpi4py import MPI

    comm = comm_world.Dup()
    sys.exit = _exit

    def leave() -> None:
        if MPI.Is_finalized():
            return
        all_leave = comm.Ibarrier()
        deadline = time.monotonic() + GRACE_S
        while _status and not all_leave.Test():
            if time.monotonic() > deadline:
                name = name_of(comm_world.rank, workers)
                print(f"{name} has left with status {_status}, and others go on", file=sys.stderr, flush=True)
                end_job(comm_world, _status)
                return  # with MPICH, which ends the process a little later
            time.sleep(_NAP_S)

    atexit.register(leave)  # before all others, so that it is called after them
