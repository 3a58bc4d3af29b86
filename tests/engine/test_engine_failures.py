"""Tasks that fail: who is told, what is skipped, and what the message shows."""

import functools
import sys
import threading
import time
import traceback
from queue import SimpleQueue

import pytest
from programs import script

from hpcdp.engine import Engine
from hpcdp.engine.engine import Workers


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


def test_of_several_errors_each_is_raised_or_printed(capfd):
    def fail(what):
        raise ValueError(what)

    with Engine() as engine:
        variables = [engine.variable() for _ in range(4)]
        for number, var in enumerate(variables):
            engine.push(functools.partial(fail, f"error {number}"), writes=[var])
        with pytest.raises(ValueError, match="error 1"):
            engine.wait_to_read(variables[1])
        for number in (0, 2):
            with pytest.raises(ValueError, match=f"error {number}"):
                engine.waitall()
        engine.shutdown()
    errors = capfd.readouterr().err
    assert "ValueError: error 3" in errors and errors.count("Traceback") == 1


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


def test_the_observer_is_told_of_every_task_and_its_failure_is_not_the_task_s(engine):
    seen = []
    engine.observer = lambda *task: seen.append((*task, threading.current_thread().name))
    begin = time.perf_counter_ns()
    var = engine.variable()
    engine.push(lambda: time.sleep(0.01), name="nap")
    engine.push(lambda: None, writes=[var], lane="other", name="short")
    dones = SimpleQueue()
    engine.push_deferred(dones.put, name="exchange")
    dones.get(timeout=10)()
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


def test_an_observer_that_is_taken_away_when_a_task_ends_is_not_missed(engine):
    seen, looks = [], iter([lambda *task: seen.append(task)] * 2)

    class Taken(Workers):
        observer = property(lambda self: next(looks, None))

    engine._workers.__class__ = Taken
    engine.push(lambda: None)
    engine.waitall()
    assert len(seen) == 1


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
        begun = threading.Event()
        default_engine().push(lambda: begun.set() or 1 / 0, name="lost")
        begun.wait()
    """)
    errors = running.communicate(timeout=20)[1]
    assert "nobody waited for it" in errors and "ZeroDivisionError" in errors and 'Task "lost"' in errors
