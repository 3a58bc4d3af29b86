"""What ranks do on a GPU, each with its own comparison with the host: ``make test-gpu`` has real ranks run them there.

``hpcdp launch -n 2 -- python tests/gpu_cases.py cuda_ipc`` runs one; where there is no GPU thread ranks do, on the
stand-in (``tests/gpu/test_gpu.py``). Every rank must call a case. What it cannot run it says by `Skipped`.
"""

import importlib.util
import itertools
import sys
import tempfile
from functools import partial

import numpy as np
from parameters_on_gpus import SHAPES, Parameter, check_steps
from raises import raises

import hpcdp
from hpcdp import autograd, data, kvstore, nn, optim
from hpcdp.checkpoint import Manager
from hpcdp.comm.gpu_buckets.cuda_ipc import CudaIpc
from hpcdp.comm.gpu_buckets.nccl import Nccl
from hpcdp.comm.gpu_buckets.transport import RowSize, offers, own_offer, parts_of
from hpcdp.comm.progress import run_until_complete
from hpcdp.core.arrays import Device, Streams, cpu, dtype_of, from_host, to_host
from hpcdp.data_parallel import Reducer, bucket_layout
from hpcdp.errors import DeviceError
from hpcdp.kernels.cuda import cudnn_conv
from hpcdp.nn.functional import conv2d
from hpcdp.train import TrainStep
from hpcdp.train.trainer import Trainer

COUNT, KINDS = 100_003, ("float32", "float16", "float64", "int32", "int64")
RULES = {"momentum": optim.SGD(0.05, momentum=0.9), "adamw": optim.AdamW(0.01), "lars": optim.LARS(0.05)}


class Skipped(Exception):
    """A case that cannot run here, and why."""


def _sizes():
    return [RowSize(COUNT, np.dtype(kind)) for kind in KINDS]


def _values(rank, dtype):
    return np.random.default_rng(rank).integers(-8, 8, COUNT).astype(dtype)


def _check_rows(world, streams, rows):
    """Every call of `NodeRows`."""
    parts = parts_of(COUNT, world.size, world.size)
    first, last = parts[world.rank]
    for row in rows:
        mine = _values(world.rank, row.size.dtype)
        wanted = sum(_values(rank, row.size.dtype) for rank in range(world.size))
        by_parts = partial(row.reduce_scatter, parts), partial(row.allgather, parts)
        for calls in (by_parts, (row.allreduce,)):
            row.mine[...] = from_host(mine, row.mine)
            streams.follow(row.stream)
            for call in calls:
                run_until_complete(call())
                streams.synchronize(row.stream)
                assert (to_host(row.mine)[first:last] == wanted[first:last]).all(), row.size
            assert (to_host(row.mine) == wanted).all(), row.size
            world.comm.barrier()  # nobody's row is written anew before all have looked


def nccl(world):
    """Its start, each call, a call that it refuses, and how the communicator is given up then."""
    streams = Streams(world.device)
    offered = offers(world.node_comm, own_offer(world.device, shares_memory=True))
    if not offered[0].nccl:
        raise Skipped("CuPy finds no NCCL")
    node = Nccl(world.node_comm, world.node_memory, streams, offered, world.rank)
    group = node.group(_sizes())
    rows = group.hand_out()
    _check_rows(world, streams, rows)
    at, no_such_rank = int(rows[0].mine.data.ptr), world.size + 4
    with raises(DeviceError, operation="NCCL"):
        node.launch(lambda comm, stream: comm.reduce(at, at, 8, 7, 0, no_such_rank, stream))
    with raises(DeviceError, operation="NCCL"):
        node.check()
    group.close()


def cuda_ipc(world):
    """Rows of ranks that share a GPU."""
    streams = Streams(world.device)
    group = CudaIpc(world.node_comm, world.node_memory, streams, _sizes())
    rows = group.hand_out()
    _check_rows(world, streams, rows)
    del rows
    group.close()


def reducer(world):
    """Buckets as the job's GPUs and nodes let them go: allreduced in the node, or staged between nodes."""
    for overlap, dtype in itertools.product((False, True), ("f4", "f2")):
        params = [Parameter(f"p{i}", shape, dtype) for i, shape in enumerate(SHAPES)]
        layout = bucket_layout.plan([(p.name, p.data.shape, np.dtype(dtype)) for p in params], 0.004, 0.004)
        check_steps(world, Reducer(params, layout, world, overlap), params, 3)


def delivery(world):
    """Batches that come ahead, beside what is computed on those before."""
    count, rng = 4001, np.random.default_rng(1)
    x, y = rng.standard_normal((count, 3, 16), np.float32), rng.integers(0, 9, count)
    for prefetch in (0, 3):
        sampler = data.ShardedSampler(count, 500, seed=3)
        kept = []
        for x_batch, y_batch in data.DataLoader(data.ArrayDataset(x, y), sampler, prefetch, device=world.device):
            assert Device.of(x_batch) == world.device
            kept.append((x_batch * 2, y_batch + 1))
        wanted = data.DataLoader(data.ArrayDataset(x, y), data.ShardedSampler(count, 500, seed=3), 0)
        for (x_found, y_found), (x_wanted, y_wanted) in zip(kept, wanted, strict=True):
            np.testing.assert_array_equal(to_host(x_found), x_wanted * 2)
            np.testing.assert_array_equal(to_host(y_found), y_wanted + 1)


