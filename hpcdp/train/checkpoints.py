"""When a run is saved, what of it, and where it goes on."""

from __future__ import annotations

import contextlib
import numbers
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..comm import World
from ..errors import ConfigError, DataError, SaveError
from .metrics import Record
from .preemption import Agreement, Reason, StopRequests

if TYPE_CHECKING:
    from ..checkpoint import Manager

_METRICS = ("loss", "accuracy", "test_loss", "test_accuracy")
EPOCH = "epoch"
"""``every`` for a checkpoint at the end of each epoch."""
AUTO = "auto"
"""``every`` for as many checkpoints as cost next to nothing."""

_SHORT_S, _LONG_S, _TIMES = 5.0, 300.0, 20
"""With `AUTO`: the least age of the last checkpoint at the end of an epoch, and within one; and how many times as long
as the last save took."""


class Position(NamedTuple):
    """Where a run is."""

    epoch: int
    """The epoch under way, from 1."""
    step: int
    """Steps of it that are done; where ranks do not step together, batches that they have taken."""
    total: int
    """Steps since the start of the run."""


@dataclass(frozen=True)
class Stopped:
    """Where a run stopped early, and why; alike on all ranks."""

    position: Position
    reason: Reason


class Checkpoints:
    """What `fit` saves, and when: every rank makes it, alike.

    The last checkpoint is that of the end of the training, or of the step after which ranks have agreed to stop; others
    are written beside the steps that follow. After a restart on as many ranks the run goes on to the bit.

    Args:
        manager: of the folder.
        every: steps between two checkpoints; ``"epoch"``: one after each epoch, with its numbers as ``metrics``;
            ``"auto"``: after each epoch, unless the last one is less than five seconds old, and within an epoch where
            it is five minutes old, but never sooner than after 20 times the time that the last save took; None: none
            until the end. Where ranks do not step together they have a common state at the end of an epoch alone, and
            so a checkpoint there.
        stop: asks for an early end; see `stopped`.
        resume: go on from the newest good checkpoint of the folder, which must have one. False: the folder must have
            none.
        extra: further entries of the state, e.g. the moving average of a network, restored in place where they can be;
            their numbers are in `restored`.
        config: the settings, for the checkpoint's own record.

    Raises:
        ConfigError: an argument is none of that.
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
        whole = isinstance(every, numbers.Integral) and not isinstance(every, bool) and every >= 1
        if not (whole or every is None or (isinstance(every, str) and every in (EPOCH, AUTO))):
            expected = f"a number of steps, {EPOCH!r}, {AUTO!r} or None"
            raise ConfigError("Checkpoints", where="every", expected=expected, got=repr(every))
        from ..checkpoint import Manager  # not before: who does not save needs none of it

        if not isinstance(manager, Manager):
            raise ConfigError("Checkpoints", where="manager", expected="a checkpoint.Manager", got=repr(manager))
        for name, given, kind, expected in (
            ("stop", stop, StopRequests, "StopRequests()"), ("extra", extra, Mapping, "a dict"),
            ("config", config, Mapping, "a dict"),
        ):  # fmt: skip
            if not (given is None or isinstance(given, kind)):
                raise ConfigError("Checkpoints", where=name, expected=f"{expected}, or None", got=repr(given))
        self.manager, self.stop, self.resume = manager, stop, resume
        self.stopped: Stopped | None = None
        """Set where `fit` returned before all epochs were done."""
        self.ended = 0
        """Of a run that goes on, which a callback has ended: of so many epochs; 0 of others."""
        self.restored: dict[str, Any] = {}
        """What ``extra`` was, as far as the run was restored."""
        self._every = int(every) if isinstance(every, numbers.Integral) else every
        self._config = None if config is None else dict(config)
        self._extra = dict(extra or {})
        self._parts: dict[str, Any] = {}
        self._saved: Position | None = None
        """That of the last checkpoint."""
        self._just_saved = False
        """Whether a save has begun since ranks have last said whether the one before is over."""
        self._began_s = time.monotonic()
        """When the last save began, or the run."""
        self._took_s = 0.0
        """How long the last save has taken, until this rank found it to be over."""

    def alike(self) -> list[str]:
        """What of it must be the same on every rank, in words, which `fit` compares before it trains."""
        from ..checkpoint import manager as checkpoint_manager  # not before, as above

        named = f"checkpoints every={self._every!r}, resume={self.resume}, extra={sorted(map(str, self._extra))}"
        return [named, *checkpoint_manager.told_alike({}, checkpoint_manager.settings(self._config or {}))]

    def begin(self, world: World, parts: Mapping[str, Any]) -> Position:
        """Take in what the state consists of, and restore it where the run goes on; every rank must call.

        From here on no other job saves in the folder.

        Raises:
            ConfigError: there are checkpoints, and the run does not go on from them.
            DataError: there is no good checkpoint; or another job saves there.
        """
        if not self.resume or self.manager.steps():  # else there is nothing to keep others from
            self.manager.claim()
        if not self.resume and (steps := self.manager.steps()):
            raise ConfigError(
                "Checkpoints", where=self.manager.path, expected="no checkpoint of another run",
                got=f"that of step {steps[-1]}", remedy="pass resume=True to go on, or take another folder",
            )  # fmt: skip
        self._world, self._began_s = world, time.monotonic()
        self._agreement = world.keep(Agreement, lambda: Agreement(world, 3))
        self._agreement.finish()  # of a `fit` that has failed
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
        """After a step of all ranks: save where it is time; whether the run stops here. Every rank must call.

        Args:
            steps: of an epoch.
        """
        pending = self.manager.pending
        asked, is_under_way, is_old = self._agreement.exchange(
            self._asked, pending and not self.manager.over, self._is_old(_LONG_S)
        )
        if pending and not is_under_way and not self._just_saved:
            self._wait()  # nobody waits: it is over on all ranks
        is_old, self._just_saved = is_old and not self._just_saved, False  # what was said before it has saved
        if asked:
            self._stop_here(position, Reason(self._agreement.finish()[0]))  # who is asked stays so
            return True
        due = position.total % self._every == 0 if isinstance(self._every, int) else is_old
        if due and position.step < steps:
            self._save(position, wait=False)
        return False

    def where_all_meet(self, position: Position) -> bool:
        """At the end of an epoch in which ranks made steps of their own: whether the run stops here; all must call."""
        self._agreement.exchange(self._asked, 0, 0)
        reason = self._agreement.finish()[0]
        if reason:
            self._stop_here(position, Reason(reason))
        return bool(reason)

    def after_epoch(self, position: Position, record: Record, together: bool) -> None:
        """After an epoch, with its record; every rank must call.

        Args:
            position: the beginning of the next epoch.
            together: whether ranks make their steps together.
        """
        due = self._every == EPOCH
        if isinstance(self._every, int):
            due = not together or position.total % self._every == 0
        elif self._every == AUTO:
            due = self._world.comm.allgather_json(self._is_old(_SHORT_S))[0]
        if due:
            self._save(position, wait=not together, record=record)

    def at_end(self, position: Position, record: Record | None, ended: int) -> None:
        """After the last epoch: save its state, and wait until that is done; every rank must call.

        Also over a checkpoint after the last step, where the run was stopped before the epoch had ended.

        Args:
            ended: of how many epochs, where a callback has ended the run; else 0.
        """
        self._agreement.finish()
        if self._saved != position:
            self._save(position, wait=True, record=record, ended=ended)
        self._wait()

    def _is_old(self, least_s: float) -> bool:
        """Whether rank 0, by whose clock all go, finds the last checkpoint so old that the next one is due."""
        if self._every != AUTO or self._world.rank != 0:
            return False
        age_s = time.monotonic() - self._began_s
        took_s = age_s if self.manager.pending else self._took_s  # so far, at least
        return age_s >= max(least_s, _TIMES * took_s)

    @property
    def _asked(self) -> Reason:
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
        """What cannot be written ends the training, and says where it can go on; on all ranks, as the error is."""
        try:
            yield
        except DataError as error:
            failed = SaveError(
                error.operation, where=error.where, expected=error.expected, got=error.got, rank=error.rank,
                remedy=f"make room there, or make it writable, and {self._where_to_go_on()}",
            )  # fmt: skip
            failed.is_on_every_rank = error.is_on_every_rank
            raise failed from error

    def _where_to_go_on(self) -> str:
        try:
            steps = self.manager.steps()
        except DataError:  # the disk is gone
            return "go on with --resume when it can be read"
        if steps:
            return f"go on with --resume: the newest complete checkpoint is of step {steps[-1]}"
        return "start again: no checkpoint is complete"
