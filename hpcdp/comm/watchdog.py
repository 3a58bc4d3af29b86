"""Notices a call that does not end, says what this rank waits for and for whom, and ends the job if nothing changes.

A hang is the usual end of ranks that call collectives differently, or of one that has stopped. A thread of each rank
looks now and then whether the rank is still in the same call. How far the others of the node are is read from its
memory, and how they are from /proc: nobody needs to answer. The watchdogs of other nodes are asked, see `roll_call`.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import numpy as np

from .. import kernels
from ..errors import ConfigError, WorldAborted, listed, report_directly
from .members import Member, look_at
from .roll_call import Question, RollCall
from .shared import LINE_NUMBERS, Gate, NodeMemory

if TYPE_CHECKING:
    from .world import World

DEFAULT_STALL_S = 60.0
DEFAULT_TIMEOUT_S = 600.0
_LOOKS = 20
_LONGEST_LOOK_S = 1.0
_GRACE_S = 1.0
_DEATH_S = 3.0
"""For so long a call must go on after a rank has gone: it may have done its part of it, and come to its end."""
_MOST_NAMES = 8
_SHORTEST_LIMIT_S = 0.1
_ANSWER_S = 1.0
"""How long an answer may take, beside the time until the other watchdog looks."""
_NAP_S = 0.01
_LATE, _GONE, _LEFT = "has not come", "is gone", "has left the program"
_STDERR = 2
"""The descriptor, since `sys.stderr` may be a buffer that is lost with the process."""
_SHOW_STACKS = signal.SIGRTMIN + 9
"""At this signal a rank writes where its main thread is, even where an extension holds the interpreter."""


def limits_s() -> tuple[float, float]:
    """Seconds until a call is reported, and until it ends the job: ``HPCDP_STALL_S`` and ``HPCDP_TIMEOUT_S``; 0: never.

    Raises:
        ConfigError: one of them is no such number.
    """
    return _seconds("HPCDP_STALL_S", DEFAULT_STALL_S), _seconds("HPCDP_TIMEOUT_S", DEFAULT_TIMEOUT_S)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        limit = float(text) if text else default
    except ValueError:
        limit = -1.0
    if limit != 0 and not _SHORTEST_LIMIT_S <= limit < float("inf"):
        expected = f"seconds, at least {_SHORTEST_LIMIT_S:g}, or 0 for no limit"
        raise ConfigError(name, expected=expected, got=repr(text))
    return limit


class Watchdog:
    """Watches the calls of one rank. All ranks must make theirs together, with the same limits.

    Args:
        world: the ranks; its communicator ends the job.
        stall_s: seconds after which a call is reported, once; 0 for never.
        timeout_s: seconds after which a call is reported and the job ended; 0 for never.
        stream: where reports go; default file descriptor 2, see `errors.report_directly`.
    """

    def __init__(self, world: World, stall_s: float, timeout_s: float, stream: TextIO | None = None) -> None:
        self._open: dict[int, tuple[Any, ...]] = {}
        """The calls of all threads that have begun and not ended, in that order, by their identities."""
        self.calls = 0
        """How many calls this rank has begun."""
        self.asked: Asked | None = None
        """What this rank asks for in vain now and then, between other things."""
        self._world, self._stall_s, self._timeout_s = world, stall_s, timeout_s
        self._stream = stream
        self._look_s = min([_LONGEST_LOOK_S, *(limit / _LOOKS for limit in (stall_s, timeout_s) if limit > 0)])
        self._ended = threading.Event()
        self._parent = os.getppid() if world.size > 1 else None
        """What has started this rank among others; one that is alone may outlive the shell of its user."""
        self._thread = threading.Thread(target=self._watch, name="hpcdp-watchdog", daemon=True)
        if stall_s > 0 or timeout_s > 0:
            self._meet(shows_stacks=stream is None and _show_stacks_when_asked())
            self._thread.start()
            atexit.register(self.end)  # before MPI_Finalize, during which no thread may be in MPI

    def _meet(self, shows_stacks: bool) -> None:
        world, pid, host = self._world, os.getpid(), socket.gethostname()
        mine = Member(world.rank, host, pid, look_at(pid)[1], shows_stacks)
        self._everyone = [Member(*each) for each in world.comm.allgather_json(mine)]
        self._visible = [each for each in self._everyone if each.host == host and each.state != "X"]
        """Those whose process can be looked at."""
        self._neighbours = world.node_comm.allgather_json(world.rank) if world.node_memory.size > 1 else [world.rank]
        self._seen = world.node_memory.alloc((world.node_memory.size,), np.int64)
        self._watched = threading.get_ident()
        self._shown: int | None = None
        """The number of the call after which this rank has shown its stack to the ranks of other nodes."""
        strangers = sorted(set(range(world.size)) - set(self._neighbours))
        self._roll = RollCall(world.comm.duplicate(), strangers) if world.concurrent and strangers else None
        exchange = world.comm.allgather_json

        def watched(value: Any) -> list[Any]:
            with contextlib.nullcontext() if self.call else self.watching("an exchange of all ranks"):
                return exchange(value)

        # Whatever ranks agree on, they exchange so; it may be far from any other call, as when a Trainer is made.
        world.comm.allgather_json = watched  # type: ignore[method-assign]

    @classmethod
    def of(cls, world: World) -> Watchdog:
        """That of ``world``; one that watches nothing where `hpcdp.init` has not made it."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(world, 0, 0))

    def watching(
        self, operation: str, x: object = None, behind: Callable[[], Sequence[int]] | None = None
    ) -> _Watching:
        """A context: watch what is done meanwhile; all ranks come here, so who has not can be told.

        Args:
            operation: what it is.
            x: what it is done to: an array, or a function that says so when it must be reported.
            behind: the local ranks that are waited for; default those that have made fewer calls. `nobody` where
                the call needs no other rank, and so goes on when one dies.
        """
        return _Watching(self, (operation, x, behind))

    @property
    def call(self) -> tuple[Any, ...] | None:
        """What this rank is in, of several calls the one that has begun last; for every call a new tuple of the
        arguments of `watching`."""
        begun = list(self._open.values())  # a copy: other threads come and go
        return begun[-1] if begun else None

    def enter(self, call: tuple[Any, ...]) -> None:
        """Be in ``call``, a new tuple of the arguments of `watching`, until `leave` is called with it.

        For what is too short for a context; a call to which all ranks come adds one to `calls` before.
        """
        self._open[id(call)] = call

    def leave(self, call: tuple[Any, ...]) -> None:
        """``call`` has ended; others may have begun or ended meanwhile, in other threads."""
        self._open.pop(id(call), None)

    def end(self) -> None:
        """Watch no longer; this rank makes no more calls."""
        self._ended.set()
        atexit.unregister(self.end)
        if self._thread.is_alive():
            self._thread.join(_GRACE_S)  # no longer: it may be ending the job
            self._seen[self._world.node_memory.rank] = -1 - self.calls
            if self._roll is not None and not self._thread.is_alive():
                self._roll.leave(self.calls)

    def _watch(self) -> None:
        with contextlib.suppress(WorldAborted):  # there is nobody left to ask
            self._look_again_and_again()

    def _look_again_and_again(self) -> None:
        call: tuple[Any, ...] | None = None
        lasted, gone_at, told = 0.0, None, False
        looked = time.monotonic()
        while not self._ended.wait(self._look_s):
            if self._parent not in (None, os.getppid()):
                self._say("what has started the ranks is gone; this one ends now")
                os._exit(1)  # there may be nobody left who would end the job
            # While this process was stopped itself nobody kept it waiting.
            lasted += min(time.monotonic() - looked, self._look_s + _LONGEST_LOOK_S)
            looked = time.monotonic()
            self._seen[self._world.node_memory.rank] = self.calls
            self._answer()
            now, asked = self._now(), self.asked
            if asked is not None and now is asked.call:
                lasted = asked.waited_s
            if now is not call or call is None:
                if told and call is not None:
                    self._say(f"{_described(call)} has ended after {lasted:.1f} s, and the job goes on")
                call, lasted, gone_at, told = now, 0.0, None, False
                continue
            gone = self._gone(call)
            gone_at = None if not gone else lasted if gone_at is None else gone_at
            if gone_at is not None and lasted - gone_at > _DEATH_S:
                self._say(f"{_described(call)} cannot end: {self._listed(gone)}; the job ends now")
                self._world.comm.abort(1)
                return
            if kernels.loading():
                lasted = 0.0
            elif 0 < self._timeout_s < lasted:
                told = True
                self._report(call, self._timeout_s, "the job ends now (HPCDP_TIMEOUT_S)")
                self._answer_for(_GRACE_S, lambda: False)  # the other ranks have something to say too
                if self._now() is call:
                    self._world.comm.abort(1)
                    return
            elif 0 < self._stall_s < lasted and not told:
                told = True
                until = f", until {self._timeout_s:g} s have passed (HPCDP_TIMEOUT_S)" if self._timeout_s else ""
                self._report(call, self._stall_s, f"the job goes on{until}")

    def _now(self) -> tuple[Any, ...] | None:
        asked = self.asked
        return self.call if self.call is not None or asked is None else asked.call

    def _report(self, call: tuple[Any, ...], limit_s: float, next_: str) -> None:
        missing = self._missing(call)
        self._say(
            f"{_described(call)} has not ended in {limit_s:g} s: {self._listed(missing)}\n"
            f"  {next_}; HPCDP_DEBUG=1 compares the calls of all ranks; stacks:"
        )
        with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
            faulthandler.dump_traceback(_STDERR if self._stream is None else self._stream)
        if self._world.rank == min(set(self._neighbours) - missing.keys(), default=None):
            self._ask_for_stacks(missing)

    def _ask_for_stacks(self, missing: dict[int, str]) -> None:
        """By a signal, of the ranks of this node; others show theirs when the roll is called."""
        for each in self._visible:
            late = each.rank in self._neighbours and missing.get(each.rank) == _LATE
            if late and each.shows_stacks and each.state != "X":
                self._say(f"{each} shows its stack, too")
                with contextlib.suppress(OSError):
                    os.kill(each.pid, _SHOW_STACKS)

    def _answer(self) -> None:
        """Tell ranks of other nodes that have asked how far this one is."""
        if self._roll is None:
            return
        self._world.use_gpu_of_messages()
        for question in self._roll.questions():
            calls = self.calls
            self._roll.answer(question.rank, calls, self._now() is not None)
            if question.calls > calls != self._shown:
                self._shown = calls
                self._show_stack(question)

    def _answer_for(self, limit_s: float, enough: Callable[[], bool]) -> None:
        """For so long, or until there is ``enough``; naps are counted, since this process may be stopped meanwhile."""
        for _ in range(int(limit_s / _NAP_S)):
            self._answer()
            if enough() or self._ended.wait(_NAP_S):
                break

    def _show_stack(self, question: Question) -> None:
        asker = self._everyone[question.rank]
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  its thread has ended"
        said = f"rank {asker.rank} (host {asker.host}) waits in {question.call}; this rank is here:\n{stack}"
        self._say(said.rstrip())

    def _say(self, text: str) -> None:
        said = f"rank {self._world.rank} of {self._world.size}: {text}"
        if self._stream is None:
            report_directly(said)
        else:
            print(said, file=self._stream, flush=True)

    def _gone(self, call: tuple[Any, ...]) -> dict[int, str]:
        """The ranks without which a call cannot end any more."""
        if call[2:] == (nobody,):
            return {}
        found = {rank: why for rank, why in self._late(call).items() if why == _LEFT}
        found |= dict.fromkeys(self._roll.lost if self._roll else (), _GONE)
        for each in self._visible:
            if each.state == "X":
                found[each.rank] = _GONE
        return found

    def _late(self, call: tuple[Any, ...]) -> dict[int, str]:
        """The ranks that a call waits for, of this node and of those that have left, and whether they may come."""
        behind = call[2] if len(call) > 2 else None
        begun = [-1 - calls if calls < 0 else calls for calls in self._seen]  # see `end`
        late = (here for here, calls in enumerate(begun) if calls < self.calls) if behind is None else behind()
        found = {self._neighbours[here]: _LEFT if self._seen[here] < 0 else _LATE for here in late}
        found.pop(self._world.rank, None)
        left = self._roll.left if self._roll else {}
        return found | {rank: _LEFT for rank, calls in left.items() if calls < self.calls}

    def _missing(self, call: tuple[Any, ...]) -> dict[int, str]:
        """The ranks that this one waits for, as far as can be seen from here, and what is the matter with each."""
        found = self._late(call)
        for each in self._visible:
            state = each.state
            if state == "X":
                found[each.rank] = _GONE
            elif state in ("T", "t"):
                found[each.rank] = "is stopped"
        return dict(sorted((found | self._absent(call, found)).items()))

    def _absent(self, call: tuple[Any, ...], known: dict[int, str]) -> dict[int, str]:
        """As `_missing`, of the ranks of other nodes, about which no more is ``known`` than they say."""
        roll, calls = self._roll, self.calls
        if roll is None:
            return {}
        asked = roll.ask((each.rank for each in self._everyone if each.rank not in known), calls, _described(call))
        self._answer_for(self._look_s + _ANSWER_S, lambda: asked <= roll.answers.keys() or self._now() is not call)
        found = dict.fromkeys(asked - roll.answers.keys(), "does not answer")
        for rank in asked & roll.answers.keys():
            if roll.answers[rank].calls < calls:
                found[rank] = "is in an earlier call" if roll.answers[rank].within else _LATE
        return found

    def _listed(self, missing: dict[int, str]) -> str:
        if missing:
            return listed([f"{self._everyone[rank]} {why}" for rank, why in missing.items()], _MOST_NAMES)
        if self._roll is not None or len(self._neighbours) == self._world.size:
            return "all ranks have come, and their calls may differ"
        return "the ranks of this node have come; see what those of others report"


