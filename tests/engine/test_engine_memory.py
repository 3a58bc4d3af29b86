"""What an engine keeps of tasks that have ended: nothing."""

import gc
import threading
import time
import tracemalloc
import weakref
from functools import partial

import pytest


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
        push(5000)  # so that one byte of each would be seen
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 5000
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
