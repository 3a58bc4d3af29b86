"""A save that ends, or fails, at any call of the file system: what is complete stays, the next one works."""

import contextlib
import os
import shutil
import warnings

import failing_calls
import numpy as np
import pytest

from hpcdp.checkpoint import Manager, PerRank, complete_steps
from hpcdp.comm import thread_comm
from hpcdp.errors import DataError

WAYS = {
    "atomic": (True, None),
    "file by file": (False, failing_calls.renaming_file_by_file(False)),
    "file by file, backwards": (False, failing_calls.renaming_file_by_file(True)),
}


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)


def state(value, world=None):
    own = {} if world is None else {"own": PerRank(np.full(world.rank + 1, value))}
    return {"a": np.full(5, value), "number": value} | own


def prepare_new(path, world, atomic):
    """Saving step 3 removes step 1."""
    with Manager(path, world, keep=2, atomic_rename=atomic) as manager:
        manager.save(1, state(1.0))
        manager.save(2, state(2.0))


def prepare_replaced(path, world, atomic):
    """Saving step 3 replaces it."""
    with Manager(path, world, keep=2, atomic_rename=atomic) as manager:
        manager.save(2, state(2.0))
        manager.save(3, state(3.0))


def prepare_left_over(path, world, atomic):
    """A save of step 3 had ended while it was replaced, another one of step 4 while it was written."""
    prepare_replaced(path, world, atomic)
    complete_steps.path_of(path, 3).rename(path / "step-0000000003.old.tmp")
    for partial in (complete_steps.partial_path(path, 3), complete_steps.partial_path(path, 4)):
        partial.mkdir()
        (partial / "shard-00000.h5").write_bytes(b"torn")


def check_complete(path, world, *values):
    """The newest complete checkpoint is undamaged, and has one of the values, entirely."""
    with Manager(path, world) as manager:
        found = manager.restore()
        assert found.step == manager.latest()
    assert found.state["number"] in values
    assert np.array_equal(found.state["a"], np.full(5, found.state["number"]))
    return found


@pytest.mark.each_value
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way == "atomic" else pytest.mark.thorough) for way in WAYS]
)
@pytest.mark.parametrize("prepare", [prepare_new, prepare_replaced, prepare_left_over])
def test_a_crash_at_any_call(prepare, way, tmp_path):
    atomic, rename = WAYS[way]

    def crashed(path, world, fails):
        prepare(path, world, atomic)
        manager = Manager(path, world, keep=2, atomic_rename=atomic)
        with failing_calls.calls(failing_calls.WRITING, fails, rename=rename) as made, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(failing_calls.Crashed):
                manager.save(3, state(3.5))
                manager.close()  # with what is removed behind
        with contextlib.suppress(failing_calls.Crashed):
            manager._release()
        if manager._lock is not None:
            manager._lock.release()  # as the end of a process does
        return made

    def one(world):
        total = crashed(tmp_path / "all", world, None).count
        assert total > 15
        for fails in range(total):
            path = tmp_path / str(fails)
            made = crashed(path, world, fails)
            assert made.failed
            newest = 2.0 if prepare is prepare_new else 3.0
            check_complete(path, world, newest, 3.5)
            left_over = complete_steps.left_over(path, atomic)
            with (
                Manager(path, world, keep=2, atomic_rename=atomic) as manager,
                warnings.catch_warnings(record=True) as said,
            ):
                warnings.simplefilter("always")
                manager.save(9, state(9.0))
                steps = manager.steps()
            assert [str(each.message).partition(":")[0] for each in said] == [str(each) for each in left_over]
            assert steps[-1] == 9 and len(steps) == 2
            names = {complete_steps.path_of(path, step).name for step in steps} | {"writer.lock"}
            assert {each.name for each in path.iterdir()} == names, made.failed
            assert check_complete(path, world, 9.0).step == 9
            shutil.rmtree(path)

    thread_comm.run(1, one)


@contextlib.contextmanager
def patching(world, fails, rank):
    """On all ranks: that call of one rank fails with EIO; rank 0 has the `Calls`."""
    names = failing_calls.WRITING + failing_calls.READING
    world.comm.barrier()
    if world.rank == 0:
        with failing_calls.calls(names, fails, crash=False, thread=f"rank-{rank}") as made:
            world.comm.barrier()
            yield made
            world.comm.barrier()
    else:
        world.comm.barrier()
        yield None
        world.comm.barrier()
    world.comm.barrier()


@pytest.mark.parametrize(
    ("atomic", "shards", "rank"),
    [
        (True, "rank", 0),
        (True, "rank", 1),
        (False, "rank", 0),
        pytest.param(False, "rank", 1, marks=pytest.mark.thorough),
        pytest.param(True, "node", 0, marks=pytest.mark.thorough),  # writes what a rank does, for the node
        (True, "node", 1),
    ],
)
def test_an_error_of_any_call_on_one_rank(atomic, shards, rank, tmp_path):
    """It is the same on all ranks; or it concerned what is to be removed, and the checkpoint is complete."""

    def one(world):
        failures = 0
        for fails in range(10_000):
            path = tmp_path / str(fails)
            with Manager(path, world, keep=1, shards=shards, atomic_rename=atomic) as manager:
                manager.save(2, state(2.0, world))
                with patching(world, fails, rank) as made:
                    error = None
                    try:
                        manager.save(3, state(3.5, world))
                    except DataError as caught:
                        error = str(caught)
                assert len({*world.comm.allgather_json(error)}) == 1
                failed = world.comm.allgather_json(made.failed if made else "")[0]
                failures += error is not None
                found = check_complete(path, world, 2.0, 3.5)
                assert error is not None or found.step == 3
                manager.save(3, state(3.75, world))
                assert manager.restore().state["own"][0] == 3.75 and manager.steps() == [3]
            if not failed:
                break
        return failures

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = thread_comm.run(2, one)
    assert counts[0] == counts[1] > (19 if rank == 0 else 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_any_call_while_reading(rank, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            manager.save(2, state(2.0, world))
            fails = 0
            while True:
                with patching(world, fails, rank) as made:
                    error = None
                    try:
                        assert manager.restore().state["own"][0] == 2.0
                    except DataError as caught:
                        error = str(caught)
                assert len({*world.comm.allgather_json(error)}) == 1
                if not world.comm.allgather_json(made.failed if made else "")[0]:
                    return fails
                fails += 1

    assert thread_comm.run(2, one)[0] > (5 if rank == 0 else 1)
