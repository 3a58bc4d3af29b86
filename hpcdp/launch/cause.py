"""Which of the ends of a job's ranks was the cause of the others: mpirun kills ranks for it, and others leave for it.

mpirun itself says nothing of it, or names a rank that it has killed. See `hpcdp.launch.watch` for how ends are seen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from .watch import End

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
BEREFT = 14
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
