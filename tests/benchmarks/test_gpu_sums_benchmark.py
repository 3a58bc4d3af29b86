"""The jobs of the benchmark of a GPU: their cases on stand-ins, and how they are started, end and fail."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pairs import in_turn

import bench_gpu as gpu_jobs
import bench_gpu_sums as gpu_sums
from bench_gpu import JOBS, Job, failed, line, run_all
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.world import Gpu


@pytest.fixture
def few(monkeypatch):
    """Turns, steps and numbers, on the one GPU that each rank sees."""
    monkeypatch.setattr(comm_world, "visible", lambda: (Gpu(0, "NVIDIA A", "0000:00:00.0", "a"),))
    for name, value in (("_TURNS", 1), ("_ROUNDS", 2), ("_STEPS", 2), ("_BATCH", 3), ("_WIDTH", 40)):
        monkeypatch.setattr(gpu_sums, name, value)


@pytest.fixture
def one_gpu(few, gpus_on_host):
    return gpus_on_host


def run(job, count=500):
    def rank(world):
        world.device.use()
        return gpu_sums.CASES[job.case](world, count)

    found = thread_comm.run(job.ranks, rank, job.ranks_per_node)[0]
    assert "WRONG" not in line({"name": job.name, **found})
    return found


@pytest.mark.parametrize(
    ("gpus_on_host", "job"),
    in_turn([0, 1], [job for job in JOBS if job.case != "graphs"]),  # in which streams take turns
    indirect=["gpus_on_host"],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_each_job_comes_to_right_results(one_gpu, job):
    found = run(job)
    assert found["wrong"] == 0
    assert (found["share"] is not None) == (job.case in ("shared", "staging"))
    json.dumps(found)
    way = "ALONE" if job.ranks_per_node == 1 else "CUDA_IPC"
    said = {
        "shared": "GB/s of memory", "staging": "GB/s each way", "nccl": "refuses a missing rank",
        "refused": "NCCL refuses, CUDA_IPC is used", "training": way, "codes": "topk",
    }  # fmt: skip
    assert said[job.case] in found["summary"]
    if job.case == "nccl":
        assert "NCCL_ERROR_4" in found["errors"][0] and "given up" in found["errors"][1]


@pytest.mark.filterwarnings("ignore:gradients on GPUs", "error:hybridize")
@pytest.mark.parametrize("job", [job for job in JOBS if job.case == "graphs"], ids=lambda job: job.name)
def test_jobs_of_graphs_come_to_right_results(few, graphs_on_host, monkeypatch, job):
    monkeypatch.setattr("hpcdp.comm.gpu_buckets.transport._nccl_version", lambda: 0)
    found = run(job)
    assert found["wrong"] == 0 and "with overlap" in found["summary"]
    assert graphs_on_host.num_graphs == 2 * job.ranks, "one of each trainer: where there is one bucket none is cut"


@pytest.mark.parametrize("job", [Job("shared", 2), Job("nccl", 1)], ids=lambda job: job.name)
def test_what_is_summed_has_come_to_the_gpu_in_the_first_turn(one_gpu, monkeypatch, job):
    monkeypatch.setattr(gpu_sums, "_slowest", lambda world, turn: turn())
    for order in range(10):
        one_gpu.random.seed(order)
        assert run(job)["wrong"] == 0


def test_other_bits_with_overlap_are_told(one_gpu, monkeypatch):
    make, seeds = gpu_sums.nn.models.mlp, iter(range(9))
    monkeypatch.setattr(gpu_sums.nn.models, "mlp", lambda *args, seed: make(*args, seed=next(seeds)))
    found = thread_comm.run(1, lambda world: gpu_sums.training(world, 80))[0]
    assert found["wrong"] > 0 and "WRONG" in line({"name": "training", **found})


def test_nccl_that_refuses_nothing_is_told(one_gpu, monkeypatch):
    monkeypatch.setattr(gpu_sums.Nccl, "launch", lambda self, calls: None)
    monkeypatch.setattr(gpu_sums.Nccl, "check", lambda self: None)
    assert thread_comm.run(1, lambda world: gpu_sums.nccl(world, 50))[0]["wrong"] >= 2


def test_without_nccl_it_is_skipped(one_gpu, monkeypatch):
    monkeypatch.setattr("hpcdp.comm.gpu_buckets.transport._nccl_version", lambda: 0)
    assert thread_comm.run(1, lambda world: gpu_sums.nccl(world, 50))[0]["summary"] == "skipped: CuPy finds no NCCL"


def test_a_case_on_a_machine_without_a_gpu_is_skipped_with_its_reason(monkeypatch, capsys):
    monkeypatch.setattr(comm_world, "visible", lambda: ())
    monkeypatch.setattr(gpu_sums.comm_module, "init", lambda: thread_comm.run(1, lambda world: world)[0])
    assert gpu_sums.main(["shared", "-m", "4K"]) == 0
    assert capsys.readouterr().out == "skipped: no NVIDIA GPU, or no CuPy\n"


def program(monkeypatch, text):
    """Let each job be this program, whose first argument is the file for its report."""
    monkeypatch.setattr(Job, "command", lambda self, size, report: [sys.executable, "-c", text, str(report)])


def test_what_a_job_writes_is_its_row(monkeypatch):
    program(monkeypatch, """
