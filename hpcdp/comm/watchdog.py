"""The watchdog, which reports a rank that waits too long, and ends the job if nothing changes.

A hang is the usual result of ranks that call collectives differently, or of a stopped rank. A thread of each rank
checks at intervals whether the rank is still in the same call. The progress of the node's other ranks is read from
shared memory, and their state from /proc, so none of them needs to answer. The watchdogs of other nodes are asked, see
`roll_call`. The lowest rank that waits in a call reports it; if it does not, another one does a little later.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

import numpy as np

from .. import kernels
from ..errors import ConfigError, MismatchError, WorldAborted, listed, report_directly
from .communicator import exchange_of
from .consistency import Calls, called
from .roll_call import (
    ABANDONED,
    CLOSED,
    EARLIER,
    GONE,
    LATE,
    LEFT,
    STOPPED,
    TEXT_NBYTES,
    DifferentCalls,
    Missing,
    Question,
    RollCall,
    WaitingCall,
    mismatch,
)
from .shared_memory import LINE_NUMBERS, NodeBarrier, NodeMemory

if TYPE_CHECKING:
    from .world import World


class Member(NamedTuple):
    """A rank as the others know it."""

    rank: int
    host: str
    pid: int
    born: str
    """When its process began, as in /proc, because process numbers are reused."""
    shows_stacks: bool
    number: int | None = None
    """Its rank among all ranks, if it is known as another one in a part of them."""

    @property
    def state(self) -> str:
        """The state of its process, a letter of proc(5); X if it has ended, ? if this process cannot look."""
        try:
            state, born = look_at(self.pid)
        except OSError:
            return "?"
        return "X" if born != self.born or state == "Z" else state

    def __str__(self) -> str:
        among_all = "" if self.number is None else f" of the group, {self.number} of all"
        return f"rank {self.rank}{among_all} (host {self.host}, pid {self.pid})"


_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def look_at(pid: int) -> tuple[str, str]:
    """Return the state and the start time of a process; empty texts if it cannot be seen.

    Raises:
        OSError: this process has too many open files, or too little memory, to look.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except UnicodeDecodeError:
        return "", ""
    except OSError as error:
        if error.errno in _LACKS:
            raise
        return "", ""
    return fields[0], fields[19]


DEFAULT_STALL_S = 60.0
DEFAULT_TIMEOUT_S = 600.0
_LOOKS = 20
_LONGEST_LOOK_S = 1.0
_GRACE_S = 1.0
_DEATH_S = 3.0
"""Seconds that a call may continue after a rank has gone, which may have done its part of it and ended."""
_COMPARE_S = 3.0
"""Seconds after which waiting ranks compare their calls."""
_SHORT_LOOK_S = 0.25
"""Seconds between two checks of a waiting rank."""
_WAITS_IN = tuple(f"hpcdp.{package}." for package in ("comm", "collectives", "data_parallel", "kvstore", "engine"))
"""Packages whose functions the main thread executes while it waits for other ranks."""
_WAITS_BY = ("threading", "contextlib", "hpcdp.kernels.")
"""Modules that these packages call to wait."""
_CALLS = "collective calls"
_MOST_NAMES = 8
_SHORTEST_LIMIT_S = 0.1
_NAP_S = 0.01
_HOP_S = 0.05
"""Seconds per level of a tree of all ranks by which others delay a report that a lower rank may make."""
_EXCHANGE = "an exchange of all ranks"
_STDERR = 2
"""A file descriptor, because `sys.stderr` may be a buffer that is lost with the process."""
_ENDED = {LEFT: -1, CLOSED: -(1 << 40), ABANDONED: -(1 << 41)}
"""A rank that makes no more calls leaves its reason's number minus the number of its calls in the node's memory."""
_SHOW_STACKS = signal.SIGRTMIN + 9
"""The signal at which a rank prints the stack of its main thread, even while an extension holds the interpreter."""


def limits_s() -> tuple[float, float]:
    """Return the seconds until a call is reported, and until it ends the job; 0 for never.

    They are ``HPCDP_STALL_S`` and ``HPCDP_TIMEOUT_S``.

    Raises:
        ConfigError: one of them is not a valid number.
    """
    return seconds("HPCDP_STALL_S", DEFAULT_STALL_S), seconds("HPCDP_TIMEOUT_S", DEFAULT_TIMEOUT_S)


