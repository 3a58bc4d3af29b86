"""The engine against a sequential run: order, priority, bounds, modes, and what it refuses."""

import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raises import raises

from hpcdp.engine import Engine
from hpcdp.errors import ConfigError

GUIDE = Path(__file__).parents[2] / "docs" / "engine.md"


CELLS = 4


PROGRAMS = st.lists(
    st.tuples(
        st.sets(st.integers(0, CELLS - 1)),
        st.sets(st.integers(0, CELLS - 1)),
        st.sampled_from(["io", "compute"]),
        st.integers(-1, 1),  # priority
        st.sampled_from([0, 0, 0, 1e-4, 1e-3]),  # seconds of sleep
        st.sampled_from([False, False, False, True]),  # fails
    ),
    max_size=25,
)


class Planned(Exception):
    pass


def sequential_run(program):
    """What the cells hold in the end, and which failure has spoilt each: a model without an engine."""
    cells, spoilt = [0.0] * CELLS, [None] * CELLS
    for number, (reads, writes, *_, fails) in enumerate(program):
        origin = next((spoilt[i] for i in sorted(reads) if spoilt[i] is not None), number if fails else None)
        if origin is None:
            value = sum(cells[i] for i in sorted(reads | writes)) + number + 1
            for i in writes:
                cells[i] = value * (i + 1) % 1e6
        for i in writes:
            spoilt[i] = origin
    return cells, spoilt


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PROGRAMS, st.booleans(), st.integers(1, 64))
def test_any_program_gives_what_a_sequential_run_gives(program, synchronous, max_inflight):
    engine = Engine({"io": 1, "compute": 3}, max_inflight, synchronous)
    variables = [engine.variable(str(i)) for i in range(CELLS)]
    cells, using = [0.0] * CELLS, [0] * CELLS  # readers at work, or -1: a writer
    clashes, lock = [], threading.Lock()

    def task(number, reads, writes, nap_s, fails):
        with lock:
            clashes.extend(i for i in reads | writes if using[i] < 0 or (using[i] and i in writes))
            for i in reads | writes:
                using[i] = -1 if i in writes else using[i] + 1
        if nap_s:
            time.sleep(nap_s)
        with lock:
            for i in reads | writes:
                using[i] = 0 if i in writes else using[i] - 1
        if fails:
            raise Planned(number)
        value = sum(cells[i] for i in sorted(reads | writes)) + number + 1
        for i in writes:
            cells[i] = value * (i + 1) % 1e6

    try:
        for number, (reads, writes, lane, priority, nap_s, fails) in enumerate(program):
            with suppress(Planned):  # raised here in synchronous mode
                engine.push(
                    lambda *given, number=number, reads=reads, writes=writes, nap_s=nap_s, fails=fails: task(
                        number, reads, writes, nap_s, fails
                    ),
                    [variables[i] for i in sorted(reads)],
                    [variables[i] for i in writes],
                    lane,
                    priority,
                )
        spoilt = []
        for var in variables:
            try:
                engine.wait_to_read(var)
                spoilt.append(None)
            except Planned as error:
                spoilt.append(error.args[0])
        with suppress(Planned):
            engine.waitall()
    finally:
        engine.shutdown()
    assert (cells, spoilt) == sequential_run(program)
    assert clashes == []


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
    engine = Engine(max_inflight=1)
    var = engine.variable()
    engine.push(lambda: engine.push(lambda: None, writes=[var]))
    engine.waitall()
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
    engine.waitall()
    assert "a task of lane io; read the variable, or use another engine" in seen[0]
    assert seen[1] == "later"


def test_two_readers_in_one_lane_of_two_threads_meet():
    with Engine({"compute": 2}) as engine:
        var, meeting = engine.variable(), threading.Barrier(2, timeout=10)
        for _ in range(2):
            engine.push(meeting.wait, reads=[var], lane="compute")


def test_the_bound_holds_for_many_pushers():
    with Engine({"compute": 4}, max_inflight=3) as engine:
        unfinished, most, lock = set(), [0], threading.Lock()

        def task(key):
            with lock:
                unfinished.discard(key)

        def push(who):
            for number in range(40):
                engine.push(lambda key=(who, number): task(key), lane="compute")
                with lock:
                    most[0] = max(most[0], engine._schedule._inflight)

        pushers = [threading.Thread(target=push, args=(who,)) for who in range(4)]
        for pusher in pushers:
            pusher.start()
        for pusher in pushers:
            pusher.join(10)
        assert not any(pusher.is_alive() for pusher in pushers)
    assert most[0] <= 3


