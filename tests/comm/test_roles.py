"""Worlds of jobs with servers: of workers alone, and of all; on thread ranks and as processes."""

import json
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import hpcdp
from hpcdp.comm import thread_comm
from hpcdp.comm.communicator import ENDED, count_workers, name_of
from hpcdp.errors import LaunchError, WorldAborted

SIZES = [(workers, servers) for workers in (1, 2, 3, 4) for servers in (1, 2)]


def wait_for_all(whole):
    """What a server does at least: it ends when the workers have."""
    for worker in range(whole.size - whole.num_servers):
        whole.comm.irecv(np.empty(0, np.uint8), worker, ENDED).wait()


def numbers(world):
    return [
        [world.rank, world.size, world.node, world.num_nodes],
        [world.local_rank, world.local_size, world.num_rails, world.node_memory.size],
        [world.comm.size, world.node_comm.size, world.rail_comm and world.rail_comm.size, world.num_servers],
    ]


def expected(rank, nodes, servers):
    """`numbers` of a rank where ``nodes`` have so many ranks."""
    node = next(node for node in range(len(nodes)) if rank < sum(nodes[: node + 1]))
    local, rails = rank - sum(nodes[:node]), min(nodes)
    return [
        [rank, sum(nodes), node, len(nodes)],
        [local, nodes[node], rails, nodes[node]],
        [sum(nodes), nodes[node], len(nodes) if local < rails else None, servers],
    ]


@pytest.mark.parametrize(("workers", "servers"), SIZES)
@pytest.mark.parametrize("per_node", [None, 1, 2])
def test_each_world_has_numbers_of_its_own(workers, servers, per_node):
    def nodes(n):
        return [min(per_node or n, n - first) for first in range(0, n, per_node or n)]

    def serve(whole):
        assert whole.whole is None
        served.append(numbers(whole))
        wait_for_all(whole)

    served = []
    found = thread_comm.run(workers, lambda world: [numbers(world), numbers(world.whole)], per_node, servers, serve)
    everyone = [expected(rank, nodes(workers + servers), servers) for rank in range(workers + servers)]
    assert found == [[expected(rank, nodes(workers), 0), everyone[rank]] for rank in range(workers)]
    assert sorted(served) == everyone[workers:]


def test_servers_are_behind_nodes_of_given_sizes():
    found = thread_comm.run(3, lambda world: (world.node, world.whole.node, world.whole.num_nodes), (2, 1), 2)
    assert found == [(0, 0, 3), (0, 0, 3), (1, 1, 3)]


@pytest.mark.parametrize(("workers", "servers"), SIZES)
def test_workers_reduce_without_servers_and_send_them_messages(workers, servers):
    got = {}

    def work(world):
        x = np.full(5, 10.0**world.rank)
        hpcdp.allreduce(x, world=world)
        for server in range(workers, workers + servers):
            world.whole.comm.isend(x * (world.rank + 1), server, 9).wait()
        return x.tolist()

    def serve(whole):
        got[whole.rank] = 0
        for worker in range(workers):
            x = np.empty(5)
            whole.comm.irecv(x, worker, 9).wait()
            got[whole.rank] += x
        wait_for_all(whole)

    total = sum(10.0**rank for rank in range(workers))
    assert thread_comm.run(workers, work, 2, servers, serve) == [[total] * 5] * workers
    assert sorted(got) == list(range(workers, workers + servers))
    for x in got.values():
        np.testing.assert_array_equal(x, np.full(5, total * workers * (workers + 1) / 2))


@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_failure_releases_workers_and_servers(who):
    released = []

    def waits(world):
        try:
            world.comm.irecv(np.empty(1), 0, 1).wait()
        except WorldAborted:
            released.append(world.rank)
            raise

    def fails(world):
        raise KeyError("mine")

    programs = {"worker": (fails, waits), "server": (waits, fails)}
    with pytest.raises(KeyError, match="mine") as caught:
        thread_comm.run(1, programs[who][0], None, 1, programs[who][1])
    assert released == [1 if who == "worker" else 0]
    named = {"worker": "rank 0 of 1", "server": "server 0 (rank 1)"}
    assert caught.value.__notes__ == [f"raised on thread {named[who]}"]


def test_what_a_worker_leaves_for_its_end_is_done_before_servers_are_told():
    class Tells:
        def __init__(self, whole):
            self.whole = whole

        def end(self):
            self.whole.comm.isend(np.full(1, 2.0), 1, 8).wait()

    def work(world):
        world.endings.add(world.keep(Tells, lambda: Tells(world.whole)).end)

    def serve(whole):
        wait_for_all(whole)
        x = np.empty(1)
        assert whole.comm.irecv(x, 0, 8).test()
        got.append(x[0])

    got = []
    thread_comm.run(1, work, None, 1, serve)
    assert got == [2.0]


@pytest.mark.parametrize(
    ("serve", "says"),
    [
        ([True], "expected workers, and servers behind them, got 1 server alone; mpirun -n 4"),
        ([True, True], "got 2 servers alone"),
        ([True, False], "expected all workers before the servers, got a server as rank 0 and a worker as rank 1"),
        ([False, True, True, False], "got a server as rank 1 and a worker as rank 3"),
    ],
)
def test_jobs_without_workers_in_front_are_refused(serve, says):
    with pytest.raises(LaunchError) as caught:
        count_workers(serve)
    assert says in str(caught.value)


