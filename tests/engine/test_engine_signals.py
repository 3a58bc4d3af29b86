"""Signals that meet a wait or a push: it ends at once, and what it did is whole."""

import gc
import random
import signal
import threading
import time
from contextlib import suppress

import pytest
from programs import SPIN, script

from hpcdp.engine import Engine


class Interrupted(BaseException):
    pass


@pytest.fixture
def alarms():
    """A signal that raises when `signal.setitimer` says, as Ctrl-C may."""

    def interrupt(number, frame):
        raise Interrupted

    gc.disable()  # what others do when it runs might be interrupted, too
    earlier = signal.signal(signal.SIGALRM, interrupt)
    yield
    with suppress(Interrupted):
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, earlier)
    gc.enable()


@pytest.mark.usefixtures("alarms")
def test_a_push_that_is_interrupted_anywhere_is_done_or_undone():
    """At a random moment in each of some thousand calls."""
    engine = Engine({"io": 1, "compute": 2}, max_inflight=8)
    variables = [engine.variable() for _ in range(3)]
    pushed, ran, interrupted, draw = 0, [], 0, random.Random(3)
    for lane in ("io", "compute"):
        engine.push(lambda: None, lane=lane)
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
        engine.shutdown()
    assert interrupted > 50
    assert pushed <= len(ran) <= pushed + interrupted
    assert [(var.held, len(var.queue or ())) for var in variables] == [(0, 0)] * 3


@pytest.mark.usefixtures("alarms")
def test_a_hold_that_is_interrupted_anywhere_holds_nothing():
    engine = Engine()
    var, interrupted, draw = engine.variable(), 0, random.Random(4)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        held = False
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 8e-6))
            held = engine.hold(var)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            interrupted += not held
        assert bool(var.held) == held
        if held:
            engine.release(var)
    assert interrupted > 50


@pytest.mark.parametrize("task", ["time.sleep(60)", SPIN], ids=["sleeping", "spinning"])
def test_ctrl_c_ends_each_wait_at_once(task):
    running = script(f"""
        from hpcdp.engine import Engine
        engine = Engine(max_inflight=1)
        var, begun = engine.variable(), threading.Event()
        engine.push(lambda: (begun.set(), {task}), writes=[var])
        begun.wait()
        for wait in (lambda: engine.wait_to_read(var), engine.waitall, lambda: engine.push(print)):
            try:
                print("waits", flush=True)
                wait()
            except KeyboardInterrupt:
                print(time.monotonic(), flush=True)
        os._exit(0)
    """)
    for _ in range(3):
        assert running.stdout.readline() == "waits\n"
        time.sleep(0.1)  # it may still be on its way there
        begin = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert float(running.stdout.readline()) - begin < 20  # the task takes a minute
    _, errors = running.communicate(timeout=20)
    assert running.returncode == 0, errors


@pytest.mark.parametrize(
    "waits",  # no text for `eval`, out of which an interrupt would end Python with SIGINT after the last test
    [
        lambda engine, x, task: engine.waitall(),
        lambda engine, x, task: engine.wait_to_read(x),
        lambda engine, x, task: engine.push(task, writes=[x]),
    ],
    ids=["waitall", "wait_to_read", "push"],
)
def test_a_signal_that_another_thread_takes_ends_a_wait(waits):
    """It does not wake the thread that waits, which looks up now and then."""
    with Engine(max_inflight=1) as engine:
        x, ready, gone = engine.variable(), threading.Event(), threading.Event()

        def task():
            assert ready.wait(30)
            time.sleep(0.05)  # until the other one waits
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            assert gone.wait(10)

        engine.push(task, writes=[x])
        with pytest.raises(KeyboardInterrupt):
            ready.set()
            waits(engine, x, task)
        gone.set()
