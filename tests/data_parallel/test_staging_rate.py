"""The staging against its limits, on a clock of its own: copies that go at a rate, a host that takes time for calls and
sleeps longer than it meant to. Other tests hold it to the order of what it does, this one to nobody waiting in vain.
"""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdp.comm import communicator
from hpcdp.comm.communicator import PolledRequest
from hpcdp.comm.progress import run_until_complete
from hpcdp.data_parallel.gpu_reduction import Staging

COPY_RATE = 55e9
"""Each way, of an H100's PCIe 5 x16."""
CALL_S, YIELD_S, OVERSLEPT_S = 4e-6, 1e-6, 60e-6
"""Of a call of CUDA's runtime through CuPy, of a wait without a nap, and of Linux, which lets a nap last longer."""
BEGIN_S, BETWEEN_S = 3e-6, 2e-6
"""Until a copy begins on a stream that has nothing to do, and what each takes beside its bytes."""


class Clock:
    """What `Staging` needs of `Streams`, and `wait_for` of the system; a stream is when its work ends, an event when it
    passes."""

    def __init__(self):
        self.now = 0.0

    def go_on(self, seconds):
        self.now += seconds

    def stream(self):
        return SimpleNamespace(until=0.0)

    def event(self):
        return SimpleNamespace(at=0.0)

    def pinned(self, nbytes, *copied_by):
        return np.empty(nbytes, np.uint8)

    def record(self, event, stream):
        self.go_on(CALL_S)
        event.at = max(self.now, stream.until)

    def wait_event(self, stream, event):
        self.go_on(CALL_S)
        stream.until = max(stream.until, event.at)

    def copy_async(self, target, source, stream):
        self.go_on(CALL_S)
        stream.until = max(self.now + BEGIN_S, stream.until) + BETWEEN_S + source.nbytes / COPY_RATE

    def query(self, event):
        self.go_on(CALL_S)
        return self.now >= event.at


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(communicator, "os", SimpleNamespace(sched_yield=lambda: made.go_on(YIELD_S)))
    monkeypatch.setattr(communicator, "time", SimpleNamespace(sleep=lambda nap: made.go_on(nap + OVERSLEPT_S)))
    return made


def taken_s(clock, nbytes, network_rate):
    """Of one sum, until it is back; the network takes segments one after another."""
    part, row = np.empty(nbytes // 4, np.float32), SimpleNamespace(stream=clock.stream(), check=lambda: None)
    link = clock.stream()

    def total(x, tag, turn):
        link.until = max(link.until, clock.now) + x.nbytes / network_rate
        arrives = link.until
        yield [PolledRequest(lambda: clock.now >= arrives)]

    def machine():
        events = yield from staged.sum(0, part, row, total, 0, None)
        clock.now = max(clock.now, *(each.at for each in events))

    staged = Staging(clock, [nbytes])
    begin = clock.now
    run_until_complete(machine())
    return clock.now - begin


@pytest.mark.parametrize("network_rate", [12.5e9, 25e9, 50e9, np.inf])
def test_a_long_part_takes_hardly_longer_than_its_copies_or_its_messages(clock, network_rate):
    nbytes = 256 << 20
    limit = nbytes / min(COPY_RATE, network_rate)
    assert limit / taken_s(clock, nbytes, network_rate) >= 0.9
