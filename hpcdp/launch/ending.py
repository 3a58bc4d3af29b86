"""How a command that has failed says why and ends, alone or as a rank of a job."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from ..errors import to_stderr
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
        with contextlib.suppress(OSError):  # the terminal may be closed: that may be why it ends
            to_stderr(f"hpcdp: {reason}")
    if rank is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status
