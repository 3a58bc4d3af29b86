"""How a command that has failed says why and ends, alone or as a rank of a job."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TextIO

from ..errors import HpcdpError, report_directly
from ..launched import launched_rank

INTERRUPTED = 128 + signal.SIGINT
"""The status after Ctrl-C, as in a shell."""

_OF_ALL_S, _OF_SOME_S = 1.0, 0.2


def fail(reason: object, status: int, *, by_all: bool = False) -> int:
    """Say why on one line of stderr; a rank of a job ends here, without MPI_Finalize, which waits for all ranks.

    Rank 0 speaks first: where all ranks failed alike, mpirun ends the others before they repeat it, and where that is
    certain (``by_all``) they say nothing. Of an interrupt the launcher speaks.

    Returns:
        ``status``, outside a job.
    """
    rank = launched_rank()
    if rank:
        time.sleep(_OF_ALL_S if by_all else _OF_SOME_S)
    if rank is None or (status != INTERRUPTED and not (rank and by_all)):
        report_directly(f"hpcdp: {reason}")
    if rank is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def end_early(error: KeyboardInterrupt | OSError, what: str) -> int:
    """How the command ``what`` ends after Ctrl-C, or where its standard output takes no more; another error is raised.

    Returns:
        The status, outside a job.
    """
    if isinstance(error, KeyboardInterrupt):
        return fail("interrupted", INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        lead_nowhere(sys.stdout.fileno())  # Python flushes it once more when it ends
        return 128 + signal.SIGPIPE
    if _can_be_written(sys.stdout):
        raise error
    lead_nowhere(sys.stdout.fileno())
    return fail(HpcdpError(what, where="standard output", got=error.strerror), 1)


def lead_nowhere(descriptor: int) -> None:
    """What is written to ``descriptor`` from now on is lost, without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == descriptor:
        os.set_inheritable(nowhere, True)
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _can_be_written(stream: TextIO) -> bool:
    try:
        print(file=stream, flush=True)
    except OSError:
        return False
    return True
