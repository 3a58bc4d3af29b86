"""The communication lane: reductions that progress on a thread of their own while Python computes.

A spinning thread would take the core that backward needs, and one that sleeps too long leaves the network idle: the
lane's engine polls with naps of 50 us to 1 ms, and without doubling them while somebody waits for a reduction.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from ..collectives.progress import Machine, Steps, wait_for
from ..comm import World
from ..comm.weak_methods import weakly
from ..engine import Done, Engine, Variable
from ..trace import Trace

COMMUNICATION, UPDATE = "communication", "update"
"""The names of the lanes: reductions, and the updates that follow them."""

STALLED_S = 2e-3
"""A machine that has begun no message for so long does not hold up less urgent ones: its peers have not come."""


class Turn:
    """A machine's place in the queue for the network: a request, complete while no more urgent machine gets on.

    Front layers are needed first by the next forward, so their messages should not queue behind those of others
    (Jayarajan et al., "Priority-based parameter propagation for distributed DNN training", 2019). Machines that have
    begun go on: ranks may have begun others, and each waits for the messages of all.
    """

    def __init__(self, lane: Lane, priority: int) -> None:
        self.priority = priority
        self.began = 0.0
        self._lane = lane

    def test(self) -> bool:
        """Whether it may begin another message; then it counts as having begun."""
        now = time.monotonic()
        if any(each.priority > self.priority and now - each.began < STALLED_S for each in self._lane.turns):
            return False
        self.began = now
        return True

    def wait(self) -> None:
        """Block until it may."""
        wait_for(self.test)


_busy: set[Lane] = set()
"""Those with something under way, which goes on when nobody holds their worlds any more: other ranks wait for it."""


class Lane:
    """What a rank has under way beside its computation. Use `of`: one for a world."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turns: list[Turn] = []
        """Of the machines under way, the most urgent first."""
        self._machines: list[tuple[Machine, Done]] = []
        self._awaited = 0
        engine.add_lane(UPDATE)
        engine.add_lane(COMMUNICATION, idle=weakly(self._poll))  # a thread would keep it, and so the engine, for ever

    @classmethod
    def of(cls, world: World) -> Lane:
        """That of ``world``."""
        return world.kept.get(cls) or world.keep(cls, lambda: cls(_engine_of(world)))

    def launch(
        self,
        steps: Callable[[Turn], Steps],
        writes: Sequence[Variable],
        priority: int,
        name: str,
        reads: Sequence[Variable] = (),
    ) -> None:
        """Let the machine that ``steps(turn)`` makes progress on the lane; return at once.

        Args:
            reads: see `Engine.push`.
            writes: held until the machine has ended; waiting for them raises what it raised.
            priority: higher ones get the network first.
            name: for traces and errors.
        """

        def start(done: Done) -> None:
            turn = Turn(self, priority)
            place = bisect.bisect_right(self.turns, -priority, key=lambda each: -each.priority)
            self.turns.insert(place, turn)
            self._machines.insert(place, (Machine(steps(turn)), done))
            _busy.add(self)

        self.engine.push_deferred(start, reads, writes, lane=COMMUNICATION, priority=priority, name=name)

    def wait(self, var: Variable) -> None:
        """Block until ``var`` is written; reductions progress as fast as they can meanwhile."""
        with self._urgently():
            self.engine.wait_to_read(var)

    @contextlib.contextmanager
    def _urgently(self) -> Iterator[None]:
        self._awaited += 1
        try:
            yield
        finally:
            self._awaited -= 1

    def _poll(self) -> bool:
        while self._awaited and self._machines and not self.engine.has_ready(COMMUNICATION):
            wait_for(self._advance)
        self._advance()
        return bool(self._machines)

    def _advance(self) -> bool:
        """Give every machine a turn; whether one has ended, another is to be started, or nobody waits.

        Ranks whose lanes each stayed with what has begun there would wait for each other's for ever.
        """
        ended: list[tuple[int, Done, Exception | None]] = []
        for place, (machine, done) in enumerate(self._machines):
            try:
                if machine.advance():
                    ended.append((place, done, None))
            except Exception as error:
                ended.append((place, done, error))
        for place, done, failure in reversed(ended):
            del self._machines[place], self.turns[place]
            done(failure)
        if not self._machines:
            _busy.discard(self)
        return bool(ended) or self.engine.has_ready(COMMUNICATION) or not self._awaited


def _engine_of(world: World) -> Engine:
    def make() -> Engine:
        engine = Engine(lanes=(), max_inflight=1 << 20)
        trace = world.kept.get(Trace)
        if trace is not None:
            engine.observer = trace.slice
        return engine

    return world.keep(Engine, make)
