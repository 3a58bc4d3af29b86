"""Early stops of a run that can resume later: requests by signal or time limit, and the agreement of all ranks."""

from __future__ import annotations

import contextlib
import datetime
import enum
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from ..comm import World
from ..comm.communicator import Request
from ..comm.watchdog import Watchdog
from ..core import environment
from ..core.checks import number
from ..core.environment import SAVE_AT, speaks, started_by_srun

STOPPED = os.EX_TEMPFAIL
"""The exit status 75 of a run that stopped early and can resume: start it again with ``--resume auto``."""

_GRACE_S, _GRACE_SHARE = 120.0, 0.1
"""The time before the end of a batch job at which a run stops: seconds, and the largest fraction of the time left."""

_SQUEUE_S = 5.0


class Reason(enum.IntEnum):
    """The reason why a run stops; of several reasons all ranks report the largest."""

    NONE = 0
    PROGRAM = 1
    """`StopRequests.request`."""
    TIME_LIMIT = 2
    JOB_END = 3
    """The batch job ends soon."""
    SIGTERM = 4
    SIGUSR1 = 5
    SIGHUP = 6
    SIGINT = 7

    def __str__(self) -> str:
        words = {Reason.PROGRAM: "the program asked", Reason.TIME_LIMIT: "time_limit_s", Reason.JOB_END: "the job ends"}
        return (words | {Reason.SIGINT: "SIGINT, Ctrl-C"}).get(self, self.name)


