"""Data-parallel training in a few lines: the same network as data_parallel_from_scratch.py, with hpcdp.Trainer.

    hpcdp launch -n 2 -- python examples/data_parallel_concise.py --epochs 5
    python examples/data_parallel_concise.py --epochs 5 --devices 2

The trainer sums the gradients over ranks while the buckets they lie in are shared by the node's ranks, updates each
parameter once, and divides by the true size of the global batch, also where it does not split evenly.
"""

import argparse

import hpcdp
from hpcdp import autograd, data, nn, optim
from hpcdp.train.evaluate import evaluate


def train(world, epochs, batch_size, lr, devices):
    """Train on the handwritten digits; returns the accuracy on the test images."""
    train_set, test_set = (data.load("digits", split=split, image_size=28) for split in ("train", "test"))
    sampler = data.ShardedSampler(len(train_set), batch_size, num_parts=world.size, part_index=world.rank)
    loader = data.DataLoader(train_set, sampler)
    net = nn.models.lenet(seed=0)
    replicas = nn.Replicas(net, [hpcdp.cpu(index) for index in range(devices)])
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=lr, momentum=0.9), world=world)
    accuracy = 0.0
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for x, y in loader:
            if len(y):
                with autograd.record():
                    loss = nn.functional.softmax_cross_entropy(replicas(x), y)
                loss.backward()
            trainer.step(len(y))
        accuracy = evaluate(replicas, test_set, world).accuracy
        if world.rank == 0:
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.4f}", flush=True)
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="LeNet on handwritten digits, data-parallel with Trainer")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of a global batch, all ranks together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--devices", type=int, default=1, help="virtual devices of each rank")
    args = parser.parse_args()
    train(hpcdp.init(), args.epochs, args.batch_size, args.lr, args.devices)