def seconds(name: str, default: float) -> float:
    """Return the limit in the environment variable ``name``; 0 for none.

    Raises:
        ConfigError: it is not a valid number.
    """
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
    """An observer of one rank's calls. All ranks must make theirs together, with the same limits.

    Args:
        world: the ranks; its communicator ends the job.
        stall_s: seconds after which a call is reported, once; 0 for never.
        timeout_s: seconds after which a call is reported and the job ended; 0 for never.
        stream: the output of reports; default file descriptor 2, see `errors.report_directly`.
    """

    def __init__(self, world: World, stall_s: float, timeout_s: float, stream: TextIO | None = None) -> None:
        self._open: dict[int, tuple[Any, ...]] = {}
        """Unfinished calls of all threads, by their ids, in the order in which they began."""
        self.calls = 0
        """The number of calls that this rank has begun."""
        self.tested: WatchedCall | None = None
        """A request that this rank tests in vain from time to time, between other work."""
        self.counts: dict[str, weakref.WeakMethod[Callable[[int], int]]] = {}
        """By kind of call that no rank ends before all have begun it: returns the number begun here of an item."""
        self._comm, self._memory, self._world = world.comm, world.node_memory, weakref.ref(world)
        self._stall_s, self._timeout_s, self._has_default = stall_s, timeout_s, timeout_s == DEFAULT_TIMEOUT_S
        self._stream = stream
        self._look_s = min([_LONGEST_LOOK_S, *(limit / _LOOKS for limit in (stall_s, timeout_s) if limit > 0)])
        self.due = time.monotonic() + self._look_s
        """The time of the next check (monotonic)."""
        self._looking = threading.RLock()
        self._ended = threading.Event()
        self._parent = os.getppid() if world.size > 1 else None
        """The launcher's process; None for a world of one, which may outlive its shell."""
        self._watched_call: tuple[Any, ...] | None = None
        """This rank's call at the last check."""
        self._lasted, self._has_reported, self._is_left_to_others = 0.0, False, False
        self._gone_at: float | None = None
        self._waiting: WaitingCall | None = None
        """This rank's call at the last check, if it waits for all others in it."""
        self._asked_about: tuple[Any, ...] | None = None
        """The call in which this rank has asked ranks of other nodes for theirs."""
        self._mismatch: tuple[float, MismatchError] | None = None
        """The age of the call when others were found in a different one, and the error for it."""
        self._looked = time.monotonic()
        self._patrol: Patrol | None = None
        if stall_s > 0 or timeout_s > 0:
            self._meet(world, shows_stacks=stream is None and _show_stacks_when_asked())
            self._patrol = Patrol.of(world)
            self._patrol.add(self)

    def _meet(self, world: World, shows_stacks: bool) -> None:
        pid, host = os.getpid(), socket.gethostname()
        whole = world
        while whole.parent is not None:
            whole = whole.parent
        number = whole.rank if whole.rank != world.rank else None
        mine = Member(world.rank, host, pid, look_at(pid)[1], shows_stacks, number)
        self._everyone = [Member(*fields) for fields in world.comm.allgather_json(mine)]
        self._visible = [member for member in self._everyone if member.host == host and member.state != "X"]
        """Members whose processes are visible in /proc."""
        self._neighbors = world.node_comm.allgather_json(world.rank) if world.node_memory.size > 1 else [world.rank]
        self._calls_of_neighbors = world.node_memory.alloc((world.node_memory.size,), np.int64)
        self._within = world.node_memory.alloc((world.node_memory.size,), np.int64)
        """The number of the collective call in which each rank of the node waits; 0 for none."""
        self._reported = world.node_memory.alloc((world.node_memory.size,), np.int64)
        """The number of the last call that each rank of the node has reported."""
        self._watched = threading.get_ident()
        self._shown: int | None = None
        """The number of calls at which this rank has printed its stack for ranks of other nodes."""
        self._asked_for_stacks: int | None = None
        """The number of the call in which this rank has asked its neighbors for their stacks."""
        self._strangers = sorted(set(range(world.size)) - set(self._neighbors))
        exchange, own = exchange_of(world.comm), weakref.ref(self)

        about, differs, begun = (_weak(method) for method in (self._about, self._differs, self._begun))
        self._different = DifferentCalls(world.node_memory, self._neighbors, begun)
        asks = world.concurrent and self._strangers
        self._roll = RollCall(world.comm.duplicate(), self._look_s, about, differs) if asks else None

        def watched(value: Any) -> list[Any]:
            watchdog = own()
            with contextlib.nullcontext() if watchdog is None or watchdog.call else watchdog.watching(_EXCHANGE):
                return exchange(value)

        # Ranks agree on everything through this exchange, also outside of other calls, as when a Trainer is made.
        world.comm.allgather_json = watched  # type: ignore[method-assign]

    @classmethod
    def of(cls, world: World) -> Watchdog:
        """Return the watchdog of ``world``; one that watches nothing unless `hpcdp.init` has made it."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(world, 0, 0))

    def count(self, kind: str, begun: Callable[[int], int]) -> None:
        """Count calls of a kind that no rank ends before all have begun them; see `counts`."""
        self.counts = {other: method for other, method in self.counts.items() if method() is not None}
        self.counts[kind] = weakref.WeakMethod(begun)

    @property
    def timeout_s(self) -> float:
        """Seconds after which a call ends the job; 0 for never."""
        return self._timeout_s

    def allow(self, timeout_s: float) -> None:
        """Let calls last for ``timeout_s``, unless ``HPCDP_TIMEOUT_S`` sets another limit than the default.

        All ranks must call with the same limit; one below the default changes nothing.
        """
        if self._has_default:
            self._timeout_s = max(DEFAULT_TIMEOUT_S, timeout_s)

    def watching(
        self,
        operation: str,
        x: object = None,
        behind: Callable[[], Sequence[int]] | None = None,
        counted: tuple[str, int] | None = None,
    ) -> _Watching:
        """Return a context that watches a call to which all ranks come, so that missing ranks can be named.

        An interrupted call without ``behind`` abandons the world, see `World.abandon`.

        Args:
            operation: the name of the call.
            x: its array, or a function that describes its operand for a report.
            behind: returns the local ranks that are waited for; default those that have made fewer calls. `nobody` if
                the call needs no other rank, and so continues when one dies.
            counted: its kind and item, if it is counted (see `count`); default that of `Calls`.
        """
        return _Watching(self, (operation, x, behind) if counted is None else (operation, x, behind, counted))

    @property
    def call(self) -> tuple[Any, ...] | None:
        """The last begun of all threads' unfinished calls; a new tuple of `watching`'s arguments each time."""
        begun = list(self._open.values())  # a copy, because other threads change it
        return begun[-1] if begun else None

    def enter(self, call: tuple[Any, ...]) -> None:
        """Begin ``call``, a new tuple of `watching`'s arguments, until `leave` is called with it.

        For calls that are too short for a context. A call to which all ranks come first increments `calls`; any other
        has a fourth element, `OWN`.
        """
        self._open[id(call)] = call

    def leave(self, call: tuple[Any, ...]) -> None:
        """End ``call``; other threads may have begun or ended calls meanwhile."""
        self._open.pop(id(call), None)

    def abandon(self, operation: str, error: BaseException) -> None:
        """Call `World.abandon` of the world, if it lives."""
        if (world := self._world()) is not None:
            world.abandon(operation, error)

    def end(self, why: str = LEFT) -> None:
        """Stop watching: this rank makes no more calls, because it has `LEFT`, `CLOSED` or `ABANDONED` the world."""
        if self._patrol is None or self._ended.is_set():
            return
        self._ended.set()
        has_stopped = self._looking.acquire(timeout=_GRACE_S)  # with a limit, because the check may be ending the job
        ended = self.calls - (why == ABANDONED)  # the call that it has abandoned does not count
        self._calls_of_neighbors[self._memory.rank] = _ENDED[why] - ended
        self._within[self._memory.rank] = 0
        if has_stopped:
            if self._roll is not None and why != CLOSED:
                self._roll.leave(ended, why, self._strangers)
            self._looking.release()

    def look(self) -> bool:
        """Check this rank's call if it is due; return whether to continue."""
        if time.monotonic() < self.due:
            return not self._ended.is_set()
        self._memory.meanwhile()  # its queue may be full while it is in a call of the MPI library
        with self._looking, contextlib.suppress(WorldAborted):  # no rank is left to ask
            if not self._ended.is_set() and self._look():
                is_waiting = self._waiting is not None
                self.due = time.monotonic() + min(self._look_s, _SHORT_LOOK_S if is_waiting else self._look_s)
                return True
        self._ended.set()
        return False

    def _look(self) -> bool:
        if self._parent not in (None, os.getppid()):
            with contextlib.suppress(OSError):  # the launcher may have held the reading end of stderr
                self._say("the launcher of the ranks is gone; this rank ends now")
            os._exit(1)  # no launcher is left to end the job
        # Time during which this process itself was stopped does not count as waiting.
        self._lasted += min(time.monotonic() - self._looked, self._look_s + _LONGEST_LOOK_S)
        self._looked = time.monotonic()
        self._calls_of_neighbors[self._memory.rank] = self.calls
        self.answer()
        call, now, tested = self._watched_call, self._now(), self.tested
        if tested is not None and tested.call is now is call:
            self._lasted = tested.waited_s
        self._waiting = self._waits_in(call) if call is not None and now is call else None
        if now is not call or call is None:
            self._different.look(None)
            self._memory.failure = self._mismatch = None
            if self._has_reported and call is not None:
                self._say(f"{_described(call)} has ended after {self._lasted:.1f} s, and the job goes on")
            self._watched_call, self._lasted, self._gone_at = now, 0.0, None
            self._has_reported = self._is_left_to_others = False
            return True
        gone = self._gone(call)
        self._gone_at = None if not gone else self._lasted if self._gone_at is None else self._gone_at
        if self._gone_at is not None and self._lasted - self._gone_at > _DEATH_S:
            self._say(f"{_described(call)} cannot end: {self._listed(Missing(gone, len(gone)))}; the job ends now")
            self._comm.abort(1)
            return False
        if kernels.loading():
            self._lasted = 0.0
        elif self._is_different(call):
            return False
        elif 0 < self._timeout_s < self._lasted:
            reports = self._reports(call, self._lasted - self._timeout_s)
            if reports and self._report(call, self._timeout_s, "the job ends now (HPCDP_TIMEOUT_S)"):
                self._has_reported = True
                self._answer_for(_GRACE_S, lambda: False)  # late ranks show their stacks
                if self._now() is call:
                    self._comm.abort(1)
                    return False
        elif 0 < self._stall_s < self._lasted and not self._has_reported and not self._is_left_to_others:
            self._is_left_to_others = self._is_reported(call)
            if not self._is_left_to_others and self._reports(call, self._lasted - self._stall_s):
                until = f", until {self._timeout_s:g} s have passed (HPCDP_TIMEOUT_S)" if self._timeout_s else ""
                self._has_reported = self._report(call, self._stall_s, f"the job goes on{until}")
                self._is_left_to_others = not self._has_reported
        return True

    def _waits_in(self, call: tuple[Any, ...]) -> WaitingCall | None:
        """Return ``call`` for `DifferentCalls`; None unless the main thread waits for all ranks in it."""
        counted = call[3] if len(call) > 3 else None
        if not is_of_all(call) or self.call is not call or (counted is None and call[2:] not in ((), (None,))):
            return None
        inner = sys._current_frames().get(self._watched)
        while inner is not None and inner.f_globals.get("__name__", "").startswith(_WAITS_BY):
            inner = inner.f_back
        if inner is None or not inner.f_globals.get("__name__", "").startswith(_WAITS_IN):
            return None  # the main thread computes, and another thread waits
        kind, item = counted or (_CALLS, 0)
        owner, name = called(inner)
        text = _described(call)
        if not name.startswith("_") and not text.startswith(name):
            text = f"{owner}.{name} ({text})" if owner not in ("", name) else f"{name} ({text})"
        return WaitingCall(kind, item, self._begun(kind, item), text.encode()[:TEXT_NBYTES].decode(errors="ignore"))

    def _begun(self, kind: str, item: int) -> int:
        """Return the number of calls of a kind that this rank has begun; 0 of an unknown kind."""
        if kind == _CALLS:
            world = self._world()
            calls = None if world is None else world.kept.get(Calls)
            return 0 if calls is None else calls.number
        method = self.counts.get(kind)
        begun = None if method is None else method()
        return 0 if begun is None else begun(item)

    def _differs(self, other_call: WaitingCall) -> WaitingCall | None:
        """Return this rank's call if it waits without having begun ``other_call``; else None."""
        is_there = self._waiting is not None and self._now() is self._watched_call
        return self._waiting if is_there and self._begun(other_call.kind, other_call.item) < other_call.number else None

    def _is_different(self, call: tuple[Any, ...]) -> bool:
        """Check whether this rank and others wait for each other in different calls; return whether the job ends.

        A rank that waits through the node's memory gets an error. That may come too late or not at all; then the job
        ends a little later.
        """
        waiting = self._waiting
        different = self._different.look(waiting, self._lasted >= _COMPARE_S)
        if waiting is None:
            return False
        if self._mismatch is None:
            different = different or self._waiting_on_other_nodes(waiting, call)
            if different and self._now() is call:
                self._mismatch = self._lasted, mismatch(different)
                self._memory.failure = self._mismatch[1]
        elif self._lasted - self._mismatch[0] > _GRACE_S:
            self._say(f"{self._mismatch[1]}; the job ends now")
            self._comm.abort(1)
            return True
        return False

    def _waiting_on_other_nodes(self, waiting: WaitingCall, call: tuple[Any, ...]) -> dict[int, WaitingCall]:
        """Ask ranks of other nodes for their calls, once per call and unless a lower rank asks."""
        roll, rank = self._roll, self._comm.rank
        if roll is None or self._asked_about is call or roll.is_compared(waiting):
            return {}
        if self._lasted < _COMPARE_S + rank.bit_length() * _HOP_S:
            return {}
        self._asked_about = call
        roll.compare(waiting)
        self._answer_for(roll.limit_s, lambda: roll.is_over or self._now() is not call)
        answer = roll.compared()
        if answer is None or self._begun(answer[1].kind, answer[1].item) >= answer[1].number:
            return {}
        return {rank: waiting, answer[0]: answer[1]}

    def _now(self) -> tuple[Any, ...] | None:
        tested = self.tested
        return self.call if self.call is not None or tested is None else tested.call

    def _waits(self) -> int:
        """Return the number of the collective call in which this rank waits; 0 for none."""
        now = self._now()
        return self.calls if now is not None and is_of_all(now) else 0

    def _is_reported(self, call: tuple[Any, ...]) -> bool:
        """Return whether another rank has reported a call, or announced that it will."""
        if not is_of_all(call):
            return False
        here, waits = self._memory.rank, self._waits()
        return any(call == waits for at, call in enumerate(self._reported) if at != here) or self._is_left(waits)

    def _is_left(self, waits: int) -> bool:
        """Return whether a rank of any node has announced that it reports a call."""
        roll = self._roll
        return roll is not None and not roll.is_wanted(waits) and roll.reporter(waits) not in (None, self._comm.rank)

    def _reports(self, call: tuple[Any, ...], over_s: float) -> bool:
        """Return whether this rank is the one that reports a call, ``over_s`` seconds after the limit."""
        if not is_of_all(call) or self._has_been_in_vain(over_s):
            return True
        waits = self._waits()
        stopped = {member.rank for member in self._visible if member.state in "XTt"}
        here = self._memory.rank
        if any(self._within[below] == waits and self._neighbors[below] not in stopped for below in range(here)):
            return False
        if self._roll is None or self._roll.is_wanted(waits):
            return True
        return over_s > self._comm.rank.bit_length() * (self._look_s + _HOP_S) and not self._is_left(waits)

    def _has_been_in_vain(self, over_s: float) -> bool:
        """Return whether the responsible rank should have reported a call by now."""
        limit_s = self._look_s + _GRACE_S if self._roll is None else self._roll.limit_s
        return over_s > 2 * limit_s + self._comm.size.bit_length() * (self._look_s + _HOP_S)

    def _report(self, call: tuple[Any, ...], limit_s: float, next_: str) -> bool:
        """Report a call unless another rank does; return whether this one has."""
        missing = self._missing(call)
        if missing is None:
            if not self._has_been_in_vain(self._lasted - limit_s):
                return False
            visible = self._seen_missing(call)
            missing = Missing(dict(sorted(visible.items())), len(visible))
        self._reported[self._memory.rank] = self._waits()
        self._say(f"{_described(call)} has not ended in {limit_s:g} s: {self._listed(missing)}\n  {next_}; stacks:")
        with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
            faulthandler.dump_traceback(_STDERR if self._stream is None else self._stream)
        self._ask_for_stacks(missing.named)
        return True

    def _ask_for_stacks(self, missing: Mapping[int, str]) -> None:
        """Signal late ranks of this node to print their stacks; ranks of other nodes do so in the roll call."""
        for member in self._visible:
            late = member.rank in self._neighbors and missing.get(member.rank) == LATE
            if late and member.shows_stacks and member.state != "X":
                self._say(f"{member} shows its stack, too")
                with contextlib.suppress(OSError):
                    os.kill(member.pid, _SHOW_STACKS)

    def answer(self) -> None:
        """Advance roll calls, and answer ranks of other nodes that have asked about this one."""
        if self._ended.is_set() or not self._looking.acquire(blocking=False):
            return
        try:
            self._answer()
        finally:
            self._looking.release()

    def _answer(self) -> None:
        waits = self._waits()
        self._within[self._memory.rank] = waits
        if self._roll is None:
            return
        if (world := self._world()) is not None:
            world.use_gpu_of_messages()
        for question in self._roll.turn(waits or None):
            if question.calls > self.calls != self._shown:
                self._shown = self.calls
                self._show_stack(question)
            elif question.calls == waits != self._asked_for_stacks:
                self._asked_for_stacks = waits
                now = self._now()
                if now is not None and not any(call == waits for call in self._within[: self._memory.rank]):
                    self._ask_for_stacks(self._late(now))

    def _about(self, calls: int) -> dict[int, str]:
        """Return the problems of this rank and of visible ones, for a rank that waits in a call of this number."""
        problems: dict[int, str] = {}
        alive = [member.rank for member in self._visible if member.state not in "XTt"]
        if self._comm.rank == min(alive, default=self._comm.rank):  # the lowest rank answers for all of a machine
            states = {"X": GONE, "T": STOPPED, "t": STOPPED}
            problems = {member.rank: states[member.state] for member in self._visible if member.state in states}
        problems |= {rank: why for rank, (begun, why) in self._ended_ranks().items() if begun < calls}
        if self.calls < calls:
            problems[self._comm.rank] = LATE if self._now() is None else EARLIER
        return problems

    def _ended_ranks(self) -> dict[int, tuple[int, str]]:
        """Return, for each rank that makes no more calls, the number that it has begun, and the reason."""
        left = {} if self._roll is None else self._roll.left
        neighbors = zip(self._neighbors, self._seen_calls(), strict=True)
        return left | {rank: (begun, why) for rank, (begun, why) in neighbors if why != LATE}

    def _answer_for(self, limit_s: float, enough: Callable[[], bool]) -> None:
        """Answer questions for up to ``limit_s`` seconds, or until ``enough()``.

        It counts naps, not time, because this process may be stopped meanwhile.
        """
        assert self._patrol is not None
        for _ in range(int(limit_s / _NAP_S)):
            self._patrol.answer()
            if enough() or self._ended.wait(_NAP_S):
                break

    def _show_stack(self, question: Question) -> None:
        asker = self._everyone[question.rank]
        frame = sys._current_frames().get(self._watched)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  its thread has ended"
        text = f"rank {asker.rank} (host {asker.host}) waits in {question.call}; this rank is here:\n{stack}"
        self._say(text.rstrip())

    def _say(self, text: str) -> None:
        line = f"rank {self._comm.rank} of {self._comm.size}: {text}"
        if self._stream is None:
            report_directly(line)
        else:
            print(line, file=self._stream, flush=True)

    def _gone(self, call: tuple[Any, ...]) -> dict[int, str]:
        """Return the ranks without which a call cannot end any more."""
        if call[2:] == (nobody,):
            return {}
        gone = {rank: why for rank, why in self._late(call).items() if why in _ENDED}
        gone |= dict.fromkeys(self._roll.lost if self._roll else (), GONE)
        return gone | {member.rank: GONE for member in self._visible if member.state == "X"}

    def _seen_calls(self) -> list[tuple[int, str]]:
        """Return the number of calls that each rank of the node has begun, and whether more may follow; see `end`."""
        counts = self._calls_of_neighbors.tolist()
        reasons = [next((why for why in reversed(_ENDED) if count <= _ENDED[why]), LATE) for count in counts]
        return [(_ENDED[why] - n if why in _ENDED else n, why) for n, why in zip(counts, reasons, strict=True)]

    def _late(self, call: tuple[Any, ...]) -> dict[int, str]:
        """Return the ranks of this node that a call waits for, and ranks that have left, with the reason."""
        if OWN in call[3:4] and len(call) > 4:
            return {call[4]: LATE}
        behind = call[2] if len(call) > 2 else None
        neighbors = self._seen_calls()
        late = (here for here, (begun, _) in enumerate(neighbors) if begun < self.calls) if behind is None else behind()
        missing = {self._neighbors[here]: neighbors[here][1] for here in late}
        missing.pop(self._comm.rank, None)
        left = self._roll.left if self._roll else {}
        return missing | {rank: why for rank, (begun, why) in left.items() if begun < self.calls}

    def _seen_missing(self, call: tuple[Any, ...]) -> dict[int, str]:
        """Return the missing ranks that are visible from here, with the reason for each."""
        missing = self._late(call)
        for member in self._visible:
            state = member.state
            if state == "X":
                missing[member.rank] = GONE
            elif state in ("T", "t"):
                missing[member.rank] = STOPPED
        return missing

    def _missing(self, call: tuple[Any, ...]) -> Missing | None:
        """Return the missing ranks of all nodes; None if another rank reports the call."""
        visible, roll = self._seen_missing(call), self._roll
        if roll is None:
            return Missing(dict(sorted(visible.items())), len(visible))
        roll.call(self.calls, _described(call), alone=not is_of_all(call))
        self._answer_for(roll.limit_s, lambda: roll.is_over or self._now() is not call)
        answers = roll.result()
        if answers is None:
            return None
        named = {rank: why for rank, why in answers.named.items() if rank != self._comm.rank} | visible
        return Missing(dict(sorted(named.items())), answers.total + len(visible.keys() - answers.named.keys()))

    def _listed(self, missing: Missing) -> str:
        if missing.named:
            reasons = [f"{self._everyone[rank]} {why}" for rank, why in missing.named.items()][:_MOST_NAMES]
            more = missing.total - len(reasons)
            return listed(reasons, len(reasons)) + (f" and {more} more" if more > 0 else "")
        if self._roll is not None or len(self._neighbors) == self._comm.size:
            return "all ranks have come, and their calls may differ"
        return "the ranks of this node have come; see what those of others report"


