"""Tasks that somebody else ends later, and lanes that poll what is under way."""

import threading
import time
from contextlib import suppress
from queue import SimpleQueue

import pytest
from raises import raises

from hpcdp.engine import Engine
from hpcdp.engine import engine as engine_engine
from hpcdp.errors import ConfigError


def test_deferred_tasks_hold_their_variables_until_somebody_says_that_they_are_done(engine):
    var, dones, log = engine.variable(), SimpleQueue(), SimpleQueue()
    engine.push_deferred(dones.put, writes=[var])
    engine.push(lambda: log.put("read"), reads=[var])
    engine.push(lambda: log.put("free"))  # the lane is not blocked
    done = dones.get(timeout=10)
    assert log.get(timeout=10) == "free" and log.empty()
    done()
    done(OSError("too late"))
    engine.waitall()
    assert log.get(timeout=10) == "read"


@pytest.mark.parametrize("raised", [True, False])
def test_a_deferred_task_fails_by_raising_or_by_saying_so(engine, raised):
    def start(done):
        if raised:
            raise OSError("link down")
        done(OSError("link down"))

    var, ran = engine.variable(), []
    engine.push_deferred(start, writes=[var], name="exchange")
    engine.push(lambda: ran.append(1), reads=[var])
    with pytest.raises(OSError, match="link down") as caught:
        engine.wait_to_read(var)
    assert 'Task "exchange" of lane "io" was pushed by' in caught.value.__notes__[0]
    with suppress(OSError):
        engine.waitall()
    assert not ran


@pytest.mark.parametrize("synchronous", [False, True])
def test_an_idle_lane_polls_what_is_under_way(synchronous):
    pending, asked, finished = [], [], []

    def idle():
        asked.append(threading.current_thread().name)
        for turns, done in list(pending):
            turns.pop()
            if not turns:
                pending.remove((turns, done))
                done()
        return bool(pending)

    engine = Engine((), synchronous=synchronous)
    engine.add_lane("communication", idle=idle)
    with engine:
        variables = [engine.variable() for _ in range(3)]
        for var, turns in zip(variables, (9, 3, 6), strict=True):
            engine.push_deferred(
                lambda done, turns=turns: pending.append(([0] * turns, done)), writes=[var], lane="communication"
            )
            engine.push(lambda turns=turns: finished.append(turns), reads=[var], lane="communication")
        for var in variables:
            engine.wait_to_read(var)
        engine.waitall()
        assert finished == ([9, 3, 6] if synchronous else [3, 6, 9])
        for _ in range(100):  # it asks once more after its last task
            calls = len(asked)
            time.sleep(0.02)
            if len(asked) == calls:
                break
        assert len(asked) == calls  # nothing is under way: it sleeps
    assert set(asked) == {threading.current_thread().name if synchronous else "hpcdp-communication"}


def test_a_push_ends_the_nap_of_an_idle_lane(monkeypatch):
    monkeypatch.setattr(engine_engine, "NAPS_S", (30.0, 30.0))
    under_way, ran = [True], threading.Event()
    engine = Engine(())
    engine.add_lane("communication", idle=lambda: under_way[0])
    engine.push(lambda: None, lane="communication")
    engine.waitall()
    time.sleep(0.05)
    begin = time.monotonic()
    engine.push(ran.set, lane="communication")
    assert ran.wait(20)
    time.sleep(0.05)
    engine.shutdown()  # ends it, too
    assert time.monotonic() - begin < 20


def test_what_idle_raises_fails_all_that_is_under_way(engine):
    def idle():
        raise ConnectionError("peer gone")

    engine.add_lane("communication", idle=idle)
    var, result = engine.variable(), engine.variable()
    engine.push_deferred(lambda done: None, writes=[var], lane="communication")
    engine.push(lambda: None, reads=[var], writes=[result])
    with pytest.raises(ConnectionError, match="peer gone"):
        engine.wait_to_read(result)


def test_a_function_that_raises_after_it_has_said_done_is_heard_of(engine):
    def start(done):
        done()
        raise OSError("afterwards")

    var = engine.variable()
    engine.push_deferred(start, writes=[var])
    engine.push(lambda: None)  # after it on the lane
    engine.wait_to_read(var)
    with pytest.raises(OSError, match="afterwards"):
        engine.waitall()


def test_a_deferred_task_ends_with_an_exception_or_nothing(engine):
    var, dones = engine.variable(), SimpleQueue()
    engine.push_deferred(dones.put, writes=[var], name="exchange")
    done = dones.get(timeout=10)
    with raises(ConfigError, operation="done", where="exchange", got="failed"):
        done("failed")
    done(OSError("failed"))
    with pytest.raises(OSError, match="failed"):
        engine.wait_to_read(var)


def test_naps_stay_short_while_the_work_advances(monkeypatch):
    monkeypatch.setattr(engine_engine, "NAPS_S", (1e-3, 60.0))
    asked = [0]

    def idle():
        asked[0] += 1
        return asked[0] < 40 and engine_engine.ADVANCED

    engine = Engine(lanes=())
    engine.add_lane("communication", idle=idle)
    engine.push(list, lane="communication")
    deadline = time.monotonic() + 20  # doubled naps would take longer than the universe
    while asked[0] < 40 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert asked[0] == 40
    engine.shutdown()
