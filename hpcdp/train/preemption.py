"""Requests to stop: SIGTERM, SIGUSR1, Ctrl-C, a time limit.

Asking a run to stop, so that it can go on later: who asks, and how all ranks stop after the same step.
"""

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
from ..core.checks import is_number
from ..core.environment import SAVE_AT, speaks, started_by_srun
from ..errors import ConfigError
from . import stop_signal

STOPPED = os.EX_TEMPFAIL
"""The exit status 75 of a run that has stopped early and can go on: start it again with ``--resume auto``."""

_GRACE_S, _GRACE_SHARE = 120.0, 0.1
"""So long before the end of a batch job, but not longer than this share of what is left of it, a run stops."""

_SQUEUE_S = 5.0


class Reason(enum.IntEnum):
    """Why a run stops; of several, all ranks name the largest."""

    NONE = 0
    PROGRAM = 1
    """`StopRequests.request`."""
    TIME_LIMIT = 2
    JOB_END = 3
    """A batch job has little time left."""
    SIGTERM = 4
    SIGUSR1 = 5
    SIGHUP = 6
    SIGINT = 7

    def __str__(self) -> str:
        words = {Reason.PROGRAM: "the program asked", Reason.TIME_LIMIT: "time_limit_s", Reason.JOB_END: "the job ends"}
        return (words | {Reason.SIGINT: "SIGINT, Ctrl-C"}).get(self, self.name)


class StopRequests:
    """Whether this rank is asked to stop: by SIGUSR1, by SIGTERM under srun, or because its time is up.

    Signals that end the launcher of `hpcdp train` come as those of `hpcdp.core.environment.SAVE_AT`.

    As a context manager it takes the signals, in the main thread; a handler notes them and does nothing else, so they
    tear nothing. Under Open MPI's mpirun SIGTERM leaves ranks a quarter of a second, and so stays what it is.

    Args:
        time_limit_s: seconds from now, at least 0; None: none. The end of a Slurm job counts in any case where
            ``SLURM_JOB_END_TIME`` says it, which older versions do not set; there rank 0 asks ``squeue``, if it can.
        environ: where the launcher's and Slurm's variables are.

    Raises:
        ConfigError: ``time_limit_s`` is none of that.
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
        """Stop after so many seconds from now, at least 0; None: no such limit. Raises ConfigError."""
        if not (time_limit_s is None or (is_number(time_limit_s) and time_limit_s >= 0)):
            raise ConfigError(
                "StopRequests", where="time_limit_s", expected="seconds, at least 0, or None", got=repr(time_limit_s)
            )
        self._limits[Reason.TIME_LIMIT] = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
        self._first_limit = min(self._limits.values())

    def request(self) -> None:
        """Ask to stop."""
        self._noted = max(self._noted, Reason.PROGRAM)

    def takes(self, number: signal.Signals) -> bool:
        """Whether a signal is noted by this, and has no other effect."""
        return number in self._handlers

    @property
    def reason(self) -> Reason:
        """Why this rank should stop; `Reason.NONE` where it should not."""
        now = time.monotonic()
        if not self._noted and now < self._first_limit:  # asked in every step: a fifth of the time of what follows
            return Reason.NONE
        return max(self._noted, *(why for why, at_s in self._limits.items() if now >= at_s), Reason.NONE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = max(self._noted, self._signals[number])

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {each: signal.signal(each, self._note) for each in self._signals}
            if stop_signal.take():
                self._noted = Reason.SIGUSR1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_command = stop_signal.takes(self._handlers.get(signal.SIGUSR1))
        for each, before in self._handlers.items():
            # A further one must not kill a rank that has stopped and waits for others to end, nor a command that is at
            # its end: when Python itself ends, it gives up every handler, but not that a signal is ignored.
            has_stopped = each == signal.SIGUSR1 and self._noted and before == signal.SIG_DFL
            ignore = has_stopped or (is_command and each != signal.SIGTERM)
            signal.signal(each, signal.SIG_IGN if ignore else before)
        self._handlers = {}


def _end_of_job(environ: Mapping[str, str]) -> float:
    """When to stop before the batch job ends (monotonic); never outside of one."""
    text = environ.get("SLURM_JOB_END_TIME", "")
    end_s = float(text) if text.isdecimal() else 0.0 if text else _end_by_squeue(environ)
    left_s = end_s - time.time()
    if left_s <= 0:  # the job runs: that is not its end
        return math.inf
    return time.monotonic() + left_s - min(_GRACE_S, _GRACE_SHARE * left_s)


def _end_by_squeue(environ: Mapping[str, str]) -> float:
    """When the job ends (seconds since 1970) as ``squeue`` tells rank 0; 0 elsewhere, and where it does not."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job or not speaks(environ):
        return 0.0
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        asked = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%e"], capture_output=True, text=True, timeout=_SQUEUE_S, check=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return datetime.datetime.fromisoformat(asked.stdout.strip()).timestamp()
    return 0.0


class Agreement:
    """The largest of what all ranks say, number for number, a step later, so that nobody waits for it.

    In the memory of one node it is written down, since ranks meet in every step; over several nodes an allreduce is on
    its way during the next step. Every rank must make it.

    Args:
        world: the ranks; that of a world is ``world.keep(Agreement, lambda: Agreement(world, ...))``.
        count: how many numbers are said at once.
    """

    def __init__(self, world: World, count: int) -> None:
        self._world, self._watchdog = world, Watchdog.of(world)
        self._calls = 0
        self._heard_of_none = True
        self._under_way: Request | None = None
        self._rows: np.ndarray | None = None
        """Of all ranks, for calls of even and odd number: who writes the next but one has met all who read this."""
        if world.node_memory.size == world.size:
            self._rows = world.node_memory.alloc((2, world.size, count), np.int32)
        else:
            self._said, self._comm = np.zeros(count, np.int32), world.comm.duplicate()

    def exchange(self, *mine: int) -> list[int]:
        """Say numbers, at least 0; the largest ones of the last call, 0 at the first.

        Every rank must call; between two calls all ranks must have met.
        """
        found = self._last()
        self._calls, self._heard_of_none = self._calls + 1, False
        if self._rows is not None:
            self._rows[self._calls % 2, self._world.rank] = mine
        else:
            self._said[:] = mine
            self._under_way = self._comm.native_iallreduce(self._said, "max")
        return found

    def finish(self) -> list[int]:
        """The largest ones of the last call; the next one is a first one. Every rank must call."""
        self._world.barrier()
        found = self._last()
        self._heard_of_none = True
        return found

    def _last(self) -> list[int]:
        if self._rows is not None:
            said = self._rows[self._calls % 2]
            found = said.max(axis=0) if said.any() else said[0]
        else:
            if self._under_way is not None:
                with self._watchdog.watching("agreement on stopping"):
                    self._under_way.wait()
                self._under_way = None
            found = self._said
        return [0] * found.size if self._heard_of_none else found.tolist()
