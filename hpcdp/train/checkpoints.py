"""The checkpoints of `fit`, and early stops of a run that can resume later.

`Checkpoints` decides when `fit` saves, what it saves, and where a resumed run continues. `StopRequests` collects
requests to stop, by signal or time limit. With `Agreement` all ranks agree on them.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import math
import numbers
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, NoneType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..comm import World
from ..comm.communicator import Request
from ..comm.watchdog import Watchdog
from ..core import environment
from ..core.checks import instance, number
from ..core.environment import SAVE_AT, speaks, started_by_srun
from ..errors import ConfigError, DataError, SaveError
from .metrics import Record

if TYPE_CHECKING:
    from ..checkpoint import Manager

_METRICS = ("loss", "accuracy", "test_loss", "test_accuracy")
EPOCH = "epoch"
"""``every`` for a checkpoint at the end of each epoch."""
AUTO = "auto"
"""``every`` for checkpoints at intervals that keep their cost negligible."""

_SHORT_S, _LONG_S, _TIMES = 5.0, 300.0, 20
"""Limits of `AUTO`: the minimum age of the last checkpoint at the end of an epoch and within one, in seconds, and as a
multiple of the duration of the last save."""
STOPPED = os.EX_TEMPFAIL
"""The exit status 75 of a run that stopped early and can resume: start it again with ``--resume auto``."""
_GRACE_S, _GRACE_SHARE = 120.0, 0.1
"""The time before the end of a batch job at which a run stops: seconds, and the largest fraction of the time left."""
_SQUEUE_S = 5.0


class Position(NamedTuple):
    """The position of a run in its training."""

    epoch: int
    """The current epoch, counted from 1."""
    step: int
    """Completed steps of the epoch; where ranks do not step together, the batches taken by all ranks."""
    total: int
    """Steps since the start of the run."""


@dataclass(frozen=True)
class Stopped:
    """The position at which a run stopped early, and the reason; the same on all ranks."""

    position: Position
    reason: Reason


class Checkpoints:
    """The checkpoint policy of `fit`. Every rank must create it, with the same arguments.

    `fit` writes the last checkpoint at the end of training, or after the step at which ranks agreed to stop. It writes
    the other ones in the background, during the steps that follow. A run that resumes on the same number of ranks
    continues bit for bit.

    Args:
        manager: the manager of the checkpoint folder.
        every: steps between two checkpoints. ``"epoch"``: after each epoch, with its record as ``metrics``.
            ``"auto"``: after each epoch if the last checkpoint is at least 5 s old, and within an epoch if it is at
            least 5 min old, but never before 20 times the duration of the last save has passed. None: only at the end.
            Ranks that do not step together share a state, and so save, only at the end of an epoch.
        stop: the requests for an early stop; see `stopped`.
        resume: continue from the newest undamaged checkpoint, which must exist. False: the folder must not contain a
            checkpoint.
        extra: further entries of the state, such as a moving average of the parameters. They are restored in place
            where that is possible; their values are in `restored`.
        config: the settings to record in each checkpoint.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(
        self,
        manager: Manager,
        *,
        every: int | str | None = None,
        stop: StopRequests | None = None,
        resume: bool = False,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        is_count = isinstance(every, numbers.Integral) and not isinstance(every, bool) and every >= 1
        if not (is_count or every is None or (isinstance(every, str) and every in (EPOCH, AUTO))):
            expected = f"a number of steps, {EPOCH!r}, {AUTO!r} or None"
            raise ConfigError("Checkpoints", where="every", expected=expected, got=repr(every))
        from ..checkpoint import Manager  # imported late: runs without checkpoints do not need it

        instance("Checkpoints", "manager", manager, Manager, "a checkpoint.Manager")
        for name, value, kind, expected in (
            ("stop", stop, StopRequests, "StopRequests()"), ("extra", extra, Mapping, "a dict"),
            ("config", config, Mapping, "a dict"),
        ):  # fmt: skip
            instance("Checkpoints", name, value, (kind, NoneType), f"{expected}, or None")
        self.manager, self.stop, self.resume = manager, stop, resume
        self.stopped: Stopped | None = None
        """The reason and the position if `fit` returned before the last epoch was complete."""
        self.ended = 0
        """The number of epochs of a resumed run that a callback has ended; 0 for other runs."""
        self.restored: dict[str, Any] = {}
        """The restored values of ``extra``."""
        self._every = int(every) if isinstance(every, numbers.Integral) else every
        self._config = None if config is None else dict(config)
        self._extra = dict(extra or {})
        self._parts: dict[str, Any] = {}
        self._saved: Position | None = None
        """The position of the last checkpoint."""
        self._just_saved = False
        """True if a save began after the last exchange of save states between ranks."""
        self._began_s = time.monotonic()
        """The start of the last save, or of the run, on the monotonic clock."""
        self._took_s = 0.0
        """The duration of the last save, until this rank noticed its end."""

    def alike(self) -> list[str]:
        """Describe the arguments that must be the same on every rank; `fit` compares them before it trains."""
        from ..checkpoint import manager as checkpoint_manager  # imported late, as above

        named = f"checkpoints every={self._every!r}, resume={self.resume}, extra={sorted(map(str, self._extra))}"
        return [named, *checkpoint_manager.told_alike({}, checkpoint_manager.settings(self._config or {}))]

    def begin(self, world: World, parts: Mapping[str, Any]) -> Position:
        """Register the objects of the state, and restore them if the run resumes; every rank must call.

        Locks the folder against other jobs.

        Raises:
            ConfigError: the folder contains checkpoints, and the run does not resume.
            DataError: there is no undamaged checkpoint, or another job saves in the folder.
        """
        if not self.resume or self.manager.steps():  # a folder without checkpoints needs no lock: restore fails
            self.manager.claim()
        if not self.resume and (steps := self.manager.steps()):
            raise ConfigError(
                "Checkpoints", where=self.manager.path, expected="a folder without checkpoints",
                got=f"a checkpoint of step {steps[-1]}",
                remedy="pass resume=True to continue that run, or choose another folder",
            )  # fmt: skip
        self._world, self._began_s = world, time.monotonic()
        self._agreement = world.keep(Agreement, lambda: Agreement(world, 3))
        self._agreement.finish()  # a `fit` that failed may have left an exchange pending
        self._parts = dict(parts) | {"extra": self._extra}
        if not self.resume:
            return Position(1, 0, 0)
        restored = self.manager.restore(into=self._state(Position(1, 0, 0)))
        self.restored = restored.state["extra"]
        saved = restored.state["position"]
        position = Position(**{name: int(saved[name]) for name in Position._fields})
        self.ended = int(saved.get("ended", 0))
        self._saved = position
        return position

    def _state(self, position: Position, ended: int = 0) -> dict[str, Any]:
        return self._parts | {"position": position._asdict() | ({"ended": ended} if ended else {})}

    def after_step(self, position: Position, steps: int) -> bool:
        """Save after a step of all ranks if a checkpoint is due; every rank must call.

        Args:
            position: the position after the step.
            steps: steps of an epoch.

        Returns:
            Whether the run stops here.
        """
        pending = self.manager.pending
        reason, is_under_way, is_old = self._agreement.exchange(
            self._reason, pending and not self.manager.over, self._is_old(_LONG_S)
        )
        if pending and not is_under_way and not self._just_saved:
            self._wait()  # returns at once: the save is complete on all ranks
        is_old, self._just_saved = is_old and not self._just_saved, False  # the ages exchanged predate that save
        if reason:
            self._stop_here(position, Reason(self._agreement.finish()[0]))  # a request is never withdrawn
            return True
        due = position.total % self._every == 0 if isinstance(self._every, int) else is_old
        if due and position.step < steps:
            self._save(position, wait=False)
        return False

    def where_all_meet(self, position: Position) -> bool:
        """Return whether the run stops after an epoch in which ranks did not step together; every rank must call."""
        self._agreement.exchange(self._reason, 0, 0)
        reason = self._agreement.finish()[0]
        if reason:
            self._stop_here(position, Reason(reason))
        return bool(reason)

    def after_epoch(self, position: Position, record: Record, together: bool) -> None:
        """Save after an epoch if a checkpoint is due; every rank must call.

        Args:
            position: the beginning of the next epoch.
            record: the record of the epoch.
            together: whether ranks step together.
        """
        due = self._every == EPOCH
        if isinstance(self._every, int):
            due = not together or position.total % self._every == 0
        elif self._every == AUTO:
            due = self._world.comm.allgather_json(self._is_old(_SHORT_S))[0]
        if due:
            self._save(position, wait=not together, record=record)

    def at_end(self, position: Position, record: Record | None, ended: int) -> None:
        """Save the final state and wait for it; every rank must call.

        Replaces a checkpoint of the last step, which a run has if it was stopped before its last epoch ended.

        Args:
            position: the end of the run.
            record: the record of the last epoch, if any.
            ended: the number of epochs if a callback has ended the run; else 0.
        """
        self._agreement.finish()
        if self._saved != position:
            self._save(position, wait=True, record=record, ended=ended)
        self._wait()

    def _is_old(self, least_s: float) -> bool:
        """Return whether the next checkpoint is due by the clock of rank 0; False on the other ranks."""
        if self._every != AUTO or self._world.rank != 0:
            return False
        age_s = time.monotonic() - self._began_s
        took_s = age_s if self.manager.pending else self._took_s  # of a pending save: a lower bound
        return age_s >= max(least_s, _TIMES * took_s)

    @property
    def _reason(self) -> Reason:
        return Reason.NONE if self.stop is None else self.stop.reason

    def _stop_here(self, position: Position, reason: Reason) -> None:
        if self._saved is None or self._saved.total != position.total:
            self._save(position, wait=True)
        self._wait()
        self.stopped = Stopped(position, reason)

    def _save(self, position: Position, *, wait: bool, record: Record | None = None, ended: int = 0) -> None:
        numbers = {} if record is None else record
        metrics = {name: float(numbers[name]) for name in _METRICS if numbers.get(name) is not None}
        state = self._state(position, ended)
        self._wait()
        self._began_s = time.monotonic()
        with self._writing():
            self.manager.save(position.total, state, metrics=metrics or None, config=self._config, wait=wait)
        self._saved, self._just_saved = position, True
        if wait:
            self._took_s = time.monotonic() - self._began_s

    def _wait(self) -> None:
        if self.manager.pending:
            with self._writing():
                self.manager.wait()
            self._took_s = time.monotonic() - self._began_s

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn a failed write into a `SaveError` that names the checkpoint to resume from."""
        try:
            yield
        except DataError as error:
            failed = SaveError(
                error.operation, where=error.where, expected=error.expected, got=error.got, rank=error.rank,
                remedy=f"free disk space or make the folder writable, then {self._where_to_resume()}",
            )  # fmt: skip
            failed.is_on_every_rank = error.is_on_every_rank
            raise failed from error

    def _where_to_resume(self) -> str:
        try:
            steps = self.manager.steps()
        except DataError:  # the disk is gone
            return "continue with --resume when it can be read"
        if steps:
            return f"continue with --resume: the newest complete checkpoint is of step {steps[-1]}"
        return "start again: no checkpoint is complete"


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