@pytest.mark.parametrize("synchronous", [False, True])
def test_what_is_pushed_while_a_variable_is_held_runs_when_it_is_released(synchronous):
    engine, log = Engine(synchronous=synchronous), []
    var = engine.variable("held")
    assert engine.hold(var)
    engine.push(lambda: log.append("written"), writes=[var])
    assert not engine.hold(var)
    log.append("released")
    engine.release(var)
    deadline = time.monotonic() + 10
    while not (free := engine.hold(var)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert free
    assert log == ["released", "written"]
    engine.release(var)
    engine.shutdown()


def test_synchronous_tasks_run_and_raise_within_push():
    engine, log = Engine(synchronous=True), []
    var = engine.variable()

    def outer():
        engine.push(lambda: log.append("inner"), reads=[var])  # waits for the task that pushes it
        with raises(ConfigError, operation="waitall"):
            engine.waitall()
        log.append(threading.current_thread())

    engine.push(outer, writes=[var])
    assert log == [threading.current_thread(), "inner"]
    with pytest.raises(ZeroDivisionError):
        engine.push(lambda: 1 / 0, writes=[var])
    with pytest.raises(ZeroDivisionError):
        engine.push(lambda: log.append("spoilt"), reads=[var])
    engine.waitall()
    assert len(log) == 2
    engine.push(lambda: None, writes=[var])
    engine.wait_to_read(var)
    engine.shutdown()


def test_the_environment_chooses_the_mode(monkeypatch):
    monkeypatch.setenv("HPCDP_ENGINE", "synchronous")
    assert Engine().synchronous
    monkeypatch.setenv("HPCDP_ENGINE", "parallel")
    with raises(ConfigError, operation="Engine", where="HPCDP_ENGINE", got="parallel"):
        Engine()


def test_lanes_and_bounds_are_refused_by_name(engine):
    with raises(ConfigError, operation="push", where="lane", expected=["io", "other"], got="gpu"):
        engine.push(lambda: None, lane="gpu")
    with raises(ConfigError, operation="Engine", where="lanes"):
        Engine(lanes="io")
    with raises(ConfigError, operation="add_lane", where="name", got="io"):
        engine.add_lane("io")
    with raises(ConfigError, operation="add_lane", where="threads of polling", expected=1, got=2):
        engine.add_lane("polling", threads=2, idle=lambda: False)
    for wrong in ("a", 1.5, 0):
        with raises(ConfigError, operation="Engine", where="max_inflight", expected=1, got=wrong):
            Engine(max_inflight=wrong)
        with raises(ConfigError, operation="add_lane", where="threads of io", expected=1, got=wrong):
            Engine({"io": wrong})


@pytest.mark.parametrize("synchronous", [False, True])
def test_the_examples_of_the_guide_run(synchronous, monkeypatch):
    monkeypatch.setenv("HPCDP_ENGINE", "synchronous" if synchronous else "threads")
    examples = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(examples) >= 2
    for example in examples:
        exec(compile(example, str(GUIDE), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("priority", ["high", None, float("nan"), 0.5])
def test_a_priority_that_is_no_integer_is_refused_and_the_engine_goes_on(engine, priority):
    var = engine.variable("v")
    with raises(ConfigError, operation="push", where="priority"):
        engine.push(lambda: None, writes=[var], priority=priority)
    found = []
    engine.push(lambda: found.append(1), writes=[var])
    engine.waitall()
    assert found == [1]


def test_what_is_no_variable_of_the_engine_is_refused_and_the_engine_goes_on(engine):
    with Engine() as other:
        for var, fields in (
            (other.variable("x"), {"got": "Variable('x')"}),
            ("x", {"got": "x", "remedy": "engine.variable()"}),
        ):
            with raises(ConfigError, operation="push", **fields):
                engine.push(lambda: None, reads=[engine.variable()], writes=[var])
            with raises(ConfigError, operation="push", **fields):
                engine.push_deferred(lambda done: done(), reads=[var])
            with raises(ConfigError, operation="wait_to_read", **fields):
                engine.wait_to_read(var)
    engine.waitall()
