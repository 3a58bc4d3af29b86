"""Data-parallel training from scratch: LeNet with plain parameter arrays and one allreduce.

    hpcdp launch -n 2 -- python examples/data_parallel_from_scratch.py --epochs 5

Every rank holds a whole copy of the network. In each step a batch is split over the ranks, each rank computes the
gradient of its piece, the gradients are summed over ranks, and every rank makes the same update. Network, sizes and
names follow section 12.5 of "Dive into Deep Learning"; one rank here stands where the book has one GPU.
"""

import argparse

import numpy as np

import hpcdp
from hpcdp import autograd, data
from hpcdp.autograd import Tensor
from hpcdp.nn import functional as F

SHAPES = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]


def initial_params(seed):
    """Weights whose variance suits ReLU layers (He et al. 2015, eq. 10), and zero biases."""
    rng = np.random.default_rng(seed)
    params = []
    for shape in SHAPES:
        inputs = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))
        scale = np.sqrt(2 / inputs) if len(shape) > 1 else 0.0
        params.append((scale * rng.standard_normal(shape)).astype(np.float32))
    return params


def lenet(x, params):
    """Images of shape ``(batch, 1, 28, 28)`` to scores of shape ``(batch, 10)``."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(x, w1, b1)), 2)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, w2, b2)), 2)
    h3 = F.relu(F.dense(h2.reshape(len(x), -1), w3, b3))
    return F.dense(h3, w4, b4)


def get_params(params, world):
    """Rank 0's parameters as this rank's own, with room for gradients."""
    copies = []
    for param in params:
        copy = param.copy()
        world.comm.native_broadcast(copy, 0)
        copies.append(Tensor(copy))
        copies[-1].attach_grad()
    return copies


def allreduce(grads, world):
    """Each gradient becomes its sum over all ranks."""
    for grad in grads:
        hpcdp.allreduce(grad, op="sum", world=world)


def split_batch(x, y, world):
    """This rank's piece of a batch; pieces differ by at most one sample, and may be empty."""
    assert len(x) == len(y)
    return np.array_split(x, world.size)[world.rank], np.array_split(y, world.size)[world.rank]


def train_batch(x, y, params, lr, world):
    """One step on the batch that all ranks hold; returns the mean loss over the batch."""
    x_piece, y_piece = split_batch(x, y, world)
    loss_sum = np.zeros(1)
    if len(y_piece):
        with autograd.record():
            losses = F.softmax_cross_entropy(lenet(Tensor(x_piece), params), y_piece)
        losses.backward()
        loss_sum[0] = losses.data.sum()
    else:
        for param in params:
            param.grad[...] = 0
    allreduce([param.grad for param in params], world)
    for param in params:
        # The gradients are sums over samples, so the batch size of all ranks together divides them.
        param.data -= lr / len(y) * param.grad
    hpcdp.allreduce(loss_sum, world=world)
    return loss_sum[0] / len(y)


def evaluate_accuracy(params, dataset, world):
    """The share of right answers over the whole data set, each rank looking at its own part."""
    x, y = split_batch(*dataset[:], world)
    answers = lenet(Tensor(x), params).data.argmax(axis=1) if len(y) else y
    counts = np.array([(answers == y).sum(), len(y)])
    hpcdp.allreduce(counts, world=world)
    return counts[0] / counts[1]


def train(world, epochs, batch_size, lr):
    """Train on the handwritten digits; returns the accuracy on the test images."""
    train_set, test_set = (data.load("digits", split=split, image_size=28) for split in ("train", "test"))
    params = get_params(initial_params(seed=world.rank), world)
    accuracy = 0.0
    for epoch in range(epochs):
        # The same seed on all ranks: they agree on the batches without talking about them.
        order = np.random.default_rng(epoch).permutation(len(train_set))
        losses = [
            train_batch(*train_set[order[first : first + batch_size]], params, lr, world)
            for first in range(0, len(order), batch_size)
        ]
        accuracy = evaluate_accuracy(params, test_set, world)
        if world.rank == 0:
            print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, test accuracy {accuracy:.4f}", flush=True)
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="LeNet on handwritten digits, data-parallel from scratch")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a batch, all ranks together")
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    train(hpcdp.init(), args.epochs, args.batch_size, args.lr)
