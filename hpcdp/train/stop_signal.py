"""SIGUSR1 to a command that has just been started: noted, since it must neither end the process nor be lost.

The command line imports this module before NumPy and MPI.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from ..core.environment import SAVE_AT

_has_come = False


def note() -> None:
    """Note SIGUSR1 from now on, until `StopRequests` takes it; in the main thread, else nothing.

    Those of the launcher that were ignored get their default effect: it sends them when ranks take or ignore them.
    """
    take()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _note)
        for number in SAVE_AT.values():
            signal.signal(number, signal.SIG_DFL)


def takes(handler: object) -> bool:
    """Whether a signal's handler is that of `note`: of a command, which ends when its run has."""
    return handler is _note


def ignore() -> None:
    """Ignore SIGUSR1 from now on where it was noted: the command is at its end, and Python gives handlers up first."""
    if takes(signal.getsignal(signal.SIGUSR1)):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def has_come() -> bool:
    """Whether it has come since `note`."""
    return _has_come


def take() -> bool:
    """Whether it has come; from now on it has not."""
    global _has_come
    came, _has_come = _has_come, False
    return came


def _note(number: int, frame: FrameType | None) -> None:
    global _has_come
    _has_come = True
