"""LeNet whose layers are split by channels: each rank holds and computes a part of every layer.

    hpcdp launch -n 4 -- python examples/split.py --parts 2 --epochs 5

Four ranks and two parts are two copies of the model, whose ranks of one part sum their gradients; one part is data
parallelism.
"""

import hpcdp
from hpcdp import autograd, data, nn, optim
from hpcdp.launch.parser import Program, at_least
from hpcdp.parallel import ColumnConv2D, ColumnDense, RowConv2D, RowDense, split_world


def lenet(parts):
    """The network of which this rank has a part; the same one however many parts there are."""
    weights = nn.init.Xavier(seed=1)  # draws whole layers, one after the other, of which each rank keeps its part
    return nn.Sequential(
        ColumnConv2D(1, 20, 3, parts, activation="relu", weight_init=weights), nn.AvgPool2D(2),  # each rank some of 20
        RowConv2D(20, 50, 5, parts, activation="relu", weight_init=weights), nn.AvgPool2D(2),  # each all 50
        nn.Flatten(),
        ColumnDense(800, 128, parts, activation="relu", weight_init=weights),
        RowDense(128, 10, parts, weight_init=weights),
    )  # fmt: skip


def train(world, num_parts, epochs, batch_size, lr):
    """Train on the handwritten digits; returns the accuracy on the test images."""
    parts, replicas = split_world(num_parts, world)
    train_set, test_set = (data.load("digits", split=split, image_size=28) for split in ("train", "test"))
    net = lenet(parts)
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=lr, momentum=0.9), replicas)
    sampler = data.ShardedSampler(len(train_set), batch_size, num_parts=replicas.size, part_index=replicas.rank)
    loader = data.DataLoader(train_set, sampler)  # the parts of a copy see the same batches, in the same order
    result = 0.0
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            with autograd.record():
                loss = nn.functional.softmax_cross_entropy(net(x), y)
            loss.backward()
            trainer.step(len(y))
            total += float(loss.data.sum())
        total = sum(replicas.comm.allgather_json(total))
        x, y = test_set[:]
        result = float((net(x).data.argmax(axis=1) == y).mean())
        if world.rank == 0:
            print(f"epoch {epoch + 1}: loss {total / len(train_set):.4f}, test accuracy {result:.4f}", flush=True)
    held = world.comm.allgather_json(sum(param.size for param in net.parameters()))
    if world.rank == 0:
        print(f"parameters that each rank holds: {held}")
    return result


if __name__ == "__main__":
    parser = Program(description="LeNet split by channels on handwritten digits")
    parser.add_argument("--parts", type=at_least(1), help="ranks that each layer is split over (default: all)")
    parser.add_argument("--epochs", type=at_least(1), default=10, help="passes over the images")
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="samples of a step, over all replicas")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    with parser.settings() as args:
        ranks = hpcdp.init()
        train(ranks, args.parts or ranks.size, args.epochs, args.batch_size, args.lr)
