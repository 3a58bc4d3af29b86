"""An operator that waits, so that calls are under way for as long as a test wants."""

import threading

import pytest

from hpcdp.autograd import Tensor
from hpcdp.autograd.tape import CALLS, OPERATORS, operator

LIMIT_S = 20


class Gates:
    """An operator that adds 1 once a gate is open; gates are floats, on which no shape depends."""

    def __init__(self):
        self.events = [threading.Event() for _ in range(10)]
        self.arrived = [threading.Event() for _ in range(10)]
        self.events[0].set()

        @operator("gated")
        def gated(x, gate):
            self.arrived[int(gate)].set()
            assert self.events[int(gate)].wait(LIMIT_S), f"nobody has opened gate {gate}"
            return Tensor(x.data + 1)

        self.add_one = gated

    def know(self, x):
        """From now on the shapes of its results are known, and of their doubles."""
        _ = gated_twice(self, x, 0.0, 0.0) * 2


def gated_twice(gates, x, first, second):
    return gates.add_one(gates.add_one(x, first), second)


@pytest.fixture
def gates():
    made = Gates()
    yield made
    for event in made.events:
        event.set()
    del OPERATORS["gated"], CALLS["gated"]
