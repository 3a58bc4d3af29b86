"""A handler for SIGUSR1 during the start of a command: the signal must neither end the process nor be lost.

The command line imports this module before NumPy and MPI.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

from ...core.environment import SAVE_AT

_has_come = False


def note() -> None:
    """Record SIGUSR1 from now on, until `StopRequests` handles it; only in the main thread.

    Signals of the launcher that were ignored get their default effect again: it sends them only when ranks handle or
    ignore them.
    """
    take()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _note)
        for number in SAVE_AT.values():
            signal.signal(number, signal.SIG_DFL)


def takes(handler: object) -> bool:
    """Return whether ``handler`` is the handler of `note`, which is that of a command."""
    return handler is _note


def ignore() -> None:
    """Ignore SIGUSR1 from now on if `note` handled it: Python resets handlers before the command has ended."""
    if takes(signal.getsignal(signal.SIGUSR1)):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def has_come() -> bool:
    """Return whether the signal has arrived since `note`."""
    return _has_come


def take() -> bool:
    """Return whether the signal has arrived, and reset that."""
    global _has_come
    came, _has_come = _has_come, False
    return came


def _note(number: int, frame: FrameType | None) -> None:
    global _has_come
    _has_come = True
