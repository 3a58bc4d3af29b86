"""Programs that are killed while they save: the newest complete checkpoint is one, and the next save cleans up."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import samples
import saving_forever

from hpcdp.checkpoint import Manager, complete_steps
from hpcdp.comm import thread_comm

KILLS_OF_PROCESSES, KILLS_OF_JOBS = (44, 6) if os.environ.get("HPCDP_TEST_THOROUGH") else (12, 2)


def check(path, least):
    """The newest one is complete, and not older than what had been said to be; a further save removes what is torn."""
    left_over = complete_steps.left_over(path)

    def one(world):
        with Manager(path, world, keep=2) as manager:
            restored = manager.restore()
            samples.check(restored.state, restored.step, world.rank, 2, 2)
            manager.save(restored.step + 1, samples.state(restored.step + 1, world))
            return restored.step

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = thread_comm.run(2, one)[0]
    assert step >= least
    assert [str(each.message).partition(":")[0] for each in said] == [str(each) for each in left_over]
    names = {each.name for each in path.iterdir()}
    assert names == {"writer.lock", *(complete_steps.path_of(path, each).name for each in complete_steps.find(path))}
    return len(left_over)


@pytest.mark.slow
@pytest.mark.thorough
def test_processes_that_are_killed(tmp_path):
    context, source = multiprocessing.get_context("forkserver"), random.Random(8)
    context.set_forkserver_preload(["saving_forever", "h5py"])
    complete, torn = context.Value("q", 0, lock=False), 0
    for number in range(KILLS_OF_PROCESSES):
        before = complete.value
        arguments = (tmp_path, number % 2 == 0, number % 3 == 0, complete)
        child = context.Process(target=saving_forever.in_threads, args=arguments, daemon=True)
        child.start()
        deadline = time.monotonic() + 20
        while complete.value in (before, 0) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(source.random() * 0.06)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        torn += check(tmp_path, complete.value)
    assert torn > KILLS_OF_PROCESSES / 10  # it was within saves that they were killed


def ranks_of(path):
    """The processes that save there."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (each / "cmdline").read_bytes().split(b"\0")
            if arguments[1:3] == [saving_forever.__file__.encode(), bytes(path)]:
                yield int(each.name)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS_OF_JOBS))
def test_jobs_of_which_a_rank_is_killed(number, tmp_path):
    path, source = tmp_path / "run", random.Random(number)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, saving_forever.__file__, str(path), "wait" if number % 2 else "behind"]
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", *program]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        try:
            deadline = time.monotonic() + 30
            while len(complete_steps.find(path)) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(source.random() * 0.2)
            ranks = sorted(ranks_of(path))
            assert len(ranks) == 2
            for rank in ranks if number % 3 == 2 else [ranks[number % 3]]:
                os.kill(rank, signal.SIGKILL)
            job.communicate(timeout=30)
            assert job.returncode != 0
        finally:
            job.kill()
    while [*ranks_of(path)] and time.monotonic() < deadline + 30:
        time.sleep(0.01)
    said = [int(each.read_text() or 0) for each in (path.with_suffix(".0"), path.with_suffix(".1"))]
    check(path, max(said))
