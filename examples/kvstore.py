"""Data-parallel training on a key-value store, each rank waiting for all the others, or for none of them.

    hpcdp launch -n 2 -- python examples/kvstore.py
    hpcdp launch -n 3 -- python examples/kvstore.py --store dist_async --slow 3
    hpcdp launch -n 3 -s 1 -- python examples/kvstore.py --store dist_async --staleness 4

With dist_sync a step is that of the global batch, and computes what a trainer without a store computes. With dist_async
each rank takes the next batch that nobody has, pushes its gradients when it has them, and goes on with the values that
there are. --slow makes the last rank sleep, so that it does fewer batches, and with dist_sync keeps all others waiting.
"""

import time

import hpcdp
from hpcdp import autograd, data, kvstore, nn, optim
from hpcdp.launch.parser import Program, at_least
from hpcdp.train.fit import SharedCount
from hpcdp.train.metrics import evaluate


def train(world, store, epochs, batch_size, lr, sleep_s):
    """Train on the handwritten digits; returns the accuracy on the test images."""
    train_set, test_set = (data.load("digits", split=split, image_size=28) for split in ("train", "test"))
    net = nn.models.lenet(seed=0)
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=lr, momentum=0.9), world, kvstore=store)
    if trainer.steps_together:
        sampler = data.ShardedSampler(len(train_set), batch_size, world.size, world.rank)
    else:
        sampler = data.SharedSampler(len(train_set), batch_size // world.size, SharedCount(world))
    loader = data.DataLoader(train_set, sampler, prefetch=0)  # what is read ahead no other rank can take
    accuracy = 0.0
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        began, done = time.perf_counter(), 0
        for x, y in loader:
            if len(y):
                with autograd.record():
                    loss = nn.functional.softmax_cross_entropy(net(x), y)
                loss.backward()
            time.sleep(sleep_s)
            trainer.step(len(y))
            done += 1
        trainer.synchronize()  # all have ended, and have the values that all their pushes have made
        seconds = time.perf_counter() - began
        accuracy = evaluate(net, test_set, world).accuracy
        steps = world.comm.allgather_json(done)
        if world.rank == 0:
            figures = f"test accuracy {accuracy:.4f}, {seconds:.1f} s, steps of each rank {steps}"
            print(f"epoch {epoch + 1}: {figures}", flush=True)
    return accuracy


if __name__ == "__main__":
    parser = Program(description="LeNet on handwritten digits, data-parallel on a key-value store")
    parser.add_argument("--store", choices=("dist_sync", "dist_async"), default="dist_sync", help="kind of the store")
    parser.add_argument(
        "--staleness", type=at_least(0), help="with dist_async: pushes that a rank may be ahead of the slowest"
    )
    parser.add_argument("--epochs", type=at_least(1), default=5, help="passes over the images")
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="samples of a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate; stale gradients need a lower one")
    parser.add_argument(
        "--slow", type=at_least(0.0), default=1.0, help="how many times as long as others the last rank sleeps per step"
    )
    with parser.settings() as args:
        world = hpcdp.init()
        if args.batch_size < world.size:
            parser.error(f"--batch-size: expected a sample for each of the {world.size} ranks, got {args.batch_size}")
        sleep_s = 0.01 * (args.slow if world.rank == world.size - 1 else 1)
        store = kvstore.create(args.store, world, staleness=args.staleness)
        train(world, store, args.epochs, args.batch_size, args.lr, sleep_s)