import json, os, sys
found = {"summary": os.environ.get("HPCDP_RANKS_PER_NODE", "-"), "share": 0.5, "wrong": 0}
json.dump(found, open(sys.argv[1], "w"))
""")  # fmt: skip
    rows = list(run_all([Job("training", 2), Job("training", 4, 2)], "4K", time.monotonic() + 20))
    assert [line(row) for row in rows] == [
        "training, 2 ranks               0.50  -", "training, 4 ranks on 2 nodes    0.50  2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print('hpcdp: no such thing'); print('later'); raise SystemExit(2)", "hpcdp: no such thing"),
        ("raise ValueError('lost')", "ValueError: lost"),
        ("raise SystemExit(3)", "status 3"),
        ("print('skipped: no NVIDIA GPU, or no CuPy')", "skipped: no NVIDIA GPU, or no CuPy"),
    ],
)
def test_a_job_that_fails_is_told_and_the_next_one_runs(monkeypatch, text, why):
    program(monkeypatch, text)
    rows = list(run_all([Job("shared", 1), Job("shared", 2)], "4K", time.monotonic() + 20))
    assert [row["failed"] for row in rows] == [why] * 2 and failed(rows[0])
    assert line(rows[1]) == f"shared, 2 ranks               FAILED: {why}"


ENDS = f"""
import sys, time
sys.path.insert(0, {str(Path(gpu_jobs.__file__).parent)!r})
import bench_gpu as gpu_jobs
gpu_jobs._JOB_S, gpu_jobs._ENDING_S = 1.0, 0.1
gpu_jobs.Job.command = lambda self, size, report: sys.argv[1:]
(row,) = gpu_jobs.run_all([gpu_jobs.Job("shared", 4)], "4K", time.monotonic() + 20)
print(row["failed"])
"""
"""A process of its own, for all that is below it is ended."""


@pytest.mark.parametrize("group", ["of the job", "of its own"])
@pytest.mark.thorough
def test_a_job_that_does_not_end_is_ended_with_all_that_it_has_started(tmp_path, group):
    job = f"""
import os, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    with open({str(tmp_path / "child")!r}, "w") as file:
        file.write(str(child))
elif {group == "of its own"}:  # as some MPI libraries have it
    os.setsid()
signal.pause()
"""
    command = [sys.executable, "-c", ENDS, sys.executable, "-c", job]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "no end after 1 s\n", ended.stderr
    assert not Path("/proc", (tmp_path / "child").read_text()).exists()


def test_no_job_begins_when_its_time_is_over(monkeypatch):
    program(monkeypatch, "")
    assert [row["failed"] for row in run_all(JOBS, "4K", time.monotonic())] == ["not started: no time left"] * len(JOBS)


@pytest.mark.parametrize(("visible", "seen"), [(None, "0"), ("3,5", "3"), ("GPU-8932f937", "GPU-8932f937"), ("", "")])
def test_ranks_that_are_to_share_a_gpu_see_one(monkeypatch, visible, seen):
    """Of several the ranks of a machine take one each."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = {job.case: job.environment().get("CUDA_VISIBLE_DEVICES") for job in JOBS}
    assert told == {case: seen if case in ("shared", "refused") else None for case in gpu_sums.CASES}


@pytest.mark.thorough
def test_ranks_that_mpirun_starts_say_why_they_skip(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (row,) = run_all([Job("shared", 2, 1)], "4K", time.monotonic() + 30)
    assert row["failed"] == "skipped: no NVIDIA GPU, or no CuPy"
