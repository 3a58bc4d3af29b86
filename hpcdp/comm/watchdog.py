"""Notices a call that does not end, says what this rank waits for and for whom, and ends the job if nothing changes.

A hang is the usual end of ranks that call collectives differently, or of one that has stopped. A thread of each rank
looks now and then whether the rank is still in the same call. How far the others are is read from the node's memory,
and how they are from /proc: ranks that are stuck answer no messages.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

import numpy as np

from .. import kernels
from ..errors import ConfigError
from .shared import Gate, NodeMemory

if TYPE_CHECKING:
    from .world import World

DEFAULT_STALL_S = 60.0
DEFAULT_TIMEOUT_S = 600.0
_LOOKS = 20
_LONGEST_LOOK_S = 1.0
_GRACE_S = 1.0
_MOST_NAMES = 8
_LATE = "has not come"
_SHOW_STACKS = signal.SIGRTMIN + 9
"""At this signal a rank writes its stacks, by faulthandler and so even where an extension holds the interpreter."""


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
    if not 0 <= limit < float("inf"):
        raise ConfigError(name, expected="seconds, or 0 for no limit", got=repr(text))
    return limit


class _Member(NamedTuple):
    """A rank as the others know it."""

    rank: int
    host: str
    pid: int
    born: str
    """When its process began, as /proc puts it: a process of the same number may be another one."""
    shows_stacks: bool

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


def _process(pid: int) -> tuple[str, str]:
    """State and birth of a process; empty where there is none to be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return "", ""
    return fields[0], fields[19]


