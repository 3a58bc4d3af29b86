"""On real ranks: the same losses and parameters as with torch's own DistributedDataParallel over gloo.

Ordinary runs take 3 ranks: each process imports torch for these tests alone, and other files of this folder have 1 to 5
thread ranks.
"""

import functools

import numpy as np
import pytest
from pairs import only_on

pytestmark = pytest.mark.mpi
only_on(3)
torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn

import bench_torch_ddp as torch_ddp
import hpcdp.torch
from bench_harness import peers

STEPS = 5


class Network(nn.Module):
    """Two branches of which a step may leave out one; running statistics where ``normed``."""

    def __init__(self, normed):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if normed else nn.Identity(), nn.ReLU())
        self.left, self.right = nn.Linear(4 * 36, 5), nn.Linear(4 * 36, 5)

    def forward(self, x, branches=("left", "right")):
        x = self.trunk(x).flatten(1)
        return sum(getattr(self, name)(x) for name in branches)


def batch(step, rank):
    rng = np.random.default_rng([step, rank])
    return torch.from_numpy(rng.standard_normal((3 + rank, 1, 8, 8), "f4")), torch.from_numpy(
        rng.integers(0, 5, 3 + rank)
    )


def trained(world, wrap, optimize, *, micro=1, clip=None, branches=None, batches=None, normed=True):
    """Losses of this rank, and the parameters at the end; ranks that are given a number of batches are joined."""
    torch.manual_seed(world.rank)  # rank 0's values are to be everybody's
    model = wrap(Network(normed))
    optimizer = optimize(model)
    losses = []

    def train():
        for step in range(STEPS if batches is None else batches):
            optimizer.zero_grad()
            for part in range(micro):
                x, y = batch(step * micro + part, world.rank)
                used = ("left", "right") if branches is None else branches(step, world.rank)
                if part < micro - 1:
                    with model.no_sync():
                        loss = nn.functional.cross_entropy(model(x, used), y)
                        loss.backward()
                else:
                    loss = nn.functional.cross_entropy(model(x, used), y)
                    loss.backward()
                losses.append(float(loss.detach()))
            if clip is not None:
                if hasattr(optimizer, "clip_grad_norm_"):
                    optimizer.clip_grad_norm_(clip)
                else:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()

    if batches is None:
        train()
    else:
        with model.join():
            train()
    world.barrier()
    values = [param.detach().numpy().copy() for param in model.parameters()]
    world.barrier()
    return losses, values


SCENARIOS = {
    "plain": {},
    "accumulation": {"micro": 3},
    "clipping": {"clip": 0.2},
    "unused parameters": {"branches": lambda step, rank: ("left",) if (step + rank) % 2 else ("left", "right")},
    "uneven inputs": {"batches": None, "normed": False},
}


RULE = {"lr": 0.1, "momentum": 0.9}


def settings_of(scenario, rank):
    return SCENARIOS[scenario] | ({"batches": 1 + rank} if "batches" in SCENARIOS[scenario] else {})


@pytest.fixture(scope="module")
def by_torch(world):
    """Losses and parameters of torch's own wrapper in a scenario, which is trained once; all ranks must call it."""

    @functools.cache
    def found(scenario):
        return trained(
            world,
            lambda net: nn.parallel.DistributedDataParallel(
                net, find_unused_parameters=scenario == "unused parameters"
            ),
            lambda model: torch.optim.SGD(model.parameters(), **RULE),
            **settings_of(scenario, world.rank),
        )

    return found


@pytest.mark.parametrize(("owner", "overlap"), [("rank", False), ("rank", True), ("shard", False)])
@pytest.mark.parametrize("scenario", list(SCENARIOS))
def test_losses_and_parameters_are_those_of_torchs_ddp(world, by_torch, scenario, owner, overlap):
    find_unused = scenario == "unused parameters"

    def ours(net):
        return hpcdp.torch.DistributedDataParallel(
            net, world, owner=owner, overlap=overlap, find_unused_parameters=find_unused, bucket_cap_mb=0.01
        )

    def optimize(model):
        if owner == "shard":
            return hpcdp.torch.ShardedOptimizer(model, torch.optim.SGD, **RULE)
        return torch.optim.SGD(model.parameters(), **RULE)

    found, expected = trained(world, ours, optimize, **settings_of(scenario, world.rank)), by_torch(scenario)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_candidates_of_the_benchmark_learn_alike(world):
    if world.size != 2:
        pytest.skip("two ranks are enough: tests/torch/test_torch_ddp_benchmark.py has what the program says")
    row = torch_ddp.measure(world, "lenet", peers.MODELS["lenet"].batches[0], turns=1, seconds=0.02)
    assert row["loss_difference"] < 0.02 * row["apart"]
    assert list(row["step_ms"]) == [torch_ddp.DDP, torch_ddp.BACKEND, torch_ddp.RANK, torch_ddp.SHARD, torch_ddp.ALONE]


@pytest.mark.thorough  # tests/torch/test_torch_amp.py compiles both ways, with one rank
def test_compiled_modules_learn_as_others(world, by_torch):
    if world.size != 2:
        pytest.skip("two ranks are enough: what is compiled is the same on any number of them")

    def wrap(net):
        return torch.compile(hpcdp.torch.DistributedDataParallel(net, world), backend="aot_eager")

    def optimize(model):
        return torch.optim.SGD(model.parameters(), **RULE)

    found = trained(world, wrap, optimize)
    np.testing.assert_allclose(found[0], by_torch("plain")[0], rtol=1e-4)
