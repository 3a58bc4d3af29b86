"""Names of checkpoints; which are complete, left over, no longer kept."""

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdp.checkpoint import complete_steps, manifest
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
        make(complete_steps.path_of(tmp_path, step))
    make(complete_steps.partial_path(tmp_path, 101))
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-0000000012").mkdir()  # without a manifest
    (tmp_path / "notes.txt").touch()
    assert list(complete_steps.find(tmp_path)) == [7, 99, 100, 10**17]
    assert complete_steps.left_over(tmp_path) == [complete_steps.partial_path(tmp_path, 101)]
    assert complete_steps.find(tmp_path / "nowhere") == complete_steps.find(tmp_path / "notes.txt") == {}
    assert complete_steps.left_over(tmp_path / "nowhere") == complete_steps.left_over(tmp_path / "notes.txt") == []


def test_manifests_of_all_that_are_kept_are_not_taken_apart(tmp_path, monkeypatch):
    """In each save, while the program trains."""
    parse, parsed = manifest.parse, []
    monkeypatch.setattr(manifest, "parse", lambda *given: parsed.append(given[1]) or parse(*given))
    paths = [make(complete_steps.path_of(tmp_path, step)) for step in (1, 2)]
    marked = make(complete_steps.path_of(tmp_path, 3), commit_file=True)
    torn = make(complete_steps.path_of(tmp_path, 5))
    (torn / NAME).write_bytes(b"damaged")
    assert [*complete_steps.find(tmp_path).values()] == [*paths, torn]
    assert parsed == [marked / NAME]


def test_one_that_was_being_replaced_counts_and_gets_its_name_back(tmp_path):
    old = make(tmp_path / "step-0000000005.old.tmp")
    partial = make(complete_steps.partial_path(tmp_path, 5))
    assert complete_steps.find(tmp_path) == {5: old}
    assert complete_steps.clean(tmp_path, True) == [partial]
    assert complete_steps.find(tmp_path) == {5: complete_steps.path_of(tmp_path, 5)}


def test_one_that_was_replaced_is_left_over(tmp_path):
    old, new = make(tmp_path / "step-0000000005.old.tmp"), make(complete_steps.path_of(tmp_path, 5))
    assert complete_steps.find(tmp_path) == {5: new} and complete_steps.clean(tmp_path, True) == [old]


def test_without_atomic_renames_complete_is_what_has_its_mark_and_all_files(tmp_path):
    path = make(complete_steps.path_of(tmp_path, 3), commit_file=True)
    assert not complete_steps.is_complete(path) and complete_steps.left_over(tmp_path, False) == [path]
    (path / complete_steps.COMMITTED).touch()
    assert complete_steps.is_complete(path) and complete_steps.left_over(tmp_path, False) == []
    (path / "shard-00000.h5").unlink()
    assert not complete_steps.is_complete(path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_one_that_cannot_be_looked_into_hides_no_other(code, tmp_path, monkeypatch):
    for step in (1, 2):
        make(complete_steps.path_of(tmp_path, step))
    shut, plain_stat = complete_steps.path_of(tmp_path, 2), Path.stat

    def stat(path, **options):
        if path.parent == shut:
            raise OSError(code, os.strerror(code), str(path))
        return plain_stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert list(complete_steps.find(tmp_path)) == [1, 2]  # what is wrong with it says who reads it
    assert complete_steps.left_over(tmp_path) == []


@pytest.mark.parametrize(
    "make_left_over", [complete_steps.partial_path, lambda path, step: path / f"step-{step:010d}.old.tmp"]
)
def test_of_a_link_to_a_folder_elsewhere_the_link_is_removed(make_left_over, tmp_path):
    moved = make(tmp_path / "archive")
    here = tmp_path / "here"
    here.mkdir()
    make(complete_steps.path_of(here, 3))
    link = make_left_over(here, 3)
    link.symlink_to(moved)
    assert complete_steps.clean(here, True) == [link]
    assert not link.is_symlink()
    assert complete_steps.is_complete(moved)


def test_a_damaged_manifest_is_said_where_it_is_read(tmp_path):
    path = make(complete_steps.path_of(tmp_path, 3))
    (path / NAME).write_bytes(b"")
    assert list(complete_steps.find(tmp_path)) == [3] and complete_steps.left_over(tmp_path, False) == []


@pytest.mark.parametrize("atomic", [True, False])
def test_a_checkpoint_of_the_same_step_is_put_aside_then_removed(atomic, tmp_path):
    make(complete_steps.partial_path(tmp_path, 4), commit_file=not atomic)
    first = complete_steps.commit(tmp_path, 4, atomic)
    (first / "first").touch()
    make(complete_steps.partial_path(tmp_path, 4), commit_file=not atomic)
    second = complete_steps.commit(tmp_path, 4, atomic)
    assert first == second and not (second / "first").exists() and len(list(tmp_path.iterdir())) == 2
    make(complete_steps.partial_path(tmp_path, 4), commit_file=not atomic)
    complete_steps.commit(tmp_path, 4, atomic)  # although what was put aside is still there
    complete_steps.remove_old(tmp_path, 4)
    assert list(tmp_path.iterdir()) == [second]
    assert complete_steps.left_over(tmp_path, atomic) == []
    retired = complete_steps.retire(tmp_path, 4)
    assert complete_steps.find(tmp_path) == {} and complete_steps.left_over(tmp_path, atomic) == list(
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
    assert complete_steps.dropped(steps, keep, keep_every, values) == sorted({*steps} - {*stay})


@given(
    st.sets(st.integers(0, 1000)),
    st.integers(1, 5),
    st.none() | st.integers(1, 50),
    st.dictionaries(st.integers(0, 1000), st.floats(allow_nan=False)),
)
def test_the_newest_are_never_dropped(steps, keep, keep_every, values):
    dropped = complete_steps.dropped(steps, keep, keep_every, {step: values[step] for step in steps & {*values}})
    assert {*sorted(steps)[-keep:]}.isdisjoint(dropped) and {*dropped} <= steps


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO, errno.ENOSPC])
def test_a_folder_that_cannot_be_synced_is_no_failure_unless_the_disk_says_so(code, tmp_path, monkeypatch):
    sync = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    make(complete_steps.partial_path(tmp_path, 3))
    if code in (errno.EINVAL, errno.ENOTSUP):
        assert complete_steps.commit(tmp_path, 3, True) == complete_steps.path_of(tmp_path, 3)
        return
    with pytest.raises(OSError, match=os.strerror(code)):
        complete_steps.commit(tmp_path, 3, True)
    assert not complete_steps.find(tmp_path)