def nobody() -> list[int]:
    """For `Watchdog.watching`."""
    return []


class Asked(Protocol):
    """Something that was started, and that is asked for until it is there."""

    call: tuple[Any, ...]
    """As `Watchdog.call`."""
    waited_s: float
    """For how long it has been asked for."""


class _Watching:
    """See `Watchdog.watching`; a generator would take three times as long, in each step of training."""

    __slots__ = ("_call", "_watchdog")

    def __init__(self, watchdog: Watchdog, call: tuple[Any, ...]) -> None:
        self._watchdog, self._call = watchdog, call

    def __enter__(self) -> None:
        watchdog = self._watchdog
        watchdog.calls += 1
        watchdog.enter(self._call)

    def __exit__(self, *_: object) -> None:
        self._watchdog.leave(self._call)


class WatchedGate(Gate):
    """A gate under the eyes of a watchdog.

    Args:
        memory: see `Gate`.
        watchdog: that of this rank.
        most_numbers: see `Gate`.
    """

    def __init__(self, memory: NodeMemory, watchdog: Watchdog, most_numbers: int = LINE_NUMBERS) -> None:
        super().__init__(memory, most_numbers)
        self._watchdog = watchdog

    def barrier(self) -> None:
        if self._memory.size > 1:
            with self._watchdog.watching("barrier of the node's ranks"):
                super().barrier()


def _described(call: tuple[Any, ...]) -> str:
    operation, x = call[:2]
    if isinstance(x, np.ndarray):
        return f"{operation} of {x.size} {x.dtype}"
    return f"{operation} of {x()}" if callable(x) else str(operation)


@functools.cache  # faulthandler would not put back its handler, and a process may be of two worlds
def _show_stacks_when_asked() -> bool:
    try:
        # What faulthandler puts back when Python ends; by default the signal would end a rank that is in MPI_Finalize.
        signal.signal(_SHOW_STACKS, signal.SIG_IGN)
        # One thread, the main one: the stacks of others may change while they are read, which has crashed.
        faulthandler.register(_SHOW_STACKS, _STDERR, all_threads=False)
    except (OSError, ValueError, AttributeError, RuntimeError):  # not the main thread
        return False
    return True
