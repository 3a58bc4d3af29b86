"""Training in batch jobs of Slurm on four hosts, and what Slurm says of jobs that fail."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_on_hosts import hpcdp, numbers, wait_for

from bench_harness.cluster import Cluster
from hpcdp.train.metrics import read_metrics

pytestmark = pytest.mark.cluster

# What Open MPI's wheel needs on these hosts: they have one network, root is the user, and they share few cores.
SETTINGS = """
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 PMIX_MCA_psec=native OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp
export OMPI_MCA_btl_tcp_if_include=eth0 OMPI_MCA_osc=^ucx OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1
export PRTE_MCA_hwloc_default_binding_policy=none
"""

LAUNCHERS = {"mpirun": f"{Path(sys.executable).parent}/mpirun", "srun": "srun --mpi=pmix"}


@pytest.fixture(scope="module")
def slurm(slurm_possible: None) -> Iterator[Cluster]:
    with Cluster(4) as cluster:
        cluster.slurm()
        yield cluster


def submitted(cluster: Cluster, options: str, body: str, limit_s: float = 180) -> tuple[str, str]:
    """The number of a job that has ended, and what it has written."""
    script, output = cluster.folder / "job.sh", cluster.folder / "job-%j.txt"
    script.write_text(f"#!/bin/bash\n#SBATCH {options} --output={output}\n{SETTINGS}\n{body}\n")
    done = cluster.on(1, ["sbatch", "--parsable", str(script)])
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    wait_for(lambda: cluster.on(1, ["squeue", "-h", "-j", job]).stdout == "", f"the end of job {job}", limit_s)
    return job, Path(str(output).replace("%j", job)).read_text()


def state(cluster: Cluster, job: str) -> tuple[str, str]:
    """State and exit status of a job, as Slurm has them."""
    shown = cluster.on(1, ["scontrol", "-o", "show", "job", job]).stdout
    found = re.search(r" JobState=(\w+) .* ExitCode=([\d:]+) ", shown)
    assert found, shown
    return found[1], found[2]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("nodes", "tasks_per_node"), [(2, 2), (4, 1)])
def test_the_digits_are_trained(slurm: Cluster, launcher: str, nodes: int, tasks_per_node: int) -> None:
    folder = slurm.folder / f"{launcher}-{nodes}"
    train = hpcdp("train", "lenet", "--data", "digits", "--epochs", "2", "--batch-size", "64", "--run-dir", folder)
    options = f"--nodes={nodes} --ntasks-per-node={tasks_per_node}"
    job, shown = submitted(slurm, options, f"{LAUNCHERS[launcher]} {' '.join(train)}")
    assert state(slurm, job) == ("COMPLETED", "0:0"), shown
    assert "samples/s over 4 ranks" in shown
    epochs = [record for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "epoch"]
    assert [record["samples"] for record in epochs] == [1438] * 2
    assert epochs[-1]["test_accuracy"] > 0.8


def test_mpirun_and_srun_and_ssh_compute_the_same(slurm: Cluster) -> None:
    train = ("train", "mlp", "--data", "digits", "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "96")
    curves = []
    for launcher, command in LAUNCHERS.items():
        folder = slurm.folder / f"same-{launcher}"
        run = " ".join(hpcdp(*train, "--run-dir", folder))
        job, shown = submitted(slurm, "--nodes=2 --ntasks-per-node=2", f"{command} {run}")
        assert state(slurm, job)[0] == "COMPLETED", shown
        curves.append(numbers(folder))
    folder = slurm.folder / "same-ssh"
    assert slurm.mpirun([2, 2, 0, 0], hpcdp(*train, "--run-dir", folder)).returncode == 0
    assert curves == [numbers(folder)] * 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_fails_is_the_jobs_failure(slurm: Cluster, launcher: str) -> None:
    program = "import hpcdp; world = hpcdp.init(); assert world.rank != 2; world.barrier()"
    (slurm.folder / "fails.py").write_text(program)
    run = f"{LAUNCHERS[launcher]} {sys.executable} {slurm.folder}/fails.py"
    job, shown = submitted(slurm, "--nodes=3 --ntasks-per-node=1", f"{run}\nexit $?")
    found, status = state(slurm, job)
    assert found == "FAILED", shown
    assert status != "0:0"
    assert "rank 2 of 3 failed" in shown
    for host in (1, 2, 3):
        assert slurm.on(host, ["pgrep", "-fc", "fails.py"]).stdout == "0\n"


def test_a_wrong_setting_is_a_line_of_the_output(slurm: Cluster) -> None:
    run = " ".join(hpcdp("train", "mlp", "--lr", "fast"))
    job, shown = submitted(slurm, "--nodes=2 --ntasks-per-node=1", f"srun --mpi=pmix {run}")
    assert state(slurm, job) == ("FAILED", "2:0")
    assert "Traceback" not in shown
    assert "hpcdp: setting lr: expected a number, got 'fast'" in shown.splitlines()


UP = "import time, hpcdp; print('up', hpcdp.init().rank, flush=True); time.sleep(100)"


def test_a_job_that_outlives_a_lost_host_is_no_success(slurm: Cluster) -> None:
    """The last one here: node4 stays lost. With --no-kill Slurm leaves a job alone that has lost it."""
    script, output = slurm.folder / "lost.sh", slurm.folder / "lost.txt"
    launch = [*hpcdp("launch", "-n", "2", "--"), sys.executable, "-c", f'"{UP}"']
    options = "--nodes=2 --ntasks-per-node=1 --nodelist=node[1,4] --no-kill --no-requeue"
    body = f"{' '.join(launch)}\necho status $?\n"
    script.write_text(f"#!/bin/bash\n#SBATCH {options} --output={output}\n{SETTINGS}\n{body}")
    assert slurm.on(1, ["sbatch", str(script)]).returncode == 0
    wait_for(lambda: output.exists() and output.read_text().count("up") == 2, "both ranks", 60)
    slurm.crash(4)
    wait_for(lambda: "status" in output.read_text(), "the end of the job", 120)
    assert "hpcdp launch: Slurm has lost node4\nstatus 1\n" in output.read_text(), output.read_text()
