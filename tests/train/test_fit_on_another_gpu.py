"""`fit` and `evaluate` of a network on a GPU that is not current, and with batches that are elsewhere.

On the stand-in, which refuses what is computed on one GPU with arrays of another.
"""

import numpy as np
import pytest
from rows_on_gpus import reference_kernels

from hpcdp import data, kernels, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import Device, cpu, gpu, to_host
from hpcdp.parallel.functional import SyncBatchNorm
from hpcdp.train.fit import fit
from hpcdp.train.metrics import BatchSums, evaluate
from hpcdp.train.trainer import Trainer

N = 30
RNG = np.random.default_rng(3)
SAMPLES = data.ArrayDataset(RNG.standard_normal((N, 8)).astype("f4"), RNG.integers(0, 4, N))
THERE = gpu(1)
BATCHES = {
    "all": lambda x, y: (THERE.put(x), THERE.put(y)),
    "labels on the host": lambda x, y: (THERE.put(x), y),
    "on the host": lambda x, y: (x, y),
    "on another": lambda x, y: (gpu(2).put(x), gpu(0).put(y)),
}


@pytest.fixture(autouse=True)
def by_numpy(monkeypatch):
    monkeypatch.setattr(kernels, "_for_cuda", reference_kernels)  # CUDA's are tested for themselves, and slow here


def trained(world, device, transform, joint=False, n=N):
    """Records and parameters of a run on ``device``, while GPU 0 is current; the last rank has ``n`` samples."""
    norm = SyncBatchNorm(16, world=world) if joint else nn.BatchNorm(16)
    net = nn.Sequential(nn.Dense(8, 16), norm, nn.ReLU(), nn.Dense(16, 4))
    for number, param in enumerate(net.parameters()):
        param.data[...] = np.random.default_rng(number).standard_normal(param.data.shape) / 4
    net.to(device)
    with device.current():
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1), world)
    gpu(0).use()
    own = SAMPLES if world.rank < world.size - 1 else data.ArrayDataset(SAMPLES.x[:n], SAMPLES.y[:n])
    loader = data.DataLoader(
        own, data.ShardedSampler(len(own), 10, num_parts=1, part_index=0, seed=0), prefetch=0, transform=transform
    )
    tested = evaluate(net, SAMPLES, world, batch_size=7)
    records = fit(
        net, trainer, loader, epochs=2, world=world, evaluate=lambda: evaluate(net, SAMPLES, world, batch_size=7)
    )
    params = [param.data for param in net.parameters()]
    assert {Device.of(each) for each in params} == {device}
    measured = [[record[name] for name in ("loss", "accuracy", "test_loss", "test_accuracy")] for record in records]
    return [(tested.loss, tested.accuracy), measured, *map(to_host, params)]


def assert_same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batches", BATCHES)
def test_batches_come_to_where_the_network_is(gpus_on_host, batches):
    found = thread_comm.run(1, lambda world: trained(world, THERE, BATCHES[batches]))
    assert_same(found, thread_comm.run(1, lambda world: trained(world, cpu(0), None)))


@pytest.mark.filterwarnings("ignore:gradients on GPUs are summed in host memory")
def test_so_do_those_of_a_rank_that_has_no_more(gpus_on_host):
    """Its empty batches are read for the layers that all ranks compute together."""
    found = thread_comm.run(2, lambda world: trained(world, THERE, None, joint=True, n=10))
    assert_same(found, thread_comm.run(2, lambda world: trained(world, cpu(0), None, joint=True, n=10)))


def test_batches_on_a_gpu_come_to_a_network_on_the_host(gpus_on_host):
    found = thread_comm.run(1, lambda world: trained(world, cpu(0), BATCHES["all"]))
    assert_same(found, thread_comm.run(1, lambda world: trained(world, cpu(0), None)))


def test_sums_are_where_the_last_batch_was(gpus_on_host):
    sums, logits = BatchSums(2), np.eye(4, dtype="f4")
    for row, device in [(0, gpu(1)), (0, gpu(2)), (1, cpu(0)), (1, gpu(1))]:
        gpu(0).use()
        sums.add(row, *(device.put(each) for each in (np.ones(4, "f4"), logits, np.array([0, 1, 2, 0]))))
    np.testing.assert_array_equal(sums.rows, [[8, 6, 8], [8, 6, 8]])
