"""A loop of one's own whose loss is a mean already is warned of, once; others are not."""

import warnings

import numpy as np
import pytest

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.train import TrainStep

F = nn.functional
N = 8


def batch(rank, count=N):
    rng = np.random.default_rng(rank)
    return rng.standard_normal((count, 6)).astype("f4"), rng.integers(0, 3, count)


def warned(backward, ranks=2, steps=3, **options):
    """What was said while ``backward(net, x, y, trainer)``, which returns a count, was followed by a step."""

    def rank(world):
        net = nn.Dense(6, 3)
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world, **options)
        for _ in range(steps):
            trainer.step(backward(net, *batch(world.rank), trainer))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread_comm.run(ranks, rank)
    return [each for each in caught if "on the mean of" in str(each.message)]


def begun_with(head, *head_grad, count=lambda y: len(y)):
    def backward(net, x, y, trainer):
        with autograd.record():
            number = head(F.softmax_cross_entropy(net(x), y), net)
        number.backward(*(each(y, trainer) for each in head_grad))
        return count(y)

    return backward


MEANS = {
    "mean": begun_with(lambda losses, net: losses.mean()),
    "of one axis": begun_with(lambda losses, net: losses.reshape(N, 1).mean(axis=0)),
    "sum by count": begun_with(lambda losses, net: losses.sum() / len(losses)),
    "with a penalty": begun_with(lambda losses, net: losses.mean() + 0.01 * (net.weight * net.weight).sum()),
    "of the global batch": begun_with(lambda losses, net: losses.mean(), count=lambda y: 2 * len(y)),
    "by one": begun_with(lambda losses, net: losses.mean(), lambda y, trainer: 1.0),
}


@pytest.mark.parametrize("way", [{}, {"kvstore": "dist_sync"}, {"reproducible": True, "virtual_shards": 2}])
@pytest.mark.parametrize("means", MEANS)
def test_a_mean_over_samples_is_told_once_with_what_to_do(means, way):
    (warning,) = warned(MEANS[means], **way)
    assert str(warning.message).endswith(
        f"the mean of {N} losses, and step() divides by the number of samples again: the update is {N} times too "
        "small; call backward() on the loss of each sample, without a mean, or loss.backward(len(y))"
    )
    assert warning.filename == __file__


def test_a_mean_is_told_where_a_batch_has_as_many_samples_as_classes():
    (warning,) = warned(lambda net, x, y, trainer: MEANS["mean"](net, x[:3], y[:3], trainer))
    assert "the mean of 3 losses" in str(warning.message)


def test_a_mean_with_a_loss_scale_is_told_with_it():
    (warning,) = warned(
        begun_with(lambda losses, net: losses.mean(), lambda y, trainer: trainer.loss_scale), loss_scale=4
    )
    assert "loss.backward(len(y) * trainer.loss_scale)" in str(warning.message)


def test_a_mean_before_update_is_told():
    def backward(net, x, y, trainer):
        MEANS["mean"](net, x, y, trainer)
        trainer.allreduce_grads()
        trainer.update(len(y))
        return 0

    (warning,) = warned(backward)
    assert "update(8)" in str(warning.message) and warning.filename == __file__


def each_alone(net, x, y, trainer):
    """One sample after another, within `no_sync` or in one backward of several heads."""
    with trainer.no_sync():
        for at in range(len(y) - 1):
            begun_with(lambda losses, net: losses.mean())(net, x[at : at + 1], y[at : at + 1], trainer)
    return len(y) if begun_with(lambda losses, net: losses.mean())(net, x[-1:], y[-1:], trainer) else 0


def of_pieces(net, x, y, trainer):
    with trainer.no_sync():
        for at in range(len(y) - 1):
            trainer.step(begun_with(lambda losses, net: losses.mean())(net, x[at : at + 1], y[at : at + 1], trainer))
    return begun_with(lambda losses, net: losses.mean())(net, x[-1:], y[-1:], trainer)


def several_heads(net, x, y, trainer):
    with autograd.record():
        heads = [F.softmax_cross_entropy(net(x[at : at + 1]), y[at : at + 1]).mean() for at in range(len(y))]
    autograd.backward(heads)
    return len(y)


def by_train_step(net, x, y, trainer):
    TrainStep(net, trainer)(x, y)
    return 0


OTHERS = {
    "losses": begun_with(lambda losses, net: losses),
    "sum": begun_with(lambda losses, net: losses.sum()),
    "sum with a mean penalty": begun_with(lambda losses, net: losses.sum() + (net.weight * net.weight).mean()),
    "mean with its head gradient": begun_with(lambda losses, net: losses.mean(), lambda y, trainer: len(y)),
    "with both": begun_with(lambda losses, net: losses.mean(), lambda y, trainer: len(y) * trainer.loss_scale),
    "count of one": begun_with(lambda losses, net: losses.mean(), count=lambda y: 1),
    "weighted": begun_with(lambda losses, net: (losses * np.arange(N, dtype="f4")).sum()),
    "features": begun_with(lambda losses, net: (losses.reshape(N, 1) * np.ones((N, 16), "f4")).sum(axis=0).mean()),
    "each alone": each_alone,
    "of pieces": of_pieces,
    "several heads": several_heads,
    "train step": by_train_step,
}


@pytest.mark.parametrize("others", OTHERS)
def test_what_is_no_mean_is_not_told(others):
    assert not warned(OTHERS[others], loss_scale=1.0 if others != "with both" else 128.0)


def test_a_step_with_its_head_gradient_is_exact_for_uneven_batches():
    def rank(world, mean):
        net = nn.Dense(6, 3)
        net.weight.data[...] = 0.1
        trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=0.1), world)
        x, y = batch(world.rank, 2 + 3 * world.rank)
        with autograd.record():
            losses = F.softmax_cross_entropy(net(x), y)
            head = losses.mean() if mean else losses
        head.backward(len(y) if mean else None)
        trainer.step(len(y))
        return net.weight.data.copy()

    found = [thread_comm.run(3, lambda world, m=mean: rank(world, m))[0] for mean in (False, True)]
    np.testing.assert_allclose(*found, rtol=1e-6)
