import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdp.engine import Engine
from hpcdp.errors import ConfigError


@pytest.fixture
def engine():
    engine = Engine(lanes=("io", "other"))
    yield engine
    engine.shutdown()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.sampled_from(["io", "other"])), max_size=25
    )
)
def test_any_program_gives_what_a_sequential_run_gives(program):
    def execute(push):
        cells = [0.0] * 4
        for number, (reads, writes, lane) in enumerate(program):

            def task(number=number, reads=reads, writes=writes):
                value = sum(cells[i] for i in sorted(reads | writes)) + number + 1
                for i in writes:
                    cells[i] = value * (i + 1) % 1e6

            push(task, reads, writes, lane)
        return cells

    sequential = execute(lambda task, *rest: task())
    engine = Engine(lanes=("io", "other"))
    variables = [engine.variable(str(i)) for i in range(4)]
    parallel = execute(
        lambda task, reads, writes, lane: engine.push(
            task, [variables[i] for i in reads], [variables[i] for i in writes], lane
        )
    )
    engine.waitall()
    engine.shutdown()
    assert parallel == sequential


def test_readers_run_in_parallel_and_a_writer_waits_for_them(engine):
    var, meeting, log = engine.variable(), threading.Barrier(2, timeout=10), []

    def read():
        meeting.wait()  # passes only when both readers run at once
        log.append("read")

    engine.push(read, reads=[var], lane="io")
    engine.push(read, reads=[var], lane="other")
    engine.push(lambda: log.append("write"), writes=[var])
    engine.wait_to_read(var)
    assert log == ["read", "read", "write"]


def test_higher_priority_goes_first_then_the_earlier(engine):
    gate, log = threading.Event(), []
    engine.push(gate.wait)
    for priority, name in [(0, "a"), (5, "b"), (5, "c"), (-1, "d")]:
        engine.push(lambda name=name: log.append(name), priority=priority)
    gate.set()
    engine.waitall()
    assert log == ["b", "c", "a", "d"]


def test_an_exception_reaches_who_waits_and_skips_who_reads(engine):
    source, result, ran = engine.variable(), engine.variable(), []

    def fail():
        raise OSError("disk gone")

    engine.push(fail, writes=[source])
    engine.push(lambda: ran.append(1), reads=[source], writes=[result])
    with pytest.raises(OSError, match="disk gone") as caught:
        engine.wait_to_read(result)
    assert not ran
    assert "fail" in [entry.name for entry in caught.traceback]
    engine.push(lambda: None, writes=[source])
    engine.wait_to_read(source)  # written anew: good again


def test_waitall_raises_what_nobody_has_seen(engine):
    def fail():
        raise ValueError("unseen")

    engine.push(fail)
    with pytest.raises(ValueError, match="unseen"):
        engine.waitall()
    engine.waitall()


def test_push_blocks_at_max_inflight():
    engine, gate = Engine(max_inflight=2), threading.Event()
    engine.push(gate.wait)
    engine.push(lambda: None)
    pushed = threading.Event()
    pusher = threading.Thread(target=lambda: (engine.push(lambda: None), pushed.set()))
    pusher.start()
    assert not pushed.wait(0.1)
    gate.set()
    assert pushed.wait(10)
    pusher.join()
    engine.waitall()
    engine.shutdown()


def test_a_lane_may_push_beyond_the_bound():
    engine, var = Engine(max_inflight=1), None
    var = engine.variable()
    engine.push(lambda: engine.push(lambda: None, writes=[var]))
    engine.waitall()
    engine.shutdown()


def test_shutdown_ends_threads_and_releases_waiters():
    engine, gate, var = Engine(), threading.Event(), None
    var = engine.variable("v")
    engine.push(gate.wait)
    engine.push(lambda: None, writes=[var])
    threading.Timer(0.05, gate.set).start()
    closer = threading.Thread(target=engine.shutdown)
    closer.start()
    with pytest.raises(ConfigError, match="got a shutdown"):
        engine.wait_to_read(var)
    closer.join(10)
    assert not any(thread.name == "hpcdp-io" and thread.is_alive() for thread in [closer])
    with pytest.raises(ConfigError, match="one that was shut down"):
        engine.push(lambda: None)


def test_shutdown_drops_what_becomes_ready_after_it():
    engine, begun, gate, log = Engine(lanes=("io", "other")), threading.Event(), threading.Event(), []
    var = engine.variable("v")

    def first():
        begun.set()
        gate.wait(10)
        log.append("first")

    engine.push(first, writes=[var])
    engine.push(lambda: log.append("second"), writes=[var])
    engine.push(lambda: log.append("third"), writes=[var], lane="other")
    assert begun.wait(10)
    closer = threading.Thread(target=engine.shutdown)
    closer.start()
    with pytest.raises(ConfigError, match="got a shutdown"):
        engine.wait_to_read(var)
    gate.set()
    closer.join(10)
    waiter = threading.Thread(target=engine.waitall, daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()
    assert log == ["first"]
    engine.shutdown()


def test_a_task_cannot_wait_for_a_later_one_of_its_lane(engine):
    var, seen = engine.variable("v"), []

    def wait():
        engine.push(lambda: seen.append("later"), writes=[var])
        try:
            engine.wait_to_read(var)
        except ConfigError as error:
            seen.append(str(error))

    engine.push(wait)
    deadline = time.monotonic() + 5
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "a task of lane io; read the variable, or use another engine" in seen[0]
    assert seen[1] == "later"


def test_wrong_lane_and_bound_are_refused_by_name(engine):
    with pytest.raises(ConfigError, match=r"push \[lane\]: expected io or other, got gpu"):
        engine.push(lambda: None, lane="gpu")
    with pytest.raises(ConfigError, match="max_inflight"):
        Engine(max_inflight=0)


def test_a_finished_task_keeps_nothing_alive(engine):
    import gc
    import weakref

    class Big:
        pass

    big, var = Big(), engine.variable()
    seen = weakref.ref(big)
    engine.push(lambda big=big: None, writes=[var])
    engine.wait_to_read(var)
    del big
    deadline = time.monotonic() + 5
    while seen() is not None and time.monotonic() < deadline:
        gc.collect()
    assert seen() is None
