"""What is damaged is refused by name, what is undamaged is found, and nothing else changes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import samples
from raises import raises

from hpcdp.checkpoint import Manager, complete_steps, inspect, manifest
from hpcdp.comm import thread_comm
from hpcdp.errors import DataError

OLDER, NEWER = 7, 14
MANIFEST, INDEX, FIRST, SECOND = FILES = "manifest.json", "index.h5", "shard-00000.h5", "shard-00001.h5"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")

    def one(world):
        with Manager(path, world) as manager:
            for step in (OLDER, NEWER):
                manager.save(step, samples.state(step, world))

    thread_comm.run(2, one)
    return path


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run", copy_function=os.link)


def damage(path, change):
    """Another content for a file, of which there may be further links."""
    content = bytearray(path.read_bytes())
    path.unlink()
    changed = change(content)
    path.write_bytes(content if changed is None else changed)


def refusal(run, n=2):
    """What is said of the newer checkpoint, on all of ``n`` ranks; None where it is restored as it was saved."""

    def one(world):
        with Manager(run, world) as manager:
            try:
                restored = manager.restore(NEWER)
            except DataError as error:
                return str(error)
            samples.check(restored.state, NEWER, world.rank, 2, n)
            return None

    said = thread_comm.run(n, one)
    assert len({*said}) == 1
    return said[0]


def assert_older_is_taken(run, n=2):
    def one(world):
        with Manager(run, world) as manager:
            restored = manager.restore(into=samples.blank(world))
            assert restored.step == OLDER
            samples.check(restored.state, OLDER, world.rank, 2, n)

    with pytest.warns(UserWarning, match=f"taking step {OLDER} instead"):
        thread_comm.run(n, one)


def assert_restored_without_index(run):
    """It is for other readers."""
    with pytest.warns(UserWarning, match=rf"restore \[.*{INDEX}\].* got .*: ignored, because"):
        assert refusal(run) is None


def elements_of(run, name):
    """Where the elements in a file are: data set, first and last byte."""
    found = manifest.read(complete_steps.path_of(run, NEWER))
    for tensor in found.tensors.values():
        for part in tensor.parts:
            if part.file == name and part.count:
                yield part.dataset, part.offset, part.offset + part.count * tensor.stored_dtype.itemsize


@pytest.mark.parametrize("name", [FIRST, SECOND])
def test_flipped_bits_of_elements(name, run):
    path = complete_steps.path_of(run, NEWER) / name
    places = [*elements_of(run, name)]
    assert len(places) >= 3
    for dataset, first, last in places:
        for at in {first, (first + last) // 2, last - 1}:
            damage(path, lambda content, at=at: content.__setitem__(at, content[at] ^ 0x10))
            said = refusal(run)
            assert re.search(
                rf"restore \[{re.escape(str(path))}, {re.escape(dataset)}\]: expected checksum \w+ of MiB", said
            )
            assert f"call restore(step={OLDER}) for another checkpoint" in said
            damage(path, lambda content, at=at: content.__setitem__(at, content[at] ^ 0x10))
        assert refusal(run) is None
    damage(path, lambda content: content.__setitem__(places[0][1], content[places[0][1]] ^ 1))
    assert_older_is_taken(run, 3)


def test_flipped_bits_of_what_hdf5_wrote_give_no_wrong_numbers(run):
    for name in (FIRST, INDEX):
        path = complete_steps.path_of(run, NEWER) / name
        places = [*elements_of(run, name)]
        beside = [at for at in range(path.stat().st_size) if not any(first <= at < last for _, first, last in places)]
        for at in beside[:: len(beside) // 30]:
            damage(path, lambda content, at=at: content.__setitem__(at, content[at] ^ 0xFF))
            said = refusal(run)
            assert said is None or str(path) in said
            damage(path, lambda content, at=at: content.__setitem__(at, content[at] ^ 0xFF))


def test_flipped_bits_of_the_manifest(run):
    path = complete_steps.path_of(run, NEWER) / MANIFEST
    for at in range(0, path.stat().st_size, 97):
        damage(path, lambda content, at=at: content.__setitem__(at, content[at] ^ 0x01))
        said = refusal(run)
        assert said.startswith(f"read the checkpoint [{path}]: expected an undamaged manifest, got ")
        damage(path, lambda content, at=at: content.__setitem__(at, content[at] ^ 0x01))
    damage(path, lambda content: content.__setitem__(5, 0))
    assert_older_is_taken(run)


@pytest.mark.parametrize("length", ["nothing", "half", "a byte less", "a byte more"])
@pytest.mark.parametrize("name", FILES)
def test_other_lengths(name, length, run):
    path = complete_steps.path_of(run, NEWER) / name
    cut = {"nothing": lambda x: b"", "half": lambda x: x[: len(x) // 2], "a byte less": lambda x: x[:-1]}
    damage(path, cut.get(length, lambda x: x + b"x"))
    if name == INDEX:
        assert_restored_without_index(run)
        return
    said = refusal(run)
    assert f"[{path}]: expected" in said and f"restore(step={OLDER})" in said
    assert_older_is_taken(run)


@pytest.mark.parametrize("instead", ["nothing", "a folder", "a link to nowhere", "that of another step"])
@pytest.mark.parametrize("name", [INDEX, FIRST, SECOND])
def test_missing_files(name, instead, run):
    path = complete_steps.path_of(run, NEWER) / name
    path.unlink()
    if instead == "a folder":
        path.mkdir()
    elif instead == "a link to nowhere":
        path.symlink_to("nowhere")
    elif instead == "that of another step":
        shutil.copy(complete_steps.path_of(run, OLDER) / name, path)
    if name == INDEX and instead == "that of another step":
        assert refusal(run) is None
        return
    if name == INDEX:
        assert_restored_without_index(run)
        return
    said = refusal(run)
    assert said.startswith(f"restore [{path}") and f"restore(step={OLDER})" in said
    assert_older_is_taken(run)


def test_the_file_of_another_rank(run):
    first, second = (complete_steps.path_of(run, NEWER) / name for name in (FIRST, SECOND))
    first.rename(run / "kept")
    second.rename(first)
    (run / "kept").rename(second)
    assert str(first.parent) in refusal(run)
    assert_older_is_taken(run)


def test_a_checkpoint_in_the_folder_of_another_step(run):
    copy = complete_steps.path_of(run, NEWER + 1)
    shutil.copytree(complete_steps.path_of(run, OLDER), copy)
    what = f"step {OLDER} in a folder of step {NEWER + 1}"
    assert complete_steps.overview(run).checkpoints[-1].damage == f"{MANIFEST}: {what}"
    assert list(inspect.faults(copy)) == [f"{MANIFEST}: {what}"]
    with pytest.warns(UserWarning, match=rf"{MANIFEST}\]: got {what}: taking step {NEWER} instead"):
        thread_comm.run(2, lambda world: samples.check(Manager(run, world).restore().state, NEWER, world.rank, 2, 2))
    copy.rename(run / "kept by hand")
    assert list(inspect.faults(run / "kept by hand")) == []


@pytest.mark.parametrize("instead", ["nothing", "a folder", "a pipe"])
def test_without_a_manifest_it_is_no_checkpoint(instead, run):
    path = complete_steps.path_of(run, NEWER) / MANIFEST
    path.unlink()
    if instead != "nothing":
        (os.mkfifo if instead == "a pipe" else os.mkdir)(path)
    said = refusal(run)
    assert (
        f"restore [{run}]: expected a complete checkpoint of step {NEWER}, got none; call restore(step={OLDER})" in said
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for n in (1, 2):
            assert {restored.step for restored in thread_comm.run(n, lambda world: Manager(run, world).restore())} == {
                OLDER
            }
    expected = f"restore [{path}]: expected a file, got none: taking step {OLDER} instead"
    assert [str(each.message) for each in warned] == [expected] * 2

    def one(world):
        with Manager(run, world, keep=2) as manager:
            manager.save(21, {})
            assert manager.steps() == [OLDER, 21] and path.parent.exists()
            manager.save(28, {})
            assert manager.steps() == [21, 28]

    thread_comm.run(2, one)
    assert sorted(each.name for each in run.iterdir()) == ["step-0000000021", "step-0000000028", "writer.lock"]


def test_where_nothing_but_one_without_a_manifest_is_left(tmp_path):
    (complete_steps.path_of(tmp_path, 3)).mkdir()

    def one(world):
        with (
            Manager(tmp_path, world) as manager,
            raises(DataError, operation="restore", where=tmp_path, got=["step-0000000003", "manifest.json"]),
        ):
            manager.restore()

    thread_comm.run(2, one)


def test_where_all_are_damaged(run):
    for step in (OLDER, NEWER):
        (complete_steps.path_of(run, step) / FIRST).unlink()

    def one(world):
        with Manager(run, world) as manager:
            with raises(DataError, operation="restore", where=f"{run}/step-0000000007/{FIRST}", remedy=2):
                manager.restore()
            state = samples.state(21, world)
            manager.save(21, state)
            samples.check(manager.restore().state, 21, world.rank, 2, 2)

    with pytest.warns(UserWarning, match="instead"):
        thread_comm.run(2, one)


@pytest.mark.parametrize("n", [1, 2])
def test_an_empty_folder(n, tmp_path):
    def one(world):
        with Manager(tmp_path / "none", world) as manager:
            assert (manager.steps(), manager.latest()) == ([], None)
            with raises(DataError, operation="restore", where=tmp_path / "none"):
                manager.restore()
            with raises(DataError, operation="restore", where=tmp_path / "none", expected=3):
                manager.restore(3)

    thread_comm.run(n, one)
    assert not (tmp_path / "none").exists()


def refused_save(manager, world, step, state):
    """What is said, on all ranks, of a save that cannot be; the state is as it was."""
    before = state["weights"].copy()
    with pytest.raises(DataError) as info:
        manager.save(step, state)
    assert np.array_equal(before, state["weights"])
    assert len({*world.comm.allgather_json(str(info.value))}) == 1
    return str(info.value)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a file system of its own needs root: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # HDF5 must not be left with a torn file
def test_a_full_disk(small_disk):
    run, filler = small_disk / "run", small_disk / "filler"

    def one(world):
        refused = 0
        with Manager(run, world, keep=1) as manager:
            manager.save(7, samples.state(7, world))
            assert "no space left on device" in refused_save(manager, world, 14, samples.state(14, world, 3_000_000))
            for room in (0, 16 << 10, 600 << 10, *range(1160 << 10, 1240 << 10, 4 << 10)):
                if world.rank == 0:
                    filler.unlink(missing_ok=True)
                    with open(filler, "xb") as file:
                        status = os.statvfs(small_disk)
                        file.truncate(max(0, status.f_bavail * status.f_bsize - room))
                        os.posix_fallocate(file.fileno(), 0, max(1, status.f_bavail * status.f_bsize - room))
                world.comm.barrier()
                before = manager.latest()
                step = before + 7
                try:
                    manager.save(step, samples.state(step, world))
                except DataError as error:
                    assert str(error).endswith("no space left on device")
                    assert manager.steps() == [before]
                    names = {path.name for path in run.iterdir()}
                    assert names == {"writer.lock", complete_steps.path_of(run, before).name}
                    step, refused = before, refused + 1
                samples.check(manager.restore().state, step, world.rank, 2, 2)
                world.comm.barrier()
            if world.rank == 0:
                filler.unlink()
            world.comm.barrier()
            manager.save(700, samples.state(700, world))
            samples.check(manager.restore().state, 700, world.rank, 2, 2)
        return refused

    assert 5 <= thread_comm.run(2, one)[0] <= 20  # of 23


def test_a_read_only_disk(small_disk):
    run = small_disk / "run"

    def one(world):
        with Manager(run, world) as manager:
            manager.save(7, samples.state(7, world))
        world.comm.barrier()
        if world.rank == 0:
            subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        world.comm.barrier()
        with Manager(run, world) as manager:
            assert "a read-only file system" in refused_save(manager, world, 14, samples.state(14, world))
            samples.check(manager.restore().state, 7, world.rank, 2, 2)

    thread_comm.run(2, one)


@pytest.mark.parametrize("name", ["step-0000000003", "step-0000000003.tmp", "step-0000000003.old.tmp"])
def test_a_file_of_the_name_of_a_checkpoint(name, tmp_path):
    (tmp_path / name).write_text("mine")

    def one(world):
        with Manager(tmp_path, world, keep=2) as manager:
            manager.save(2, {})
            with raises(DataError, operation="save", where=tmp_path / name):
                manager.save(3, {})
            manager.save(4, {})
            assert manager.steps() == [2, 4]

    thread_comm.run(2, one)
    assert (tmp_path / name).read_text() == "mine"


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")

    def one(world, path):
        with Manager(path, world) as manager:
            said = refused_save(manager, world, 7, samples.state(7, world))
            assert manager.steps() == []
            return said

    assert (
        "expected a folder, or nothing yet, got a file"
        in thread_comm.run(2, lambda world: one(world, tmp_path / "file"))[0]
    )
    assert "a path through a file" in thread_comm.run(2, lambda world: one(world, tmp_path / "file" / "below"))[0]


def test_no_permission(tmp_path):
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed").chmod(0o555)
    user = os.geteuid()
    tmp_path.chmod(0o755)

    def one(world):
        with Manager(tmp_path / "closed", world) as manager:
            return refused_save(manager, world, 7, samples.state(7, world))

    try:
        if user == 0:
            os.seteuid(65534)
        assert "no permission" in thread_comm.run(2, one)[0]
    finally:
        os.seteuid(user)


JOB = """
import sys, time, numpy
from hpcdp.checkpoint import Manager
manager = Manager(sys.argv[1])
manager.save(7, {"a": numpy.ones(3)})
print("saved", flush=True)
time.sleep(60)
"""


def test_a_second_job_is_refused_until_the_first_has_gone(tmp_path):
    with subprocess.Popen([sys.executable, "-c", JOB, tmp_path], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None and first.stdout.readline() == "saved\n"

        def one(world):
            with Manager(tmp_path, world) as manager:
                said = refused_save(manager, world, 14, samples.state(14, world))
                assert f"expected no other job that saves here, got process {first.pid} of" in said
                assert manager.restore().state["a"][2] == 1  # others may read
                world.comm.barrier()
                if world.rank == 0:
                    first.send_signal(signal.SIGKILL)
                    first.wait()
                world.comm.barrier()
                manager.save(14, samples.state(14, world))
                assert manager.steps() == [7, 14]

        thread_comm.run(2, one)


def test_what_was_left_behind_is_named_and_removed(run):
    torn = complete_steps.partial_path(run, 21)
    shutil.copytree(complete_steps.path_of(run, NEWER), torn)

    def one(world):
        with Manager(run, world) as manager:
            manager.save(28, {})
            manager.save(35, {})

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        thread_comm.run(2, one)
    assert [str(each.message) for each in said] == [f"{torn}: removed the folder of an interrupted save"]
    assert said[0].filename == __file__  # the line of the program that saves
    assert not torn.exists()