class StopRequests:
    """The stop requests of this rank: SIGUSR1, SIGTERM under srun, a time limit, or the end of the batch job.

    The launcher of `hpcdp train` forwards the signals that end it as those of `hpcdp.core.environment.SAVE_AT`.

    As a context manager, in the main thread, it handles these signals. A handler only records the signal, so it
    interrupts nothing. SIGTERM keeps its effect under Open MPI's mpirun, which kills ranks a quarter of a second later.

    Args:
        time_limit_s: seconds from now, at least 0; None: no limit. The end of a Slurm job always counts. It is read
            from ``SLURM_JOB_END_TIME``; older versions of Slurm do not set it, so rank 0 runs ``squeue``.
        environ: the variables of the launcher and of Slurm.

    Raises:
        ConfigError: ``time_limit_s`` is invalid.
    """

    def __init__(self, time_limit_s: float | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self._noted = Reason.NONE
        self._signals: dict[int, Reason] = {signal.SIGUSR1: Reason.SIGUSR1}
        self._signals |= {number: Reason[sign.name] for sign, number in SAVE_AT.items()}
        if started_by_srun(environ):
            self._signals[signal.SIGTERM] = Reason.SIGTERM
        self._handlers: dict[int, Any] = {}
        self._limits = {Reason.JOB_END: _end_of_job(environ)}
        self.limit(time_limit_s)

    def limit(self, time_limit_s: float | None) -> None:
        """Set the time limit in seconds from now, at least 0; None: no limit. Raises ConfigError."""
        if time_limit_s is None:
            time_limit_s = math.inf
        number("StopRequests", "time_limit_s", time_limit_s, least=0, most=math.inf, expected="seconds >= 0, or None")
        self._limits[Reason.TIME_LIMIT] = time.monotonic() + time_limit_s
        self._first_limit = min(self._limits.values())

    def request(self) -> None:
        """Request a stop by the program."""
        self._noted = max(self._noted, Reason.PROGRAM)

    def takes(self, sign: signal.Signals) -> bool:
        """Return whether this object handles a signal."""
        return sign in self._handlers

    @property
    def reason(self) -> Reason:
        """The reason why this rank should stop; `Reason.NONE` if it should not."""
        now = time.monotonic()
        if not self._noted and now < self._first_limit:  # read in every step: five times as fast as the next line
            return Reason.NONE
        return max(self._noted, *(reason for reason, at_s in self._limits.items() if now >= at_s), Reason.NONE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = max(self._noted, self._signals[number])

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {sign: signal.signal(sign, self._note) for sign in self._signals}
            if environment.take_usr1():
                self._noted = Reason.SIGUSR1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_command = environment.is_usr1_note(self._handlers.get(signal.SIGUSR1))
        for sign, before in self._handlers.items():
            # A later signal must not kill a rank that has stopped and waits for others, nor a command that is about to
            # exit: Python resets handlers at its end, but signals that are ignored stay ignored.
            has_stopped = sign == signal.SIGUSR1 and self._noted and before == signal.SIG_DFL
            ignore = has_stopped or (is_command and sign != signal.SIGTERM)
            signal.signal(sign, signal.SIG_IGN if ignore else before)
        self._handlers = {}


def _end_of_job(environ: Mapping[str, str]) -> float:
    """Return the time to stop before the batch job ends (monotonic), infinity outside a batch job."""
    text = environ.get("SLURM_JOB_END_TIME", "")
    end_s = float(text) if text.isdecimal() else 0.0 if text else _end_by_squeue(environ)
    left_s = end_s - time.time()
    if left_s <= 0:  # cannot be right, since the job is running
        return math.inf
    return time.monotonic() + left_s - min(_GRACE_S, _GRACE_SHARE * left_s)


def _end_by_squeue(environ: Mapping[str, str]) -> float:
    """Return the end of the job in seconds since 1970 by ``squeue`` on rank 0; 0 elsewhere, or without an answer."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job or not speaks(environ):
        return 0.0
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        squeue = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%e"], capture_output=True, text=True, timeout=_SQUEUE_S, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return datetime.datetime.fromisoformat(squeue.stdout.strip()).timestamp()
    return 0.0


class Agreement:
    """A delayed maximum over ranks: each exchange returns the maxima of the previous one, so no rank waits.

    On one node the ranks write to shared memory, which the synchronization of the next step makes visible. On several
    nodes a nonblocking allreduce runs during the next step. Every rank must create it.

    Args:
        world: the ranks. Create one per world: ``world.keep(Agreement, lambda: Agreement(world, ...))``.
        count: the number of values per exchange.
    """

    def __init__(self, world: World, count: int) -> None:
        self._world, self._watchdog = world, Watchdog.of(world)
        self._calls = 0
        self._is_first = True
        self._pending: Request | None = None
        self._rows: np.ndarray | None = None
        """Values of all ranks in shared memory. A rank reuses a buffer two calls later, when all ranks have
        read it."""
        if world.node_memory.size == world.size:
            self._rows = world.node_memory.alloc((2, world.size, count), np.int32)
        else:
            self._values, self._comm = np.zeros(count, np.int32), world.comm.duplicate()

    def exchange(self, *mine: int) -> list[int]:
        """Contribute this rank's values, and return the maxima of the previous call, 0 at the first.

        Every rank must call, and all ranks must synchronize between two calls.

        Args:
            mine: the values, at least 0.
        """
        maxima = self._last()
        self._calls, self._is_first = self._calls + 1, False
        if self._rows is not None:
            self._rows[self._calls % 2, self._world.rank] = mine
        else:
            self._values[:] = mine
            self._pending = self._comm.native_iallreduce(self._values, "max")
        return maxima

    def finish(self) -> list[int]:
        """Return the maxima of the last call and start again, as before the first; every rank must call."""
        self._world.barrier()
        maxima = self._last()
        self._is_first = True
        return maxima

    def _last(self) -> list[int]:
        if self._rows is not None:
            values = self._rows[self._calls % 2]
            maxima = values.max(axis=0) if values.any() else values[0]
        else:
            if self._pending is not None:
                with self._watchdog.watching("agreement on stopping"):
                    self._pending.wait()
                self._pending = None
            maxima = self._values
        return [0] * maxima.size if self._is_first else maxima.tolist()
