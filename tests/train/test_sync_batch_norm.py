"""Batch normalization over all ranks, against one process that has the whole batch."""

import numpy as np
import pytest
from raises import raises

import hpcdp
from hpcdp import nn, optim
from hpcdp.autograd import Tensor, record
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import Device, Streams, cpu, dtype_of, gpu, to_host
from hpcdp.data import ArrayDataset, DataLoader, ShardedSampler
from hpcdp.errors import ConfigError, MismatchError
from hpcdp.nn.functional import softmax_cross_entropy
from hpcdp.parallel.functional import SyncBatchNorm
from hpcdp.train.fit import fit

SAMPLES = [3, 5, 1, 0]


def samples(rank, shape, step, dtype):
    rng = np.random.default_rng([rank, step])
    x = (3 + 2 * rng.standard_normal((SAMPLES[rank], 6, *shape))).astype(dtype)
    return x, rng.standard_normal(x.shape).astype(dtype)


def through(layer, x, gy):
    """Result and gradient of ``x`` in training."""
    source = Tensor(x)
    source.attach_grad()
    with record():
        y = layer(source)
    y.backward(gy)
    return y.data, source.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [("f4", 1e-4), ("f8", 1e-10)])
@pytest.mark.parametrize("shape", [(), (5,), (4, 3)])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_output_gradients_and_statistics_are_those_of_the_whole_batch(n, shape, dtype, tolerance):
    def rank(world):
        reference = nn.BatchNorm(6, momentum=0.7).to(dtype)
        ours = SyncBatchNorm.convert(nn.BatchNorm(6, momentum=0.7).to(dtype), world)
        for step in range(3):
            pieces = [samples(other, shape, step, dtype) for other in range(n)]
            expected = through(reference, *(np.concatenate(each) for each in zip(*pieces, strict=True)))
            found = through(ours, *pieces[world.rank])
            first = sum(SAMPLES[: world.rank])
            for whole, mine in zip(expected, found, strict=True):
                part = whole[first : first + SAMPLES[world.rank]]
                np.testing.assert_allclose(mine, part, rtol=tolerance, atol=tolerance)
            for name, param in reference.named_parameters():  # each rank's are those of its samples: they add up
                mine = getattr(ours, name).grad
                total = np.sum(world.comm.allgather_json(mine.tolist()), axis=0)
                np.testing.assert_allclose(total, param.grad, rtol=10 * tolerance, atol=10 * tolerance)
        for name, buffer in reference.named_buffers():
            np.testing.assert_allclose(getattr(ours, name).data, buffer.data, rtol=tolerance, atol=tolerance)
        x = samples(0, shape, 9, dtype)[0]
        np.testing.assert_allclose(ours(x).data, reference(x).data, rtol=tolerance, atol=tolerance)

    thread_comm.run(n, rank)


