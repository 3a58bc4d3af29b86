"""A server on a host of its own: training with it over hosts, and what happens when it, or its host, is lost (R9)."""

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from subprocess import CompletedProcess

import numpy as np
import pytest
from runs_on_hosts import left_on, pids_of, running, wait_for

from bench_harness.cluster import Cluster
from hpcdp.launch import mpi_library

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        mpi_library.find_library().family != "openmpi", reason="ranks are found by a variable of Open MPI's"
    ),
]

# Workers push until they are told to stop, and tell what came of it.
PROGRAM = """
import json, pathlib, sys, time
import numpy as np
import hpcdp
from hpcdp import kvstore, optim

folder, world = pathlib.Path(sys.argv[1]), hpcdp.init()
store = kvstore.create("dist_async", world)
store.init([1, 2], [np.zeros(5000, "f4"), np.zeros(3, "f4")])
store.set_optimizer(optim.SGD(lr=1.0))
pushes = 0
while not (folder / "stop").exists():
    store.push([1, 2], [np.full(5000, -1.0, "f4"), np.full(3, -float(world.rank + 1), "f4")])
    store.wait()
    pushes += 1
    (folder / f"pushing-{world.rank}").touch()
    time.sleep(0.02)
store.barrier()
values = [np.asarray(store.pull(key)) for key in (1, 2)]
ends = [[float(each.min()), float(each.max())] for each in values]
(folder / f"answer-{world.rank}").write_text(json.dumps([pushes, *ends]))
store.barrier()
"""


@pytest.fixture
def hosts(hosts_possible: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("HPCDP_STALL_S", "3")
    monkeypatch.setenv("HPCDP_TIMEOUT_S", "6")
    with Cluster(3, tcp_retries=4) as cluster:
        (cluster.folder / "program.py").write_text(PROGRAM)
        yield cluster


def pushing(cluster: Cluster) -> AbstractContextManager[Future[CompletedProcess[str]]]:
    """Two workers, and a server on the third host, run meanwhile."""
    argv = [sys.executable, str(cluster.folder / "program.py"), str(cluster.folder)]
    return running(cluster, "node1:1,node2:1,node3:1", argv, "-n", "2", "-s", "1")


def wait_for_pushes(cluster: Cluster) -> None:
    wait_for(lambda: len(list(cluster.folder.glob("pushing-*"))) == 2, "pushes of both workers")


def test_every_push_counts_once(hosts: Cluster) -> None:
    with pushing(hosts) as job:
        wait_for_pushes(hosts)
        time.sleep(1)
        (hosts.folder / "stop").touch()
        done = job.result()
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads((hosts.folder / f"answer-{rank}").read_text()) for rank in (0, 1)]
    pushes = [answer[0] for answer in answers]
    expected = [sum(pushes), pushes[0] + 2 * pushes[1]]
    for answer in answers:
        np.testing.assert_array_equal(answer[1:], [[value] * 2 for value in expected])


@pytest.mark.parametrize("how", ["its process", "its host", "its host's power"])
def test_a_server_that_is_lost_ends_the_job(hosts: Cluster, how: str) -> None:
    with pushing(hosts) as job:
        wait_for_pushes(hosts)
        began = time.monotonic()
        if how == "its process":
            (pid,) = pids_of(hosts, 3, rank=2)
            hosts.on(3, ["kill", "-KILL", str(pid)])
        else:
            (hosts.kill if how == "its host" else hosts.crash)(3)
        done = job.result()
    assert time.monotonic() - began < 25, done.stdout + done.stderr
    assert done.returncode not in (0, 124), done.stdout + done.stderr
    assert "node3" in done.stderr, done.stderr
    assert not list(hosts.folder.glob("answer-*"))
    for host in (1, 2):
        wait_for(lambda host=host: not left_on(hosts, host), f"nothing of it on host {host}", 10)