class Watchdog:
    """Watches the calls of one rank. All ranks must make theirs together, with the same limits.

    Args:
        world: the ranks; its communicator ends the job.
        stall: seconds after which a call is reported, once; 0 for never.
        timeout: seconds after which a call is reported and the job ended; 0 for never.
        stream: where reports go; default standard error.
    """

    def __init__(self, world: World, stall: float, timeout: float, stream: TextIO | None = None) -> None:
        self.call: tuple[Any, ...] | None = None
        """What this rank is in, a new tuple for every call: see the arguments of `watching`."""
        self.calls = 0
        """How many calls this rank has begun."""
        self.asked: Asked | None = None
        """What this rank asks for in vain now and then, between other things."""
        self._world, self._stall, self._timeout = world, stall, timeout
        self._stream = sys.stderr if stream is None else stream
        self._ended = threading.Event()
        if stall > 0 or timeout > 0:
            self._meet(shows_stacks=stream is None and _show_stacks_when_asked())
            threading.Thread(target=self._watch, name="hpcdp-watchdog", daemon=True).start()

    def _meet(self, shows_stacks: bool) -> None:
        world, pid, host = self._world, os.getpid(), socket.gethostname()
        mine = _Member(world.rank, host, pid, _process(pid)[1], shows_stacks)
        self._everyone = [_Member(*each) for each in world.comm.allgather_json(mine)]
        self._visible = [each for each in self._everyone if each.host == host and _process(each.pid)[1] == each.born]
        """Those whose process can be looked at."""
        self._neighbours = world.node_comm.allgather_json(world.rank) if world.node_memory.size > 1 else [world.rank]
        self._seen = world.node_memory.alloc((world.node_memory.size,), np.int64)
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
            behind: the local ranks that are waited for; default those that have made fewer calls.
        """
        return _Watching(self, (operation, x, behind))

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def _watch(self) -> None:
        call: tuple[Any, ...] | None = None
        lasted, told = 0.0, False
        look_s = min(_LONGEST_LOOK_S, *(limit / _LOOKS for limit in (self._stall, self._timeout) if limit > 0))
        looked = time.monotonic()
        while not self._ended.wait(look_s):
            # While this process was stopped itself nobody kept it waiting.
            lasted += min(time.monotonic() - looked, look_s + _LONGEST_LOOK_S)
            looked = time.monotonic()
            self._seen[self._world.node_memory.rank] = self.calls
            now, asked = self._now(), self.asked
            if asked is not None and now is asked.call:
                lasted = asked.waited_s
            if now is not call or call is None:
                if told and call is not None:
                    self._say(f"{_described(call)} has ended after {lasted:.1f} s, and the job goes on")
                call, lasted, told = now, 0.0, False
            elif kernels.loading():
                lasted = 0.0
            elif 0 < self._timeout < lasted:
                told = True
                self._report(call, self._timeout, "the job ends now (HPCDP_TIMEOUT_S)")
                time.sleep(_GRACE_S)  # the other ranks have something to say too
                if self._now() is call:
                    self._world.comm.abort(1)
                    return
            elif 0 < self._stall < lasted and not told:
                told = True
                until = f", until {self._timeout:g} s have passed (HPCDP_TIMEOUT_S)" if self._timeout else ""
                self._report(call, self._stall, f"the job goes on{until}")

    def _now(self) -> tuple[Any, ...] | None:
        asked = self.asked
        return self.call if self.call is not None or asked is None else asked.call

    def _report(self, call: tuple[Any, ...], limit: float, next_: str) -> None:
        missing = self._missing(call)
        self._say(
            f"{_described(call)} has not ended in {limit:g} s: {self._listed(missing)}\n"
            f"  {next_}; HPCDP_DEBUG=1 compares the calls of all ranks; stacks:"
        )
        with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
            faulthandler.dump_traceback(self._stream)
        if self._world.rank == min({each.rank for each in self._visible} - missing.keys(), default=None):
            self._ask_for_stacks(missing)

    def _ask_for_stacks(self, missing: dict[int, str]) -> None:
        for each in self._visible:
            if missing.get(each.rank) == _LATE and each.shows_stacks and _process(each.pid)[1] == each.born:
                self._say(f"{each} shows its stacks, too")
                with contextlib.suppress(OSError):
                    os.kill(each.pid, _SHOW_STACKS)

    def _say(self, text: str) -> None:
        self._stream.write(f"rank {self._world.rank} of {self._world.size}: {text}\n")
        self._stream.flush()

    def _missing(self, call: tuple[Any, ...]) -> dict[int, str]:
        """The ranks that this one waits for, as far as can be seen from here, and what is the matter with each."""
        behind = call[2] if len(call) > 2 else None
        late = (here for here, calls in enumerate(self._seen) if calls < self.calls) if behind is None else behind()
        found = dict.fromkeys((self._neighbours[here] for here in late), _LATE)
        found.pop(self._world.rank, None)
        for each in self._visible:
            state, born = _process(each.pid)
            if born != each.born or state in ("Z", "X"):
                found[each.rank] = "is gone"
            elif state in ("T", "t"):
                found[each.rank] = "is stopped"
        return dict(sorted(found.items()))

    def _listed(self, missing: dict[int, str]) -> str:
        if missing:
            shown = [f"{self._everyone[rank]} {why}" for rank, why in list(missing.items())[:_MOST_NAMES]]
            return ", ".join(shown) + (f" and {len(missing) - len(shown)} more" if len(missing) > len(shown) else "")
        if len(self._neighbours) == self._world.size:
            return "all ranks have come, and their calls may differ"
        return "the ranks of this node have come; see what those of others report"


class Asked(Protocol):
    """Something that was started, and that is asked for until it is there."""

    call: tuple[Any, ...]
    """As `Watchdog.call`."""
    waited_s: float
    """For how long it has been asked for."""


class _Watching:
    """See `Watchdog.watching`; a generator would take three times as long, in each step of training."""

    __slots__ = ("_around", "_call", "_watchdog")

    def __init__(self, watchdog: Watchdog, call: tuple[Any, ...]) -> None:
        self._watchdog, self._call = watchdog, call

    def __enter__(self) -> None:
        watchdog = self._watchdog
        watchdog.calls += 1
        self._around, watchdog.call = watchdog.call, self._call

    def __exit__(self, *_: object) -> None:
        self._watchdog.call = self._around


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
        with self._watchdog.watching("barrier of the node's ranks"):
            super().barrier()


def _described(call: tuple[Any, ...]) -> str:
    operation, x = call[:2]
    if isinstance(x, np.ndarray):
        return f"{operation} of {x.size} {x.dtype}"
    return f"{operation} of {x()}" if callable(x) else str(operation)


def _show_stacks_when_asked() -> bool:
    try:
        faulthandler.register(_SHOW_STACKS, sys.stderr, all_threads=True)
    except (OSError, ValueError, AttributeError, RuntimeError):  # a stream without a file descriptor
        return False
    return True
