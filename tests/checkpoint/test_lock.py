"""One writer a folder."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys

import pytest
from raises import raises

from hpcdp.checkpoint import Manager, complete_steps
from hpcdp.comm import thread_comm
from hpcdp.errors import DataError

HOLDER = """
import pathlib, sys, time
from hpcdp.checkpoint.complete_steps import WriterLock
held = WriterLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_second_is_told_who_is_first(tmp_path):
    first = complete_steps.WriterLock(tmp_path)
    with raises(DataError, operation="lock the checkpoints", where=tmp_path / "writer.lock", got=os.getpid()):
        complete_steps.WriterLock(tmp_path)
    first.release()
    first.release()
    complete_steps.WriterLock(tmp_path).release()


def test_on_a_full_disk_it_is_held_but_nobody_says_by_whom(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    first = complete_steps.WriterLock(tmp_path)
    with raises(DataError, operation="lock the checkpoints", where=tmp_path / "writer.lock"):
        complete_steps.WriterLock(tmp_path)
    first.release()


def test_a_job_that_was_killed_holds_nothing(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with raises(DataError, operation="lock the checkpoints", where=tmp_path / "writer.lock", got=holder.pid):
            complete_steps.WriterLock(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        complete_steps.WriterLock(tmp_path).release()


def test_a_child_made_by_fork_does_not_hold_what_was_released(tmp_path):
    held = complete_steps.WriterLock(tmp_path)
    context = multiprocessing.get_context("fork")
    ended = context.Event()
    child = context.Process(target=ended.wait, args=(30,))
    child.start()
    try:
        held.release()
        complete_steps.WriterLock(tmp_path).release()
    finally:
        ended.set()
        child.join()


def test_a_manager_may_claim_its_folder_before_it_saves(tmp_path):
    def one(world):
        with Manager(tmp_path / "a", world) as manager:
            manager.claim()
            manager.claim()
            other = Manager(tmp_path / "a", world)
            with raises(DataError, operation="lock the checkpoints", where=tmp_path / "a/writer.lock"):
                other.claim()
            manager.save(1, {})

    thread_comm.run(2, one)
    complete_steps.WriterLock(tmp_path / "a").release()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'"x"', b"null"])
def test_an_owner_who_does_not_say_who_it_is(content, tmp_path):
    (tmp_path / complete_steps.NAME).write_bytes(content)
    assert complete_steps.owner(tmp_path / complete_steps.NAME) == ""
    assert complete_steps.owner(tmp_path / "nowhere") == ""


def test_the_job_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    held = complete_steps.WriterLock(tmp_path)
    assert json.loads((tmp_path / complete_steps.NAME).read_text())["pid"] == os.getpid()
    assert re.fullmatch(
        r"process \d+ of .+ on .+, job 4711, since \d{4}-.*", complete_steps.owner(tmp_path / complete_steps.NAME)
    )
    held.release()


def test_a_group_that_shares_a_folder_shares_the_lock(tmp_path):
    before = os.umask(0o002)
    try:
        complete_steps.WriterLock(tmp_path).release()
    finally:
        os.umask(before)
    assert (tmp_path / complete_steps.NAME).stat().st_mode & 0o777 == 0o664


def test_a_file_that_cannot_be_made(tmp_path):
    (tmp_path / complete_steps.NAME).mkdir()
    with raises(DataError, operation="lock the checkpoints", where=tmp_path / "writer.lock"):
        complete_steps.WriterLock(tmp_path)


def test_a_file_that_is_removed_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    """As by a run that overwrites the results of another one, at the moment when a third one begins."""
    take, is_removed = complete_steps.WriterLock._take, iter([True] * 3)

    def late(self, path):
        if next(is_removed, False):
            path.unlink()
        take(self, path)

    monkeypatch.setattr(complete_steps.WriterLock, "_take", late)
    held = complete_steps.WriterLock(tmp_path)
    held.require_held()
    with raises(DataError, operation="lock the checkpoints", where=tmp_path / "writer.lock", got=os.getpid()):
        complete_steps.WriterLock(tmp_path)
    held.release()


@pytest.mark.parametrize("instead", ["nothing", "the lock of another job"])
def test_a_lock_that_was_removed_is_no_lock(instead, tmp_path):
    def one(world):
        with Manager(tmp_path, world) as manager:
            manager.save(1, {"a": 1})
            world.comm.barrier()
            if world.rank == 0:
                (tmp_path / complete_steps.NAME).unlink()
            other = None
            if world.rank == 0 and instead != "nothing":
                other = complete_steps.WriterLock(tmp_path)
            world.comm.barrier()
            with raises(DataError, operation="lock the checkpoints", where=tmp_path / "writer.lock"):
                manager.save(2, {"a": 2})
            assert manager.steps() == [1]
            if other is not None:
                other.release()

    thread_comm.run(2, one)
