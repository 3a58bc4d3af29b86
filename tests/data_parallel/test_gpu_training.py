"""A network, its data and its gradients on GPUs, on ranks: the same program as on the host, here on a stand-in."""

import contextlib
import shutil
import sys

import numpy as np
import pytest
from gpu_on_host import streams as gpu_streams
from pairs import in_turn

from hpcdp import autograd, data, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.gpu_buckets.transport import GpuTransport
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import cpu, gpu, to_host
from hpcdp.train.trainer import Trainer

N, STEPS = 48, 4
pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++, which compiles kernels for this processor")


def network():
    rng = np.random.default_rng(7)
    net = nn.Sequential(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 4))
    for param in net.parameters():
        param.data[...] = rng.standard_normal(param.data.shape).astype("f4") / 4
    return net


def train(world, optimizer=None, **options):
    """The program; where it runs is `World.device` alone."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((N, 8)).astype("f4"), rng.integers(0, 4, N)
    world.device.use()
    net = network().to(world.device)
    options = options or {"clip_norm": 1.0}
    optimizer = optimizer or optim.AdamW(lr=0.01)
    trainer = Trainer(net.parameters(), optimizer, world, bucket_cap_mb=0.0003, **options)
    sampler = data.ShardedSampler(N, N // STEPS, num_parts=world.size, part_index=world.rank, seed=0)
    losses = []
    for x_batch, y_batch in data.DataLoader(data.ArrayDataset(x, y), sampler, prefetch=0, device=world.device):
        with autograd.record():
            loss = nn.functional.softmax_cross_entropy(net(x_batch), y_batch)
        loss.backward()
        trainer.step(len(y_batch))
        losses.append(float(to_host(loss.data).sum()))
        if len(losses) == 2:
            with trainer.changing_parameters():
                net[0].weight *= 0.5
    return type(net.parameters()[0].data).__module__, losses, [to_host(each.data).copy() for each in net.parameters()]


def check(monkeypatch, way, n, nodes, *args, **options):
    """The program on GPUs has, but for rounding, the numbers of the program on the host, and the same on all ranks."""

    def program(world):
        return train(world, *args, **options)

    monkeypatch.setattr(comm_world, "visible", lambda: ())
    host = thread_comm.run(n, program, nodes)
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(8 if way is GpuTransport.NCCL else 1))
    monkeypatch.setattr(comm_world, "visible", lambda: found)
    there = thread_comm.run(n, program, nodes)
    for (kind, losses, params), (host_kind, host_losses, host_params) in zip(there, host, strict=True):
        assert (kind, host_kind) == ("cupy", "numpy")
        np.testing.assert_allclose(losses, host_losses, rtol=1e-5)
        for mine, first, theirs in zip(params, there[0][2], host_params, strict=True):
            np.testing.assert_array_equal(mine, first)
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}])
def test_networks_on_several_gpus_are_trained_whatever_gpu_is_current(gpus_on_host, options):
    """Each trainer where its parameters are."""
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((N, 8)).astype("f4"), rng.integers(0, 4, N)

    def trained(world, places):
        nets, trainers = [], []
        for place in places:
            place.use()
            nets.append(network().to(place))
            trainers.append(Trainer(nets[-1].parameters(), optim.SGD(lr=0.1, momentum=0.9), world, **options))
        for _ in range(2):
            for net, trainer, place in zip(nets, trainers, places, strict=True):
                for ahead in (trainer.no_sync(), contextlib.nullcontext()):
                    with ahead:
                        with autograd.record():
                            loss = nn.functional.softmax_cross_entropy(net(place.put(x)), place.put(y))
                        loss.backward()
                        trainer.step(N)
            state = trainers[0].state_dict()
            trainers[0].load_state_dict(state)
        return [to_host(each.data).copy() for net in nets for each in net.parameters()]

    ((wanted, found),) = thread_comm.run(1, lambda world: (trained(world, [cpu()]), trained(world, [gpu(1), gpu(2)])))
    for mine, theirs in zip(found, wanted * 2, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("way", "n", "nodes"), [(GpuTransport.NCCL, 2, None), (GpuTransport.CUDA_IPC, 2, None), (GpuTransport.NCCL, 4, 2)]
)
def test_a_program_on_gpus_is_the_program_on_the_host(gpus_on_host, monkeypatch, way, n, nodes):
    check(monkeypatch, way, n, nodes)
    assert any("nccl" in name for name in gpus_on_host.log) == (way is GpuTransport.NCCL)


@pytest.mark.parametrize(("n", "nodes"), [(1, None), (2, None), (4, 2)])
def test_the_host_waits_for_no_stream_in_a_step(gpus_on_host, monkeypatch, n, nodes):
    """What it must know it asks again and again, and lets other ranks' work go on meanwhile."""
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(8))
    monkeypatch.setattr(comm_world, "visible", lambda: found)
    cupy = sys.modules["cupy"]
    waits: list[str] = []

    def counted(owner, name):
        whole = getattr(owner, name)

        def wait(*args):
            waits.append(f"{owner.__name__}.{name}")
            return whole(*args)

        monkeypatch.setattr(owner, name, wait)

    for owner in (gpu_streams.Stream, gpu_streams.Event):
        counted(owner, "synchronize")
    for name in ("get", "item", "tolist", "__float__", "__int__", "__bool__"):
        counted(cupy.Array, name)

    def program(world):
        rng = np.random.default_rng(world.rank)
        world.device.use()
        net = network().to(world.device)
        x, y = (world.device.put(each) for each in (rng.standard_normal((4, 8)).astype("f4"), rng.integers(0, 4, 4)))
        trainer = Trainer(net.parameters(), optim.AdamW(lr=0.01), world, bucket_cap_mb=0.0003, clip_norm=1.0)
        for step in range(4):
            with autograd.record():
                loss = nn.functional.softmax_cross_entropy(net(x), y)
            loss.backward()
            world.barrier()
            if step == 2 and world.rank == 0:
                waits.clear()
            world.barrier()
            trainer.step(4)
        world.barrier()
        return list(waits)

    assert thread_comm.run(n, program, nodes) == [[]] * n


