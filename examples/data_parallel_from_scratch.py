"""Data-parallel training from scratch: LeNet with plain parameter arrays and an allreduce of its own.

    python examples/data_parallel_from_scratch.py --devices 2
    hpcdp launch -n 2 -- python examples/data_parallel_from_scratch.py

Every device of every rank holds a whole copy of the network. In each step a batch is split over all devices, each
computes the gradient of its piece, the gradients are summed, and every device makes the same update. Network, sizes and
names follow section 12.5 of "Dive into Deep Learning"; its settings are --data fashion_mnist --batch-size 256 --lr 0.2.
"""

import time

import numpy as np

import hpcdp
from hpcdp import autograd, data
from hpcdp.autograd import Tensor
from hpcdp.launch.parser import Program, at_least
from hpcdp.nn import functional

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
    h1 = functional.avg_pool2d(functional.relu(functional.conv2d(x, w1, b1)), 2)
    h2 = functional.avg_pool2d(functional.relu(functional.conv2d(h1, w2, b2)), 2)
    h3 = functional.relu(functional.dense(h2.reshape(len(x), -1), w3, b3))
    return functional.dense(h3, w4, b4)


def get_params(params, device):
    """Copies of the parameters on a device, with room for gradients."""
    copies = [Tensor(device.put(param)) for param in params]
    for copy in copies:
        copy.attach_grad()
    return copies


def allreduce(pieces, devices, world):
    """Arrays of one shape, one on each device of this rank: each becomes the sum over all devices of all ranks."""
    total = pieces[0]
    for piece in pieces[1:]:
        total += devices[0].put(piece)
    hpcdp.allreduce(total, op="sum", world=world)
    for device, piece in zip(devices[1:], pieces[1:], strict=True):
        piece[...] = device.put(total)


def split_batch(x, y, devices, world):
    """This rank's pieces of a batch, one on each device; sizes differ by at most one sample, and may be 0."""
    assert len(x) == len(y)
    first, total = world.rank * len(devices), world.size * len(devices)

    def load(whole):
        pieces = np.array_split(whole, total)[first : first + len(devices)]
        return [device.put(piece) for device, piece in zip(devices, pieces, strict=True)]

    return load(x), load(y)


def train_batch(x, y, params, lr, devices, world):
    """One step on the batch that all ranks hold; ``params`` are each device's own. Returns the batch's mean loss."""
    loss_sum = np.zeros(1)
    for x_piece, y_piece, own in zip(*split_batch(x, y, devices, world), params, strict=True):
        if len(y_piece):
            with autograd.record():
                losses = functional.softmax_cross_entropy(lenet(Tensor(x_piece), own), y_piece)
            losses.backward()
            loss_sum += float(losses.data.sum())
        else:
            for param in own:
                param.grad[...] = 0
    for number in range(len(SHAPES)):
        allreduce([own[number].grad for own in params], devices, world)
    for own in params:
        for param in own:
            # The gradients are sums over samples, so the size of the whole batch divides them.
            param.data -= lr / len(y) * param.grad
    hpcdp.allreduce(loss_sum, world=world)
    return loss_sum[0] / len(y)


def evaluate_accuracy(params, dataset, devices, world):
    """The share of right answers over the whole data set, each device looking at its own part."""
    counts = np.zeros(2, np.int64)
    for x, y, own in zip(*split_batch(*dataset[:], devices, world), params, strict=True):
        if len(y):
            counts += (lenet(Tensor(x), own).data.argmax(axis=1) == y).sum(), len(y)
    hpcdp.allreduce(counts, world=world)
    return counts[0] / counts[1]


def train(world, devices, train_set, test_set, epochs, batch_size, lr):
    """Returns the mean loss and the test accuracy of every epoch."""
    initial = initial_params(seed=world.rank)
    for param in initial:
        hpcdp.broadcast(param, root=0, world=world)
    params = [get_params(initial, device) for device in devices]
    curve, seconds = [], 0.0
    for epoch in range(epochs):
        # The same seed on all ranks: they agree on the batches without talking about them.
        order = np.random.default_rng(epoch).permutation(len(train_set))
        began = time.perf_counter()
        losses = [
            train_batch(*train_set[order[first : first + batch_size]], params, lr, devices, world)
            for first in range(0, len(order), batch_size)
        ]
        seconds += time.perf_counter() - began
        curve.append((float(np.mean(losses)), float(evaluate_accuracy(params, test_set, devices, world))))
        if world.rank == 0:
            print(f"epoch {epoch + 1}: loss {curve[-1][0]:.4f}, test accuracy {curve[-1][1]:.4f}", flush=True)
    if world.rank == 0:
        ranks = f"{world.size} rank{'s' * (world.size > 1)}"
        print(f"{seconds / epochs:.1f} s an epoch; {ranks}, each on {', '.join(map(str, devices))}")
    return curve


if __name__ == "__main__":
    parser = Program(description="LeNet on small images, data-parallel from scratch")
    parser.add_argument("--data", choices=("digits", "mnist", "fashion_mnist"), default="digits", help="images")
    parser.add_argument("--devices", type=at_least(1), metavar="N", default=1, help="virtual devices of each rank")
    parser.add_argument("--epochs", type=at_least(1), default=10, help="passes over the images")
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="samples of a step, on all devices")
    parser.add_argument("--lr", type=at_least(0.0), default=0.1, help="learning rate")
    with parser.settings() as args:
        train_set, test_set = (data.load(args.data, split=split, image_size=28) for split in ("train", "test"))
        devices = [hpcdp.cpu(index) for index in range(args.devices)]
        train(hpcdp.init(), devices, train_set, test_set, args.epochs, args.batch_size, args.lr)
