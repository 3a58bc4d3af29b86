"""What a polling lane asks of the scheduler, seen by the system itself."""

import os
import threading

import pytest

from hpcdp.engine import Engine
from hpcdp.engine import engine as engine_engine
from hpcdp.engine.engine import SLICE_NS, ask_for_short_slices


def slice_ns():
    """What the calling thread has asked for, or the system's default; None where that is unknown."""
    attributes = engine_engine._attributes()
    return attributes[engine_engine._RUNTIME] if attributes else None


def in_a_thread(fn):
    found = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture
def before():
    if not slice_ns():
        pytest.skip("the system does not tell the slices of threads (Linux from 6.12 does)")
    return slice_ns()


def test_only_the_thread_that_asks_gets_short_slices(before):
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    assert before > SLICE_NS
    assert in_a_thread(lambda: (ask_for_short_slices(), slice_ns())) == (True, SLICE_NS)
    assert in_a_thread(lambda: ask_for_short_slices() and os.getpriority(os.PRIO_PROCESS, 0)) == nice
    assert slice_ns() == before


def test_another_policy_is_left_alone(before):
    def batch():
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return ask_for_short_slices(), os.sched_getscheduler(0)

    assert in_a_thread(batch) == (False, os.SCHED_BATCH)


def test_the_thread_of_a_polling_lane_asks_and_others_do_not(before):
    engine = Engine(lanes=("io",))
    engine.add_lane("polling", idle=lambda: False)
    found = {}
    for lane in ("io", "polling"):
        engine.push(lambda lane=lane: found.update({lane: slice_ns()}), lane=lane)
    engine.waitall()
    engine.shutdown()
    assert found == {"io": before, "polling": SLICE_NS}
