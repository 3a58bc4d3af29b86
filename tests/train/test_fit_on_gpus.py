"""`fit` with network and data on GPUs: the run of the host, measured without waiting in each step, and its checkpoints
on either."""

import contextlib
import functools

import numpy as np
import pytest
from pairs import in_turn, pairs
from rows_on_gpus import reference_kernels

from hpcdp import checkpoint, data, kernels, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.comm import world as comm_world
from hpcdp.comm.world import Gpu
from hpcdp.core.arrays import from_host, to_host
from hpcdp.parallel.functional import SyncBatchNorm
from hpcdp.train.checkpoints import Checkpoints
from hpcdp.train.fit import fit
from hpcdp.train.metrics import evaluate
from hpcdp.train.trainer import Trainer

N, BATCH = 181, 18
"""The last of an epoch's 11 batches has one sample, and so some ranks have none."""
ORDERS = [0, 1]
"""In which streams take turns."""


@pytest.fixture
def place(gpus_on_host, monkeypatch):
    """Sets where ranks compute: each on a GPU of its own, or on the host."""
    monkeypatch.setattr(kernels, "_for_cuda", reference_kernels)  # CUDA's are tested for themselves, and slow here

    def set_place(kind):
        count = 8 if kind == "gpu" else 0
        found = tuple(Gpu(i, "NVIDIA A", f"0000:{i:02x}:00.0", str(i)) for i in range(count))
        monkeypatch.setattr(comm_world, "visible", lambda: found)

    return set_place


def train(world, epochs=2, norm=nn.BatchNorm, folder=None, resume=False, **options):
    """The program; where it runs is `World.device` alone."""
    rng = np.random.default_rng(1)
    samples = data.ArrayDataset(rng.standard_normal((N, 8)).astype("f4"), rng.integers(0, 4, N))
    world.device.use()
    args = {} if norm is nn.BatchNorm else {"world": world}
    net = nn.Sequential(nn.Dense(8, 16), norm(16, **args), nn.ReLU(), nn.Dropout(0.2, seed=world.rank), nn.Dense(16, 4))
    for number, param in enumerate(net.parameters()):
        param.data[...] = np.random.default_rng(number).standard_normal(param.data.shape) / 4
    net.to(world.device)
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.05, momentum=0.9), world, bucket_cap_mb=0.0003, **options)
    sampler = data.ShardedSampler(N, BATCH, num_parts=world.size, part_index=world.rank, seed=0, last="keep")
    loader = data.DataLoader(samples, sampler, prefetch=0, device=world.device)
    with contextlib.ExitStack() as stack:
        checkpoints = None
        if folder is not None:
            manager = stack.enter_context(checkpoint.Manager(folder, world))
            checkpoints = Checkpoints(manager, every=4, resume=resume)
        records = fit(
            net, trainer, loader, epochs=epochs, world=world, checkpoints=checkpoints,
            evaluate=lambda: evaluate(net, samples, world, batch_size=7),
        )  # fmt: skip
    kind = type(net.parameters()[0].data).__module__
    arrays = [*(each.data for each in net.parameters()), *(each.data for _, each in net.named_buffers())]
    return kind, records, [to_host(each).copy() for each in arrays]


@functools.cache
def run_on_host(n, nodes=None, **options):
    """What several tests compare with; ``place("host")`` has been called."""
    return thread_comm.run(n, lambda world: train(world, **options), nodes)


MEASURED = ("loss", "accuracy", "samples", "test_loss", "test_accuracy")


def assert_same_run(found, wanted):
    for (_, records, arrays), (_, of_host, on_host) in zip(found, wanted, strict=True):
        for record, other in zip(records, of_host, strict=True):
            np.testing.assert_allclose([record[name] for name in MEASURED], [other[name] for name in MEASURED], 1e-4)
        for mine, theirs in zip(arrays, on_host, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("gpus_on_host", "layout"), in_turn(ORDERS, [(1, None), (2, None), (3, None), (4, 2)]), indirect=["gpus_on_host"]
)
def test_a_run_on_gpus_is_that_on_the_host(place, layout):
    n, nodes = layout
    place("host")
    wanted = run_on_host(n, nodes)
    place("gpu")
    found = thread_comm.run(n, train, nodes)
    assert [each[0] for each in found] == ["cupy"] * n
    assert_same_run(found, wanted)


