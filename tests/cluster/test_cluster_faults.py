"""Runs over hosts that lose a rank, a host or a link: they end in bounded time and by name, or go on (TARGETS R1, R9).

What was lost goes on from the last checkpoint, on the hosts that are left, to the numbers of a run that lost nothing.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs_on_hosts import (
    checkpoints_of,
    hpcdp,
    launch,
    left_on,
    numbers,
    pids_of,
    running,
    wait_for,
    wait_for_checkpoints,
)

from bench_harness.cluster import Cluster
from hpcdp.launch import mpi_library

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        mpi_library.find_library().family != "openmpi",
        reason="which rank has ended, and how, is known of Open MPI's jobs: MPICH's mpirun has other statuses",
    ),
]

SLOW = "200mbit"

RUN = ("train", "mlp", "--data", "digits", "--epochs", "12", "--batch-size", "144", "--reproducible",
       "--checkpoint-every", "20", "--keep", "2", "--resume", "auto")  # fmt: skip


def command(cluster: Cluster, name: str) -> tuple[Path, list[str]]:
    folder = cluster.folder / name
    return folder, hpcdp(*RUN, "--run-dir", folder)


@pytest.fixture(scope="module")
def two_hosts(hosts_possible: None) -> Iterator[Cluster]:
    """With links so slow that a run over both hosts lasts until something has been done to it."""
    with Cluster(2, rate=SLOW) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(two_hosts: Cluster) -> list[list[object]]:
    folder, argv = command(two_hosts, "undisturbed")
    done = launch(two_hosts, "node1:2", argv)
    assert done.returncode == 0, done.stdout + done.stderr
    return numbers(folder)


@pytest.fixture
def mortal(hosts_possible: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two hosts of which one may die. Ranks that wait in vain for six seconds end the job."""
    monkeypatch.setenv("HPCDP_STALL_S", "3")
    monkeypatch.setenv("HPCDP_TIMEOUT_S", "6")
    with Cluster(2, rate=SLOW, tcp_retries=4) as cluster:
        yield cluster


def check_resumed(cluster: Cluster, hosts: str, name: str, undisturbed: list[list[object]]) -> None:
    """A run goes on from a checkpoint, on the hosts that are up, and ends with the numbers of one that lost nothing."""
    folder, argv = command(cluster, name)
    assert checkpoints_of(folder)
    again = launch(cluster, hosts, argv)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resuming {folder}\n" in again.stdout
    assert numbers(folder) == undisturbed


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed_ends_all_on_every_host(
    two_hosts: Cluster, undisturbed: list[list[object]], rank: int
) -> None:
    folder, argv = command(two_hosts, f"killed-{rank}")
    host = 1 + rank // 2
    with running(two_hosts, "node1:2,node2:2", argv) as job:
        wait_for_checkpoints(folder, 1, job)
        (pid,) = pids_of(two_hosts, host, rank)
        two_hosts.on(host, ["kill", "-KILL", str(pid)])
        began = time.monotonic()
        done = job.result()
    assert time.monotonic() - began < 10
    assert done.returncode == 137, done.stderr
    assert f"hpcdp launch: rank {rank} (pid {pid} on node{host}) was killed by SIGKILL" in done.stderr, done.stderr
    for each in (1, 2):
        wait_for(lambda host=each: not left_on(two_hosts, host), f"nothing of it on host {each}", 5)
    check_resumed(two_hosts, "node1:2", f"killed-{rank}", undisturbed)


@pytest.mark.parametrize("how", ["kill", "crash"])
def test_a_host_that_is_lost(mortal: Cluster, undisturbed: list[list[object]], how: str) -> None:
    """Closed connections end the job at once; of a host without power nothing is heard, and the watchdog ends it."""
    folder, argv = command(mortal, "lost")
    with running(mortal, "node1:1,node2:1", argv) as job:
        wait_for_checkpoints(folder, 1, job)
        getattr(mortal, how)(2)
        began = time.monotonic()
        done = job.result()
    assert time.monotonic() - began < 25, done.stdout + done.stderr
    assert done.returncode not in (0, 124), done.stdout + done.stderr
    assert "node2" in done.stderr, done.stderr
    if how == "crash":
        assert "rank 1 (host node2, pid " in done.stderr
    assert len(numbers(folder)) < len(undisturbed)
    wait_for(lambda: not left_on(mortal, 1), "nothing of it on host 1", 5)
    check_resumed(mortal, "node1:2", "lost", undisturbed)
    mortal.boot(2)
    assert mortal.on(1, ["ssh", "node2", "hostname"]).stdout == "node2\n"


def test_a_link_that_is_cut_for_five_seconds(two_hosts: Cluster, undisturbed: list[list[object]]) -> None:
    folder, argv = command(two_hosts, "cut")
    with running(two_hosts, "node1:1,node2:1", argv) as job:
        wait_for_checkpoints(folder, 1, job)
        two_hosts.cut(2)
        try:
            time.sleep(1)  # what was under way
            before = os.stat(folder / "metrics.jsonl").st_size
            time.sleep(4)
            assert os.stat(folder / "metrics.jsonl").st_size == before
        finally:
            two_hosts.join(2)
        done = job.result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(folder) == undisturbed
