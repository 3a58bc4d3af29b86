"""Training with real ranks of which one fails: what the others do, what they say, and after what time."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import faulty_rank
import numpy as np
import pytest

from hpcdp.comm import thread_comm

pytestmark = pytest.mark.slow

STARTED_S = 60
"""A busy machine takes its time until all ranks train."""


class Job:
    """Ranks of `faulty_rank` under the launcher; all its processes carry a mark in their environment."""

    def __init__(self, folder, scenario, ranks, per_node=None, limits=(0, 0), **options):
        self.folder, self.ranks = folder, ranks
        self.mark = f"HPCDP_TEST_JOB={uuid.uuid4()}"
        mine = ("OMPI_", "PMIX_", "PMI_", "HPCDP_RANKS", "HPCDP_TEST_REPORT")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        environment |= dict([self.mark.split("=")])
        environment |= {"HPCDP_STALL_S": str(limits[0]), "HPCDP_TIMEOUT_S": str(limits[1])}
        if per_node is not None:
            environment["HPCDP_RANKS_PER_NODE"] = str(per_node)
        command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", sys.executable]
        command += [faulty_rank.__file__, scenario, str(folder), json.dumps(options)]
        with (folder / "said").open("w") as said:
            self.launcher = subprocess.Popen(
                command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.launcher.terminate()  # it clears away what a job leaves behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(20)
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()

    @property
    def said(self):
        return (self.folder / "said").read_text(errors="replace")

    def pid(self, rank):
        return int((self.folder / f"pid-{rank}").read_text())

    def processes(self):
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def shared_files(self):
        """Files of memory that the job's processes have mapped and that have a name to be left behind with."""
        found = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found.update(re.findall(r" (/dev/shm/\S+)", Path(f"/proc/{pid}/maps").read_text()))
        return {name for name in found if Path(name).exists()}

    def wait_for(self, condition, limit_s):
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain; the job said:\n{self.said}"
            time.sleep(0.02)

    def trains(self, step=5):
        """Wait until every rank has made some steps; files appear empty."""
        paths = [self.folder / f"step-{rank}" for rank in range(self.ranks)]
        self.wait_for(
            lambda: all(path.exists() and (path.read_text() or "0") >= str(step) for path in paths), STARTED_S
        )

    def fault(self):
        """When a rank's own fault began, by `time.time`."""
        self.wait_for(lambda: (self.folder / "fault").exists(), STARTED_S)
        return float((self.folder / "fault").read_text())

    def ends(self, within_s, since):
        """The exit status, once the job has ended and left no process behind, in time."""
        try:
            self.launcher.wait(STARTED_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it has not ended; it said:\n{self.said}")
        took = time.time() - since
        assert took < within_s, f"ended after {took:.1f} s; it said:\n{self.said}"
        assert self.processes() == []
        return self.launcher.returncode

    def results(self):
        """What the scenario returned on every rank of a job in which nobody is to fail."""
        assert self.ends(STARTED_S, time.time()) == 0, self.said
        return [json.loads((self.folder / f"result-{rank}").read_text()) for rank in range(self.ranks)]


OVERLAP = {"overlap": True, "owner": "rank"}


@pytest.mark.thorough  # test_world.py has a rank that fails alone
@pytest.mark.parametrize(
    ("scenario", "per_node", "options"),
    [
        ("raises_in_backward", 1, OVERLAP),
        ("raises_between_steps", None, {"overlap": False, "owner": "shard"}),
    ],
)
def test_a_rank_that_raises_ends_all(scenario, per_node, options, tmp_path):
    with Job(tmp_path, scenario, 2, per_node, **options) as job:
        assert job.ends(10, since=job.fault()) not in (0, None)
        assert "rank 1 of 2 failed:\nTraceback" in job.said
        assert 'raise ValueError("the fault of this test")' in job.said
        assert "rank 0 of 2 failed" not in job.said


@pytest.mark.parametrize(
    ("overlap", "ranks", "per_node", "owner"),
    [(True, 3, 2, "shard"), pytest.param(False, 2, None, "rank", marks=pytest.mark.thorough)],
)
def test_a_rank_that_is_killed_ends_all_and_leaves_nothing(overlap, ranks, per_node, owner, tmp_path):
    with Job(tmp_path, "fine", ranks, per_node, overlap=overlap, owner=owner) as job:
        job.trains()
        mapped = job.shared_files()
        pid, killed = job.pid(1), time.time()
        os.kill(pid, signal.SIGKILL)
        assert job.ends(10, since=killed) not in (0, None)
        openmpi = rf"rank 1 with PID {pid} .*exited\s+on\s+signal 9"
        assert re.search(rf"{openmpi}|rank 1 \(pid {pid}\) was killed by SIGKILL", job.said)
        assert [name for name in mapped if Path(name).exists()] == []


BUCKET = r"update of bucket \d \(\d\.\w+.*; \d+ bytes\)"  # whichever this rank reads first


@pytest.mark.thorough
def test_a_rank_that_is_stopped_is_reported_and_the_job_goes_on_when_it_does(tmp_path):
    with Job(tmp_path, "stops_in_an_update", 2, limits=(0.7, 40), owner="shard") as job:
        since = 0.0
        for waits_in in (BUCKET, "barrier of the node's ranks"):  # with overlap, and without
            job.wait_for(lambda since=since: job.fault() > since, STARTED_S)
            since, pid = job.fault(), job.pid(1)
            missing = rf"rank 1 \(host {socket.gethostname()}, pid {pid}\) is stopped"
            first = rf"rank 0 of 2: {waits_in} has not ended in 0\.7 s: {missing}\n"
            job.wait_for(lambda first=first: re.search(first, job.said), 6)
            os.kill(pid, signal.SIGCONT)
            assert time.time() - since < 8
            ended = rf"rank 0 of 2: {waits_in} has ended after \d.* s, and the job goes on"
            job.wait_for(lambda ended=ended: re.search(ended, job.said), 6)
            assert len(re.findall(first, job.said)) == 1, job.said
        first_undisturbed, first_disturbed, undisturbed, disturbed = job.results()[0]
        assert first_undisturbed == first_disturbed
        assert undisturbed == disturbed
        told = r"is stopped\n.*the job goes on, until 40 s have passed.*stacks:\n.*[Tt]hread"
        assert len(re.findall(told, job.said)) == 2, job.said  # a slow machine may tell of more
        assert "in train_for_ever" in job.said


@pytest.mark.thorough  # who is missing: test_watchdog; that such a job ends: the one below whose trainer some lack
@pytest.mark.parametrize(("ranks", "per_node", "overlap"), [(3, 1, True), (3, None, False), (4, 2, False)])
def test_ranks_that_loop_or_stay_stopped_are_named_and_the_job_aborted(ranks, per_node, overlap, tmp_path):
    with Job(tmp_path, "loops_and_stops", ranks, per_node, (0.7, 2), overlap=overlap, owner="rank") as job:
        since = job.fault()
        assert job.ends(2 + 10, since) not in (0, None)
        one, last = (rf"rank {rank} \(host \S+, pid {job.pid(rank)}\)" for rank in (1, ranks - 1))
        missing = f"{one} has not come, {last} is stopped"
        said = rf"rank (\d) of {ranks}: .* has not ended in {{}} s: {missing}\n  the job {{}}"
        waiting = {*range(ranks)} - {1, ranks - 1}
        goes_on = re.findall(said.format(0.7, "goes on, until 2 s have passed"), job.said)
        assert len(goes_on) == 1 and int(goes_on[0]) in waiting, job.said
        ends = re.findall(said.format(2, "ends now"), job.said)
        assert ends and {*map(int, ends)} <= waiting, job.said  # the first one ends the others
        assert "in loops_for_ever" in job.said
        if per_node is not None:
            assert re.search(rf"rank 1 of {ranks}: rank \d \(host .*\) waits in .*; this rank is here:\n", job.said)


@pytest.mark.thorough  # ranks of test_world do so in a barrier, and threads of test_watchdog on several nodes
@pytest.mark.parametrize("per_node", [None, 1])
def test_a_rank_that_has_ended_its_program_is_named_and_unharmed(per_node, tmp_path):
    """It waits in MPI_Finalize; who waits for it in a collective waits in vain, and needs no limit to know."""
    with Job(tmp_path, "ends_early", 2, per_node, limits=(0.7, 30)) as job:
        assert job.ends(5 + 10, since=job.fault()) not in (0, None)
        call, left = "rank 0 of 2: allreduce of 4 float64", r"rank 1 \(host .*\) has left the program"
        assert len(re.findall(f"{call} has not ended in 0.7 s: {left}\n", job.said)) == 1, job.said
        assert len(re.findall(f"{call} cannot end: {left}; the job ends now\n", job.said)) == 1, job.said
        assert (tmp_path / "result-1").exists()
        assert "Real-time signal" not in job.said


@pytest.mark.thorough  # test_watchdog.py reports late ranks, of threads
@pytest.mark.parametrize(
    ("ranks", "per_node"),
    [(2, None), (2, 1), (3, 2)],
)
def test_a_job_in_which_a_rank_comes_late_ends_well_and_sees_the_last_updates_through(ranks, per_node, tmp_path):
    with Job(tmp_path, "comes_late", ranks, per_node, limits=(0.7, 40)) as job:
        assert job.results() == [[[1.0] * 4, rank == 0] for rank in range(ranks)]
        assert job.said.count(f"rank 0 of {ranks}: allreduce of 4 float64 has not ended") == 2
        assert "in dawdles" in job.said


def results_of(scenario, ranks_are, folder):
    """What a scenario in which nobody is to fail returns on three ranks, two of one node."""
    if ranks_are == "threads":
        return thread_comm.run(3, lambda world: getattr(faulty_rank, scenario)(world, {}), 2)
    with Job(folder, scenario, 3, 2) as job:
        return job.results()


THREADS_OR_PROCESSES = pytest.mark.parametrize(
    "ranks_are", ["threads", pytest.param("processes", marks=pytest.mark.thorough)]
)


@THREADS_OR_PROCESSES
def test_ranks_whose_models_differ_are_told_alike(ranks_are, tmp_path):
    everyone = results_of("other_models", ranks_are, tmp_path)
    found = {name: {rank[name][0] for rank in everyone} for name in everyone[0]}
    assert [len(messages) for messages in found.values()] == [1] * 4
    said = {name: messages.pop() for name, messages in found.items()}
    first = "expected 0.weight (6, 400) float32 as on rank 0, got 0.weight {} on rank 2"
    assert first.format("(6, 401) float32") in said["shapes"]
    assert first.format("(6, 400) float64") in said["dtypes"]
    assert re.search(r"expected 0\.weight .* as on rank 0, got 3\.bias .* on rank 2", said["order"])
    assert re.search(r"expected 3\.weight .*3.* as on rank 0, got 3\.weight .*400, 400.* on rank 2", said["number"])
    assert max(took for rank in everyone for _, took in rank.values()) < 30


@pytest.mark.thorough  # test_watchdog.py names those that have not come
def test_a_trainer_that_some_ranks_do_not_make_is_a_hang_that_names_them(tmp_path):
    with Job(tmp_path, "trainer_on_some_ranks", 2, limits=(0.5, 1.5)) as job:
        since = job.fault()
        assert job.ends(1.5 + 10, since) not in (0, None)
        assert re.search(rf"rank 0 of 2: .* in 0\.5 s: rank 1 \(host .*, pid {job.pid(1)}\) has not come", job.said)
        assert "in trainer_of" in job.said  # where rank 0 waits
        assert "in trainer_on_some_ranks" in job.said  # where rank 1 is instead


@THREADS_OR_PROCESSES
def test_fewer_batches_on_one_rank_give_the_gradient_of_the_global_batch(ranks_are, tmp_path):
    everyone = results_of("fewer_batches", ranks_are, tmp_path)

    def alone(world):
        net, params = faulty_rank.model()
        trainer = faulty_rank.trainer_of(params, world)
        for step in range(6):
            parts = [faulty_rank.batch(step, rank, faulty_rank.counts_of(step, rank)) for rank in range(3)]
            x, y = (np.concatenate(each) for each in zip(*parts, strict=True))
            faulty_rank.backward(net, x, y)
            trainer.step(len(y))
        return faulty_rank.values(params)

    wanted = thread_comm.run(1, alone)[0]
    totals = [sum(faulty_rank.counts_of(step, rank) for rank in range(3)) for step in range(6)]
    assert all(each[0] == totals for rank in everyone for each in rank.values())
    (bits,) = {each[1] for rank in everyone for each in rank.values()}  # either owner, overlap or not, on every rank
    np.testing.assert_allclose(np.frombuffer(bytes.fromhex(bits), "f4"), wanted, rtol=1e-3, atol=1e-5)


@THREADS_OR_PROCESSES
def test_a_nan_on_one_rank_is_treated_alike_on_all(ranks_are, tmp_path):
    everyone = results_of("not_finite", ranks_are, tmp_path)
    wanted = {
        # After the first NaN nothing is finite any more.
        "count": {"raised": [], "untouched": [2, 3, 4], "counted": 4, "updates": 5, "finite": False},
        "skip": {"raised": [], "untouched": [1, 3], "counted": 2, "updates": 3, "finite": True},
        "raise": {"raised": [1, 3], "untouched": [1, 3], "counted": 2, "updates": 3, "finite": True},
    }
    for policy, expected in wanted.items():
        for overlap in (False, True):
            found = [rank[f"{policy} {overlap}"] for rank in everyone]
            if policy == "count":  # bits of NaN may or may not change
                found = [each | {"untouched": expected["untouched"]} for each in found]
            assert found == [expected] * 3, policy


@pytest.mark.thorough  # tests/launch/test_local.py sends it to a job, and others end overlapped steps
def test_ctrl_c_ends_overlapped_steps_at_once(tmp_path):
    with Job(tmp_path, "fine", 2, 1, overlap=True, owner="rank") as job:
        job.trains()
        interrupted = time.time()
        job.launcher.send_signal(signal.SIGINT)
        assert job.ends(5, since=interrupted) == 128 + signal.SIGINT
