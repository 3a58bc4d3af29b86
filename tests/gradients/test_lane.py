"""What a lane does with several machines, as its users need it."""

import threading
import time

from hpcdp.comm import threads
from hpcdp.gradients.lane import Lane


class When:
    def __init__(self, test):
        self.test = test


def test_a_machine_is_started_while_another_is_waited_for():
    """The first ends only when the second has begun: a rank must not stay with what it has begun."""

    def rank(world):
        lane, begun = Lane.of(world), threading.Event()

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

    threads.run(1, rank)


def test_a_machine_that_fails_fails_alone():
    def rank(world):
        lane, told = Lane.of(world), []

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

    assert threads.run(1, rank) == [["no route"]]
