"""Notices a collective that never ends, says what this rank waits for, and ends the job.

A hang is the usual end of ranks that call collectives differently, or of one that has stopped. A thread of each rank
looks now and then whether the rank is still in the same call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

import numpy as np

from .. import kernels
from ..errors import ConfigError

if TYPE_CHECKING:
    from .world import World

DEFAULT_LIMIT_S = 600.0
_LOOKS = 20
_GRACE_S = 1.0


def limit_s() -> float:
    """Seconds a collective may take: ``HPCDP_TIMEOUT_S``, default `DEFAULT_LIMIT_S`; 0 for ever.

    Raises:
        ConfigError: it is no such number.
    """
    text = os.environ.get("HPCDP_TIMEOUT_S", "")
    try:
        limit = float(text) if text else DEFAULT_LIMIT_S
    except ValueError:
        limit = -1.0
    if not 0 <= limit < float("inf"):
        raise ConfigError("HPCDP_TIMEOUT_S", expected="seconds, or 0 for no limit", got=repr(text))
    return limit


class Watchdog:
    """Watches the calls of one rank. All ranks of a node must make theirs together, with the same limit.

    Args:
        world: the ranks; its communicator ends the job.
        limit: seconds a call may take; 0 for ever.
        stream: where the report goes; default standard error.
    """

    def __init__(self, world: World, limit: float, stream: TextIO | None = None) -> None:
        self.call: tuple[str, object] | None = None
        """What this rank is in, a new tuple for every call: the operation and its array."""
        self.calls = 0
        """How many calls this rank has begun."""
        self.asked: tuple[str, object] | None = None
        """What this rank has asked for in vain, since the watchdog looked last."""
        self._world, self._limit = world, limit
        self._stream = sys.stderr if stream is None else stream
        self._ended = threading.Event()
        if limit > 0:
            self._seen = world.node_memory.alloc((world.node_memory.size,), np.int64)
            threading.Thread(target=self._watch, name="hpcdp-watchdog", daemon=True).start()

    @classmethod
    def of(cls, world: World) -> Watchdog:
        """That of ``world``; one that watches nothing where `hpcdp.init` has not made it."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(world, 0))

    @contextlib.contextmanager
    def watching(self, operation: str, x: object) -> Iterator[None]:
        """Watch what is done meanwhile; all ranks come here, so who has not can be told."""
        self.calls += 1
        self.call = operation, x
        try:
            yield
        finally:
            self.call = None

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def _watch(self) -> None:
        call: tuple[str, object] | None = None
        since = time.monotonic()
        while not self._ended.wait(min(1.0, self._limit / _LOOKS)):
            self._seen[self._world.node_memory.rank] = self.calls
            now, self.asked = self.call or self.asked, None
            if now is not call or call is None or kernels.loading():
                call, since = now, time.monotonic()
            elif time.monotonic() - since > self._limit:
                self._report(call)
                time.sleep(_GRACE_S)  # the other ranks have something to say too
                if (self.call or self.asked) is call:
                    self._world.comm.abort(1)
                    return

    def _report(self, call: tuple[str, object]) -> None:
        world, (operation, x) = self._world, call
        what = f"{operation} of {x.size} {x.dtype}" if isinstance(x, np.ndarray) else str(operation)
        late = [str(rank) for rank, calls in enumerate(self._seen) if calls < self.calls]
        who = f"local rank {', '.join(late)} has not called it" if late else "all ranks of this node have called it"
        self._stream.write(
            f"rank {world.rank} of {world.size}: {what} has not ended in {self._limit:g} s; {who}; ranks that call "
            "collectives with other sizes or in another order wait for ever: HPCDP_DEBUG=1 compares their calls, "
            "HPCDP_TIMEOUT_S sets the limit\n"
        )
        self._stream.flush()
        with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
            faulthandler.dump_traceback(self._stream)
