"""The least time that a step can take, from what its parts took: a pure function.

A step is a forward pass, a backward pass, and for every bucket a reduction between its last gradient and the first
layer of the *next* forward that reads its parameters. The thread that computes does one thing at a time, and so does
the network. From the beginning of a backward to the end of the next forward,

- computation alone takes ``B + between + F``;
- bucket b is ready ``r_b`` after backward began, keeps the network busy for ``c_b``, and when it is done there are
  ``q_b = u_b + F - n_b`` still to come: its update, and what forward has left from where it needs the bucket, ``n_b``.

Whatever the order in which buckets go, a set S of them cannot begin before the first is ready, takes the sum of its
reductions, and leaves at least the shortest of its rests. So no step is shorter than

    max( B + between + F,  max over S of  min_S r  +  sum_S c  +  min_S q )

and a network that always serves the most urgent bucket that is ready, the one with the longest rest, reaches it (the
preemptive schedule of Jackson, "Scheduling a production line to minimize maximum tardiness", 1955; that the bound over
sets is tight: Carlier, "The one-machine sequencing problem", 1982, section 2). Only the sets of all buckets that are
ready from some time on and have at least some rest need to be looked at, n^2 of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import listed


class BucketTimes(NamedTuple):
    """When a bucket was where in one step, in ns of `time.perf_counter_ns`."""

    number: int
    nbytes: int
    ready_ns: int
    """Backward had written its last gradient."""
    launched_ns: int
    done_ns: int
    """This rank's part was reduced."""


class BucketCost(NamedTuple):
    """What a bucket asks of a step, in seconds."""

    number: int
    ready_s: float
    """From the beginning of backward until its gradients are written."""
    reduction_s: float
    """That the network is busy with it."""
    needed_s: float
    """From the beginning of the next forward until a layer reads its parameters; that of the whole forward if none."""
    update_s: float = 0.0
    """From the end of its reduction until its parameters may be read."""


class CriticalPath(NamedTuple):
    """The longest chain of a step."""

    seconds: float
    buckets: tuple[int, ...]
    """The numbers of the buckets that follow each other on it, in the order of their becoming ready; none where
    computation alone takes longest."""

    def __str__(self) -> str:
        if not self.buckets:
            return "computation"
        return f"bucket{'s' if len(self.buckets) > 1 else ''} {listed(self.buckets, 4)}"


def critical_path(
    forward_s: float, backward_s: float, buckets: Sequence[BucketCost], between_s: float = 0.0
) -> CriticalPath:
    """The least time from one forward's end to the next one's, which is that of a step.

    Args:
        forward_s, backward_s: computation alone, without waiting.
        buckets: in any order.
        between_s: what else the computing thread does between a backward and the next forward, e.g. reading data.
    """
    longest = CriticalPath(forward_s + backward_s + between_s, ())
    rests = [(each.update_s + forward_s - each.needed_s, each) for each in buckets]
    rests.sort(key=lambda rest: -rest[0])
    for earliest_s in {each.ready_s for each in buckets}:
        busy_s = 0.0
        later = [(rest_s, each) for rest_s, each in rests if each.ready_s >= earliest_s]
        for count, (rest_s, each) in enumerate(later, 1):
            busy_s += each.reduction_s
            if earliest_s + busy_s + rest_s > longest.seconds:
                order = sorted((other for _, other in later[:count]), key=lambda other: (other.ready_s, other.number))
                longest = CriticalPath(earliest_s + busy_s + rest_s, tuple(other.number for other in order))
    return longest


def reduction_seconds(times: Sequence[BucketTimes]) -> list[float]:
    """How long the network was busy with each bucket, in the order of ``times``.

    While several are under way each of them counts for its part of the time, so that all add up to the time in which
    any was.
    """
    changes = sorted([(each.launched_ns, 1) for each in times] + [(each.done_ns, -1) for each in times])
    under_way, shared_ns, at = 0, 0.0, {}
    for (now_ns, change), (next_ns, _) in itertools.pairwise([*changes, (changes[-1][0], 0)] if changes else []):
        at[now_ns] = shared_ns
        under_way += change
        if next_ns > now_ns and under_way:
            shared_ns += (next_ns - now_ns) / under_way
    return [(at[each.done_ns] - at[each.launched_ns]) / 1e9 for each in times]


def mirrored_need(ready_s: float, forward_s: float, backward_s: float) -> float:
    """About when forward needs what backward has ready after ``ready_s``: it passes the layers the other way round."""
    return forward_s * min(1.0, max(0.0, 1.0 - ready_s / backward_s)) if backward_s > 0 else 0.0
