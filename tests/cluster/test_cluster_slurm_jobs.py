"""Jobs that `hpcdp slurm` renders, under a real Slurm: stopped, requeued and resumed; by srun and by mpirun; arrays."""

import ctypes
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench_harness.cluster import Cluster
from hpcdp.train.metrics import read_metrics

pytestmark = pytest.mark.cluster

HPCDP = [sys.executable, "-m", "hpcdp.cli"]
PROFILES = {
    "srun": 'mpi_type = "pmix"\n',
    "mpirun": 'launcher = "mpirun"\n',
}
COMMON = """
time = "10"
[env]
OMPI_MCA_pml = "ob1"
OMPI_MCA_btl = "self,sm,tcp"
OMPI_MCA_osc = "^ucx"
OMPI_MCA_btl_tcp_if_include = "eth0"
OMPI_MCA_mpi_yield_when_idle = "1"
OMPI_ALLOW_RUN_AS_ROOT = "1"
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = "1"
PRTE_ALLOW_RUN_AS_ROOT = "1"
PRTE_ALLOW_RUN_AS_ROOT_CONFIRM = "1"
"""
TRAIN = ["hpcdp", "train", "mlp", "--data", "digits", "--checkpoint-every", "epoch", "--epochs"]


@pytest.fixture(scope="module")
def slurm(hosts_possible: None) -> Iterator[Cluster]:
    for tool in ("munged", "slurmctld", "slurmd", "srun"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: slurm-wlm munge libpmix2 libpmix-dev)")
    try:
        ctypes.CDLL("libpmix.so")
    except OSError:
        pytest.skip("Slurm finds no libpmix.so (Debian: libpmix2 libpmix-dev)")
    if (Path(sys.executable).parent / "mpiexec.hydra").exists():
        pytest.skip("MPICH knows no PMIx")
    with Cluster(2) as cluster:
        prepare(cluster)
        yield cluster


def prepare(cluster: Cluster) -> None:
    """Start Slurm on ``cluster``, whose jobs find this ``hpcdp``."""
    cluster.slurm()
    command = cluster.folder / "bin" / "hpcdp"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hpcdp.cli "$@"\n')
    command.chmod(0o755)


class Site:
    """A folder on the cluster with a profile, where jobs are submitted."""

    _count = itertools.count()

    def __init__(self, cluster: Cluster, launcher: str, further: str = "") -> None:
        self.cluster = cluster
        self.folder = cluster.folder / f"{launcher}-{next(self._count)}"
        self.folder.mkdir()
        path = f"{cluster.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        (self.folder / "hpcdp-site.toml").write_text(f'{PROFILES[launcher]}{further}{COMMON}PATH = "{path}"\n')

    def hpcdp(self, *arguments: str) -> str:
        command = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), *HPCDP, *arguments]
        done = self.cluster.on(1, command, 180)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *arguments: str) -> str:
        return self.hpcdp("slurm", "submit", *arguments).strip()

    def slurm(self, *command: str) -> str:
        done = self.cluster.on(1, list(command))
        return done.stdout + done.stderr

    def show(self, job: str) -> str:
        return self.slurm("scontrol", "--oneliner", "show", "job", job)

    def until(self, condition: Callable[[], object], what: str, limit_s: float = 180) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > deadline:
                logs = (path.read_text(errors="replace")[-3000:] for path in self.folder.glob("runs/*.out"))
                pytest.fail("\n".join([f"waited in vain for {what}", self.slurm("squeue"), *logs]))
            time.sleep(0.3)

    def end(self, job: str, limit_s: float = 240) -> tuple[str, int]:
        """State and exit status of a job that has left the queue."""
        self.until(lambda: not re.search("JobState=(PENDING|RUNNING|COMPLETING)", self.show(job)), job, limit_s)
        found = re.search(r"JobState=(\w+).* ExitCode=(\d+):", self.show(job))
        assert found, self.show(job)
        return found[1], int(found[2])