def test_workers_are_counted_and_processes_named():
    assert [count_workers(roles) for roles in ([False], [False] * 3, [False, True], [False, False, True, True])] == [
        1, 3, 1, 2,
    ]  # fmt: skip
    assert [name_of(rank, 2) for rank in range(4)] == [
        "rank 0 of 2",
        "rank 1 of 2",
        "server 0 (rank 2)",
        "server 1 (rank 3)",
    ]


SERVER = """
    import sys, types
    import numpy as np
    from hpcdp.comm.communicator import ENDED
    from hpcdp.kvstore import serve as program

    def serve(whole):
        assert whole.whole is None
        whole.comm.allgather_json([whole.rank, whole.size, whole.node, whole.num_nodes, whole.num_servers])
        for worker in range(whole.size - whole.num_servers):
            whole.comm.irecv(np.empty(0, np.uint8), worker, ENDED).wait()

    program.serve = serve
    program.main()
"""
WORKER = """
    import json, sys, time
    import numpy as np
    import hpcdp

    world = hpcdp.init()
    whole = world.whole
    all_of_them = whole.comm.allgather_json([whole.rank, whole.size, whole.node, whole.num_nodes, whole.num_servers])
    x = np.full(3, 10.0**world.rank)
    hpcdp.allreduce(x, world=world)
    mine = [world.rank, world.size, world.node, world.num_nodes, world.node_memory.size, x.tolist()]
    found = world.comm.allgather_json(mine)
    time.sleep(float(sys.argv[1]))
    world.barrier()
    if world.rank == 0:
        print(json.dumps([found, all_of_them]))
"""


COMPILING = re.compile(r"^hpcdp: (compiling kernels that are new|waiting for another rank or job).*\n", re.M)


def job(*programs, **environ):
    """Run programs, each a number of processes, its code and its arguments, as one job."""
    start = (
        "import os, subprocess, sys; from hpcdp.launch import mpi_library\n"
        "library = mpi_library.find_library(); mpirun = mpi_library.find_mpirun(library)\n"
        "environ = mpi_library.environment(library, mpirun, 4, os.environ)\n"
        "sys.exit(subprocess.run([mpirun, *sys.argv[1:]], env=environ).returncode)"
    )
    command = []
    for number, code, *arguments in programs:
        command += [":", "-n", str(number), sys.executable, "-c", textwrap.dedent(code), *arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE"))}
    done = subprocess.run(
        [sys.executable, "-c", start, *command[1:]], env=env | environ, capture_output=True, text=True, timeout=100
    )
    done.stderr = COMPILING.sub("", done.stderr)  # the first job after a change of kernels says so
    return done


@pytest.mark.parametrize(
    ("workers", "servers", "per_node", "idle_s"),
    [
        (3, 1, 2, 4.5),  # longer than the limit of a call: servers that idle are in none
        *(pytest.param(*each, 0, marks=pytest.mark.thorough) for each in ((2, 1, None), (1, 1, 1), (3, 2, 2))),
    ],
)
def test_processes_form_both_worlds(workers, servers, per_node, idle_s):
    settings = {} if per_node is None else {"HPCDP_RANKS_PER_NODE": str(per_node)}
    done = job((workers, WORKER, str(idle_s)), (servers, SERVER), HPCDP_STALL_S="4", **settings)
    assert (done.returncode, done.stderr) == (0, "")
    found, all_of_them = json.loads(done.stdout)
    total = float(sum(10**rank for rank in range(workers)))
    size = workers + servers
    nodes, whole_nodes = (-(-n // (per_node or n)) for n in (workers, size))
    for rank in range(workers):
        node = rank // (per_node or workers)
        neighbors = min(per_node or workers, workers - node * (per_node or workers))
        assert found[rank] == [rank, workers, node, nodes, neighbors, [total] * 3]
    assert all_of_them == [[rank, size, rank // (per_node or size), whole_nodes, servers] for rank in range(size)]


@pytest.mark.parametrize(
    ("programs", "says"),
    [
        ([(1, SERVER), (1, "import hpcdp; hpcdp.init()")], "got a server as rank 0 and a worker as rank 1"),
        ([(2, SERVER)], "got 2 servers alone"),
    ],
)
def test_processes_in_a_wrong_order_are_told(programs, says):
    done = job(*programs)
    assert done.returncode == 1
    assert f"init: expected {'all workers before the' if len(programs) > 1 else 'workers, and'} servers" in done.stderr
    assert says in done.stderr


def test_a_server_alone_is_refused_in_one_line():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SERVER)],
        env={name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE"))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("hpcdp: init: expected workers, and servers behind them, got 1 server alone; ")


@pytest.mark.parametrize("servers", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_program_may_finalize_mpi_itself(servers):
    """Also on one rank before others, which still need the keys that it keeps."""
    workers = """
        import numpy as np
        import hpcdp
        from hpcdp import kvstore, optim
        from mpi4py import MPI

        world = hpcdp.init()
        store = kvstore.create("dist_async", world)
        store.init(["a", "b"], [np.zeros(3), np.zeros(5)])
        store.set_optimizer(optim.SGD(lr=1.0))
        for _ in range(9 * world.rank):
            store.push(["a", "b"], [np.ones(3), np.ones(5)])
            assert store.pull("a")[0] < 0 > store.pull("b")[0]
        MPI.Finalize()
        print("ended")
    """
    programs = [(2, workers), (servers, "from hpcdp.kvstore.serve import main; main()")]
    done = job(*programs[: 1 + servers], HPCDP_RANKS_PER_NODE="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n" * 2, "")
