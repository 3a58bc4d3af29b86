"""Notices a call that does not end, says what this rank waits for and for whom, and ends the job if nothing changes.

A hang is the usual end of ranks that call collectives differently, or of one that has stopped. A thread of each rank
looks now and then whether the rank is still in the same call. How far the others of the node are is read from its
memory, and how they are from /proc: nobody needs to answer. The watchdogs of other nodes are asked, see `roll_call`.
A call is reported by one rank, the lowest that waits in it; where that one does not, another one does a little later.
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
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import numpy as np

from .. import kernels
from ..errors import ConfigError, WorldAborted, listed
from .members import Member, look_at
from .roll_call import EARLIER, GONE, LATE, LEFT, STOPPED, Missing, Question, RollCall
from .shared import Gate, NodeMemory

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
_NAP_S = 0.01
_HOP_S = 0.05
"""So much later, for each level of a tree of all ranks, others look whether a lower rank reports what they wait in."""
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
        stream: where reports go; default standard error.
    """

    def __init__(self, world: World, stall_s: float, timeout_s: float, stream: TextIO | None = None) -> None:
        self._open: dict[int, tuple[Any, ...]] = {}
        """The calls of all threads that have begun and not ended, in that order, by their identities."""
        self.calls = 0
        """How many calls this rank has begun."""
        self.asked: Asked | None = None
        """What this rank asks for in vain now and then, between other things."""
        self._world, self._stall_s, self._timeout_s = world, stall_s, timeout_s
        self._stream = sys.stderr if stream is None else stream
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
        self._within = world.node_memory.alloc((world.node_memory.size,), np.int64)
        """The number of the call that each rank of the node waits in, with the others; 0: none."""
        self._reported = world.node_memory.alloc((world.node_memory.size,), np.int64)
        """The number of the call that each rank of the node has last reported."""
        self._watched = threading.get_ident()
        self._shown: int | None = None
        """The number of the call after which this rank has shown its stack to the ranks of other nodes."""
        self._asked_for_stacks: int | None = None
        """The number of the call in which this rank has asked its neighbours for theirs."""
        self._strangers = sorted(set(range(world.size)) - set(self._neighbours))
        asks = world.concurrent and self._strangers
        self._roll = RollCall(world.comm.duplicate(), self._look_s, self._about) if asks else None
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
            self._within[self._world.node_memory.rank] = 0
            if self._roll is not None and not self._thread.is_alive():
                self._roll.leave(self.calls, self._strangers)

    def _watch(self) -> None:
        with contextlib.suppress(WorldAborted):  # there is nobody left to ask
            self._look_again_and_again()

    def _look_again_and_again(self) -> None:
        call: tuple[Any, ...] | None = None
        lasted, gone_at, told, is_left_to_others = 0.0, None, False, False
        looked = time.monotonic()
        while not self._ended.wait(self._look_s):
            if self._parent not in (None, os.getppid()):
                with contextlib.suppress(OSError):  # it may have read what is said
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
                call, lasted, gone_at, told, is_left_to_others = now, 0.0, None, False, False
                continue
            gone = self._gone(call)
            gone_at = None if not gone else lasted if gone_at is None else gone_at
            if gone_at is not None and lasted - gone_at > _DEATH_S:
                self._say(f"{_described(call)} cannot end: {self._listed(Missing(gone, len(gone)))}; the job ends now")
                self._world.comm.abort(1)
                return
            if kernels.loading():
                lasted = 0.0
            elif 0 < self._timeout_s < lasted:
                reports = self._reports(call, lasted - self._timeout_s)
                if reports and self._report(call, self._timeout_s, "the job ends now (HPCDP_TIMEOUT_S)", lasted):
                    told = True
                    self._answer_for(_GRACE_S, lambda: False)  # late ranks show their stacks
                    if self._now() is call:
                        self._world.comm.abort(1)
                        return
            elif 0 < self._stall_s < lasted and not told and not is_left_to_others:
                is_left_to_others = self._is_reported(call)
                if not is_left_to_others and self._reports(call, lasted - self._stall_s):
                    until = f", until {self._timeout_s:g} s have passed (HPCDP_TIMEOUT_S)" if self._timeout_s else ""
                    told = self._report(call, self._stall_s, f"the job goes on{until}", lasted)
                    is_left_to_others = not told

    def _now(self) -> tuple[Any, ...] | None:
        asked = self.asked
        return self.call if self.call is not None or asked is None else asked.call

    def _waits(self) -> int:
        """Return the number of the call in which this rank waits for others; 0 where it is in none."""
        now = self._now()
        return self.calls if now is not None and now[2:] != (nobody,) else 0

    def _is_reported(self, call: tuple[Any, ...]) -> bool:
        """Return whether another rank has reported a call, or has said that it does."""
        if call[2:] == (nobody,):
            return False
        here, waits = self._world.node_memory.rank, self._waits()
        return any(said == waits for at, said in enumerate(self._reported) if at != here) or self._is_left(waits)

    def _is_left(self, waits: int) -> bool:
        """Return whether a rank of all nodes has said that it reports a call."""
        roll = self._roll
        return roll is not None and not roll.is_wanted(waits) and roll.reporter(waits) not in (None, self._world.rank)

    def _reports(self, call: tuple[Any, ...], over_s: float) -> bool:
        """Return whether this rank, of those that wait in a call, is the one that reports it, ``over_s`` too late."""
        if call[2:] == (nobody,) or self._has_been_in_vain(over_s):
            return True
        waits = self._waits()
        stopped = {each.rank for each in self._visible if each.state in "XTt"}
        here = self._world.node_memory.rank
        if any(self._within[below] == waits and self._neighbours[below] not in stopped for below in range(here)):
            return False
        if self._roll is None or self._roll.is_wanted(waits):
            return True
        return over_s > self._world.rank.bit_length() * (self._look_s + _HOP_S) and not self._is_left(waits)

    def _has_been_in_vain(self, over_s: float) -> bool:
        """Return whether whoever was to report a call should have done so."""
        limit_s = self._look_s + _GRACE_S if self._roll is None else self._roll.limit_s
        return over_s > 2 * limit_s + self._world.size.bit_length() * (self._look_s + _HOP_S)

    def _report(self, call: tuple[Any, ...], limit_s: float, next_: str, lasted: float) -> bool:
        """Report a call, unless another rank does; return whether this one has."""
        missing = self._missing(call)
        if missing is None:
            if not self._has_been_in_vain(lasted - limit_s):
                return False
            seen = self._seen_missing(call)
            missing = Missing(dict(sorted(seen.items())), len(seen))
        self._reported[self._world.node_memory.rank] = self._waits()
        self._say(
            f"{_described(call)} has not ended in {limit_s:g} s: {self._listed(missing)}\n"
            f"  {next_}; HPCDP_DEBUG=1 compares the calls of all ranks; stacks:"
        )
        with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
            faulthandler.dump_traceback(self._stream)
        self._ask_for_stacks(missing.named)
        return True

    def _ask_for_stacks(self, missing: Mapping[int, str]) -> None:
        """By a signal, of the ranks of this node; others show theirs when the roll is called."""
        for each in self._visible:
            late = each.rank in self._neighbours and missing.get(each.rank) == LATE
            if late and each.shows_stacks and each.state != "X":
                self._say(f"{each} shows its stack, too")
                with contextlib.suppress(OSError):
                    os.kill(each.pid, _SHOW_STACKS)

    def _answer(self) -> None:
        """Go on with roll calls, and tell ranks of other nodes that have asked how far this one is."""
        waits = self._waits()
        self._within[self._world.node_memory.rank] = waits
        if self._roll is None:
            return
        self._world.use_gpu_of_messages()
        for question in self._roll.turn(waits or None):
            if question.calls > self.calls != self._shown:
                self._shown = self.calls
                self._show_stack(question)
            elif question.calls == waits != self._asked_for_stacks:
                self._asked_for_stacks = waits
                now = self._now()
                if now is not None and not any(each == waits for each in self._within[: self._world.node_memory.rank]):
                    self._ask_for_stacks(self._late(now))

    def _about(self, calls: int) -> dict[int, str]:
        """Return what is wrong with this rank, and those of the node, for one that waits in a call of this number."""
        found: dict[int, str] = {}
        alive = [each.rank for each in self._visible if each.state not in "XTt"]
        if self._world.rank == min(alive, default=self._world.rank):  # each would say the same
            states = {"X": GONE, "T": STOPPED, "t": STOPPED}
            found = {each.rank: states[each.state] for each in self._visible if each.state in states}
        found |= {rank: LEFT for rank, begun in self._left().items() if begun < calls}
        if self.calls < calls:
            found[self._world.rank] = LATE if self._now() is None else EARLIER
        return found

    def _left(self) -> dict[int, int]:
        """Return how many calls each rank has begun that is known to have left."""
        left = {} if self._roll is None else dict(self._roll.left)
        return left | {self._neighbours[here]: -1 - int(seen) for here, seen in enumerate(self._seen) if seen < 0}

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
        self._stream.write(f"rank {self._world.rank} of {self._world.size}: {text}\n")
        self._stream.flush()

    def _gone(self, call: tuple[Any, ...]) -> dict[int, str]:
        """The ranks without which a call cannot end any more."""
        if call[2:] == (nobody,):
            return {}
        found = {rank: why for rank, why in self._late(call).items() if why == LEFT}
        found |= dict.fromkeys(self._roll.lost if self._roll else (), GONE)
        for each in self._visible:
            if each.state == "X":
                found[each.rank] = GONE
        return found

    def _late(self, call: tuple[Any, ...]) -> dict[int, str]:
        """The ranks that a call waits for, of this node and of those that have left, and whether they may come."""
        behind = call[2] if len(call) > 2 else None
        begun = [-1 - calls if calls < 0 else calls for calls in self._seen]  # see `end`
        late = (here for here, calls in enumerate(begun) if calls < self.calls) if behind is None else behind()
        found = {self._neighbours[here]: LEFT if self._seen[here] < 0 else LATE for here in late}
        found.pop(self._world.rank, None)
        left = self._roll.left if self._roll else {}
        return found | {rank: LEFT for rank, calls in left.items() if calls < self.calls}

    def _seen_missing(self, call: tuple[Any, ...]) -> dict[int, str]:
        """The ranks that this one waits for, as far as can be seen from here, and what is the matter with each."""
        found = self._late(call)
        for each in self._visible:
            state = each.state
            if state == "X":
                found[each.rank] = GONE
            elif state in ("T", "t"):
                found[each.rank] = STOPPED
        return found

    def _missing(self, call: tuple[Any, ...]) -> Missing | None:
        """As `_seen_missing`, with the ranks of other nodes; None where another rank reports the call."""
        found, roll = self._seen_missing(call), self._roll
        if roll is None:
            return Missing(dict(sorted(found.items())), len(found))
        roll.call(self.calls, _described(call), alone=call[2:] == (nobody,))
        self._answer_for(roll.limit_s, lambda: roll.is_over or self._now() is not call)
        asked = roll.result()
        if asked is None:
            return None
        named = {rank: why for rank, why in asked.named.items() if rank != self._world.rank} | found
        return Missing(dict(sorted(named.items())), asked.total + len(found.keys() - asked.named.keys()))

    def _listed(self, missing: Missing) -> str:
        if missing.named:
            said = [f"{self._everyone[rank]} {why}" for rank, why in missing.named.items()][:_MOST_NAMES]
            return listed(said, len(said)) + (f" and {more} more" if (more := missing.total - len(said)) > 0 else "")
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
    """

    def __init__(self, memory: NodeMemory, watchdog: Watchdog) -> None:
        super().__init__(memory)
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
        faulthandler.register(_SHOW_STACKS, sys.stderr, all_threads=False)
    except (OSError, ValueError, AttributeError, RuntimeError):  # not the main thread; no file descriptor
        return False
    return True
