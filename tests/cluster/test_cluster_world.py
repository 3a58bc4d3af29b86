"""Ranks on several hosts: who they are, and allreduce among them."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from runs_on_hosts import launch, wait_for

from bench_harness.cluster import Cluster
from hpcdp.collectives import ALGORITHMS

pytestmark = pytest.mark.cluster

PLACES = """
import socket
answer |= {"host": socket.gethostname(), "node": world.node, "local_rank": world.local_rank,
           "local_size": world.local_size, "num_nodes": world.num_nodes, "num_rails": world.num_rails,
           "rail": None if world.rail_comm is None else world.rail_comm.size, "shared": world.node_memory.size}
"""

# Sums of fractions: the order of the additions shows in the bits. Sizes: one element, fewer and more than ranks, a
# prime, several segments.
REDUCE = """
import hashlib
from hpcdp.errors import UnsupportedError
for algorithm in {algorithms}:
    for count in (1, 5, 1009, 300007):
        x = np.random.default_rng(world.rank).standard_normal(count).astype(np.float32)
        results = []
        try:
            for _ in range(2):
                results.append(hpcdp.allreduce(x.copy(), world=world, algorithm=algorithm))
        except UnsupportedError:
            answer[algorithm] = None
            break
        inputs = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(world.size)]
        expected = np.sum(inputs, axis=0, dtype=np.float64)
        answer.setdefault(algorithm, []).append(
            [float(np.abs(results[0] - expected).max()), *(hashlib.sha256(each).hexdigest() for each in results)])
"""


def places_of(slots: list[int]) -> list[dict[str, object]]:
    """What `PLACES` must answer, worked out from the number of ranks of each host."""
    rails = min(slots)
    return [
        {
            "host": f"node{node + 1}",
            "node": node,
            "local_rank": local,
            "local_size": slots[node],
            "num_nodes": len(slots),
            "num_rails": rails,
            "rail": len(slots) if local < rails else None,
            "shared": slots[node],
        }
        for node in range(len(slots))
        for local in range(slots[node])
    ]


def check_allreduce(answers: list[dict[str, list[list[object]] | None]]) -> None:
    across_nodes = [name for name in ALGORITHMS["allreduce"] if answers[0][name] is not None]
    assert {"reference", "native", "ring", "hierarchical"} <= set(across_nodes)
    assert "shared" not in across_nodes
    for name in across_nodes:
        for size in zip(*(answer[name] for answer in answers), strict=True):
            assert max(error for error, *_ in size) < 1e-5, name
            bits = {digest for _, *digests in size for digest in digests}
            assert len(bits) == 1, f"{name}: the bits differ between ranks or from run to run"


def test_two_hosts_know_their_ranks(two_hosts: Cluster, run) -> None:
    assert run(two_hosts, 2, PLACES) == places_of([2, 2])


def test_three_hosts_with_different_numbers_of_ranks(three_hosts: Cluster, run) -> None:
    assert run(three_hosts, [2, 1, 3], PLACES) == places_of([2, 1, 3])


def test_allreduce_over_two_hosts(two_hosts: Cluster, run) -> None:
    check_allreduce(run(two_hosts, 2, REDUCE.format(algorithms=["auto", *ALGORITHMS["allreduce"]])))


def test_allreduce_over_hosts_with_different_numbers_of_ranks(three_hosts: Cluster, run) -> None:
    check_allreduce(run(three_hosts, [2, 1, 3], REDUCE.format(algorithms=["auto", *ALGORITHMS["allreduce"]])))


def test_info_names_the_hosts(two_hosts: Cluster) -> None:
    done = two_hosts.mpirun([1, 2], [sys.executable, "-m", "hpcdp.cli", "info", "--json"])
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert [rank["host"] for rank in facts["world"]] == ["node1", "node2", "node2"]
    assert (facts["nodes"], facts["rails"]) == (2, 1)


FAILS = """
import hpcdp, sys
from pathlib import Path
world = hpcdp.init()
Path(sys.argv[1], f"rank-{world.rank}").touch()
assert world.rank != 3
world.barrier()
"""


@pytest.mark.parametrize("launcher", ["mpirun", "hpcdp launch"])
def test_a_rank_that_fails_ends_the_job_on_all_hosts(two_hosts: Cluster, launcher: str) -> None:
    """Open MPI 5's mpirun sometimes waits for ever after the last rank has ended, if other ranks abort beside it."""
    folder = two_hosts.folder / launcher
    folder.mkdir()
    program = [sys.executable, "-c", FAILS, str(folder)]

    def ranks_left() -> int:
        found = [two_hosts.on(host, ["pgrep", "-fc", r"^\S*python\S* -c .*import hpcdp, sys"]) for host in (1, 2)]
        return sum(int(each.stdout) for each in found)

    with ThreadPoolExecutor(1) as pool:
        if launcher == "mpirun":
            job = pool.submit(two_hosts.mpirun, 2, program, 60)
        else:
            job = pool.submit(launch, two_hosts, "node1:2,node2:2", program, limit_s=60)
        wait_for(lambda: len(list(folder.iterdir())) == 4, "all ranks start", 50)
        wait_for(lambda: ranks_left() == 0, "all ranks end", 20)
        done = job.result()
    assert done.returncode not in ((0,) if launcher == "mpirun" else (0, 124))
    assert "rank 3 of 4 failed" in done.stderr


def test_numbers_are_right_at_a_slow_link(two_hosts: Cluster, run) -> None:
    two_hosts.rate(2, "100mbit")
    try:
        (seconds,) = {
            answer["sum"]
            for answer in run(two_hosts, 1, "answer['sum'] = float(hpcdp.allreduce(np.ones(1000000)).sum())")
        }
    finally:
        two_hosts.rate(2, "1gbit")
    assert seconds == np.float64(2000000)


FIRST_WORDS = """
import threading, time
import numpy as np
import hpcdp

world = hpcdp.init()
from mpi4py import MPI

comm, other, over = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup(), threading.Event()


def look():
    while not over.is_set():
        other.iprobe()
        time.sleep(0)


looking = threading.Thread(target=look)
looking.start()
mine, theirs = np.zeros(1000), np.zeros((comm.size, 1000))
peers = [(comm.rank + distance) % comm.size for distance in range(1, comm.size)]
MPI.Request.Waitall([each for peer in peers for each in (comm.Irecv(theirs[peer], peer), comm.Isend(mine, peer))])
over.set()
looking.join()
comm.Barrier()
"""


def test_threads_that_hear_of_a_peer_first_drop_no_connection(four_hosts: Cluster) -> None:
    """Of four jobs, half have lost one, and some hung, where Open MPI learns of peers one by one."""
    program = four_hosts.folder / "first_words.py"
    program.write_text(FIRST_WORDS)
    for _ in range(4):
        done = four_hosts.mpirun(2, [sys.executable, program], 120)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "inbound MPI TCP connection" not in done.stderr
