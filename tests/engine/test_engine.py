"""The engine against a sequential run; tasks that fail, wait, are interrupted, or outlast the process."""

import gc
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import tracemalloc
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcdp.engine import Engine, default_engine, process, workers
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


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    monkeypatch.delenv("HPCDP_ENGINE", raising=False)


@pytest.fixture
def engine():
    engine = Engine(lanes=("io", "other"))
    yield engine
    engine.shutdown()


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


def test_an_error_shows_where_it_was_raised_and_the_line_that_pushed_it(engine):
    def fail():
        raise OSError("disk gone")

    var = engine.variable()
    engine.push(fail, writes=[var], name="bucket 3")
    line = sys._getframe().f_lineno - 1
    texts = []
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            engine.wait_to_read(var)
        texts.append("".join(traceback.format_exception(caught.value)))
    assert "in fail" in texts[0] and "_run" not in texts[0]
    assert f'Task "bucket 3" of lane "io" was pushed by:\n  File "{__file__}", line {line}, in ' in texts[0]
    assert texts[0] == texts[1]  # it does not grow when it is raised again


def test_a_function_that_is_read_and_written_is_not_run_when_spoilt(engine):
    var, ran = engine.variable(), []
    engine.push(lambda: 1 / 0, writes=[var])
    engine.push(lambda: ran.append(1), reads=[var], writes=[var])
    with pytest.raises(ZeroDivisionError):
        engine.wait_to_read(var)
    assert not ran


def test_deferred_tasks_hold_their_variables_until_somebody_says_that_they_are_done(engine):
    var, dones, log = engine.variable(), [], []
    begun = threading.Event()

    def start(done):
        dones.append(done)
        begun.set()

    engine.push_deferred(start, writes=[var])
    engine.push(lambda: log.append("read"), reads=[var])
    engine.push(lambda: log.append("free"))  # the lane is not blocked
    assert begun.wait(10)
    while not log:
        time.sleep(0.001)
    assert log == ["free"]
    dones[0]()
    dones[0](OSError("too late"))
    engine.waitall()
    assert log == ["free", "read"]


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
        calls = len(asked)
        time.sleep(0.02)
        assert len(asked) == calls  # nothing is under way: it sleeps
    assert set(asked) == {threading.current_thread().name if synchronous else "hpcdp-communication"}


def test_a_push_ends_the_nap_of_an_idle_lane(monkeypatch):
    monkeypatch.setattr(workers, "NAPS_S", (30.0, 30.0))
    under_way, ran = [True], threading.Event()
    engine = Engine(())
    engine.add_lane("communication", idle=lambda: under_way[0])
    engine.push(lambda: None, lane="communication")
    engine.waitall()
    time.sleep(0.05)
    begin = time.monotonic()
    engine.push(ran.set, lane="communication")
    assert ran.wait(10) and time.monotonic() - begin < 5
    time.sleep(0.05)
    engine.shutdown()  # ends it, too
    assert time.monotonic() - begin < 5


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


def test_the_observer_is_told_of_every_task_and_its_failure_is_not_the_task_s(engine):
    seen = []
    engine.observer = lambda *task: seen.append((*task, threading.current_thread().name))
    begin = time.perf_counter_ns()
    var = engine.variable()
    engine.push(lambda: time.sleep(0.01), name="nap")
    engine.push(lambda: None, writes=[var], lane="other", name="short")
    dones = []
    engine.push_deferred(dones.append, name="exchange")
    while not dones:
        time.sleep(0.001)
    dones[0]()
    engine.waitall()
    end = time.perf_counter_ns()
    assert {(name, lane) for name, lane, *_ in seen} == {("nap", "io"), ("short", "other"), ("exchange", "io")}
    assert all(begin <= start <= stop <= end for _, _, start, stop, _ in seen)
    nap = next(task for task in seen if task[0] == "nap")
    assert nap[3] - nap[2] >= 9e6 and nap[4] == "hpcdp-io"
    engine.observer = lambda *task: 1 / 0
    engine.push(lambda: None, writes=[var])
    engine.wait_to_read(var)
    with pytest.raises(ZeroDivisionError):
        engine.waitall()


def test_synchronous_tasks_run_and_raise_within_push():
    engine, log = Engine(synchronous=True), []
    var = engine.variable()

    def outer():
        engine.push(lambda: log.append("inner"), reads=[var])  # waits for the task that pushes it
        with pytest.raises(ConfigError, match="a task of lane io"):
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
    with pytest.raises(ConfigError, match=r"HPCDP_ENGINE.*synchronous or threads, got parallel"):
        Engine()


