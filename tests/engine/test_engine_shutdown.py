"""How an engine ends: by shutdown, with its process, and in a child made by fork."""

import gc
import threading
import time
import weakref

import pytest
from programs import SPIN, script
from raises import raises

from hpcdp.engine import Engine, default_engine
from hpcdp.engine import engine as engine_engine
from hpcdp.errors import ConfigError


def test_shutdown_ends_threads_and_releases_waiters():
    engine, begun, gate = Engine(lanes=("ending",)), threading.Event(), threading.Event()
    var = engine.variable("v")
    engine.push(lambda: (begun.set(), gate.wait()), lane="ending")
    engine.push(lambda: None, writes=[var], lane="ending")
    assert begun.wait(30)  # what has not begun would be dropped
    closer = threading.Thread(target=engine.shutdown)
    closer.start()
    with raises(ConfigError, operation="wait_to_read", where="v", got="shutdown()"):
        engine.wait_to_read(var)
    closer.join(0.05)
    assert closer.is_alive()  # it waits for what runs
    assert "hpcdp-ending" in {thread.name for thread in threading.enumerate()}
    gate.set()
    closer.join(10)
    assert not closer.is_alive()
    assert "hpcdp-ending" not in {thread.name for thread in threading.enumerate()}
    with raises(ConfigError, operation="push", got="shutdown()"):
        engine.push(lambda: None, lane="ending")


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
    with raises(ConfigError, operation="wait_to_read", where="v", got="shutdown()"):
        engine.wait_to_read(var)
    gate.set()
    closer.join(10)
    waiter = threading.Thread(target=engine.waitall, daemon=True)
    waiter.start()
    waiter.join(10)
    assert not waiter.is_alive()
    assert log == ["first"]
    engine.shutdown()


@pytest.mark.parametrize("leave", ["", "sys.exit(3)", "raise ValueError('left')"])
def test_a_process_exits_although_tasks_run_and_wait(leave):
    begin = time.monotonic()
    running = script(f"""
        from hpcdp.engine import Engine, default_engine, engine as process
        process.EXIT_LIMIT_S = 0.3
        other, begun = Engine({{"compute": 2}}), threading.Barrier(3)
        for engine, lane in ((default_engine(), "io"), (other, "compute")):
            var = engine.variable()
            engine.push(lambda: (begun.wait(), {SPIN}), writes=[var], lane=lane)
            engine.push(lambda: print("never"), writes=[var], lane=lane)
            engine.push_deferred(lambda done: None, writes=[var], lane=lane)
        begun.wait()
        {leave}
    """)
    output, errors = running.communicate(timeout=20)
    assert running.returncode == {"": 0, "sys.exit(3)": 3}.get(leave, 1), errors
    assert output == ""
    assert ("ValueError: left" in errors) == ("ValueError" in leave)
    assert time.monotonic() - begin < 10


def test_a_child_of_fork_has_an_engine_of_its_own():
    running = script("""
        from hpcdp.engine import default_engine
        from hpcdp.errors import ConfigError
        parent = default_engine()
        var = parent.variable("v")
        begun, go_on = threading.Event(), threading.Event()
        parent.push(lambda: (begun.set(), go_on.wait(10)), writes=[var])
        begun.wait()
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
        status = os.waitpid(child, 0)[1]
        go_on.set()
        parent.wait_to_read(var)
        sys.exit(os.waitstatus_to_exitcode(status))
    """)
    errors = running.communicate(timeout=20)[1]
    assert running.returncode == 0, errors


def test_the_default_engine_is_made_once():
    assert default_engine() is default_engine()
    assert engine_engine.EXIT_LIMIT_S <= 10


def test_two_tasks_that_shut_down_do_not_wait_for_each_other():
    engine, met = Engine(lanes=("a", "b"), synchronous=False), threading.Barrier(3, timeout=10)

    def ends():
        met.wait()
        engine.shutdown()

    for lane in "ab":
        engine.push(ends, lane=lane)
    met.wait()
    ended = threading.Thread(target=engine.shutdown)
    ended.start()
    ended.join(10)
    assert not ended.is_alive()


def threads_of(*lanes):
    return [thread for thread in threading.enumerate() if thread.name.removeprefix("hpcdp-").partition("-")[0] in lanes]


def end_of(threads):
    deadline = time.monotonic() + 20
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def test_threads_of_an_engine_that_nobody_holds_end_when_all_is_done(capfd):
    engine, gate, ran = Engine({"dropped": 2, "slow": 1}), threading.Event(), []
    var = engine.variable()

    def fails():
        gate.wait(20)
        raise ValueError("nobody has waited")

    for lane in ("dropped", "slow"):
        engine.push(lambda: None, lane=lane)
    engine.waitall()
    engine.push(fails, writes=[var], lane="slow")
    engine.push(lambda: ran.append("not after a failure"), reads=[var], lane="dropped")
    engine.push(lambda: ran.append("whole"), lane="slow")
    threads = threads_of("dropped", "slow")
    assert len(threads) == 3
    del engine
    gc.collect()
    time.sleep(0.05)
    assert all(thread.is_alive() for thread in threads)
    gate.set()
    assert end_of(threads)
    assert ran == ["whole"]
    said = capfd.readouterr().err
    assert said.count("a task failed, and nobody waited for it") == said.count("ValueError: nobody has waited") == 1


def test_threads_of_an_engine_that_nobody_holds_end_with_what_others_end():
    engine, dones = Engine(lanes=("dropped",)), []
    engine.push_deferred(dones.append, lane="dropped")
    threads = threads_of("dropped")
    del engine
    time.sleep(0.05)
    assert threads[0].is_alive()
    dones.pop()()
    assert end_of(threads)


def test_an_engine_that_was_shut_down_goes_with_the_owner_whom_its_lane_asks_when_idle():
    class Owner:
        def __init__(self):
            self.engine = Engine(lanes=())
            self.engine.add_lane("asks", idle=self.idle)

        def idle(self):
            return False

    owner = Owner()
    owner.engine.push(lambda: None, lane="asks")
    owner.engine.waitall()
    owner.engine.shutdown()
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None


def test_an_engine_may_be_dropped_by_a_thread_that_has_its_lock():
    """As by garbage collection there."""
    engine = Engine(lanes=("asleep", "dropping"))
    schedule, kept = engine._schedule, [engine]
    for lane in schedule.lanes:
        engine.push(lambda: None, lane=lane)
    engine.waitall()
    threads, take = threads_of(*schedule.lanes), schedule.take

    def dropping(lane):
        task = take(lane)
        if task is None:
            kept.clear()
        return task

    schedule.take = dropping
    engine.push(lambda: None, lane="dropping")
    del engine
    assert end_of(threads)
    assert not kept


def test_what_runs_is_waited_for_at_exit_and_failures_are_told_although_nobody_holds_the_engine():
    running = script("""
        from hpcdp.engine import Engine
        begun = threading.Event()
        def fails():
            begun.set()
            time.sleep(0.3)
            raise ValueError("late")
        Engine().push(fails)
        begun.wait()
    """)
    errors = running.communicate(timeout=20)[1]
    assert running.returncode == 0
    assert errors.count("a task failed, and nobody waited for it") == errors.count("ValueError: late") == 1
