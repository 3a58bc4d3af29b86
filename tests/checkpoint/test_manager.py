"""Checkpoints of all ranks, saved and restored on any number of them; which are kept, and where."""

import gc
import json
import os
import subprocess
import sys
import warnings
import weakref

import h5py
import numpy as np
import pytest
import samples
from on_threads import caught, restore, save
from pairs import pairs
from raises import raises

from hpcdp.checkpoint import Manager, Part, PerRank, Sharded, complete_steps, flatten, inspect
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError, DataError, MismatchError, UnsupportedError

SIZES = [1, 2, 3, 4, 6]


@pytest.mark.parametrize(("saved_on", "size", "into"), pairs(SIZES, SIZES, [lambda world: None, samples.blank]))
def test_any_number_of_ranks_restores(saved_on, size, into, tmp_path):
    save(tmp_path, 0, saved_on)
    for rank, restored in enumerate(restore(tmp_path, size, into)):
        samples.check(restored.state, 0, rank, saved_on, size)
        assert (restored.step, restored.missing, restored.left_over) == (0, [], [])
        assert restored.kept == ([] if saved_on == size else ["own"])
        if saved_on != size and into is samples.blank:
            assert [*restored.state["own"]["values"]] == [-1] * (rank + 2)
        elif saved_on != size:
            assert restored.state["own"] is None


@pytest.mark.parametrize(
    ("options", "wait"),
    [
        ({"compression": "gzip"}, True),
        ({"compression": "lzf"}, False),
        ({"shards": "node"}, True),
        ({"shards": "node"}, False),
        ({"atomic_rename": False}, True),
        ({"atomic_rename": False}, False),
    ],
)
def test_other_ways_to_write(options, wait, tmp_path):
    def one(world):
        with Manager(tmp_path, world, **options) as manager:
            for step in (7, 14, 14):
                manager.save(step, samples.state(step, world), wait=wait)
            manager.wait()
            assert manager.steps() == [7, 14] and manager.latest() == 14

    thread_comm.run(4, one, ranks_per_node=2)
    for rank, restored in enumerate(restore(tmp_path, 3, ranks_per_node=2)):
        samples.check(restored.state, 14, rank, 4, 3)


@pytest.mark.parametrize("n", [1, 3])
def test_everything_is_seen_as_one_file(n, tmp_path):
    save(tmp_path, 6, n)
    with h5py.File(tmp_path / "step-0000000006" / "index.h5") as file:
        assert np.array_equal(file["weights"][...], samples.weights(6))
        assert np.array_equal(file["moments"][...], samples.moments(6))
        assert np.array_equal(file[f"own/rank-{n - 1}/values"][...], samples.own(6, n - 1))
        assert file.attrs["step"] == 6
    manifest = json.loads((tmp_path / "step-0000000006" / "manifest.json").read_text())
    assert manifest["world"] == {"size": n, "num_nodes": 1} and manifest["versions"]["numpy"] == np.__version__
    names = sorted(path.name for path in (tmp_path / "step-0000000006").iterdir())
    assert names == ["index.h5", "manifest.json", *(f"shard-{rank:05d}.h5" for rank in range(n))]


def test_copies_are_written_once(tmp_path):
    values = np.random.default_rng(0).standard_normal(300_000)

    def copies(world):
        half, copy = divmod(world.rank, 2)
        part = Part(half * 150_000, values[half * 150_000 : (half + 1) * 150_000].copy())
        return {"a": Sharded((300_000,), np.dtype("f8"), [part], copies=2, copy=copy)}

    save(tmp_path, 1, 4, lambda step, world: copies(world))
    total = sum(path.stat().st_size for path in tmp_path.glob("step-*/shard-*"))
    assert values.nbytes < total < values.nbytes * 1.1
    for restored in restore(tmp_path, 1):
        assert np.array_equal(restored.state["a"], values)


def test_retention(tmp_path):
    def one(world):
        with Manager(tmp_path, world, keep=2, keep_every=100, best="-loss") as manager:
            for step, loss in [(100, 9), (110, 1), (120, 5), (130, 6), (140, 7), (150, 2)]:
                manager.save(step, {"a": step}, metrics={"loss": loss, "odd": float("nan")}, config={"lr": 0.1})
            assert manager.steps() == [100, 110, 140, 150]
            restored = manager.restore(110)
            assert (restored.state, restored.metrics, restored.config) == ({"a": 110}, {"loss": 1}, {"lr": 0.1})
            with raises(ConfigError, operation="save", where="metrics", expected=["loss", "Manager"]):
                manager.save(160, {"a": 1}, metrics={"odd": 1})

    thread_comm.run(2, one)