@pytest.mark.parametrize("gpus_on_host", [0, pytest.param(1, marks=pytest.mark.thorough)], indirect=True)
def test_ranks_without_samples_take_part_in_joint_batch_normalization_on_gpus(place):
    place("host")
    wanted = run_on_host(3, norm=SyncBatchNorm)
    place("gpu")
    assert_same_run(thread_comm.run(3, lambda world: train(world, norm=SyncBatchNorm)), wanted)


@pytest.mark.parametrize(
    ("gpus_on_host", "ends", "n"),
    pairs(ORDERS, [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")], [1, 2]),
    indirect=["gpus_on_host"],
)
def test_a_run_goes_on_from_a_checkpoint_of_either(place, tmp_path, ends, n):
    before, after = ends
    place("host")
    wanted = run_on_host(n)
    place(before)
    thread_comm.run(n, lambda world: train(world, epochs=1, folder=tmp_path))
    place(after)
    found = thread_comm.run(n, lambda world: train(world, folder=tmp_path, resume=True))
    assert_same_run(found, [(kind, records[1:], arrays) for kind, records, arrays in wanted])


@pytest.mark.parametrize(
    ("gpus_on_host", "layout"), in_turn(ORDERS, [(2, None), (3, 1), (4, 2)]), indirect=["gpus_on_host"]
)
@pytest.mark.thorough
def test_each_rank_updates_its_shard_and_a_run_goes_on_from_its_checkpoint(place, tmp_path, layout):
    n, nodes = layout
    options = {"owner": "shard", "clip_norm": 1.0}
    place("host")
    wanted = run_on_host(n, nodes, **options)
    place("gpu")
    thread_comm.run(n, lambda world: train(world, epochs=1, folder=tmp_path, **options), nodes)
    after = [(kind, records[1:], arrays) for kind, records, arrays in wanted]
    assert_same_run(
        thread_comm.run(n, lambda world: train(world, folder=tmp_path, resume=True, **options), nodes), after
    )


def test_states_of_shards_on_gpus_are_saved_whole(place, tmp_path):
    def rank(world, **options):
        net = nn.Dense(8, 16)
        for param in net.parameters():
            param.data[...] = 0.5
        world.device.use()
        trainer = Trainer(net.to(world.device).parameters(), optim.Adam(lr=0.1), world, **options)
        for step in range(3):
            for number, param in enumerate(net.parameters()):
                values = np.random.default_rng([world.rank, step, number]).standard_normal(param.data.shape)
                param.grad[...] = from_host(values.astype("f4"), param.grad)
                param.grad_hook(param)
            if step == 1:
                trainer.allreduce_grads()
                trainer.update(1)
            else:
                trainer.step(1)
        path = tmp_path / f"{options['owner']}.npz"
        trainer.save_states(path)
        trainer.load_states(path)
        found = [trainer.nbytes["state"], *(to_host(param.data).copy() for param in net.parameters())]
        return found, {name: x.copy() for name, x in np.load(path).items() if x.ndim}

    place("gpu")
    everywhere = thread_comm.run(4, lambda world: rank(world, owner="rank"), 2)
    by_shards = thread_comm.run(4, lambda world: rank(world, owner="shard"), 2)
    assert sum(found[0] for found, _ in by_shards) == sum(found[0] for found, _ in everywhere) // 2
    for (mine, saved), (theirs, wanted) in zip(by_shards, everywhere, strict=True):
        for x, y in zip(mine[1:], theirs[1:], strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
        assert saved.keys() == wanted.keys()
        for name, x in saved.items():
            np.testing.assert_allclose(x, wanted[name], rtol=1e-5, atol=1e-7)


@pytest.mark.thorough
def test_nothing_waits_for_the_gpu_in_each_step(place, monkeypatch):
    import cupy

    place("gpu")
    waits = []
    for name in ("to_host", "get", "item", "tolist", "__float__", "__int__", "__bool__"):
        original = getattr(cupy.Array, name)
        monkeypatch.setattr(cupy.Array, name, lambda self, _o=original, _n=name: waits.append(_n) or _o(self))
    met = []
    for epochs in (1, 3):
        waits.clear()
        thread_comm.run(1, lambda world, epochs=epochs: train(world, epochs))
        met.append(len(waits))
    assert met[1] - met[0] <= 2 * 3  # in an epoch: for one exchange of metrics, and one of an evaluation
