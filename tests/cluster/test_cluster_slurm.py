"""Ranks that srun starts on several hosts: their world, and PyTorch models on it."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench_harness.cluster import Cluster

pytestmark = pytest.mark.cluster

TRAINED = """
import json, sys
import numpy as np
import torch
import hpcdp
import hpcdp.torch

world = hpcdp.init()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4))


def loss(net, step, rank):
    rng = np.random.default_rng([step, rank])
    x, y = torch.from_numpy(rng.standard_normal((5, 6), "f4")), torch.from_numpy(rng.integers(0, 4, 5))
    return torch.nn.functional.cross_entropy(net(x), y)


found = {"rank": world.rank, "size": world.size, "nodes": world.num_nodes, "local_size": world.local_size}
for owner in ("rank", "shard"):
    model, reference = hpcdp.torch.DistributedDataParallel(network(), world, owner=owner), network()
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
    if owner == "shard":
        ours = hpcdp.torch.ShardedOptimizer(model, torch.optim.AdamW, lr=0.01)
    else:
        ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(8):
        ours.zero_grad()
        theirs.zero_grad()
        loss(model, step, world.rank).backward()
        ours.step()
        for rank in range(world.size):
            (loss(reference, step, rank) / world.size).backward()
        theirs.step()
    world.barrier()
    pairs = zip(model.module.parameters(), reference.parameters())
    found[f"difference by {owner}"] = max(float((a - b).detach().abs().max()) for a, b in pairs)
    world.barrier()
answers = world.comm.allgather_json(found)
if world.rank == 0:
    print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def slurm(slurm_possible: None) -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        cluster.slurm()
        yield cluster


def srun(cluster: Cluster, *arguments: str) -> list[str]:
    settings = {
        "PMIX_MCA_psec": "native", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp", "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl_tcp_if_include": "eth0", "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = cluster.on(1, ["env", *(f"{name}={value}" for name, value in settings.items()), "srun", *arguments], 240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


MEETS = """
import time
from mpi4py import MPI
from hpcdp.comm.startup import meet

rank, waited = MPI.COMM_WORLD.rank, []
for late in range(4):
    meet()
    if rank == late:
        time.sleep(1)
    began = time.monotonic()
    meet()
    waited.append(time.monotonic() - began)
print(rank, *(f"{seconds:.1f}" for seconds in waited))
"""


def test_ranks_wait_for_those_of_other_hosts_before_they_send(slurm: Cluster) -> None:
    script = slurm.folder / "meets.py"
    script.write_text(MEETS)
    lines = srun(slurm, "--mpi=pmix", "-n", "4", "--ntasks-per-node=2", sys.executable, str(script))
    waited = {int(line.split()[0]): [*map(float, line.split()[1:])] for line in lines}
    assert sorted(waited) == [0, 1, 2, 3]
    for rank, seconds in waited.items():
        assert all((wait < 0.5) == (late == rank) for late, wait in enumerate(seconds)), waited


@pytest.mark.parametrize("tasks", [["-n", "3"], ["-n", "4", "--ntasks-per-node=2"]])
def test_pytorch_models_train_as_one_process_does(slurm: Cluster, tasks: list[str]) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (slurm.folder / "train.py").write_text(TRAINED)
    *_, last = srun(slurm, "--mpi=pmix", "-N", "2", *tasks, sys.executable, str(slurm.folder / "train.py"))
    found = json.loads(last)
    assert [each["rank"] for each in found] == list(range(int(tasks[1])))
    assert {(each["size"], each["nodes"]) for each in found} == {(int(tasks[1]), 2)}
    assert max(each[f"difference by {owner}"] for each in found for owner in ("rank", "shard")) < 1e-5


DISTRIBUTED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

for _ in range(2):
    dist.init_process_group("hpcdp")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    print(dist.get_rank(), os.environ["MASTER_ADDR"], model.module.weight.grad.tolist(), flush=True)
    dist.destroy_process_group()
"""


def test_torch_distributed_needs_no_address_and_gives_rank_0s_host(slurm: Cluster) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    script = slurm.folder / "distributed.py"
    script.write_text(DISTRIBUTED)
    lines = srun(slurm, "--mpi=pmix", "-N", "2", "-n", "2", sys.executable, str(script))
    assert sorted(lines) == [f"{rank} node1 [[1.5, 1.5]]" for rank in (0, 0, 1, 1)]


def test_ranks_that_srun_has_not_joined_are_told_how(slurm: Cluster) -> None:
    done = slurm.on(1, ["srun", "-n", "2", sys.executable, "-c", "import hpcdp; hpcdp.init()"], 60)
    assert done.returncode != 0
    assert "expected one world of 2 ranks, as srun started" in done.stderr
    assert no_segments(slurm)


def no_segments(cluster: Cluster) -> bool:
    return not any(cluster.on(host, ["sh", "-c", "ls -d /dev/shm/sm_segment.*"]).stdout for host in (1, 2))


def test_ranks_that_are_killed_with_slurms_daemon_leave_no_segments(slurm: Cluster) -> None:
    begun = slurm.folder / "begun"
    program = f"import hpcdp, time; hpcdp.init().barrier(); open({str(begun)!r}, 'a'); time.sleep(60)"
    kill = "for name in slurmstepd python srun; do pkill -9 $name; done"
    step = f"srun --mpi=pmix -N2 -n4 --ntasks-per-node=2 {sys.executable} -c {shlex.quote(program)} &"
    script = f"{step} until [ -e {begun} ]; do sleep 0.1; done; sleep 1; ssh node2 {shlex.quote(kill)}; {kill}; wait"
    slurm.on(1, ["bash", "-c", script], 90)
    assert begun.exists() and no_segments(slurm)


def test_open_mpi_says_nothing_of_munge_where_only_paths_are_set(slurm: Cluster) -> None:
    bare = ["env", "-i", "HOME=/root", f"PATH={os.environ['PATH']}", "OMPI_MCA_btl_tcp_if_include=eth0"]
    program = "import hpcdp; world = hpcdp.init(); world.barrier(); print(world.size)"
    done = slurm.on(1, [*bare, "srun", "--mpi=pmix", "-N2", "-n2", sys.executable, "-c", program], 90)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n2\n", "")


def test_a_heterogeneous_job_is_one_world_by_srun_and_refused_by_launch(slurm: Cluster) -> None:
    program = "import hpcdp; world = hpcdp.init(); world.barrier(); print(world.rank, world.size, world.num_nodes)"
    whole = ["salloc", "-N1", "-n1", ":", "-N1", "-n2"]
    hpcdp = str(Path(sys.executable).parent / "hpcdp")
    done = slurm.on(1, [*whole, hpcdp, "launch", "-n", "3", "--", sys.executable, "-c", program], 60)
    assert done.returncode == 2 and done.stdout == "" and "--mpi=pmix --het-group=0-1 PROGRAM" in done.stderr
    found = slurm.on(1, [*whole, "srun", "--mpi=pmix", "--het-group=0-1", sys.executable, "-c", program], 90)
    assert sorted(found.stdout.splitlines()) == ["0 3 2", "1 3 2", "2 3 2"], found.stderr
