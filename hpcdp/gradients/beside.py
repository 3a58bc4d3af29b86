"""What buckets do beside computation: reductions that backward launches, and updates while the next forward runs.

Both are tasks of the communication lane's engine, ordered by one variable a bucket. How far each rank of the node has
got with each bucket is posted in its memory: a reduction begins when all have filled theirs, and whoever reads a
parameter waits until all owners have updated it.

Threads of the program may read parameters, too, such as one that logs or evaluates: whoever comes first ends the update
of a bucket, and one that comes late must not take the next step's for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..collectives.progress import Steps
from ..comm import World
from ..comm.shared import Milestones, NodeMemory
from ..comm.steps import Until
from ..comm.watchdog import Watchdog
from ..trace import Trace
from .bucket import Bucket, Parameter, State
from .critical_path import BucketTimes
from .lane import UPDATE, Lane, Turn

_FILLED, _UPDATED, _PHASES = 1, 2, 2  # what is posted for each bucket in each step


class Beside:
    """The buckets of one reducer. All ranks of a node must make it together.

    Args:
        world: the ranks.
        memory: what those that share the buckets share.
        buckets: all of them.
        params: by name.
        lane: where reductions progress.
    """

    def __init__(
        self,
        world: World,
        memory: NodeMemory,
        buckets: Sequence[Bucket],
        params: Mapping[str, Parameter],
        lane: Lane,
    ) -> None:
        self.times: list[BucketTimes] = []
        """When the buckets of the last step that is over were ready, launched and done."""
        self.waited: Callable[[int, int], None] = lambda begin_ns, end_ns: None
        """Told of each wait of this rank's computation for the update of parameters."""
        self._memory, self._buckets, self._params, self._lane = memory, buckets, params, lane
        self._watchdog = Watchdog.of(world)
        self._trace: Trace | None = world.kept.get(Trace)
        self._step = 0
        self._updating: dict[int, int] = {}
        """What owners post for the update of a bucket that is under way."""
        self._ending = threading.Lock()
        self._computes = threading.get_ident()
        self._milestones = Milestones(memory, len(buckets))
        self._variables = [lane.engine.variable(f"bucket {each.number}") for each in buckets]

    def begin_step(self) -> None:
        """What is launched from now on belongs to the next step."""
        if not self._updating:
            self._note_times()
        self._step += 1
        self._computes = threading.get_ident()

    def launch(self, bucket: Bucket, reduction: Callable[[Turn], Steps]) -> None:
        """Run the machine that ``reduction(turn)`` makes, when all ranks of the node have filled the bucket."""
        number = bucket.number
        bucket.state = State.LAUNCHED
        bucket.launched_ns = time.perf_counter_ns()
        filled = _PHASES * self._step + _FILLED  # now: when the machine begins, this rank may be a step further
        self._milestones.post(filled, number)

        def when_filled(turn: Turn) -> Steps:
            if self._memory.size > 1:
                yield [Until(lambda: self._milestones.reached(filled, number))]
            yield from reduction(turn)

        self._lane.launch(when_filled, [self._variables[number]], number, f"bucket {number}")

    def wait(self, bucket: Bucket) -> None:
        """Block until the bucket, which was launched in this step, is reduced."""
        behind = partial(self._behind, bucket, _PHASES * self._step + _FILLED)
        with self._watchdog.watching("reduction", bucket.described, behind):
            self._lane.wait(self._variables[bucket.number])

    def update_later(self, bucket: Bucket, update: Callable[[], None]) -> None:
        """Call ``update()``, which updates the parameters that this rank owns, as soon as the bucket is reduced.

        It runs on the update lane. Whoever reads ``data`` or ``grad`` of one of the bucket's parameters waits until all
        owners of the node have updated theirs.
        """
        number, updated = bucket.number, _PHASES * self._step + _UPDATED

        def run() -> None:
            update()
            self._milestones.post(updated, number)

        var = self._variables[number]
        self._lane.engine.push(run, [var], [var], UPDATE, number, f"update of bucket {number}")
        self._updating[number] = updated
        self._hook(bucket, lambda param: self.settle(bucket))

    def settle(self, bucket: Bucket) -> None:
        """Wait for the update of a bucket, if one is under way."""
        updated = self._updating.get(bucket.number)
        if updated is None:
            return
        begin = time.perf_counter_ns()
        behind = partial(self._behind, bucket, updated - _UPDATED + _FILLED, updated)
        with self._watchdog.watching("update", bucket.described, behind):
            self._lane.wait(self._variables[bucket.number])
            self._milestones.wait(updated, bucket.number)
        self._end_update(bucket, updated)  # not before: whoever reads meanwhile waits, too, and an error stays one
        if threading.get_ident() != self._computes:
            return
        end = time.perf_counter_ns()
        self.waited(begin, end)
        if self._trace is not None:
            self._trace.slice(f"wait for bucket {bucket.number}", "main", begin, end)
        if not self._updating:
            self._note_times()

    def _end_update(self, bucket: Bucket, updated: int) -> None:
        with self._ending:
            if self._updating.get(bucket.number) == updated:
                bucket.state = State.FILLING  # first: who sees no update any more may write gradients
                self._hook(bucket, None)
                del self._updating[bucket.number]

    def settle_all(self) -> None:
        """Wait for all updates under way."""
        for bucket in reversed(self._buckets):
            self.settle(bucket)

    def let_go(self) -> None:
        """Wait for no update any more: those under way may never end."""
        for bucket in self._buckets:
            if (updated := self._updating.get(bucket.number)) is not None:
                self._end_update(bucket, updated)

    def _behind(self, bucket: Bucket, *milestones: int) -> list[int]:
        """The local ranks that have not reached the first of ``milestones`` that is not reached by all."""
        found = (self._milestones.behind(number, bucket.number) for number in milestones if self._memory.size > 1)
        return next(filter(None, found), [])

    def _hook(self, bucket: Bucket, hook: Callable[[Parameter], None] | None) -> None:
        for slot in bucket.slots:
            param: Any = self._params[slot.name]
            param.data_hook = param.update_hook = hook

    def _note_times(self) -> None:
        self.times = [
            BucketTimes(each.number, each.mine.nbytes, each.ready_ns, each.launched_ns, each.done_ns)
            for each in self._buckets
        ]
        if self._trace is not None:
            for each in self.times:
                ready = f"bucket {each.number} ready"
                self._trace.slice(ready, "main", each.ready_ns, each.ready_ns, nbytes=each.nbytes)