def test_lanes_are_refused_by_name(engine):
    with pytest.raises(ConfigError, match=r"add_lane \[name\]: expected none of io, other, got io"):
        engine.add_lane("io")
    with pytest.raises(ConfigError, match=r"threads of polling.*1 with idle, got 2"):
        engine.add_lane("polling", threads=2, idle=lambda: False)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        Engine({"io": 0})
    for wrong in ("a", 1.5, 0):
        with pytest.raises(ConfigError, match=f"max_inflight.: expected an integer, at least 1, got {wrong!r}"):
            Engine(max_inflight=wrong)
        with pytest.raises(ConfigError, match=f"threads of io.: expected at least 1, got {wrong!r}"):
            Engine({"io": wrong})


def test_pushes_leave_nothing_behind(engine):
    read, written = engine.variable(), engine.variable()

    def push(times):
        for number in range(times):
            engine.push(lambda number=number: number, reads=[read], writes=[written] if number % 2 else ())
        engine.waitall()

    push(1000)
    tracemalloc.start()
    try:
        push(1000)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        push(20_000)  # so that one byte of each would be seen
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()
    assert not read.queue and read.held == 0


def test_what_ends_with_a_task_may_use_the_engine(engine):
    """The last reference to a task's closure, or to the exception of an earlier one, is dropped without the lock."""
    ended = []

    class Ends:
        def __del__(self):
            engine.wait_to_read(elsewhere)
            ended.append(1)

    elsewhere, var = engine.variable(), engine.variable()

    def fail(ends):
        raise OSError

    engine.push(partial(id, Ends()), writes=[var])
    engine.push(partial(fail, Ends()), writes=[var])
    with pytest.raises(OSError):
        engine.wait_to_read(var)
    engine.push(lambda: None, writes=[var])
    waiting = threading.Thread(target=engine.waitall, daemon=True)
    waiting.start()
    waiting.join(10)
    assert not waiting.is_alive()
    deadline = time.monotonic() + 5
    while len(ended) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # no collection is needed: nothing keeps itself alive
    assert len(ended) == 2


class Interrupted(BaseException):
    pass


