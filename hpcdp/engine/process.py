"""The engine of this process, and what becomes of all engines when it exits or forks."""

from __future__ import annotations

import atexit
import os
import threading
import time

from .engine import Engine
from .workers import living_workers

EXIT_LIMIT_S = 5.0
"""So long a process that exits waits for the tasks that run; what has not started is dropped."""

_default: Engine | None = None
_default_lock = threading.Lock()


def default_engine() -> Engine:
    """The engine of this process, made at first use, with the lane "io"; a child made by fork gets one of its own."""
    global _default
    with _default_lock:
        if _default is None:
            _default = Engine()
        return _default


def _shut_down_all() -> None:
    deadline = time.monotonic() + EXIT_LIMIT_S
    for workers in living_workers():
        workers.shutdown(max(0.0, deadline - time.monotonic()))


def _forget_all() -> None:
    global _default, _default_lock
    _default, _default_lock = None, threading.Lock()
    for workers in living_workers():
        workers.forget_threads()


atexit.register(_shut_down_all)
os.register_at_fork(after_in_child=_forget_all)
