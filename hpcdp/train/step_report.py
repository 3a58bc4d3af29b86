"""Where the time of an epoch went, on which rank, and how short its steps could have been."""

from __future__ import annotations

import socket
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from ..comm import World
from ..gradients.critical_path import BucketCost, BucketTimes, critical_path, mirrored_need, reduction_seconds
from ..trace import Span, Trace
from .metrics import Record
from .trainers.gpu_times import GpuTimes
from .trainers.trainer import Trainer

STRAGGLES_AT = 1.2
"""A rank is a straggler when its own work took more than so many times the median over ranks."""

_LOOK_EVERY, _LOOKS_KEPT = 8, 256
"""The buckets of an epoch's first steps are looked at, then those of one in so many (it takes 2 us a bucket), and so
many of the last looks count."""

DATA, FORWARD, BACKWARD, STEP = "data", "forward", "backward", "step"
"""The phases of a step, in this order."""


class Phase:
    """One part of a step, entered again in every step: adds up its time, and is a span of the trace if there is one.

    Args:
        times: where that part of the step is computed on a GPU, what measures it there, too.
    """

    def __init__(self, name: str, trace: Trace | None, times: GpuTimes | None = None) -> None:
        self.name = name
        self.total_ns = 0
        """Of the host, since the last `StepReport.start_epoch`."""
        self.start_ns = self.end_ns = 0
        self._trace, self._times = trace, times
        self._span: Span | None = None
        self._part: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        if self._times is not None:
            self._part = self._times.part(self.name)
            self._part.__enter__()
        if self._trace is not None:
            self._span = self._trace.span(self.name)
            self._span.__enter__()
        self.start_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_ns = time.perf_counter_ns()
        self.total_ns += self.end_ns - self.start_ns
        if self._span is not None:
            self._span.__exit__(kind, error, trace)
        self._part.__exit__(None, None, None)


class StepReport:
    """Measures the steps of this rank, and compares them with those of others once an epoch.

    Use ``with report.phase["data"]:`` and so on around each phase of a step, then `end_step`. What is computed on a GPU
    is measured there, by events, which are read without waiting for it, but for the last ones of an epoch.
    """

    def __init__(self, trainer: Trainer, world: World) -> None:
        trace: Trace | None = world.kept.get(Trace)
        self._times = trainer.measure_on_gpu()
        self.phase = {name: Phase(name, trace, self._times) for name in (FORWARD, BACKWARD, STEP)}
        self.phase[DATA] = Phase(DATA, trace)
        self._trainer, self._world = trainer, world
        self._backwards: deque[tuple[int, int]] = deque(maxlen=3)  # updates may end a step late
        self._seen: Sequence[BucketTimes] = trainer.bucket_times
        self.start_epoch()

    def start_epoch(self) -> None:
        """Forget what was measured."""
        for phase in self.phase.values():
            phase.total_ns = 0
        if self._times is not None:
            self._times.start()
        self._steps = 0
        self._exposed_s = self._trainer.stats.exposed_s
        self._buckets: dict[int, deque[tuple[float, float]]] = {}

    def end_step(self) -> None:
        """Take in what the trainer knows of its last step."""
        self._steps += 1
        if self._times is not None:
            self._times.end_step()
            return  # when buckets were ready on the GPU is not known: those are times of the host
        backward = self.phase[BACKWARD]
        if not self._backwards or self._backwards[-1][0] != backward.start_ns:
            self._backwards.append((backward.start_ns, backward.end_ns))
        if self._steps > _LOOK_EVERY and self._steps % _LOOK_EVERY:
            return
        times = self._trainer.bucket_times
        if times is self._seen or not times:
            return
        self._seen = times
        first_ns = min(each.ready_ns for each in times)
        started = [start_ns for start_ns, end_ns in self._backwards if start_ns <= first_ns <= end_ns]
        if not started:  # of a step in which this rank had no samples
            return
        for each, reduction_s in zip(times, reduction_seconds(times), strict=True):
            measured = self._buckets.setdefault(each.number, deque(maxlen=_LOOKS_KEPT))
            measured.append(((each.ready_ns - started[-1]) / 1e9, reduction_s))

    def end_epoch(self) -> Record:
        """What an epoch's record says of its steps, alike on every rank; all must call, one small message a rank."""
        return compare(self._world.comm.allgather_json(self._summary()))

    def _summary(self) -> dict[str, Any]:
        alone = self._world.size == 1
        found: dict[str, Any] = {name: phase.total_ns / 1e9 for name, phase in self.phase.items()}
        if self._times is not None:
            self._times.finish()
            found |= {name: self._times.seconds[name] for name in (FORWARD, BACKWARD, STEP)}
        return found | {
            "host": socket.gethostname(),
            "steps": self._steps,
            "exposed": 0.0 if alone else self._trainer.stats.exposed_s - self._exposed_s,
            "buckets": [] if alone else [[n, *_medians(each)] for n, each in sorted(self._buckets.items())],
        }


