"""Ranks in containers on two hosts, which a stand-in for YARN starts there, by ``hpcdp launch --launcher yarn``."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench_harness.cluster import SCRIPT, Cluster

pytestmark = pytest.mark.cluster

STAND_IN = Path(__file__).parents[1] / "launch" / "hadoop.py"
WORLD = """
import socket
import hpcdp
world = hpcdp.init()
found = world.comm.allgather_json([world.rank, world.node, socket.gethostname()])
if world.rank == 0:
    print(world.size, world.num_nodes, found, flush=True)
"""


@pytest.fixture(scope="module")
def yarn(two_hosts: Cluster) -> Iterator[dict[str, str]]:
    """The environment in which it is there; it lies in the cluster's folder, which all hosts see."""
    hadoop, spool = two_hosts.folder / "hadoop", two_hosts.folder / "spool"
    jars = hadoop / "share" / "hadoop" / "yarn"
    for folder in (hadoop / "bin", jars, spool):
        folder.mkdir(parents=True)
    (jars / "hadoop-yarn-applications-distributedshell-3.3.6.jar").touch()
    (hadoop / "bin" / "yarn").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{STAND_IN}" yarn "$@"\n')
    (hadoop / "bin" / "yarn").chmod(0o755)
    hosts = [["bash", str(SCRIPT), "sh", str(number)] for number in (1, 2)]
    yield {
        **os.environ,
        "HPCDP_CLUSTER": str(two_hosts.folder),
        "HADOOP_HOME": str(hadoop),
        "HPCDP_TEST_YARN": str(spool),
        "HPCDP_TEST_YARN_HOSTS": json.dumps(hosts),
    }


def launch(cluster: Cluster, environ: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "--launcher", "yarn", *arguments]
    return subprocess.run(command, cwd=cluster.folder, env=environ, capture_output=True, text=True, timeout=90)


def test_containers_of_two_hosts_form_one_world(two_hosts: Cluster, yarn: dict[str, str]) -> None:
    (two_hosts.folder / "world.py").write_text(WORLD)
    done = launch(two_hosts, yarn, "-n", "4", "--ranks-per-node", "2", "--", sys.executable, "world.py")
    assert done.returncode == 0, done.stdout + done.stderr
    size, nodes, found = done.stdout.strip().split(" ", 2)
    assert (size, nodes) == ("4", "2")
    ranks = json.loads(found.replace("'", '"'))
    assert [rank for rank, _, _ in ranks] == [0, 1, 2, 3]
    assert ranks[0][2] == ranks[1][2] != ranks[2][2] == ranks[3][2]
    assert not list(two_hosts.folder.glob("hpcdp-yarn-*"))


def test_the_status_of_a_rank_on_another_host(two_hosts: Cluster, yarn: dict[str, str]) -> None:
    code = "import os, time; from mpi4py import MPI; os._exit(7) if MPI.COMM_WORLD.rank == 1 else time.sleep(60)"
    done = launch(two_hosts, yarn, "-n", "2", "--ranks-per-node", "1", "--", sys.executable, "-c", code)
    assert done.returncode == 7, done.stdout + done.stderr