def losses(folder: Path) -> list[tuple[int, float]]:
    return [
        (line["step"], line["test_loss"]) for line in read_metrics(folder / "metrics.jsonl") if line["kind"] == "epoch"
    ]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_job_that_is_stopped_requeued_and_resumed_is_one_run(slurm: Cluster, launcher: str) -> None:
    site = Site(slurm, launcher)
    shape = ["--nodes", "2", "--ranks-per-node", "1", "--", *TRAIN, "20"]
    whole = site.submit("train", *shape, "--run-dir", "runs/whole")
    assert site.end(whole) == ("COMPLETED", 0)

    cut = site.submit("train", *shape, "--run-dir", "runs/cut")
    metrics = site.folder / "runs" / "cut" / "metrics.jsonl"
    site.until(lambda: metrics.exists() and metrics.read_text().count('"epoch"') > 2, "the first epochs")
    site.slurm("scancel", "--batch", "--signal=USR1", cut)
    site.until(lambda: "Restarts=1" in site.show(cut), "the requeue")
    assert site.end(cut) == ("COMPLETED", 0)

    log = (site.folder / "runs" / f"train-{cut}.out").read_text()
    assert "start 1, on" in log and "start 2, on" in log
    assert f"job {cut} is requeued" in log
    assert losses(site.folder / "runs" / "cut") == losses(site.folder / "runs" / "whole")


def test_usr1_that_comes_while_ranks_start_ends_nobody(slurm: Cluster) -> None:
    site = Site(slurm, "srun")
    job = site.submit("train", "--ranks-per-node", "2", "--", *TRAIN, "40", "--run-dir", "runs/a")
    site.until(lambda: "JobState=RUNNING" in site.show(job), "the start")
    site.slurm("scancel", "--batch", "--signal=USR1", job)
    site.until(lambda: "Restarts=1" in site.show(job), "the requeue")
    assert site.end(job) == ("COMPLETED", 0)
    assert "is requeued" in (site.folder / "runs" / f"train-{job}.out").read_text()


def test_slurm_sends_the_signal_before_the_time_is_up(slurm: Cluster) -> None:
    """Half a minute before the end of a minute's limit, or up to a minute earlier: soon after each start."""
    site = Site(slurm, "srun")
    job = site.submit("train", "--time", "1", "--", *TRAIN, "100000", "--run-dir", "runs/a")
    site.until(lambda: "Restarts=1" in site.show(job), "the requeue", 240)
    site.hpcdp("slurm", "cancel", job)
    assert site.end(job)[0] == "CANCELLED"


def started(site: Site, *program: str) -> str:
    """The number of a job that trains for long, and has saved a few epochs."""
    job = site.submit("train", "--nodes", "2", "--", *TRAIN, "100000", *program)
    metrics = site.folder / "runs" / f"train-{job}" / "metrics.jsonl"
    site.until(lambda: metrics.exists() and metrics.read_text().count('"epoch"') > 2, "the first epochs")
    return job


def test_a_job_that_is_canceled_does_not_come_back(slurm: Cluster) -> None:
    site = Site(slurm, "srun")
    job = started(site)
    assert site.hpcdp("slurm", "cancel", job) == ""
    assert site.end(job)[0] == "CANCELLED"
    assert "Restarts=0" in site.show(job)


def test_a_job_that_was_saved_goes_on_by_the_command_that_is_named(slurm: Cluster) -> None:
    site = Site(slurm, "srun")
    job = started(site)
    told = site.hpcdp("slurm", "cancel", "--save", job)
    before, _, again = told.strip().partition("resume with: ")
    assert before == f"job {job} is not requeued; " and again.endswith(f" runs/train-{job}"), told
    assert site.end(job) == ("FAILED", 75), site.show(job)
    assert "Restarts=0" in site.show(job)
    assert "is requeued" not in (site.folder / "runs" / f"train-{job}.out").read_text()

    run = site.folder / "runs" / f"train-{job}"
    saved = len(losses(run))
    other = site.slurm("sh", "-c", again).split()[-1]
    site.until(lambda: len(losses(run)) > saved, "further epochs")
    site.hpcdp("slurm", "cancel", other)
    assert f"resuming runs/train-{job}\n" in (site.folder / "runs" / f"train-{other}.out").read_text()
    assert not (site.folder / "runs" / f"train-{other}").exists()


