"""Work under way: machines that are resumed when what they wait for has come.

A machine is a generator. It starts what a stage needs, yields the requests for it, and is resumed when all of them are
complete. `hpcdp.collectives.progress` runs them, many at a time in one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from .communicator import Request

T = TypeVar("T")

Steps = Generator[Sequence[Request], None, None]
"""A machine; each item is a stage: the requests that must be complete before it goes on."""

StepsTo = Generator[Sequence[Request], None, T]
"""A part of a machine, which returns something to the rest of it."""

_YIELDS, _NAP_S = 10, 50e-6


class Until:
    """That ``test()`` has become true: a request for what is no message.

    Args:
        yields: how often who waits for it alone asks before it naps; more where it comes soon.
    """

    def __init__(self, test: Callable[[], bool], yields: int = _YIELDS) -> None:
        self.test = test
        self._yields = yields

    def wait(self) -> None:
        """Block until it has."""
        wait_for(self.test, self._yields)


def wait_for(test: Callable[[], bool], yields: int = _YIELDS) -> None:
    """Call ``test()`` until it is true: at once for a while, then after naps, which leave the core to others."""
    idle = 0
    while not test():
        idle += 1
        if idle < yields:
            os.sched_yield()
        else:
            time.sleep(_NAP_S)
