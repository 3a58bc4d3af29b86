"""Names of checkpoints; which are complete, left over, no longer kept."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdp.checkpoint import manifest, step_folders
from hpcdp.checkpoint.hdf5_file import File
from hpcdp.checkpoint.manifest import NAME, Manifest


def make(path: Path, *, commit_file: bool = False, files: tuple[str, ...] = ("shard-00000.h5",)) -> Path:
    path.mkdir()
    for name in files:
        (path / name).write_bytes(b"x")
    whole = Manifest(3, {"dict": []}, {}, [File(name, 1, 0) for name in files], commit_file=commit_file)
    (path / NAME).write_bytes(whole.to_json())
    return path


def test_complete_ones_are_found_by_step_oldest_first(tmp_path):
    for step in (100, 7, 10**17, 99):
        make(step_folders.path_of(tmp_path, step))
    make(step_folders.partial_path(tmp_path, 101))
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-0000000012").mkdir()  # without a manifest
    (tmp_path / "notes.txt").touch()
    assert list(step_folders.find(tmp_path)) == [7, 99, 100, 10**17]
    assert step_folders.left_over(tmp_path) == [step_folders.partial_path(tmp_path, 101)]
    assert step_folders.find(tmp_path / "nowhere") == step_folders.find(tmp_path / "notes.txt") == {}
    assert step_folders.left_over(tmp_path / "nowhere") == step_folders.left_over(tmp_path / "notes.txt") == []


def test_manifests_of_all_that_are_kept_are_not_taken_apart(tmp_path, monkeypatch):
    """In each save, while the program trains."""
    parse, parsed = manifest.parse, []
    monkeypatch.setattr(manifest, "parse", lambda *given: parsed.append(given[1]) or parse(*given))
    paths = [make(step_folders.path_of(tmp_path, step)) for step in (1, 2)]
    marked = make(step_folders.path_of(tmp_path, 3), commit_file=True)
    torn = make(step_folders.path_of(tmp_path, 5))
    (torn / NAME).write_bytes(b"damaged")
    assert [*step_folders.find(tmp_path).values()] == [*paths, torn]
    assert parsed == [marked / NAME]


def test_one_that_was_being_replaced_counts_and_gets_its_name_back(tmp_path):
    old = make(tmp_path / "step-0000000005.old.tmp")
    partial = make(step_folders.partial_path(tmp_path, 5))
    assert step_folders.find(tmp_path) == {5: old}
    assert step_folders.clean(tmp_path, True) == [partial]
    assert step_folders.find(tmp_path) == {5: step_folders.path_of(tmp_path, 5)}


def test_one_that_was_replaced_is_left_over(tmp_path):
    old, new = make(tmp_path / "step-0000000005.old.tmp"), make(step_folders.path_of(tmp_path, 5))
    assert step_folders.find(tmp_path) == {5: new} and step_folders.clean(tmp_path, True) == [old]


def test_without_atomic_renames_complete_is_what_has_its_mark_and_all_files(tmp_path):
    path = make(step_folders.path_of(tmp_path, 3), commit_file=True)
    assert not step_folders.is_complete(path) and step_folders.left_over(tmp_path, False) == [path]
    (path / step_folders.COMMITTED).touch()
    assert step_folders.is_complete(path) and step_folders.left_over(tmp_path, False) == []
    (path / "shard-00000.h5").unlink()
    assert not step_folders.is_complete(path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_one_that_cannot_be_looked_into_hides_no_other(code, tmp_path, monkeypatch):
    for step in (1, 2):
        make(step_folders.path_of(tmp_path, step))
    shut, plain_stat = step_folders.path_of(tmp_path, 2), Path.stat

    def stat(path, **options):
        if path.parent == shut:
            raise OSError(code, os.strerror(code), str(path))
        return plain_stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert list(step_folders.find(tmp_path)) == [1, 2]  # what is wrong with it says who reads it
    assert step_folders.left_over(tmp_path) == []


@pytest.mark.parametrize(
    "make_left_over", [step_folders.partial_path, lambda path, step: path / f"step-{step:010d}.old.tmp"]
)
def test_of_a_link_to_a_folder_elsewhere_the_link_is_removed(make_left_over, tmp_path):
    moved = make(tmp_path / "archive")
    here = tmp_path / "here"
    here.mkdir()
    make(step_folders.path_of(here, 3))
    link = make_left_over(here, 3)
    link.symlink_to(moved)
    assert step_folders.clean(here, True) == [link]
    assert not link.is_symlink()
    assert step_folders.is_complete(moved)


def test_a_damaged_manifest_is_said_where_it_is_read(tmp_path):
    path = make(step_folders.path_of(tmp_path, 3))
    (path / NAME).write_bytes(b"")
    assert list(step_folders.find(tmp_path)) == [3] and step_folders.left_over(tmp_path, False) == []


@pytest.mark.parametrize("atomic", [True, False])
def test_a_checkpoint_of_the_same_step_is_put_aside_then_removed(atomic, tmp_path):
    make(step_folders.partial_path(tmp_path, 4), commit_file=not atomic)
    first = step_folders.commit(tmp_path, 4, atomic)
    (first / "first").touch()
    make(step_folders.partial_path(tmp_path, 4), commit_file=not atomic)
    second = step_folders.commit(tmp_path, 4, atomic)
    assert first == second and not (second / "first").exists() and len(list(tmp_path.iterdir())) == 2
    make(step_folders.partial_path(tmp_path, 4), commit_file=not atomic)
    step_folders.commit(tmp_path, 4, atomic)  # although what was put aside is still there
    step_folders.remove_old(tmp_path, 4)
    assert list(tmp_path.iterdir()) == [second]
    assert step_folders.left_over(tmp_path, atomic) == []
    retired = step_folders.retire(tmp_path, 4)
    assert step_folders.find(tmp_path) == {} and step_folders.left_over(tmp_path, atomic) == list(
        tmp_path.iterdir()
    ) == [retired]


@pytest.mark.parametrize(
    ("keep", "keep_every", "values", "stay"),
    [
        (None, None, {}, [0, 5, 10, 15, 20, 25]),
        (1, None, {}, [25]),
        (2, 10, {}, [0, 10, 20, 25]),
        (1, None, {5: 2.0, 15: 2.0, 20: 1.0}, [15, 25]),
        (9, 10, {}, [0, 5, 10, 15, 20, 25]),
    ],
)
def test_what_is_kept(keep, keep_every, values, stay):
    steps = [10, 0, 5, 25, 15, 20]
    assert step_folders.dropped(steps, keep, keep_every, values) == sorted({*steps} - {*stay})


@given(
    st.sets(st.integers(0, 1000)),
    st.integers(1, 5),
    st.none() | st.integers(1, 50),
    st.dictionaries(st.integers(0, 1000), st.floats(allow_nan=False)),
)
def test_the_newest_are_never_dropped(steps, keep, keep_every, values):
    dropped = step_folders.dropped(steps, keep, keep_every, {step: values[step] for step in steps & {*values}})
    assert {*sorted(steps)[-keep:]}.isdisjoint(dropped) and {*dropped} <= steps


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO, errno.ENOSPC])
def test_a_folder_that_cannot_be_synced_is_no_failure_unless_the_disk_says_so(code, tmp_path, monkeypatch):
    sync = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    make(step_folders.partial_path(tmp_path, 3))
    if code in (errno.EINVAL, errno.ENOTSUP):
        assert step_folders.commit(tmp_path, 3, True) == step_folders.path_of(tmp_path, 3)
        return
    with pytest.raises(OSError, match=os.strerror(code)):
        step_folders.commit(tmp_path, 3, True)
    assert not step_folders.find(tmp_path)