class Patrol:
    """The thread of a rank that runs the watchdogs of its world and of all worlds split from it.

    It keeps no watchdog alive, and ends when there is none.
    """

    def __init__(self) -> None:
        self._watchdogs: list[weakref.ref[Watchdog]] = []
        self._adding, self._added = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self.end)  # before MPI_Finalize, during which no thread may call MPI

    @classmethod
    def of(cls, world: World) -> Patrol:
        """Return the patrol of this rank's ``world``."""
        patrol: Patrol = world.common.get(cls) or world.common.setdefault(cls, cls())
        return patrol

    def add(self, watchdog: Watchdog) -> None:
        """Run this watchdog as well from now on."""
        with self._adding:
            self._watchdogs.append(weakref.ref(watchdog, self._forget))
            self._added.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="hpcdp-watchdog", daemon=True)
                self._thread.start()

    def _forget(self, watchdog: weakref.ref[Watchdog]) -> None:
        with contextlib.suppress(ValueError):  # called at the watchdog's end and at its collection, in any order
            self._watchdogs.remove(watchdog)

    def end(self) -> None:
        """End all watchdogs."""
        for reference in tuple(self._watchdogs):
            if (watchdog := reference()) is not None:
                watchdog.end()
        self._added.set()

    def answer(self) -> None:
        """Answer ranks of other nodes, which may ask about a call in any of the worlds."""
        for reference in tuple(self._watchdogs):
            if (watchdog := reference()) is not None:
                watchdog.answer()

    def _watch(self) -> None:
        while True:
            self._added.clear()
            due = [self._look(reference) for reference in tuple(self._watchdogs)]
            with self._adding:
                if not self._watchdogs:
                    self._thread = None
                    return
            self._added.wait(max(0.0, min(due, default=0.0) - time.monotonic()))

    def _look(self, own: weakref.ref[Watchdog]) -> float:
        """Let a watchdog check if it is due; return the time of its next check, without keeping it alive."""
        watchdog = own()
        if watchdog is None or not watchdog.look():
            self._forget(own)
            return 0.0
        return watchdog.due


