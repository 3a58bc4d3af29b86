"""Data-parallel training in a few lines: ResNet-18 with hpcdp.Trainer.

    python examples/data_parallel_concise.py --devices 2
    hpcdp launch -n 2 -- python examples/data_parallel_concise.py
    hpcdp launch -n 2 -- python examples/data_parallel_concise.py --kv-store dist_sync

What data_parallel_from_scratch.py does by hand nn.Replicas does for the devices of a rank, and the trainer for all
ranks: it sums the gradients, updates each parameter once, and divides by the true size of the global batch, also where
it does not split evenly. The network follows section 12.6 of "Dive into Deep Learning", whose settings are --data
fashion_mnist --batch-size 256 --lr 0.1; the digits are 8 x 8 pixels, with --image-size 28 as large as the images there.
"""

import time

import hpcdp
from hpcdp import autograd, data, kvstore, nn, optim
from hpcdp.launch.parser import Program, at_least
from hpcdp.train.metrics import evaluate


def train(world, devices, train_set, test_set, epochs, batch_size, lr, store=None):
    """Returns the network, and the loss and the accuracy on the test images after every epoch."""
    sampler = data.ShardedSampler(len(train_set), batch_size, num_parts=world.size, part_index=world.rank)
    loader = data.DataLoader(train_set, sampler)
    net = nn.Replicas(nn.models.resnet18(seed=0), devices)
    trainer = hpcdp.Trainer(net.parameters(), optim.SGD(lr=lr), world, kvstore=store)
    curve, seconds = [], 0.0
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        began = time.perf_counter()
        for x, y in loader:
            if len(y):
                with autograd.record():
                    loss = nn.functional.softmax_cross_entropy(net(x), y)
                loss.backward()
            trainer.step(len(y))
        trainer.synchronize()  # with dist_async ranks are not at the same step, and have not the same values
        seconds += time.perf_counter() - began
        tested = evaluate(net, test_set, world)
        curve.append((tested.loss, tested.accuracy))
        if world.rank == 0:
            print(f"epoch {epoch + 1}: test loss {tested.loss:.4f}, test accuracy {tested.accuracy:.4f}", flush=True)
    if world.rank == 0:
        ranks = f"{world.size} rank{'s' * (world.size > 1)}"
        print(f"{seconds / epochs:.1f} s an epoch; {ranks}, each on {', '.join(map(str, devices))}")
    return net, curve


if __name__ == "__main__":
    parser = Program(description="ResNet-18 on small images, data-parallel with Trainer")
    parser.add_argument("--data", choices=("digits", "mnist", "fashion_mnist"), default="digits", help="images")
    parser.add_argument("--image-size", type=at_least(1), help="pixels to enlarge images to (default: as they are)")
    parser.add_argument("--devices", type=at_least(1), metavar="N", default=1, help="virtual devices of each rank")
    parser.add_argument("--kv-store", metavar="KIND", help=f"train on a key-value store: {', '.join(kvstore.KINDS)}")
    parser.add_argument("--epochs", type=at_least(1), default=5, help="passes over the images")
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="samples of a step, on all devices")
    parser.add_argument("--lr", type=float, default=0.025, help="learning rate")
    with parser.settings() as args:
        train_set, test_set = (data.load(args.data, split, image_size=args.image_size) for split in ("train", "test"))
        devices = [hpcdp.cpu(index) for index in range(args.devices)]
        train(hpcdp.init(), devices, train_set, test_set, args.epochs, args.batch_size, args.lr, args.kv_store)
