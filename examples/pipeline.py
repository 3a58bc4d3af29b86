"""LeNet cut into two stages on neighboring ranks, which compute micro-batches at the same time.

    hpcdp launch -n 4 -- python examples/pipeline.py --epochs 5

Four ranks are two copies of the model, whose ranks of one stage sum their gradients; one rank has both stages.
"""

import hpcdp
from hpcdp import data, nn, optim
from hpcdp.launch.parser import Program, at_least
from hpcdp.parallel import Pipeline


def convolutions():
    """The first stage: images of 28 x 28 in, 50 maps of 4 x 4 out."""
    weights = nn.init.Xavier(seed=1)
    return nn.Sequential(
        nn.Conv2D(1, 20, 3, activation="relu", weight_init=weights), nn.AvgPool2D(2),
        nn.Conv2D(20, 50, 5, activation="relu", weight_init=weights), nn.AvgPool2D(2),
    )  # fmt: skip


def classifier():
    """The second stage."""
    weights = nn.init.Xavier(seed=2)
    first = nn.Dense(800, 128, activation="relu", weight_init=weights)
    return nn.Sequential(nn.Flatten(), first, nn.Dense(128, 10, weight_init=weights))


def accuracy(net, test_set):
    """The share of test images that are recognized, on every rank."""
    x, y = test_set[:]
    return float((net(x).data.argmax(axis=1) == y).mean())


def train(world, epochs, batch_size, micro_batches, lr):
    """Train on the handwritten digits; returns the accuracy on the test images."""
    train_set, test_set = (data.load("digits", split=split, image_size=28) for split in ("train", "test"))
    net = Pipeline([convolutions, classifier], nn.functional.softmax_cross_entropy, world, micro_batches=micro_batches)
    copy = net.replicas
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=lr, momentum=0.9), copy)
    sampler = data.ShardedSampler(len(train_set), batch_size, num_parts=copy.size, part_index=copy.rank)
    loader = data.DataLoader(train_set, sampler)  # each stage of a copy sees the same batches, in the same order
    result = 0.0
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        total = sum(copy.comm.allgather_json(sum(net.step(trainer, x, y) for x, y in loader)))
        result = accuracy(net, test_set)
        if world.rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(train_set):.4f}, test accuracy {result:.4f}", flush=True)
    return result


if __name__ == "__main__":
    parser = Program(description="LeNet in two stages on handwritten digits")
    parser.add_argument("--epochs", type=at_least(1), default=10, help="passes over the images")
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="samples of a step, over all replicas")
    parser.add_argument("--micro-batches", type=at_least(1), default=4, help="pieces into which a batch is cut")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    with parser.settings() as args:
        train(hpcdp.init(), args.epochs, args.batch_size, args.micro_batches, args.lr)
