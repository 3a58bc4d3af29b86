"""Batch normalization over all ranks, against one process that has the whole batch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from pairs import pairs
from torch import nn

import hpcdp.torch
from hpcdp.comm import thread_comm

KINDS = {(): nn.BatchNorm1d, (5,): nn.BatchNorm1d, (4, 3): nn.BatchNorm2d, (2, 3, 2): nn.BatchNorm3d}
SAMPLES = [3, 5, 1, 0]


def samples(rank, shape, step):
    rng = np.random.default_rng([rank, step])
    x = 3 + 2 * rng.standard_normal((SAMPLES[rank], 6, *shape), "f4")
    return torch.from_numpy(x), torch.from_numpy(rng.standard_normal(x.shape, "f4"))


@pytest.mark.parametrize(
    ("n", "settings", "shape"),
    pairs([1, 2, 3, 4], [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], KINDS),
)
def test_output_gradients_and_statistics_are_those_of_the_whole_batch(n, settings, shape):
    def rank(world):
        torch.set_num_threads(1)
        reference = KINDS[shape](6, **settings)
        ours = hpcdp.torch.SyncBatchNorm.convert_sync_batchnorm(KINDS[shape](6, **settings), world)
        for step in range(3):
            pieces = [samples(other, shape, step) for other in range(n)]
            whole = torch.cat([x for x, _ in pieces]).requires_grad_()
            mine = pieces[world.rank][0].clone().requires_grad_()
            expected, found = reference(whole), ours(mine)
            first = sum(SAMPLES[: world.rank])
            place = slice(first, first + SAMPLES[world.rank])
            assert torch.allclose(found, expected[place], atol=1e-5)
            expected.backward(torch.cat([gradient for _, gradient in pieces]))
            found.backward(pieces[world.rank][1])
            assert torch.allclose(mine.grad, whole.grad[place], atol=1e-5)
        for name, buffer in reference.named_buffers():
            assert torch.allclose(ours.get_buffer(name), buffer, atol=1e-5), name
        for name, param in reference.named_parameters():  # sums over the samples: those of the ranks add up
            mine = ours.get_parameter(name).grad.numpy()
            assert np.allclose(np.sum(world.comm.allgather_json(mine.tolist()), axis=0), param.grad, atol=1e-4)
        assert torch.allclose(ours.eval()(whole.detach()), reference.eval()(whole.detach()), atol=1e-5)

    thread_comm.run(n, rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_in_16_bits_too(n, affine, dtype):
    def rank(world):
        torch.set_num_threads(1)
        reference = nn.BatchNorm1d(6, affine=affine)
        ours = hpcdp.torch.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(6, affine=affine), world).to(dtype)
        pieces = [[each.to(dtype) for each in samples(other, (), 0)] for other in range(n)]
        whole = torch.cat([x for x, _ in pieces]).float().requires_grad_()
        mine = pieces[world.rank][0].clone().requires_grad_()
        expected, found = reference(whole), ours(mine)
        place = slice(sum(SAMPLES[: world.rank]), sum(SAMPLES[: world.rank + 1]))
        assert found.dtype == dtype and torch.allclose(found.float(), expected[place], atol=0.03)
        expected.backward(torch.cat([gradient for _, gradient in pieces]).float())
        found.backward(pieces[world.rank][1])
        assert mine.grad.dtype == dtype and torch.allclose(mine.grad.float(), whole.grad[place], atol=0.03)
        for name, param in reference.named_parameters():
            mine = ours.get_parameter(name).grad
            assert mine.dtype == dtype
            total = np.sum(world.comm.allgather_json(mine.float().tolist()), axis=0)
            assert np.allclose(total, param.grad, atol=0.1)
        assert torch.allclose(ours.running_mean.float(), reference.running_mean, atol=0.03)

    thread_comm.run(n, rank)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_wrapped_model_learns_as_one_process_with_the_whole_batch(overlap):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(6, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))

    def rank(world, start):
        own = net()
        own.load_state_dict(start)
        synced = hpcdp.torch.SyncBatchNorm.convert_sync_batchnorm(own, world)
        model = hpcdp.torch.DistributedDataParallel(synced, world, overlap=overlap, bucket_cap_mb=0.001)
        reference = net()
        reference.load_state_dict(start)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
        for step in range(4):
            pieces = [samples(other, (4, 3), step)[0] for other in range(3)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            (model(pieces[world.rank]) ** 2).sum().backward()
            (reference(torch.cat(pieces)) ** 2).sum().div(3).backward()  # ours is the mean over ranks of sums
            for optimizer in optimizers:
                optimizer.step()
            for (name, mine), other in zip(synced.named_parameters(), reference.parameters(), strict=True):
                assert torch.allclose(mine, other, atol=1e-4), (step, name)

    start = net().state_dict()
    thread_comm.run(3, lambda world: rank(world, start), 1 if overlap else None)


@pytest.mark.parametrize("n", [2, 3])
def test_from_a_gpu_sums_alone_go_through_the_host(monkeypatch, n):
    """``cpu()`` of a tensor on a GPU is a copy, here of one in host memory, too."""
    moved = []

    def copied(tensor):
        moved.append(tensor.numel())
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "cpu", copied)

    def rank(world):
        torch.set_num_threads(1)
        reference, ours = nn.BatchNorm2d(6), hpcdp.torch.SyncBatchNorm(6, world=world)
        pieces = [samples(other, (4, 3), 0) for other in range(n)]
        whole = torch.cat([x for x, _ in pieces]).requires_grad_()
        mine = pieces[world.rank][0].clone().requires_grad_()
        place = slice(sum(SAMPLES[: world.rank]), sum(SAMPLES[: world.rank + 1]))
        expected, found = reference(whole), ours(mine)
        expected.backward(torch.cat([gradient for _, gradient in pieces]))
        found.backward(pieces[world.rank][1])
        assert torch.allclose(found, expected[place], atol=1e-5)
        assert torch.allclose(mine.grad, whole.grad[place], atol=1e-5)
        assert torch.allclose(ours.running_var, reference.running_var, atol=1e-5)

    thread_comm.run(n, rank)
    assert sorted(moved) == [2 * 6] * n + [2 * 6 + 1] * n


@pytest.mark.parametrize("settings", [{}, {"track_running_stats": False}])
def test_one_rank_may_evaluate_alone(settings):
    def rank(world):
        ours = hpcdp.torch.SyncBatchNorm(6, world=world, **settings).eval()
        if world.rank == 1:
            x, _ = samples(1, (), 0)
            assert torch.equal(ours(x), nn.BatchNorm1d(6, **settings).eval()(x))

    thread_comm.run(2, rank)


def test_gradients_of_gradients_are_refused():
    def rank(world):
        x = samples(world.rank, (), 0)[0].requires_grad_()
        out = hpcdp.torch.SyncBatchNorm(6, world=world)(x).pow(3).sum()
        (gradient,) = torch.autograd.grad(out, x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.sum().backward()

    thread_comm.run(2, rank)


def test_statistics_that_are_no_longer_tracked_stay_as_they_are():
    def rank(world):
        ours = hpcdp.torch.SyncBatchNorm(6, world=world)
        ours.track_running_stats = False
        ours(samples(world.rank, (), 0)[0])
        assert ours.running_mean.tolist() == [0.0] * 6 and ours.num_batches_tracked == 0

    thread_comm.run(2, rank)


def test_inputs_that_have_no_statistics_are_refused():
    def rank(world):
        layer = hpcdp.torch.SyncBatchNorm(6, world=world)
        with pytest.raises(ValueError, match="at least 2 dimensions, got 1"):
            layer(torch.ones(6))
        with pytest.raises(ValueError, match="more than 1 value per channel over all ranks, got 1"):
            layer(torch.ones(1 - world.rank, 6))

    thread_comm.run(2, rank)