def test_the_best_one_is_restored(tmp_path):
    def one(world):
        with Manager(tmp_path, world, keep=1, best="-loss") as manager:
            with raises(DataError, operation="restore", where=tmp_path, expected="loss"):
                manager.restore(best=True)
            for step, loss in [(100, 2), (110, 1), (120, 1), (130, 6), (140, 7)]:
                manager.save(step, {"a": step}, metrics={"loss": loss, "accuracy": step})
            assert manager.steps() == [120, 140]
            steps = [
                manager.restore(best=best).step for best in (True, "-loss", "loss", "accuracy", "-accuracy", False)
            ]
            assert steps == [120, 120, 140, 140, 120, 140]
            for wrong, fields in (
                ({"best": "speed"}, {"expected": "speed"}),
                ({"best": "-"}, {"where": "best", "expected": ["metric", "'-metric'"], "got": "'-'"}),
                ({"best": 1.5}, {"where": "best", "expected": "metric", "got": 1.5}),
                ({"best": True, "step": 140}, {"where": "best", "expected": False, "got": True}),
            ):
                with raises((ConfigError, DataError), operation="restore", **fields):
                    manager.restore(**wrong)
            with raises(
                MismatchError, operation="restore", where="item 2 of 2 on rank 0", expected=["-loss", 0], got=1
            ):
                manager.restore(best="loss" if world.rank else "-loss")
        with (
            Manager(tmp_path, world) as manager,
            raises(ConfigError, operation="restore", where="best", expected=["Manager", "best=..."], got=True),
        ):
            manager.restore(best=True)

    thread_comm.run(2, one)


@pytest.mark.parametrize("metrics", [None, {"loss": float("nan")}, {"loss": float("inf")}])
def test_what_was_not_measured_is_never_the_best(metrics, tmp_path):
    def one(world):
        with Manager(tmp_path, world, keep=1, best="loss") as manager:
            manager.save(100, {"a": 1}, metrics={"loss": -1})
            manager.save(110, {"a": 2}, metrics=metrics)
            manager.save(120, {"a": 3}, metrics={"loss": -2})
            return manager.steps()

    assert thread_comm.run(2, one) == [[100, 120]] * 2


def test_links_to_checkpoints_elsewhere(tmp_path):
    folder, archive = tmp_path / "checkpoints", tmp_path / "archive"
    save(folder, 1, 1)
    (folder / "step-0000000001").rename(archive)
    (folder / "step-0000000001").symlink_to(archive)
    save(folder, 1, 1)  # puts the link aside
    assert sorted(each.name for each in folder.iterdir()) == ["step-0000000001", "writer.lock"]
    archive.rename(tmp_path / "again")
    (folder / "step-0000000001").rename(archive)
    (folder / "step-0000000001").symlink_to(archive)
    save(folder, 2, 1, keep=1)
    save(folder, 3, 1, keep=1)
    assert sorted(each.name for each in folder.iterdir()) == ["step-0000000003", "writer.lock"]
    assert [*inspect.faults(archive)] == [*inspect.faults(tmp_path / "again")] == []


def test_a_damaged_manifest_does_not_keep_others_from_being_removed(tmp_path):
    save(tmp_path, 1, 1)
    (tmp_path / "step-0000000001" / "manifest.json").write_bytes(b"")

    def one(world):
        with Manager(tmp_path, world, keep=1, best="loss") as manager:
            for step in (2, 3):
                manager.save(step, {}, metrics={"loss": -step})
            return manager.steps()

    assert thread_comm.run(1, one) == [[2, 3]]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.unlink(), "index.h5]: got no such file or folder"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "index.h5]: expected "),
    ],
)
def test_a_checkpoint_without_its_index_is_restored(harm, message, tmp_path):
    for step in (1, 2):
        save(tmp_path, step, 2, lambda step, world: {"a": np.full(4, step)})
    harm(tmp_path / "step-0000000002" / "index.h5")

    def one(world):
        with Manager(tmp_path, world) as manager:
            return manager.restore()

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for restored in thread_comm.run(2, one):
            assert restored.step == 2 and np.all(restored.state["a"] == 2)
    assert len(said) == 1 and message in str(said[0].message) and "\n" not in str(said[0].message)
    assert said[0].filename == __file__
    assert any(fault.startswith("index.h5: ") for fault in inspect.faults(tmp_path / "step-0000000002"))


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def one(world):
        with Manager("own", world) as manager:
            manager.save(1, {"a": 1})
            if world.rank == 0:
                monkeypatch.chdir(tmp_path / "there")
            world.comm.barrier()
            manager.save(2, {"a": 2})
            return manager.steps(), manager.restore(1).path

    path = tmp_path / "here" / "own"
    assert thread_comm.run(2, one) == [([1, 2], path / "step-0000000001")] * 2
    assert [*(tmp_path / "there").iterdir()] == [] and len([*path.glob("step-*")]) == 2


