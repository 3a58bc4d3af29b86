"""Where the time of a trainer's steps went: waits of this rank, and what ran beside its computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_WAITS_KEPT = 256
"""So many of the last waits can cover what ran beside them: those of a step or two, one for each bucket."""


class CommunicationStats:
    """Where the time of a trainer's steps went, on this rank, in seconds; no moment counts twice."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_s = 0.0
        """In communication: waiting for other ranks, summing over them, and updates that are fused into the sum. Of a
        store: the exposed part alone."""
        self.exposed_s = 0.0
        """The part of it during which this rank did nothing else."""
        self._waits: deque[tuple[int, int]] = deque(maxlen=_WAITS_KEPT)
        self._ran_until_ns = 0

    def waited_on_gpu(self, seconds: float) -> None:
        """The GPU has waited for so long, as its events say."""
        self.exposed_s += seconds
        self.total_s += seconds

    def waited(self, begin_ns: int, end_ns: int, on_host: bool = True) -> None:
        """This rank has waited from then to then; what it waited within that was told before.

        Args:
            on_host: computes there. Else the wait is no loss by itself, and only what ran beside it is not hidden.
        """
        added_ns = end_ns - begin_ns
        while self._waits and self._waits[-1][1] > begin_ns:
            inner_begin_ns, inner_end_ns = self._waits.pop()
            added_ns -= inner_end_ns - inner_begin_ns
            begin_ns = min(begin_ns, inner_begin_ns)
        self._waits.append((begin_ns, end_ns))
        if on_host:
            self.exposed_s += added_ns / 1e9
            self.total_s += added_ns / 1e9

    def ran(self, spans: Iterable[tuple[int, int]]) -> None:
        """Something was under way in these spans, told in the order of steps: hidden, where no wait covers it."""
        later = [(max(begin_ns, self._ran_until_ns), end_ns) for begin_ns, end_ns in spans]
        if not later:
            return
        self.total_s += (_covered_ns([*self._waits, *later]) - _covered_ns(self._waits)) / 1e9
        self._ran_until_ns = max(self._ran_until_ns, *(end_ns for _, end_ns in later))
        while self._waits and self._waits[0][1] <= self._ran_until_ns:
            self._waits.popleft()


def _covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    total_ns = until_ns = 0
    for begin_ns, end_ns in sorted(spans):
        total_ns += max(0, end_ns - max(begin_ns, until_ns))
        until_ns = max(until_ns, end_ns)
    return total_ns