OWN = "own"
"""The fourth element of a call to which not all ranks come; each rank that waits in one reports it. A fifth element is
the one rank that the call waits for.
"""


def is_of_all(call: tuple[Any, ...]) -> bool:
    """Return whether all ranks come to a call, so that one of the waiting ranks reports it."""
    return call[2:] != (nobody,) and OWN not in call[3:]


def nobody() -> list[int]:
    """Return no ranks; a value of ``behind`` for `Watchdog.watching`."""
    return []


class WatchedCall(Protocol):
    """An operation that was started, and that is tested until it is complete."""

    call: tuple[Any, ...]
    """As in `Watchdog.call`."""
    waited_s: float
    """The seconds for which it has been tested."""


class _Watching:
    """The context of `Watchdog.watching`; a generator would take three times as long, in each training step."""

    __slots__ = ("_call", "_watchdog")

    def __init__(self, watchdog: Watchdog, call: tuple[Any, ...]) -> None:
        self._watchdog, self._call = watchdog, call

    def __enter__(self) -> None:
        watchdog = self._watchdog
        watchdog.calls += 1
        watchdog.enter(self._call)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._watchdog.leave(self._call)
        if error is not None and self._call[2] is None:
            self._watchdog.abandon(self._call[0], error)


class WatchedBarrier(NodeBarrier):
    """A node barrier that a watchdog observes; see `NodeBarrier`."""

    def __init__(self, memory: NodeMemory, watchdog: Watchdog, most_numbers: int = LINE_NUMBERS) -> None:
        super().__init__(memory, most_numbers)
        self._watchdog = watchdog

    def barrier(self) -> None:
        """Block until every rank of the node has called it as often as this one."""
        if self._memory.size > 1:
            with self._watchdog.watching("barrier of the node's ranks"):
                super().barrier()


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a method of a watchdog, which runs the call itself, without keeping it alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        living = reference()
        assert living is not None
        return living(*args)

    return call


def _described(call: tuple[Any, ...]) -> str:
    operation, x = call[:2]
    if isinstance(x, np.ndarray):
        return f"{operation} of {x.size} {x.dtype}"
    return f"{operation} of {x()}" if callable(x) else str(operation)


@functools.cache  # faulthandler would not restore its handler a second time, and a process may have two worlds
def _show_stacks_when_asked() -> bool:
    try:
        # faulthandler restores this when Python ends; by default the signal would kill a rank in MPI_Finalize.
        signal.signal(_SHOW_STACKS, signal.SIG_IGN)
        # The main thread only: stacks of others may change while they are read, which has crashed.
        faulthandler.register(_SHOW_STACKS, _STDERR, all_threads=False)
    except (OSError, ValueError, AttributeError, RuntimeError):  # this is not the main thread
        return False
    return True
