"""Calls on one core, turn by turn, for `hybrid` and `whole_steps`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcdp.bench.measure import Schedule, alternate, turn_medians

_TURN_S = 2e-3


@dataclass
class Calls:
    """Something that is called ``number`` times a timing, which is told for one call."""

    name: str
    call: Callable[[], Any]
    number: int

    def refresh(self, iteration: int) -> None:
        self.call()

    def timed(self) -> int:
        call = self.call
        begin = time.perf_counter_ns()
        for _ in range(self.number):
            call()
        return (time.perf_counter_ns() - begin) // self.number

    def wrong(self, iteration: int) -> int:
        return 0


def turn_by_turn(calls: Mapping[str, Callable[[], Any]], turns: int, as_often_as: str) -> dict[str, np.ndarray]:
    """Microseconds a call in each of ``turns``, by name; all are called as often as the one named."""
    calls[as_often_as]()
    begin = time.perf_counter()
    calls[as_often_as]()
    number = max(1, min(50, int(_TURN_S / (time.perf_counter() - begin))))
    candidates = [Calls(name, call, number) for name, call in calls.items()]
    series = alternate(candidates, lambda: None, Schedule(turns, 5, 3), validate=False)
    return {name: turn_medians([each]) for name, each in series.items()}
