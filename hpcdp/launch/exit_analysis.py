"""The end of a job: its exit status and the cause.

How a command that has failed says why and ends, alone or as a rank of a job.

Which of the ends of a job's ranks was the cause of the others: mpirun kills ranks for it, and others leave for it.

mpirun itself says nothing of it, or names a rank that it has killed. See `hpcdp.launch.process_monitor` for how ends
are seen.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from ..core.environment import launched_rank, launched_ranks
from ..errors import ConfigError, HpcdpError, LaunchError, Terminated, report_directly
from .process_monitor import End

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


_KILLS = (signal.SIGKILL, signal.SIGTERM)
"""What mpirun ends the other ranks with."""
_BEFORE_S, _AFTER_S = 1.0, 0.05
"""So long before, and after, a rank that mpirun has killed the one that it was killed for may have ended.

Open MPI takes a quarter of a second to kill. MPICH kills when a rank's connection closes, just before the rank has
ended: on a machine with fewer cores than ranks it now and then ends after one that was killed for it.
"""
TOLD = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""What programs end with that take mpirun's SIGTERM, as `hpcdp train` does."""
_BEREFT_S = 0.2
"""So long after ranks that leave because another has gone that one may be seen to end; Open MPI kills later."""
LOST_CONNECTION_STATUS = 14
"""The exit status of Open MPI's ranks whose connection to another has closed."""
_HYDRA_FAILED = 255
"""The status of MPICH's mpirun where a rank that a signal has ended ran on another host."""


def first_failure(ends: Sequence[End], code: int, bereft: int | None = None) -> End | None:
    """The end that made mpirun end the others, None where mpirun has ended a job in which MPI_Abort was called.

    Of several ranks that all were killed it is the first that was seen to end, which in rare cases under MPICH (see
    `_AFTER_S`) is one that mpirun killed.

    Args:
        ends: the ends of the ranks, in order.
        code: mpirun's exit status. MPICH's is often that of a rank that it killed.
        bereft: the exit status of ranks that leave because the connection to another has closed; they may be seen to
            end before it. None: there is none.
    """
    if bereft is not None:
        left = next((end for end in ends if end.exit_status == bereft), None)
        cause = None if left is None else _left_others(ends, left, bereft)
        if cause is not None:
            return cause
    first = next((end for end in ends if end.status != 0), None)
    if first is not None and first.exit_status in TOLD and bereft is not None:  # MPICH's mpirun ends none by SIGTERM
        first = _told_of_later(ends, first)
    if first is not None and first.status is None:  # it may have ended well
        told = (end for end in ends if end.status and not _killed(end.status) and end.exit_status == code)
        return next(told, first)
    if first is None or first.status is None or not os.WIFSIGNALED(first.status):
        return first
    sign = os.WTERMSIG(first.status)
    if not _killed(first.status):
        # A rank in MPI_Finalize may crash when another aborts the job, and be gone before it.
        aborted = (end for end in ends if end.status and end.exit_status == code != 128 + sign)
        return next((end for end in aborted if end.at_s - first.at_s < _BEFORE_S), first)
    if bereft is None and sign == signal.SIGKILL:  # MPICH's mpirun ends ranks by no other signal
        told = (end for end in ends if end.status == signal.SIGTERM and end.host != first.host)
        other = next((end for end in told if end.at_s - first.at_s < _BEFORE_S), None)
        if other is not None:
            return other
    of_themselves = [
        end
        for end in ends
        if -_AFTER_S < first.at_s - end.at_s < _BEFORE_S
        and end.status is not None
        and not _killed(end.status)
        and end.exit_status not in TOLD
        and not (bereft is None and code == sign and _has_crashed_for(end, first))
    ]
    failed = next((end for end in of_themselves if end.status), None)
    if failed is not None:
        return failed
    if of_themselves and code in (0, 1, sign):
        return of_themselves[-1]
    return first if code in (sign, 128 + sign, _HYDRA_FAILED, *TOLD) else None


def _left_others(ends: Sequence[End], left: End, bereft: int) -> End | None:
    """The rank for which another has ``left``; where cores are few mpirun's kills may be seen as early.

    mpirun ends ranks by SIGTERM, and a quarter of a second later by SIGKILL; first those on the host of the one that
    has left.
    """

    def doubt(end: End) -> int:
        if end.status and not _killed(end.status) and end.exit_status not in TOLD:
            return 0
        statuses = [(0,), (128 + signal.SIGKILL,), TOLD]
        doubted = next(number for number, each in enumerate(statuses) if end.exit_status in each)
        return 1 + 2 * doubted + (end.host == left.host and end.at_s > left.at_s - _AFTER_S)

    others = (end for end in ends if end.status is not None and end.exit_status != bereft)
    return min((end for end in others if end.at_s - left.at_s < _BEREFT_S), key=doubt, default=None)


def _told_of_later(ends: Sequence[End], first: End) -> End:
    """The rank for which mpirun has told ``first`` to end, where another host tells of it later; else ``first``."""

    def is_cause(end: End) -> bool:
        is_elsewhere = end.host != first.host and end.at_s - first.at_s < _BEFORE_S
        return is_elsewhere and bool(end.status) and end.exit_status not in TOLD

    causes = [end for end in ends if is_cause(end)]
    return min(causes, key=lambda end: _killed(end.status or 0), default=first)


def _has_crashed_for(end: End, first: End) -> bool:
    """Return whether a rank of MPICH may have crashed because ``first``, on another host, has gone.

    The caller knows that mpirun's status is not that of the crash.
    """
    return end.status is not None and os.WIFSIGNALED(end.status) and end.host != first.host


def _killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in _KILLS
