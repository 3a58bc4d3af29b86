"""Workers and servers of an asynchronous store that are killed: who goes on, who is named, and what values are then."""

import os
import re
import subprocess
import sys

import pytest

from hpcdp.launch import mpi_library

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import hpcdp
from hpcdp import kvstore, optim
from hpcdp.errors import HpcdpError

after_s, count, rounds = float(sys.argv[1]), 1 << 18, 200
world = hpcdp.init()
store = kvstore.create("dist_async", world)
store.init("w", np.zeros(count, "f4"))
store.set_optimizer(optim.SGD(lr=1.0))
world.barrier()
if world.rank == 1:
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    done = 0
    while done < rounds or world.rank == 1:
        store.push("w", np.full(count, -1.0, "f4"))
        done += 1
    deadline = time.monotonic() + 20
    while store.num_dead_node(timeout_s=1) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    pulled = store.pull("w")
    value = np.asarray(pulled)
    print(f"rank {world.rank} goes on", (value == pulled.version).all(), pulled.version >= rounds,
          store.num_dead_node(), flush=True)
except HpcdpError as error:
    print(f"rank {world.rank}", error, flush=True)
"""


def launch(ranks, servers, after_s, mpi_args="", program=PROGRAM, **environ):
    mine = ("OMPI_", "PMIX_", "PMI_", "HPCDP_RANKS", "HPCDP_TEST_REPORT")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "-s", str(servers)]
    command += ["--mpi-args", mpi_args, "--", sys.executable, "-c", program, str(after_s)]
    return subprocess.run(command, env=clean | environ, capture_output=True, text=True, timeout=100)


LATE = """
import time
import numpy as np
import hpcdp
from hpcdp import kvstore, optim

world = hpcdp.init()
store = kvstore.create("dist_async", world, staleness=2)
keys = [1, 2, 3, 4]
store.init(keys, [np.zeros(2000, "f4") for _ in keys])
store.set_optimizer(optim.SGD(lr=1.0))
world.barrier()
for turn in range(3 if world.rank != 1 else 20):
    store.push(keys, [np.full(2000, -1.0, "f4") for _ in keys])
if world.rank == 1:
    time.sleep(0.5)
    print("late", *(float(each[0]) for each in store.pull(keys)), flush=True)
"""


@pytest.mark.parametrize(("ranks", "servers"), [pytest.param(3, 0, marks=pytest.mark.thorough), (2, 1)])
def test_who_ends_early_still_answers(ranks, servers):
    """Without a barrier at the end: the keys of a worker whose program has ended are there for the others."""
    done = launch(ranks, servers, 0, program=LATE, HPCDP_RANKS_PER_NODE="1", HPCDP_TIMEOUT_S="20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["late", *[f"{20.0 + 3 * (ranks - 1)}"] * 4]


@pytest.mark.thorough  # test_other_nodes_go_on_without_a_dead_worker_and_name_it has a bound, too, where keys are sent
@pytest.mark.skipif(mpi_library.find_library().family != "openmpi", reason="MPICH ends a job whose rank dies")
def test_the_dead_hold_nobody_back():
    program = PROGRAM.replace('"dist_async", world', '"dist_async", world, staleness=2')
    done = launch(2, 0, 0.0, "--with-ft ulfm", program=program)
    assert done.stdout.count(" goes on True True 1") + done.stdout.count("a partly changed value") == 1, done.stderr


@pytest.mark.skipif(mpi_library.find_library().family != "openmpi", reason="MPICH ends a job whose rank dies")
@pytest.mark.thorough  # other nodes and rounds of all ranks are below
@pytest.mark.parametrize("after_s", [0.0123, 0.0, 0.05])
def test_others_of_a_node_go_on_without_a_dead_worker(after_s):
    done = launch(3, 0, after_s, "--with-ft ulfm")
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert len(said) == 2, (done.stdout, done.stderr)
    for line, rank in zip(said, (0, 2), strict=True):
        # Killed within an update it leaves half a value, which nobody may take for a whole one.
        whole = f"rank {rank} goes on True True 1"
        half = rf"rank {rank} key-value store \[key 'w'\]: expected a complete value, got .*: rank 1 died"
        assert line == whole or re.match(half, line), line


ACROSS = """
import os, signal, time
import numpy as np
import hpcdp
from hpcdp import kvstore, optim
from hpcdp.errors import HpcdpError

world = hpcdp.init()
store = kvstore.create("dist_async", world)
keys = [0, 1, 2]  # worker k keeps key k, where each is a node
store.init(keys, [np.zeros(1000, "f4") for _ in keys])
store.set_optimizer(optim.SGD(lr=1.0))
store.push(keys, [np.full(1000, -1.0, "f4") for _ in keys])
bounded = kvstore.create("dist_async", world, staleness=3)
bounded.init(0, np.zeros(1000, "f4"))
bounded.set_optimizer(optim.SGD(lr=1.0))
store.barrier()
if world.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
deadline = time.monotonic() + 20
while store.num_dead_node(timeout_s=2) == 0 and time.monotonic() < deadline:
    time.sleep(0.01)