def test_a_push_that_is_interrupted_anywhere_is_done_or_undone():
    """A signal raises at a random moment in each of some thousand calls, as Ctrl-C may."""

    def interrupt(number, frame):
        raise Interrupted

    engine = Engine({"io": 1, "compute": 2}, max_inflight=8)
    variables = [engine.variable() for _ in range(3)]
    pushed, ran, interrupted, draw = 0, [], 0, random.Random(3)
    for lane in ("io", "compute"):
        engine.push(lambda: None, lane=lane)
    gc.disable()  # what others do when it runs might be interrupted, too
    earlier = signal.signal(signal.SIGALRM, interrupt)
    try:
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            chosen = draw.sample(variables, 3)
            lane, split, wait = draw.choice(["io", "compute"]), draw.randrange(4), draw.random() < 0.1
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 4e-5))
                engine.push(lambda: ran.append(1), chosen[:split], chosen[split:], lane)
                pushed += 1
                if wait:
                    engine.wait_to_read(chosen[0])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                interrupted += 1
        waiting = threading.Thread(target=engine.waitall, daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive()
    finally:
        with suppress(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
        gc.enable()
        engine.shutdown()
    assert interrupted > 50
    assert pushed <= len(ran) <= pushed + interrupted
    assert [(var.held, len(var.queue or ())) for var in variables] == [(0, 0)] * 3


# A task that spins in C without the GIL for a minute.
SPIN = "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 60_000_000)"


def script(text):
    command = [sys.executable, "-c", "import hashlib, os, sys, time\n" + textwrap.dedent(text)]
    environment = {name: value for name, value in os.environ.items() if name != "HPCDP_ENGINE"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("task", ["time.sleep(60)", SPIN], ids=["sleeping", "spinning"])
@pytest.mark.parametrize("wait", ["wait_to_read(var)", "waitall()", "push(print)"])
def test_ctrl_c_ends_a_wait_at_once(task, wait):
    running = script(f"""
        from hpcdp.engine import Engine
        engine = Engine(max_inflight=1)
        var = engine.variable()
        engine.push(lambda: (print("begun", flush=True), {task}), writes=[var])
        try:
            engine.{wait}
        except KeyboardInterrupt:
            print(time.monotonic(), flush=True)
            os._exit(0)
    """)
    assert running.stdout.readline() == "begun\n"
    time.sleep(0.2)
    begin = time.monotonic()
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=20)
    assert running.returncode == 0, errors
    assert float(output) - begin < 1


@pytest.mark.parametrize("waits", ["engine.waitall()", "engine.wait_to_read(x)", "engine.push(task, writes=[x])"])
def test_a_signal_that_another_thread_takes_ends_a_wait(waits):
    """It does not wake the thread that waits, which looks up now and then."""
    with Engine(max_inflight=1) as engine:
        x, gone = engine.variable(), threading.Event()

        def task():
            time.sleep(0.05)  # until the other one waits
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            assert gone.wait(10)

        engine.push(task, writes=[x])
        with pytest.raises(KeyboardInterrupt):
            eval(waits, {"engine": engine, "x": x, "task": task})
        gone.set()


@pytest.mark.parametrize("leave", ["", "sys.exit(3)", "raise ValueError('left')"])
def test_a_process_exits_although_tasks_run_and_wait(leave):
    begin = time.monotonic()
    running = script(f"""
        from hpcdp.engine import Engine, default_engine, process
        process.EXIT_LIMIT_S = 0.3
        other = Engine({{"compute": 2}})
        for engine, lane in ((default_engine(), "io"), (other, "compute")):
            var = engine.variable()
            engine.push(lambda: {SPIN}, writes=[var], lane=lane)
            engine.push(lambda: print("never"), writes=[var], lane=lane)
            engine.push_deferred(lambda done: None, writes=[var], lane=lane)
        time.sleep(0.2)
        {leave}
    """)
    output, errors = running.communicate(timeout=20)
    assert running.returncode == {"": 0, "sys.exit(3)": 3}.get(leave, 1), errors
    assert output == ""
    assert ("ValueError: left" in errors) == ("ValueError" in leave)
    assert time.monotonic() - begin < 10


def test_the_exit_of_a_task_reaches_who_waits():
    running = script("""
        from hpcdp.engine import default_engine
        engine = default_engine()
        engine.push(lambda: sys.exit(7))
        engine.waitall()
    """)
    running.communicate(timeout=20)
    assert running.returncode == 7


def test_a_failure_that_nobody_has_seen_is_printed_at_exit():
    running = script("""
        from hpcdp.engine import default_engine
        default_engine().push(lambda: 1 / 0, name="lost")
        time.sleep(0.2)
    """)
    errors = running.communicate(timeout=20)[1]
    assert "nobody waited for it" in errors and "ZeroDivisionError" in errors and 'Task "lost"' in errors


def test_a_child_of_fork_has_an_engine_of_its_own():
    running = script("""
        from hpcdp.engine import default_engine
        from hpcdp.errors import ConfigError
        parent = default_engine()
        var = parent.variable("v")
        parent.push(lambda: time.sleep(0.5), writes=[var])
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            engine, fresh, ran = default_engine(), default_engine().variable(), []
            engine.push(lambda: ran.append(1), writes=[fresh])
            engine.wait_to_read(fresh)
            refused = 0
            for call in (lambda: parent.push(print), lambda: parent.wait_to_read(var)):
                try:
                    call()
                except ConfigError:
                    refused += 1
            sys.exit(0 if engine is not parent and ran == [1] and refused == 2 else 1)
        parent.wait_to_read(var)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
    errors = running.communicate(timeout=20)[1]
    assert running.returncode == 0, errors


def test_the_default_engine_is_made_once():
    assert default_engine() is default_engine()
    assert process.EXIT_LIMIT_S <= 10


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
    with pytest.raises(ConfigError, match=r"push \[priority\]: expected an integer"):
        engine.push(lambda: None, writes=[var], priority=priority)
    found = []
    engine.push(lambda: found.append(1), writes=[var])
    engine.waitall()
    assert found == [1]


def test_what_is_no_variable_of_the_engine_is_refused_and_the_engine_goes_on(engine):
    with Engine() as other:
        for var, got in ((other.variable("x"), r"another engine, Variable\('x'\)"), ("x", "got 'x'")):
            with pytest.raises(ConfigError, match=f"push: expected a variable that .*{got}"):
                engine.push(lambda: None, reads=[engine.variable()], writes=[var])
            with pytest.raises(ConfigError, match=f"push: expected a variable that .*{got}"):
                engine.push_deferred(lambda done: done(), reads=[var])
            with pytest.raises(ConfigError, match=f"wait_to_read: expected a variable that .*{got}"):
                engine.wait_to_read(var)
    engine.waitall()


def test_a_deferred_task_ends_with_an_exception_or_nothing():
    engine, dones = Engine(synchronous=False), []
    var = engine.variable()
    engine.push_deferred(dones.append, writes=[var], name="exchange")
    while not dones:
        time.sleep(0.001)
    with pytest.raises(ConfigError, match=r"done \[exchange\]: expected nothing, or an exception, got 'failed'"):
        dones[0]("failed")
    dones[0](OSError("failed"))
    with pytest.raises(OSError, match="failed"):
        engine.wait_to_read(var)
    engine.shutdown()


def test_two_tasks_that_shut_down_do_not_wait_for_each_other():
    engine, met = Engine(lanes=("a", "b"), synchronous=False), threading.Barrier(2)

    def ends():
        met.wait()
        engine.shutdown()

    for lane in "ab":
        engine.push(ends, lane=lane)
    ended = threading.Thread(target=engine.shutdown)
    time.sleep(0.1)
    ended.start()
    ended.join(10)
    assert not ended.is_alive()


def test_one_name_is_no_list_of_lanes():
    with pytest.raises(ConfigError, match="several names"):
        Engine(lanes="io")