def stores(world):
    """Keys on GPUs hold what they hold on the host; kind ``device`` in one rank, else ``dist_device_sync``."""
    kind = "device" if world.size == 1 else "dist_device_sync"
    found = []
    for place in (cpu(), world.device):
        store, values = kvstore.create(kind, world), []
        store.init(["a", "b"], [place.put(np.full(shape, 2.0, "f4")) for shape in ((700, 30), (5,))])
        store.set_optimizer(optim.SGD(0.1, momentum=0.9))
        for step in range(4):
            for key, shape in (("a", (700, 30)), ("b", (5,))):
                pushed = np.random.default_rng([world.rank, step]).standard_normal(shape, np.float32)
                store.push(key, place.put(pushed))
            outs = [place.put(np.zeros((5,), "f4"))]
            store.pull("b", outs)
            values += [to_host(outs[0]), to_host(store.pull("a").wait()).copy()]
        found.append(values)
    for on_host, on_gpu in zip(*found, strict=True):
        np.testing.assert_allclose(on_gpu, on_host, rtol=1e-5, atol=1e-6)


def _network():
    start = nn.init.Xavier(seed=1)
    conv = nn.Conv2D(1, 3, 3, padding=1, activation="relu", weight_init=start)
    return nn.Sequential(
        conv, nn.BatchNorm(3), nn.MaxPool2D(2), nn.Flatten(), nn.Dense(48, 4, weight_init=start)
    )  # fmt: skip


def _train(world, device, rule, overlap, hybridize=False):
    net = _network().to(device)
    trainer = Trainer(
        net.parameters(), RULES[rule], world, clip_norm=1.0, overlap=overlap, bucket_cap_mb=0.0005
    )  # fmt: skip
    step = TrainStep(net, trainer)
    step.hybridize(hybridize)
    rng, losses = np.random.default_rng(world.rank), []
    for _ in range(5):
        x, y = rng.standard_normal((6, 1, 8, 8), np.float32), rng.integers(0, 4, 6)
        loss, _ = step(device.put(x), device.put(y))
        losses.append(to_host(loss.data).sum())
    return np.array(losses), [to_host(each).copy() for each in net.state_dict().values()]


def states(world):
    """States that are loaded and restored from the host, and `where` of bfloat16."""
    saved = _network()
    for number, param in enumerate(saved.parameters()):
        param.data[...] += number
    loaded, restored = (_network().to(world.device) for _ in range(2))
    loaded.load_state_dict(saved.state_dict())
    with tempfile.TemporaryDirectory() as folder, Manager(folder, world=world) as manager:
        manager.save(1, {"net": saved})
        manager.restore(into={"net": restored})
    for net in (loaded, restored):
        for name, wanted in saved.state_dict().items():
            np.testing.assert_array_equal(to_host(net.state_dict()[name]), wanted, err_msg=name)

    rng = np.random.default_rng(2)
    choice = rng.integers(0, 2, 500).astype(bool)
    a, b = (rng.standard_normal(500, np.float32).astype(dtype_of("bfloat16")) for _ in range(2))
    put = world.device.put
    chosen = autograd.where(put(choice), put(a), put(b))
    np.testing.assert_array_equal(to_host(chosen.data).view(np.uint16), np.where(choice, a, b).view(np.uint16))


def training(world):
    """Steps on a GPU end near those of the host, and with and without overlap at the same bits."""
    for rule in RULES:
        losses, params = _train(world, cpu(), rule, None)
        behind, beside = (_train(world, world.device, rule, overlap) for overlap in (False, True))
        np.testing.assert_allclose(behind[0], losses, rtol=1e-3)
        for mine, wanted, same in zip(behind[1], params, beside[1], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=2e-3, atol=1e-4)
            np.testing.assert_array_equal(mine, same)


def overflow(world, hybridize=False):
    """A step in which one rank's gradient is not finite is left out by all."""
    for overlap in (False, True):
        net = _network().to(world.device)
        policy = hpcdp.Policy(nonfinite="skip")
        trainer = Trainer(net.parameters(), optim.SGD(0.05), world, policy=policy, overlap=overlap)
        step = TrainStep(net, trainer)
        step.hybridize(hybridize)
        rng, moved = np.random.default_rng(world.rank), []
        for number in range(6):
            before = to_host(net[0].weight.data).copy()
            x, y = rng.standard_normal((6, 1, 8, 8), np.float32), rng.integers(0, 4, 6)
            if number in (1, 4) and world.rank == world.size - 1:
                x[0, 0, 0, 0] = np.inf
            step(world.device.put(x), world.device.put(y))
            moved.append(bool((to_host(net[0].weight.data) != before).any()))
        assert moved == [True, False, True, True, False, True] and trainer.num_nonfinite == 2, overlap


