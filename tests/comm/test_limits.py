"""What a process may make thousands of, and how many descriptors a rank needs: neither may meet a limit."""

import subprocess
import sys

import pytest

MAKES = """
import gc, os, sys, threading
import numpy as np
from mpi4py import MPI
import hpcdp
from hpcdp import autograd, checkpoint, kvstore, nn, optim
from hpcdp.train.checkpoints import Agreement

world, x = hpcdp.init(), np.ones((3, 4), np.float32)

def train(world, **options):
    net = nn.Dense(4, 3)
    net(x)
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, **options)
    with autograd.record():
        loss = net(x * (world.rank + 1)).sum()
    loss.backward()
    trainer.step(3)

def store(kind, world=world):
    made = kvstore.create(kind, world)
    made.init("a", x.copy())
    if kind == "dist_async":
        made.set_optimizer(optim.SGD(lr=0.1))
    made.push("a", x)
    made.pull("a", np.empty_like(x))

def close():
    with world.split(0) as part:
        part.barrier()

KINDS = {
    "worlds": lambda: hpcdp.allreduce(x.copy(), world=world.split(world.rank % 2)),
    "closed worlds": close,
    "worlds with trainers": lambda: train(world.split(0)),
    "worlds with dist_async": lambda: store("dist_async", world.split(0)),
    "agreements": lambda: Agreement(world, 2),
    "trainers": lambda: train(world),
    "trainers with overlap": lambda: train(world, overlap=True),
    "dist_sync": lambda: store("dist_sync"),
    "dist_async": lambda: store("dist_async"),
    "managers": lambda: checkpoint.Manager(sys.argv[3], world),
    "closed managers": lambda: checkpoint.Manager(sys.argv[3], world).close(),
}

def held():
    gc.collect()
    world.barrier()
    made = MPI.COMM_SELF.Dup()
    number = made.py2f() if MPI.get_vendor()[0] == "Open MPI" else 0  # the least that is free
    made.Free()
    with open("/proc/self/statm") as statm:
        megabytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
    return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), number, megabytes]

make = KINDS[sys.argv[1]]
for _ in range(20):
    make()
before = held()
for _ in range(int(sys.argv[2])):
    make()
more = [now - then for now, then in zip(held(), before)]
# A thread of the last world may end a moment later than that of another one.
assert more[0] <= 2 and more[1] <= 16 and more[2] <= 100 and more[3] <= 30, (more, threading.enumerate())
"""
KINDS = [line.split('"')[1] for line in MAKES.splitlines() if line.startswith('    "')]


@pytest.mark.thorough
@pytest.mark.parametrize("ranks_per_node", ["1", "2"])
@pytest.mark.parametrize("kind", KINDS)
def test_three_thousand_made_and_dropped_cost_a_bounded_number(kind, ranks_per_node, tmp_path, monkeypatch):
    """MPICH has 2048 communicators. On one node and on two."""
    monkeypatch.setenv("HPCDP_RANKS_PER_NODE", ranks_per_node)
    script = tmp_path / "makes.py"
    script.write_text(MAKES)
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable]
    done = subprocess.run(
        [*launch, script, kind, "3000", tmp_path / "saved"], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr


COUNTS = """
import os, hpcdp
world = hpcdp.init()
descriptors = world.comm.largest(len(os.listdir("/proc/self/fd")))
if world.rank == 0:
    print(world.size, descriptors[0])
"""


@pytest.mark.thorough
@pytest.mark.parametrize("n", [32, 48])
def test_a_rank_is_connected_to_few_others(n, monkeypatch):
    """Where each rank is a node of its own; in trees, not with all: 40 are what bare MPI lives with, too."""
    for name, value in {"OMPI_MCA_btl": "self,tcp", "HPCDP_RANKS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    limited = ["bash", "-c", 'ulimit -n 40; exec "$@"', "bash", sys.executable, "-c", COUNTS]
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", str(n), "--", *limited]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    ranks, descriptors = map(int, done.stdout.split())
    assert ranks == n and descriptors <= 18 + 2 * n.bit_length()
