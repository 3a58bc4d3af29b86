"""Hosts on two networks: traffic takes the one that was asked for."""

import sys
from collections.abc import Iterator

import pytest
from runs_on_hosts import launch

from bench_harness.cluster import Cluster
from hpcdp.launch import mpi_library

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        mpi_library.find_library().family != "openmpi", reason="the interface is asked for in Open MPI's words"
    ),
]

NBYTES, TIMES = 4_000_000, 5

REDUCE = f"""
import numpy as np
import hpcdp
world = hpcdp.init()
for _ in range({TIMES}):
    x = hpcdp.allreduce(np.full({NBYTES // 4}, world.rank + 1, np.float32))
assert x.min() == x.max() == 3
"""

LISTEN = """
import ctypes, os, socket, time
from pathlib import Path
import hpcdp


def listening():
    devices = set()
    for pid in (os.getpid(), os.getppid()):
        process = os.pidfd_open(pid)
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if path.is_socket():
                with socket.socket(fileno=ctypes.CDLL(None).syscall(438, process, int(path.name), 0)) as one:
                    is_tcp = one.family in (socket.AF_INET, socket.AF_INET6)
                    listens = is_tcp and one.getsockopt(1, socket.SO_ACCEPTCONN)
                    if listens and one.getsockname()[0] != "127.0.0.1":
                        devices.add((pid == os.getpid(), one.getsockopt(1, socket.SO_BINDTODEVICE, 16).decode()[:4]))
        os.close(process)
    return sorted(devices)


world, deadline = hpcdp.init(), time.monotonic() + 10
while (found := listening()) != [(False, "eth1"), (True, "eth1")] and time.monotonic() < deadline:
    time.sleep(0.1)  # the launcher and the guard look 50 times a second, where they get a core
world.comm.barrier()
print(found, flush=True)
"""


@pytest.fixture(scope="module")
def two_networks(hosts_possible: None) -> Iterator[Cluster]:
    with Cluster(2, networks=2) as cluster:
        yield cluster


def sent_nbytes(cluster: Cluster, host: int) -> list[int]:
    """What a host has sent so far, on each network."""
    files = [f"/sys/class/net/eth{network}/statistics/tx_bytes" for network in (0, 1)]
    return list(map(int, cluster.on(host, ["cat", *files]).stdout.split()))


def test_each_network_connects_the_hosts(two_networks: Cluster) -> None:
    for network in (0, 1):
        assert two_networks.on(1, ["ssh", f"10.77.{network}.2", "hostname"]).stdout == "node2\n"


@pytest.mark.parametrize("network", [0, 1])
@pytest.mark.parametrize("launcher", ["mpirun", "hpcdp launch"])
def test_the_interface_that_was_asked_for_is_taken(
    two_networks: Cluster, monkeypatch: pytest.MonkeyPatch, launcher: str, network: int
) -> None:
    program = [sys.executable, "-c", REDUCE]
    before = [sent_nbytes(two_networks, host) for host in (1, 2)]
    if launcher == "mpirun":
        monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", f"eth{network}")
        done = two_networks.mpirun(1, program)
    else:
        done = launch(two_networks, "node1:1,node2:1", program, "--interface", f"eth{network}")
    assert done.returncode == 0, done.stderr
    for host in (1, 2):
        sent = [now - then for now, then in zip(sent_nbytes(two_networks, host), before[host - 1], strict=True)]
        # Of two ranks each sends every byte once; the rest is what starts the job, and headers.
        assert TIMES * NBYTES < sent[network] < 1.2 * TIMES * NBYTES
        assert sent[1 - network] < 0.1 * TIMES * NBYTES


def test_ranks_and_daemons_listen_there_alone(two_networks: Cluster) -> None:
    done = launch(two_networks, "node1:1,node2:1", [sys.executable, "-c", LISTEN], "--interface", "eth1")
    assert done.stdout.splitlines() == 2 * ["[(False, 'eth1'), (True, 'eth1')]"], done.stderr