def test_a_job_whose_rank_is_killed_comes_back_as_often_as_it_may(slurm: Cluster) -> None:
    site = Site(slurm, "srun")
    job = site.submit("train", "--nodes", "2", "--requeues", "1", "--", *TRAIN, "100000")
    metrics = site.folder / "runs" / f"train-{job}" / "metrics.jsonl"
    for start in (0, 1):
        before = metrics.read_text().count('"epoch"') if metrics.exists() else 0
        site.until(lambda n=before: metrics.exists() and metrics.read_text().count('"epoch"') > n + 6, "further epochs")
        assert f"Restarts={start} " in site.show(job)
        assert slurm.on(2, ["pkill", "-KILL", "-f", "hpcdp.cli train"]).returncode == 0
        if start == 0:
            site.until(lambda: "Restarts=1" in site.show(job), "the requeue")
    assert site.end(job) == ("FAILED", 137)
    log = (site.folder / "runs" / f"train-{job}.out").read_text()
    assert log.count(f"hpcdp: job {job} has failed with status 137: task 1 on node2: Killed\n") == 2
    assert log.count("is requeued") == 1
    assert f"job {job} is not requeued: it was requeued 1 times after failures; resume with: cd " in log


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_job_that_has_lost_a_node_goes_on_on_others(slurm: Cluster, launcher: str) -> None:
    with Cluster(3) as cluster:
        prepare(cluster)
        site = Site(cluster, launcher)
        job = started(site)
        run = site.folder / "runs" / f"train-{job}"
        site.until(lambda: any(run.glob("checkpoints/step-*[0-9]/manifest.json")), "a checkpoint")
        cluster.kill(2)
        site.until(lambda: "NodeList=node[1,3]" in site.show(job), "the second start")
        log = (site.folder / "runs" / f"train-{job}.out").read_text()
        assert "; no answer from node2\n" in log and f"job {job} waits until Slurm reports that node2 is down\n" in log
        metrics = run / "metrics.jsonl"
        done = metrics.read_text().count('"epoch"')
        site.until(lambda: metrics.read_text().count('"epoch"') > done + 3, "further epochs")


def test_a_sweep_of_three(slurm: Cluster) -> None:
    site = Site(slurm, "srun")
    (site.folder / "lines").write_text("--lr 0.1\n--lr 0.02 --seed 3\n--epochs 1\n")
    program = ["hpcdp", "train", "mlp", "--data", "digits", "--epochs", "2"]
    job = site.submit("sweep", "--settings", "lines", "--at-once", "2", "--", *program)
    site.until(lambda: not site.slurm("squeue", "--noheader").strip(), "the end of all", 240)
    runs = {path.name: (path / "config.toml").read_text() for path in (site.folder / "runs" / f"sweep-{job}").iterdir()}
    assert set(runs) == {"1", "2", "3"}
    assert "lr = 0.1\n" in runs["1"] and "lr = 0.02\n" in runs["2"] and "seed = 3\n" in runs["2"]
    for task in runs:
        assert site.end(f"{job}_{task}") == ("COMPLETED", 0)
        assert (
            (site.folder / "runs" / f"sweep-{job}_{task}.out")
            .read_text()
            .startswith(f"hpcdp: job {job}_{task}, start 1")
        )


def test_values_arrive_as_they_were_written(slurm: Cluster) -> None:
    site = Site(slurm, "srun", "sbatch = ['--comment=a \"b\" c\\d # e']\n")
    show = "import os, sys; print(sys.argv[1:], os.environ['SLURM_CPUS_PER_TASK'], os.environ['OMP_NUM_THREADS'])"
    (site.folder / "show.py").write_text(show)
    program = ["python", "show.py", "it's", "$HOME", 'a "b"', "back\\slash"]
    job = site.submit("train", "--cpus-per-task", "2", "--name", "a.b", "--", *program)
    assert site.end(job) == ("COMPLETED", 0)
    log = (site.folder / "runs" / f"a.b-{job}.out").read_text()
    assert f"""{["it's", "$HOME", 'a "b"', "back" + chr(92) + "slash"]} 2 2\n""" in log
    assert 'Comment=a "b" c\\d # e ' in site.show(job)


def test_a_benchmark_and_its_status(slurm: Cluster) -> None:
    site = Site(slurm, "srun")
    job = site.submit("benchmark", "--nodes", "2", "--", "hpcdp", "bench", "allreduce", "-m", "4:1K", "-i", "3")
    assert site.end(job) == ("COMPLETED", 0)
    assert "2 ranks" in (site.folder / "runs" / f"benchmark-{job}.out").read_text()
    assert re.search(rf"{job} +COMPLETED .* exit 0:0 +benchmark", site.hpcdp("slurm", "status", job))


