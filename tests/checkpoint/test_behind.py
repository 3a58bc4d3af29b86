"""Saves that are written behind: of what the state was, complete at the end, and their errors are not lost."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import samples
import standin
from raises import raises

from hpcdp.checkpoint import Manager, Part, Sharded, complete_steps
from hpcdp.checkpoint import manager as checkpoint_manager
from hpcdp.checkpoint import manager as save
from hpcdp.comm import thread_comm
from hpcdp.errors import DataError


@pytest.fixture
def held(monkeypatch):
    """Files are written once the event is set."""
    event, write = threading.Event(), save.fill

    def waiting(*arguments):
        assert event.wait(30)
        return write(*arguments)

    monkeypatch.setattr(save, "fill", waiting)
    yield event
    event.set()


def failing_on(monkeypatch, rank, error):
    """Of the file of one rank."""
    write = save.fill

    def failing(path, *arguments):
        if path.name == f"shard-{rank:05d}.h5":
            raise error
        return write(path, *arguments)

    monkeypatch.setattr(save, "fill", failing)


def change(state):
    state["weights"][...] = -1
    for part in state["moments"].parts:
        part.values[...] = -1
    state["own"].value["values"][...] = -1
    state["schedule"]["at"] = -1
    state["half"][...] = -1


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_state_may_change_at_once(n, held, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            state = samples.state(6, world)
            manager.save(6, state, wait=False)
            change(state)
            assert manager.pending and not manager.over and not manager.poll() and manager.pending
            assert manager.steps() == []
            world.comm.barrier()
            held.set()
            manager.wait()
            assert not manager.pending and manager.over and manager.poll()
            samples.check(manager.restore().state, 6, world.rank, n, n)

    thread_comm.run(n, one)


def test_the_config_and_the_metrics_may_change_at_once(held, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            config, metrics = {"rates": [0.1], "of": {"a": 1}}, {"loss": 1.0}
            manager.save(1, {}, config=config, metrics=metrics, wait=False)
            config["rates"].append(0.2)
            config["of"]["a"] = object()
            metrics["loss"] = 2.0
            held.set()
            manager.wait()
            found = manager.restore()
            assert (found.config, found.metrics) == ({"rates": [0.1], "of": {"a": 1}}, {"loss": 1.0})

    thread_comm.run(2, one)


def test_training_waits_for_two_exchanges_and_the_copy(tmp_path):
    def one(world):
        gather, calls = world.comm.allgather_json, []
        world.comm.allgather_json = lambda value: calls.append(value) or gather(value)
        with Manager(tmp_path, world) as manager:
            for step in (1, 2, 3):
                calls.clear()
                manager.save(step, samples.state(step, world), wait=False)
                assert len(calls) == (3 if step == 1 else 2)  # the first one claims the folder

    thread_comm.run(2, one)


class Foreign:
    """Another library's array, whose memory NumPy sees."""

    def __init__(self, values):
        self.values, self.dtype, self.shape = values, values.dtype, values.shape

    def __array_namespace__(self):
        return np

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_what_has_been_copied_already_is_not_copied_again(held, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            values = np.arange(600.0)
            own = np.arange(300.0) + 1000 * world.rank
            arrays = {"device": standin.asarray(values), "apart": np.repeat(values, 2)[::2]}
            arrays |= {"foreign": Foreign(values.copy())}
            part = standin.asarray(own)
            state = arrays | {"part": Sharded((600,), own.dtype, [Part(300 * world.rank, part)])}
            manager.save(1, state, wait=False)
            arrays["device"][...] = arrays["apart"][...] = arrays["foreign"].values[...] = part[...] = -1
            assert manager._staging.nbytes == 0
            world.comm.barrier()
            held.set()
            manager.wait()
            manager.save(2, {"plain": values}, wait=False)
            values[...] = -1
            manager.wait()
            assert np.array_equal(manager.restore(2).state["plain"], np.arange(600.0))
            found = manager.restore(1).state
            assert all(np.array_equal(found[name], np.arange(600.0)) for name in arrays)
            assert np.array_equal(found["part"], np.concatenate([np.arange(300.0), np.arange(300.0) + 1000]))

    thread_comm.run(2, one)


@pytest.mark.parametrize("fails", ["copy", "mkdir"])
def test_what_fails_before_the_writing_is_told_behind(fails, tmp_path, monkeypatch):
    def one(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, samples.state(1, world))
            if fails == "copy" and world.rank == 1:
                monkeypatch.setattr(np, "empty", no_memory)
            elif fails == "mkdir" and world.rank == 0:
                (tmp_path / "step-0000000002.tmp").write_text("in the way")
            world.comm.barrier()
            manager.save(2, samples.state(2, world, 500_000), wait=False)
            world.comm.barrier()
            monkeypatch.undo()
            with pytest.raises(DataError) as caught:
                manager.wait()
            assert manager.steps() == [1]
            return str(caught.value)

    def no_memory(shape, dtype=float):
        if threading.current_thread().name == "rank-1" and dtype is np.uint8:
            raise MemoryError("no room for that")
        return empty(shape, dtype)

    empty = np.empty
    said = thread_comm.run(2, one)
    expected = {
        "copy": "rank 1: save [a copy of the state]: got no room for that",
        "mkdir": f"save [{tmp_path}/step-0000000002.tmp]: expected a folder, or nothing, got a file; move it away",
    }
    assert said == [expected[fails]] * 2
    assert (tmp_path / "step-0000000002.tmp").exists() == (fails == "mkdir")


def test_the_next_save_waits_for_the_last(held, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            for step in range(0, 20, 2):
                state = samples.state(step, world)
                if step == 4 and world.rank == 0:
                    held.set()
                if step == 2:
                    threading.Timer(0.2, held.set).start()
                manager.save(step, state, wait=False)
                change(state)
            manager.wait()
            for step in manager.steps():
                samples.check(manager.restore(step).state, step, world.rank, 2, 2)
            assert manager.steps() == [*range(0, 20, 2)]

    thread_comm.run(2, one)


@pytest.mark.parametrize("how", ["wait", "poll", "save", "restore", "close"])
@pytest.mark.parametrize("rank", [0, 1])
def test_errors_surface_on_all_ranks_and_the_next_save_works(rank, how, tmp_path, monkeypatch):
    def one(world):
        manager = Manager(tmp_path, world)
        manager.save(2, samples.state(2, world))
        world.comm.barrier()
        with pytest.MonkeyPatch.context() as patch:
            if world.rank == 0:
                failing_on(patch, rank, DataError("save", where="x", got="No space left on device"))
            world.comm.barrier()
            manager.save(4, samples.state(4, world), wait=False)
            with raises(DataError, operation="save", where="x", rank=rank):
                if how == "poll":
                    while not manager.poll():
                        time.sleep(0.001)
                elif how == "save":
                    manager.save(6, samples.state(6, world))
                else:
                    getattr(manager, how)()
            world.comm.barrier()
        assert not manager.pending
        if how == "close":
            manager = Manager(tmp_path, world)
        assert manager.steps() == [2] and not any(path.name.endswith(".tmp") for path in tmp_path.iterdir())
        manager.save(8, samples.state(8, world), wait=False)
        manager.close()
        assert manager.steps() == [2, 8]

    thread_comm.run(2, one)


def test_what_no_one_expects_ends_the_job_at_the_next_step(tmp_path, monkeypatch):
    """A defect of one rank alone: the others wait for it in vain, it must not wait for them."""
    failing_on(monkeypatch, 1, ZeroDivisionError("a defect"))

    def one(world):
        manager = Manager(tmp_path, world)
        manager.save(4, samples.state(4, world), wait=False)
        for _ in range(10_000):
            manager.poll()
            time.sleep(0.001)

    with pytest.raises(ZeroDivisionError, match="a defect"):
        thread_comm.run(2, one)


def test_a_program_may_end_without_waiting(tmp_path):
    def one(world):
        Manager(tmp_path, world).save(4, samples.state(4, world), wait=False)

    thread_comm.run(2, one)
    for rank, restored in enumerate(thread_comm.run(2, lambda world: Manager(tmp_path, world).restore())):
        samples.check(restored.state, 4, rank, 2, 2)


@pytest.mark.parametrize("way", ["with", "without"])
def test_errors_at_the_end_of_a_program_are_said(way, tmp_path, monkeypatch):
    failing_on(monkeypatch, 0, DataError("save", where="x", got="No space left on device"))
    kept = []

    def one(world):
        manager = Manager(tmp_path, world)
        kept.append(manager)  # until the end
        manager.save(4, samples.state(4, world), wait=False)
        if way == "with":
            with manager:
                pass

    with raises(DataError, operation="save", where="x"):
        thread_comm.run(2, one)


def test_ctrl_c_ends_the_waiting_not_the_save(held, tmp_path):
    """What is being written is not overwritten by the next save, nor lost."""
    script = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    manager = Manager(tmp_path, world_of_one())
    manager.save(2, samples.state(2, manager.world), wait=False)
    script.start()
    with pytest.raises(KeyboardInterrupt):
        manager.wait()
    assert manager.pending
    threading.Timer(0.2, held.set).start()
    manager.save(4, samples.state(4, manager.world), wait=False)
    for step in (2, 4):
        samples.check(manager.restore(step).state, step, 0, 1, 1)
    manager.close()


def world_of_one():
    (world,) = thread_comm.run(1, lambda world: world)
    return world


PROGRAM = """
import atexit, resource, sys, threading, numpy, samples, hpcdp, os, signal
from hpcdp.checkpoint import Manager, manager as files
world = hpcdp.init()
manager = Manager(sys.argv[1])
manager.save(2, samples.state(2, world))
write = files.fill
def slow(*arguments):
    threading.Event().wait(0.3)
    return write(*arguments)
files.fill = slow
if sys.argv[2] == "full":
    atexit.register(print, "goodbye")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
manager.save(4, samples.state(4, world), wait=False)
if sys.argv[2] == "interrupted":
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(5)
elif sys.argv[2] == "failing":
    with manager:
        raise ValueError("mine")
"""


@pytest.mark.parametrize(
    ("ending", "ranks", "status"), [("end", 1, 0), ("end", 2, 0), ("interrupted", 1, -signal.SIGINT), ("failing", 1, 1)]
)
@pytest.mark.thorough
def test_processes_that_end_while_a_save_is_under_way(ending, ranks, status, tmp_path):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), ending]
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--"] if ranks > 1 else []
    done = subprocess.run([*launch, *program], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == status, done.stderr
    manager = Manager(tmp_path, world_of_one())
    found = manager.restore()
    assert found.step == 4  # under way, and let end
    assert np.array_equal(found.state["weights"], samples.weights(4))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_program_fails_whose_last_save_fails_after_its_end(ranks, tmp_path):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    program = [sys.executable, "-c", PROGRAM, str(tmp_path), "full"]
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--"] if ranks > 1 else []
    done = subprocess.run([*launch, *program], capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stdout) == (1, "goodbye\n" * ranks), done.stderr
    assert "got a file larger than the limit" in done.stderr.splitlines()[-1]
    assert Manager(tmp_path, world_of_one()).steps() == [2]


def test_after_an_exception_the_folder_is_locked_as_long_as_a_save_goes_on(held, monkeypatch, tmp_path):
    """For this process, which another job may outlive; and the save is whole if it ends."""
    monkeypatch.setattr(checkpoint_manager, "_PATIENCE_S", 0.1)

    def one(world):
        held.set()
        with pytest.raises(KeyError), Manager(tmp_path, world, keep=1) as left:
            left.save(1, {"x": np.ones(5)})
            world.comm.barrier()
            held.clear()
            left.save(2, {"x": np.ones(5)}, wait=False)
            saving = left._saving
            raise KeyError
        world.comm.barrier()
        with raises(DataError, operation="lock the checkpoints", where=tmp_path / "writer.lock"):
            complete_steps.WriterLock(tmp_path)
        world.comm.barrier()
        held.set()
        saving.wait(30)
        assert saving.is_over and saving.error is None
        assert [path.name for path in tmp_path.glob("*step*")] == ["step-0000000002"]
        assert left.steps() == [2]
        if left._lock is not None:
            left._lock.release()

    thread_comm.run(2, one)