@pytest.mark.parametrize("n", [2, 3])
def test_of_a_batch_on_a_gpu_sums_alone_go_through_the_host(gpus_on_host, monkeypatch, n):
    import cupy

    moved = []
    for name in ("to_host", "get"):
        copied = getattr(cupy.Array, name)
        monkeypatch.setattr(cupy.Array, name, lambda x, _c=copied: moved.append(x.size) or _c(x))

    def copy_async(streams, target, source, stream, _c=Streams.copy_async):
        if isinstance(target, np.ndarray):
            moved.append(target.size)
        _c(streams, target, source, stream)

    monkeypatch.setattr(Streams, "copy_async", copy_async)

    def rank(world, there):
        layer = SyncBatchNorm(6, world=world)
        x, gy = samples(world.rank, (4, 3), 0, "f4")
        if not there:
            return [*through(layer, x, gy), layer.running_mean.data, layer.running_var.data]
        for each in (layer.gamma, layer.beta, layer.running_mean, layer.running_var):
            each.data = cupy.array(each.data)
            each.grad = None if each.grad is None else cupy.array(each.grad)
        found = *through(layer, cupy.array(x), cupy.array(gy)), layer.running_mean.data, layer.running_var.data
        cupy.cuda.get_current_stream().synchronize()
        return found

    host = thread_comm.run(n, lambda world: rank(world, False))
    found = thread_comm.run(n, lambda world: rank(world, True))
    assert sorted(moved) == [2 * 6] * n + [2 * 6 + 1] * n
    for mine, theirs in zip(found, host, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(x._held, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_a_batch_on_another_gpu_than_the_current_one_is_computed_there(gpus_on_host, dtype, tolerance):
    def rank(world, there):
        gpu(0).use()
        layer = SyncBatchNorm(6, world=world).to(dtype)
        x = samples(world.rank, (4, 3), 0, "f4")[0].astype(dtype_of(dtype))
        if there:
            layer, x = layer.to(gpu(1)), gpu(1).put(x)
        y, gradient = through(layer, x, x)
        found = [y, gradient, layer.gamma.grad, layer.beta.grad, layer.running_mean.data, layer.running_var.data]
        assert {Device.of(each) for each in found} == {gpu(1) if there else cpu(0)}
        return [to_host(each).astype("f4") for each in found]

    host = thread_comm.run(2, lambda world: rank(world, False))
    for mine, theirs in zip(thread_comm.run(2, lambda world: rank(world, True)), host, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_running_variance_is_biased():
    def rank(world):
        layer = SyncBatchNorm(6, momentum=0.0, world=world)
        x, gy = samples(world.rank, (), 0, "f4")
        through(layer, x, gy)
        return x, layer.running_var.data

    found = thread_comm.run(3, rank)
    whole = np.concatenate([x for x, _ in found])
    for _, variance in found:
        np.testing.assert_allclose(variance, whole.var(axis=0), rtol=1e-5)


def test_a_mean_far_from_zero_costs_no_digits():
    def rank(world):
        layer = SyncBatchNorm(1, world=world)
        x = (1000 + np.random.default_rng(world.rank).standard_normal((50, 1, 8))).astype("f4")
        return x, through(layer, x, np.ones_like(x))[0]

    found = thread_comm.run(3, rank)
    x, y = (np.concatenate(each).astype("f8") for each in zip(*found, strict=True))
    np.testing.assert_allclose(y, (x - x.mean()) / x.std(), atol=1e-3)


def test_no_samples_anywhere_move_nothing():
    def rank(world):
        layer = SyncBatchNorm(6, world=world)
        y, dx = through(layer, np.empty((0, 6, 2), "f4"), np.empty((0, 6, 2), "f4"))
        assert y.shape == dx.shape == (0, 6, 2)
        assert not layer.gamma.grad.any() and not layer.running_mean.data.any() and (layer.running_var.data == 1).all()

    thread_comm.run(2, rank)


def network():
    weights = nn.init.Xavier(3)
    return nn.Sequential(
        nn.Conv2D(1, 4, 3, weight_init=weights), nn.BatchNorm(4), nn.ReLU(), nn.MaxPool2D(2), nn.Flatten(),
        nn.Dense(16, 5, weight_init=weights),
    )  # fmt: skip


@pytest.mark.parametrize("n", [2, 3, 4])
def test_training_on_any_number_of_ranks_is_that_of_one(n):
    """Of 13 samples 4 a step make a last batch of one, in which all but one rank have none."""
    rng = np.random.default_rng(2)
    data = ArrayDataset(rng.standard_normal((13, 1, 6, 6)).astype("f4"), rng.integers(0, 5, 13))

    def rank(world):
        net = SyncBatchNorm.convert(network(), world)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world)
        loader = DataLoader(data, ShardedSampler(13, 4, world.size, world.rank, seed=1), prefetch=0)
        records = fit(net, trainer, loader, epochs=3, loss=softmax_cross_entropy, world=world)
        return records[-1]["loss"], {name: array.copy() for name, array in net.state_dict().items()}

    (loss, alone), *_ = thread_comm.run(1, rank)
    for found, state in thread_comm.run(n, rank):
        assert found == pytest.approx(loss, rel=1e-4)
        for name, array in alone.items():
            np.testing.assert_allclose(state[name], array, rtol=2e-3, atol=2e-4, err_msg=name)


def test_what_it_replaces_keeps_parameters_and_buffers():
    def rank(world):
        net = nn.Sequential(nn.Dense(4, 6), nn.Sequential(nn.BatchNorm(6, eps=1e-3)))
        before = dict(net.named_parameters()) | dict(net.named_buffers())
        assert SyncBatchNorm.convert(net, world) is net
        after = dict(net.named_parameters()) | dict(net.named_buffers())
        assert list(after) == list(before) and all(after[name] is before[name] for name in after)
        assert repr(net[1]) == "Sequential(\n  (0): SyncBatchNorm(6, momentum=0.9, eps=0.001)\n)"
        assert SyncBatchNorm.convert(net, world)[1][0].eps == 1e-3

    thread_comm.run(1, rank)


def test_a_reproducible_trainer_is_refused():
    def rank(world):
        net = SyncBatchNorm.convert(network(), world)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, reproducible=True)
        with (
            raises(ConfigError, operation="SyncBatchNorm", expected=["Trainer", "reproducible=True"]),
            record(),
        ):
            net(np.ones((2, 1, 6, 6), "f4"))
        assert trainer.step_count == 0

    thread_comm.run(2, rank)


@pytest.mark.parametrize("settings", [{}, {"kvstore": "dist_sync"}])
def test_ranks_without_the_layer_are_named_when_the_trainer_is_made(settings):
    def rank(world):
        net = nn.Sequential(nn.Dense(4, 6), nn.BatchNorm(6), nn.Dense(6, 3))
        if world.rank != 1:
            SyncBatchNorm.convert(net, world)
        with raises(
            MismatchError, operation="Trainer", expected=["1.gamma", (6,), "rank 0"], got=["1.gamma", "rank 1"]
        ):
            hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, **settings)

    thread_comm.run(3, rank)