def _medians(measured: Iterable[tuple[float, float]]) -> list[float]:
    """Of each column: a step in which something was compiled, or another rank was late, says little of the others."""
    return [statistics.median(column) for column in zip(*measured, strict=True)]


def compare(summaries: Sequence[Mapping[str, Any]]) -> Record:
    """One epoch's numbers from those of each rank; docs/tracing.md lists them.

    A rank's own work is its data and its computation in a step: all that it did but wait for others. The critical path
    is that of the rank with the longest computation. A bucket is ready when it is on the last rank, and its reduction
    takes as long as where it is shortest, since elsewhere it has waited for others. Where buckets were not measured,
    because they are reduced when backward is over, all of the exposed communication is one.
    """
    work = [(each[DATA] + _compute(each)) / max(1, each["steps"]) for each in summaries]
    median = statistics.median_low(work)
    found: Record = {
        "data_s": statistics.fmean(each[DATA] for each in summaries),
        "compute_s": statistics.fmean(_compute(each) for each in summaries),
    }
    slowest = max(range(len(work)), key=work.__getitem__)
    path_s, path = _critical_path(summaries, slowest)
    found |= {"critical_path_s": path_s * summaries[slowest]["steps"], "critical_path": path}
    if len(work) > 1:
        ratios = [seconds / median if median > 0 else 1.0 for seconds in work]
        found |= {
            "by_rank": {
                "compute_s": [_compute(each) for each in summaries],
                "data_s": [each[DATA] for each in summaries],
                "exposed_s": [each["exposed"] for each in summaries],
            },
            "slowest_rank": slowest,
            "slowest_host": summaries[slowest]["host"],
            "slowest_ratio": ratios[slowest],
            "stragglers": [
                f"rank {rank} on {summaries[rank]['host']}"
                for rank in sorted(range(len(work)), key=lambda rank: -ratios[rank])
                if ratios[rank] > STRAGGLES_AT
            ],
        }
    return found


def _waited(summary: Mapping[str, Any]) -> float:
    """Seconds for which forward has waited for parameters: communication that was exposed, but not in a step's end."""
    return min(summary[FORWARD], max(0.0, summary["exposed"] - summary[STEP]))


def _compute(summary: Mapping[str, Any]) -> float:
    rest = max(0.0, summary[STEP] - summary["exposed"])
    return summary[FORWARD] + summary[BACKWARD] - _waited(summary) + rest


def _critical_path(summaries: Sequence[Mapping[str, Any]], slowest: int) -> tuple[float, str]:
    """Seconds a step, and what it runs through."""
    own = summaries[slowest]
    steps = max(1, own["steps"])
    forward_s, backward_s = (own[FORWARD] - _waited(own)) / steps, own[BACKWARD] / steps
    between_s = (own[DATA] + max(0.0, own[STEP] - own["exposed"])) / steps
    ready: dict[int, float] = {}
    busy: dict[int, float] = {}
    for summary in summaries:
        for number, ready_s, busy_s in summary["buckets"]:
            ready[number] = max(ready_s, ready.get(number, ready_s))
            busy[number] = min(busy_s, busy.get(number, busy_s))
    if not ready:
        exposed_s = min(each["exposed"] / max(1, each["steps"]) for each in summaries)
        in_turn = "computation" + (", then communication" if exposed_s > 0 else "")
        return forward_s + backward_s + between_s + exposed_s, in_turn
    buckets = [
        BucketCost(number, ready[number], busy[number], mirrored_need(ready[number], forward_s, backward_s))
        for number in ready
    ]
    path = critical_path(forward_s, backward_s, buckets, between_s)
    return path.seconds, str(path)