found = [f"rank {world.rank} dead {store.num_dead_node(timeout_s=2)}"]
for key in keys:
    try:
        store.push(key, np.full(1000, -1.0, "f4"))
        found.append("alive" if float(store.pull(key)[0]) >= 4 else "old")
    except HpcdpError as error:
        found.append(str(error))
for _ in range(20):
    bounded.push(0, np.full(1000, -1.0, "f4"))
while bounded.pull(0)[0] < 40 and time.monotonic() < deadline:
    time.sleep(0.01)
found.append(str(bounded.pull(0)[0]))
print(*found, sep="; ", flush=True)
"""


@pytest.mark.skipif(mpi_library.find_library().family != "openmpi", reason="MPICH ends a job whose rank dies")
@pytest.mark.parametrize("per_node", [pytest.param("1", marks=pytest.mark.thorough), "2"])
def test_other_nodes_go_on_without_a_dead_worker_and_name_it(per_node):
    """And under a bound it holds them back in nothing."""
    done = launch(3, 0, 0, "--with-ft ulfm", program=ACROSS, HPCDP_RANKS_PER_NODE=per_node)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    died = r"key-value store \[on rank 2\]: expected an answer, got none: it has died; start again .*"
    assert len(said) == 2, (done.stdout, done.stderr)
    for line, rank in zip(said, (0, 1), strict=True):
        assert re.fullmatch(rf"rank {rank} dead 1; alive; alive; {died}; 40.0", line), line
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.thorough  # as of any job with servers: test_faults kills a rank, and test_servers a server
@pytest.mark.parametrize(("ranks", "servers", "per_node"), [(3, 0, None), (2, 1, "1")])
def test_without_that_the_job_ends_and_the_worker_is_named(ranks, servers, per_node):
    environ = {} if per_node is None else {"HPCDP_RANKS_PER_NODE": per_node}
    done = launch(ranks, servers, 0.05, **environ)
    assert done.returncode not in (0, None)
    assert re.search(r"\brank:? 1\b", done.stdout + done.stderr), (done.stdout, done.stderr)


ROUNDS = """
import os, signal, sys
import numpy as np
import hpcdp
from hpcdp import kvstore, optim

world = hpcdp.init()
store = kvstore.create(KIND, world, staleness=STALENESS)
keys = [0, 1]
store.init(keys, [np.zeros(1000, "f4") for _ in keys])
store.set_optimizer(optim.SGD(lr=1.0))
store.barrier()
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(20):
    store.push(0, np.full(1000, -1.0, "f4"))
    value = store.pull(0)[0]
print("the end", value, flush=True)
"""


@pytest.mark.skipif(mpi_library.find_library().family != "openmpi", reason="MPICH ends a job whose rank dies")
@pytest.mark.thorough  # test_other_nodes_go_on_without_a_dead_worker_and_name_it has a bound, too
@pytest.mark.parametrize(("servers", "per_node"), [(0, "1"), (1, None)])
def test_a_job_ends_without_its_dead_worker_wherever_keys_lie(servers, per_node):
    """Under a bound; key 0 is kept by the first worker, or by a server, which waits for no end of the dead."""
    program = ROUNDS.replace("KIND", '"dist_async"').replace("STALENESS", "3")
    environ = {} if per_node is None else {"HPCDP_RANKS_PER_NODE": per_node}
    done = launch(2, servers, 0, "--with-ft ulfm", program=program, **environ)
    assert (done.returncode, done.stdout) == (0, "the end 20.0\n"), done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.skipif(mpi_library.find_library().family != "openmpi", reason="MPICH ends a job whose rank dies")
@pytest.mark.parametrize(
    ("ranks", "per_node"), [(2, None), *(pytest.param(3, each, marks=pytest.mark.thorough) for each in (None, "1"))]
)
def test_rounds_of_all_ranks_end_with_the_name_of_the_dead(ranks, per_node):
    program = ROUNDS.replace("KIND", '"dist_sync"').replace("STALENESS", "None")
    environ = {} if per_node is None else {"HPCDP_RANKS_PER_NODE": per_node}
    done = launch(ranks, 0, 0, "--with-ft ulfm", program=program, HPCDP_STALL_S="0", **environ)
    assert done.returncode != 0
    assert "the end" not in done.stdout
    said = rf"rank 1 \(host \S+, pid \d+\) is gone|rank 1 of {ranks} has died"
    assert re.search(said, done.stdout + done.stderr), (done.stdout, done.stderr)