def graphs(world):
    """Steps by CUDA graphs, of one rank with the update in them, of several cut at buckets, end near those by hand."""
    for rule, overlap in itertools.product(RULES, (False, True)):
        wanted, found = (_train(world, world.device, rule, overlap, hybridize) for hybridize in (False, True))
        np.testing.assert_allclose(found[0], wanted[0], rtol=1e-3)
        for mine, by_hand in zip(found[1], wanted[1], strict=True):
            np.testing.assert_allclose(mine, by_hand, rtol=2e-3, atol=1e-4)
    overflow(world, hybridize=True)


def convolution(world):
    """By cuDNN, forward and backward."""
    if not cudnn_conv.is_there():
        raise Skipped("cuDNN's frontend is not installed (pip install nvidia-cudnn-frontend nvidia-cudnn-cu13)")
    check_convolutions(world.device)


def check_convolutions(device):
    """Convolutions on ``device`` against those of the host, whatever kernels it takes."""
    for stride, padding in ((1, 0), (2, 1)):
        found = []
        for place in (cpu(), device):
            rng = np.random.default_rng(5)
            arrays = [rng.standard_normal(shape, np.float32) for shape in ((2, 3, 9, 9), (4, 3, 3, 3), (4,))]
            leaves = [autograd.Tensor(place.put(each)) for each in arrays]
            for each in leaves:
                each.attach_grad()
            with autograd.record():
                y = conv2d(*leaves, stride=stride, padding=padding)
            y.backward()
            found.append([to_host(each) for each in (y.data, *(leaf.grad for leaf in leaves))])
        for on_host, there in zip(*found, strict=True):
            np.testing.assert_allclose(there, on_host, rtol=1e-4, atol=1e-4)


def torch_ddp(world):
    """PyTorch's tensors on the GPU: averages, and buffers of rank 0."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:  # tests/torch: a folder without __init__.py
        raise Skipped("PyTorch is not installed")
    import torch

    if not torch.cuda.is_available():
        raise Skipped("PyTorch here has no CUDA")
    torch.cuda.set_device(world.device.index)
    check_torch(world, "cuda")


def check_torch(world, place):
    """A wrapped module of PyTorch against one that sees the batches of all ranks."""
    import torch

    from hpcdp.torch import DistributedDataParallel

    def network():
        first, last = torch.nn.Linear(6, 7), torch.nn.Linear(7, 4)
        net = torch.nn.Sequential(first, torch.nn.BatchNorm1d(7), torch.nn.ReLU(), last)
        with torch.no_grad():
            for number, each in enumerate(net.parameters()):
                each.copy_(torch.linspace(-1, 1, each.numel()).reshape(each.shape).roll(number))
        return net

    def loss_of(net, rank, step, at):
        rng = np.random.default_rng([rank, step])
        x, y = torch.from_numpy(rng.standard_normal((5, 6), np.float32)), torch.from_numpy(rng.integers(0, 4, 5))
        return torch.nn.functional.cross_entropy(net(x.to(at)), y.to(at))

    wrapped, reference = DistributedDataParallel(network().to(place), world), network()
    for step in range(3):
        wrapped.zero_grad()
        loss_of(wrapped, world.rank, step, place).backward()
        reference.zero_grad()
        kept = {name: each.clone() for name, each in reference.named_buffers()}
        for rank in reversed(range(world.size)):
            with torch.no_grad():
                for name, each in reference.named_buffers():
                    each.copy_(kept[name])  # before each forward all have those of rank 0, which comes last
            (loss_of(reference, rank, step, "cpu") / world.size).backward()
        for mine, wanted in zip(wrapped.module.parameters(), reference.parameters(), strict=True):
            np.testing.assert_allclose(mine.grad.cpu().numpy(), wanted.grad.numpy(), rtol=1e-3, atol=1e-5)
    if world.rank == 0:
        for mine, wanted in zip(wrapped.module.buffers(), reference.buffers(), strict=True):
            np.testing.assert_allclose(mine.cpu().numpy(), wanted.numpy(), rtol=1e-4, atol=1e-5)


CASES = {
    each.__name__: each
    for each in (nccl, cuda_ipc, reducer, delivery, stores, states, training, overflow, graphs, convolution, torch_ddp)
}  # fmt: skip


def main(name):
    world = hpcdp.init()
    if world.device.kind == "cpu":
        raise SystemExit("no GPU, or no CuPy")
    import cupy

    cupy.ndarray.to_host = cupy.ndarray.get  # as the stand-in's
    world.device.use()
    try:
        CASES[name](world)
    except Skipped as reason:
        if world.rank == 0:
            print(f"skipped: {reason}")


if __name__ == "__main__":
    main(sys.argv[1])