def test_doctor_in_a_job(slurm: Cluster) -> None:
    settings = re.findall(r'^(\w+) = "(.*)"$', COMMON, re.MULTILINE)[1:]
    command = ["env", *(f"{name}={value}" for name, value in settings), "salloc", "--nodes=2", "--ntasks-per-node=1"]
    done = slurm.on(1, [*command, *HPCDP, "doctor", "--slurm"], 180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "two tasks: one world of 2 on 2 nodes, by srun --mpi=pmix" in done.stdout
    assert re.search(r"warning +MPI default: none: a plain srun starts N worlds of one", done.stdout)
    outside = slurm.on(1, [*HPCDP, "doctor", "--slurm"], 60)
    assert outside.returncode == 0 and "salloc --ntasks=2 hpcdp doctor --slurm" in outside.stdout


PLACES = "import hpcdp; w = hpcdp.init(); print('rank', w.rank, 'node', w.node)"


def test_ranks_are_spread_evenly_also_where_nodes_differ(slurm: Cluster) -> None:
    launch = [*HPCDP, "launch", "--launcher", "slurm", "-n", "5", "--", sys.executable, "-c", PLACES]
    done = slurm.on(1, ["salloc", "--nodes=2", "--ntasks-per-node=3", *launch], 240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} node {rank // 3}" for rank in range(5)]


WORLD = "import hpcdp; w = hpcdp.init(); print('rank', w.rank, w.size, w.num_nodes, w.whole and w.whole.num_servers)"


@pytest.mark.parametrize("servers", [[], ["-s", "1"]])
def test_the_slurm_launcher_with_and_without_a_job(slurm: Cluster, servers: list[str]) -> None:
    program = ["--launcher", "slurm", "-n", "3", *servers, "--ranks-per-node", "2", "--tag-output"]
    expected = [f"rank {rank} 3 2 {1 if servers else None}" for rank in range(3)]
    for around in ([], ["salloc", "--nodes=2", "--ntasks-per-node=2"]):
        done = slurm.on(1, [*around, *HPCDP, "launch", *program, "--", sys.executable, "-c", WORLD], 240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(re.sub(r"^\d+: ", "", line) for line in done.stdout.splitlines()) == expected


HOSTS = "import hpcdp, socket; w = hpcdp.init(); print('rank', w.rank, w.size, socket.gethostname())"


@pytest.mark.parametrize("servers", [[], ["-s", "1"]])
def test_the_slurm_launcher_keeps_to_the_hosts_and_slots_that_are_named(slurm: Cluster, servers: list[str]) -> None:
    program = ["--launcher", "slurm", "-n", "3", *servers, "-H", "node2:1,node1:3", "--", sys.executable, "-c", HOSTS]
    for around in ([], ["salloc", "--nodes=2", "--ntasks-per-node=3"]):
        done = slurm.on(1, [*around, *HPCDP, "launch", *program], 240)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(done.stdout.splitlines()) == ["rank 0 3 node2", "rank 1 3 node1", "rank 2 3 node1"]


def test_without_n_a_job_has_the_ranks_of_its_allocation(slurm: Cluster) -> None:
    launch = [*HPCDP, "launch", "--launcher", "slurm", "--", sys.executable, "-c", WORLD]
    done = slurm.on(1, ["salloc", "--nodes=2", "--ntasks-per-node=2", *launch], 240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} 4 2 None" for rank in range(4)]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["-n", "3"], "launch: expected at most 2 in job "),
        (["-n", "2", "-H", "node2", "--launcher", "mpi"], "launch -H: expected at most 1 on node2 in job "),
        (["-n", "1", "-H", "node3", "--launcher", "mpi"], "launch -H: expected hosts of job "),
    ],
)
def test_what_a_job_has_no_room_for_is_refused_in_a_line(slurm: Cluster, asked: list[str], says: str) -> None:
    around = ["salloc", "-Q", "--nodes=2", "--ntasks-per-node=1"]
    done = slurm.on(1, [*around, *HPCDP, "launch", *asked, "--", "hostname"], 60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stdout + done.stderr
    assert says in done.stderr, done.stderr


def test_info_tells_the_job(slurm: Cluster) -> None:
    done = slurm.on(1, ["salloc", "--nodes=2", "--ntasks-per-node=2", *HPCDP, "info", "--json"], 60)
    facts = json.loads(done.stdout)
    assert re.fullmatch(r"job \d+, 4 tasks on 2 hosts \(node1:2, node2:2\)", facts["Slurm"])


FAILS = """
import os, signal, sys, time
import hpcdp
world = hpcdp.init()
world.barrier()
if world.rank == 1:
    {}
time.sleep(100)
"""


@pytest.mark.parametrize(("fault", "status"), [("os._exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_a_rank_that_fails_ends_the_others(slurm: Cluster, fault: str, status: int) -> None:
    program = [sys.executable, "-c", FAILS.format(fault)]
    began = time.monotonic()
    done = slurm.on(
        1, [*HPCDP, "launch", "--launcher", "slurm", "-n", "4", "--ranks-per-node", "2", "--", *program], 240
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert time.monotonic() - began < 60
    for host in (1, 2):
        assert slurm.on(host, ["pgrep", "-fc", "time.sleep(100)"]).stdout == "0\n"
