"""How a command that has failed says why and ends, alone or as a rank of a job."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TextIO

from ..errors import ConfigError, HpcdpError, LaunchError, Terminated, report_directly
from ..launched import launched_rank, launched_ranks

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""The statuses after Ctrl-C and SIGTERM, as in a shell."""

_OF_ALL_S, _OF_SOME_S = 1.0, 0.2


def fail(reason: object, status: int, *, by_all: bool = False) -> int:
    """Write the reason on one line of stderr; end a rank of a job here, without MPI_Finalize, which waits for all.

    Rank 0 reports first: where all ranks failed alike, mpirun ends the others before they repeat it, and where that is
    certain they report nothing. The launcher reports an interrupt.

    Args:
        reason: an error, or a text.
        status: the exit status.
        by_all: whether all ranks fail so; an `HpcdpError` says it itself (``is_on_every_rank``).

    Returns:
        ``status``, outside a job.
    """
    rank = launched_rank()
    by_all = by_all or (isinstance(reason, HpcdpError) and reason.is_on_every_rank)
    if rank:
        time.sleep(_OF_ALL_S if by_all else _OF_SOME_S)
    if rank is None or (status not in (INTERRUPTED, TERMINATED) and not (rank and by_all)):
        is_alone = rank is None or launched_ranks() == 1
        of_each = by_all or isinstance(reason, ConfigError | LaunchError)  # what was asked wrongly is so for each rank
        is_named = isinstance(reason, HpcdpError) and reason.rank is not None
        who = "" if is_alone or of_each or is_named else f"rank {rank}: "
        with contextlib.suppress(OSError):  # the terminal may be closed: that may be why it ends
            report_directly(f"hpcdp: {who}{reason}")
    if rank is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def end_early(error: KeyboardInterrupt | OSError, what: str) -> int:
    """End the command ``what`` after Ctrl-C or SIGTERM, or where its standard output takes no more; raise other errors.

    Returns:
        The status, outside a job.
    """
    if isinstance(error, Terminated):
        return fail("ended by SIGTERM", TERMINATED)
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
