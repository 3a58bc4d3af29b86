"""Runs of ``hpcdp train`` on a cluster: how they are started, how far they are, and what they have computed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess

from bench_harness.cluster import Cluster
from hpcdp.train.metrics import read_metrics

SAME = ("kind", "step", "epoch", "loss", "accuracy", "samples", "learning_rate", "test_loss", "test_accuracy")
"""What a line of metrics.jsonl says that must not depend on times."""


OVER_SHARED_CORES = {"mpi_yield_when_idle": "1", "pml": "ob1", "btl": "self,sm,tcp"}
"""Settings of Open MPI that a launcher which believes in several machines cannot see the need of."""


def hpcdp(*arguments: str | Path) -> list[str]:
    """The command line of hpcdp in this environment, which all hosts see."""
    return [sys.executable, "-m", "hpcdp.cli", *map(str, arguments)]


def launch(
    cluster: Cluster, hosts: str, argv: Sequence[str], *options: str, limit_s: float = 240
) -> CompletedProcess[str]:
    """Run ``argv`` as a job of ``hpcdp launch``, on host 1, with one rank for each slot of ``hosts``.

    Args:
        hosts: ``"node1:2,node2:1"``.
        options: of ``hpcdp launch``, such as ``-n`` where some of the slots are for servers.
    """
    ranks = sum(int(each.partition(":")[2]) for each in hosts.split(","))
    settings = [f"--env=OMPI_MCA_{name}={value}" for name, value in OVER_SHARED_CORES.items()]
    return cluster.on(1, hpcdp("launch", "-n", str(ranks), "-H", hosts, *settings, *options, "--", *argv), limit_s)


def numbers(run_dir: Path) -> list[list[object]]:
    """What a run has computed."""
    return [[record.get(name) for name in SAME] for record in read_metrics(run_dir / "metrics.jsonl")]


def wait_for(condition: Callable[[], object], what: str, limit_s: float = 180) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in {limit_s:g} s"
        time.sleep(0.05)


def steps_of(run_dir: Path) -> int:
    """So many steps a run has done, as far as its files say."""
    path = run_dir / "metrics.jsonl"
    return max((int(record["step"]) for record in read_metrics(path)), default=0) if path.exists() else 0


def checkpoints_of(run_dir: Path) -> list[str]:
    """The complete checkpoints of a run, the oldest one first."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*") if path.suffix != ".tmp")


@contextmanager
def running(
    cluster: Cluster, hosts: str, argv: Sequence[str], *options: str
) -> Iterator[Future[CompletedProcess[str]]]:
    """A job of `launch` that runs meanwhile; it is waited for."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(launch, cluster, hosts, argv, *options)


def wait_for_checkpoints(run_dir: Path, count: int, job: Future[CompletedProcess[str]]) -> None:
    """Until a run has so many; fails when its job has ended before."""

    def there() -> bool:
        assert not job.done(), job.result().stdout + job.result().stderr
        return len(checkpoints_of(run_dir)) >= count

    wait_for(there, f"{count} checkpoints in {run_dir}")


def pids_of(cluster: Cluster, host: int, rank: int | None = None) -> list[int]:
    """The processes on a host that are ranks of an MPI job, or one rank's, as this host numbers them."""
    wanted = "OMPI_COMM_WORLD_RANK=" if rank is None else f"OMPI_COMM_WORLD_RANK={rank}$"
    look = f"grep -lzE '^{wanted}' /proc/[0-9]*/environ 2>/dev/null | tr -dc '0-9\\n'"
    return [int(pid) for pid in cluster.on(host, ["sh", "-c", look]).stdout.split()]


def left_on(cluster: Cluster, host: int) -> list[str]:
    """What a job has left on a host: its processes but sshd, and what lies in shared memory."""
    look = "ps -eo comm=,args= | grep -vE '^(sshd|ps|sh|grep|setpriv) '; ls -A /dev/shm"
    return cluster.on(host, ["sh", "-c", look]).stdout.splitlines()