@pytest.mark.parametrize(
    ("gpus_on_host", "run"),
    in_turn(
        [0, 1],
        [
            (GpuTransport.NCCL, 2, None, "rank", 0.9),
            (GpuTransport.NCCL, 2, None, "shard", 0.0),
            (GpuTransport.CUDA_IPC, 2, None, "rank", 0.0),
            (GpuTransport.NCCL, 4, 2, "shard", 0.9),
        ],
    ),
    indirect=["gpus_on_host"],
)
def test_layers_have_their_norms_on_gpus(gpus_on_host, monkeypatch, run):
    way, n, nodes, owner, momentum = run
    check(monkeypatch, way, n, nodes, optim.LARS(0.5, momentum, trust=0.1, weight_decay=0.01), owner=owner)


@pytest.mark.parametrize(
    ("n", "nodes", "options"),
    [
        (2, 1, {"compression": "1bit", "overlap": True}),
        pytest.param(2, None, {"owner": "shard"}, marks=pytest.mark.thorough),
        pytest.param(4, 2, {"compression": "topk:ratio=0.3", "owner": "shard"}, marks=pytest.mark.thorough),
    ],
)
def test_what_is_frozen_on_gpus_keeps_its_value_its_state_and_what_was_not_sent(
    gpus_on_host, monkeypatch, n, nodes, options
):
    found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(8))
    monkeypatch.setattr(comm_world, "visible", lambda: found)

    def program(world):
        rng = np.random.default_rng(world.rank)
        world.device.use()
        net = network().to(world.device)
        x, y = (world.device.put(each) for each in (rng.standard_normal((4, 8)).astype("f4"), rng.integers(0, 4, 4)))
        trainer = Trainer(net.parameters(), optim.AdamW(lr=0.01), world, **options)

        def step():
            with autograd.record():
                loss = nn.functional.softmax_cross_entropy(net(x), y)
            loss.backward()
            trainer.step(4)

        def kept():
            state = trainer.state_dict()
            held = [*state["states"]["2.weight"].values()]
            if "residuals" in state:
                held.append(state["residuals"]["2.weight"])
            parts = [to_host(part.values).copy() for each in held for part in each.parts]
            return [to_host(net[2].weight.data).copy(), *parts]

        step()
        step()
        net[2].weight.grad_req = "null"
        before, others = kept(), to_host(net[0].weight.data).copy()
        step()
        step()
        for mine, first in zip(kept(), before, strict=True):
            np.testing.assert_array_equal(mine, first)
        assert not np.array_equal(to_host(net[0].weight.data), others)
        net[2].weight.grad_req = "write"
        step()
        assert not np.array_equal(to_host(net[2].weight.data), before[0])

    thread_comm.run(n, program, nodes)