@pytest.mark.parametrize("n", [1, 3])
def test_what_cannot_be_read_back_removes_nothing(n, tmp_path, monkeypatch):
    def one(world):
        with Manager(tmp_path, world, keep=1) as manager:
            manager.save(1, {"a": 1})
            text = caught(lambda: manager.save(2, {"a": {None: world.size}}), UnsupportedError)
            assert text == "save [a]: expected keys that are str or int, got None"
            world.comm.barrier()
            if world.rank == 0:  # as if there were a kind of state that nobody has thought of
                monkeypatch.setattr(flatten, "_checked", lambda value, name: value)
            world.comm.barrier()
            text = caught(lambda: manager.save(3, {"a": {None: world.size}}), DataError)
            assert text == "save [the state]: expected a state that can be read back, got key None"
            assert manager.restore().state == {"a": 1}

    thread_comm.run(n, one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0000000001", "writer.lock"]


@pytest.mark.parametrize("n", [1, 3])
def test_communicators_go_with_their_managers(n, tmp_path):
    """Of which MPI libraries have only so many; managers beside each other have their own."""

    def one(world):
        def made(count):
            with Manager(tmp_path, world, keep=1) as manager:
                manager.save(count, {"a": np.arange(3)}, wait=count % 2 == 0)
            return weakref.ref(manager._group.comm)

        used = [made(count) for count in range(4)]
        with Manager(tmp_path, world) as third, Manager(tmp_path / "a", world) as fourth:
            fourth.save(1, {"own": PerRank(world.rank)})
            third.save(4, {"own": PerRank(world.rank)})
            assert fourth.restore().state == third.restore().state == {"own": world.rank}
        gc.collect()
        return [each() for each in used]

    assert thread_comm.run(n, one) == [[None] * 4] * n


def test_after_a_save_that_a_rank_has_left_nobody_has_its_communicators(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    def one(world):
        with Manager(tmp_path, world) as left, monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(complete_steps, "wait_for", interrupted)
            left.save(1, {"a": 1})
        comm = weakref.ref(left._group.comm)
        del left
        gc.collect()
        with Manager(tmp_path, world) as manager:
            assert comm() not in (None, manager._group.comm)
            manager.save(1, {"a": 1})

    with pytest.warns(UserWarning, match="removed the folder of an interrupted save"):
        thread_comm.run(1, one)


_READS_ALL = """
import sys
from pathlib import Path
import numpy as np
from hpcdp.checkpoint import Manager, inspect
from hpcdp.comm import thread_comm as threads

paths = [*map(Path, sys.argv[1:])]
(found,) = threads.run(1, lambda world: Manager(paths[0].parent, world=world).restore())
faults, changed = [*map(list, map(inspect.faults, paths))], [each.name for each in inspect.differences(*paths)]
is_right = [np.array_equal(found.state[name], np.arange(count) + more)
            for name, count, more in (("long", 300_000, 2), ("cut", 600, 0))]
print(faults, changed, *is_right)
"""


def test_what_more_ranks_have_saved_than_a_process_may_have_files_open(tmp_path, monkeypatch):
    ranks, count = 24, 300_000

    def state(step, world):
        shares = np.linspace(0, 600, ranks + 1).astype(int)
        first, last = shares[world.rank], shares[world.rank + 1]
        parts = [Part(first, np.arange(first, last, dtype="f8"))]
        return {"long": np.arange(count) + step, "cut": Sharded((600,), np.dtype("f8"), parts)}

    monkeypatch.setattr(os, "fsync", lambda file: None)
    for step in (1, 2):
        save(tmp_path, step, ranks, state)
    program = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({ranks},) * 2); {_READS_ALL}"
    paths = [complete_steps.path_of(tmp_path, step) for step in (1, 2)]
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[[], []] ['long'] True True\n", "")
