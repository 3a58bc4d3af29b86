"""What a lane does with several machines, as its users need it."""

import threading
import time

import pytest

from hpcdp.comm import thread_comm
from hpcdp.data_parallel.overlap import CommunicationLane
from hpcdp.engine import engine


class When:
    def __init__(self, test):
        self.test = test


def test_a_machine_is_started_while_another_is_waited_for():
    """The first ends only when the second has begun: a rank must not stay with what it has begun."""

    def rank(world):
        lane, begun = CommunicationLane.of(world), threading.Event()

        def first(turn):
            yield [When(begun.is_set)]

        def second(turn):
            begun.set()
            yield []

        one, other = (lane.engine.variable(name) for name in "ab")
        lane.launch(first, [one], 1, "first")
        waiting = threading.Thread(target=lane.wait, args=(one,))
        waiting.start()
        time.sleep(0.05)  # the lane polls for the first, as fast as it can
        lane.launch(second, [other], 0, "second")
        waiting.join(10)
        assert not waiting.is_alive()

    thread_comm.run(1, rank)


def test_a_machine_that_fails_fails_alone():
    def rank(world):
        lane, told = CommunicationLane.of(world), []

        def fails(turn):
            yield []
            raise OSError("no route")

        def goes_on(turn):
            for _ in range(50):
                yield []

        bad, good = (lane.engine.variable(name) for name in "ab")
        lane.launch(fails, [bad], 1, "fails")
        lane.launch(goes_on, [good], 0, "goes on")
        lane.wait(good)
        try:
            lane.wait(bad)
        except OSError as error:
            told.append(str(error))
        return told

    assert thread_comm.run(1, rank) == [["no route"]]


def test_who_waits_is_in_a_hurry_after_launches_that_came_to_nothing_and_beside_those_that_wait(monkeypatch):
    """The lane polls without naps then, which would take half a minute here."""
    monkeypatch.setattr(engine, "NAPS_S", (0.5, 0.5))

    def rank(world):
        lane = CommunicationLane.of(world)

        def fails(turn):
            raise OSError("no route")
            yield

        def goes_on(turn):
            turns = iter(range(30))
            yield [When(lambda: next(turns, None) is None)]

        spoilt, result, good = (lane.engine.variable(name) for name in "abc")
        lane.launch(fails, [spoilt], 1, "fails")
        lane.launch(goes_on, [result], 1, "is skipped", [spoilt])
        with pytest.raises(OSError):
            lane.wait(result)
        began = time.monotonic()
        lane.launch(goes_on, [good], 0, "goes on")
        lane.launch(goes_on, [good], 0, "comes after it")
        lane.wait(good)
        return time.monotonic() - began

    assert thread_comm.run(1, rank)[0] < 10
