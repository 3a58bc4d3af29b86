"""The same training, to the bit, on any number of ranks, also when it goes on with another number.

    hpcdp launch -n 1 -- python examples/reproducible.py
    hpcdp launch -n 3 -- python examples/reproducible.py --epochs 1 --save half
    hpcdp launch -n 2 -- python examples/reproducible.py --load half

What differs from data_parallel_concise.py is marked: seeds, the trainer, the sampler of virtual shards, and the losses,
which are kept for each of them. All digits that it prints are those of every such run.
"""

import numpy as np

import hpcdp
from hpcdp import autograd, data, nn, optim
from hpcdp.launch.parser import Program, at_least
from hpcdp.train.metrics import evaluate


def network():
    weights = nn.init.Xavier(seed=0)  # here: without a seed every run begins with other values
    return nn.Sequential(
        nn.Conv2D(1, 8, 5, stride=2, weight_init=weights), nn.BatchNorm(8), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2, seed=1), nn.Dense(1152, 64, activation="relu", weight_init=weights),
        nn.Dense(64, 10, weight_init=weights),
    )  # fmt: skip


def train(world, epochs=2, batch_size=64, save=None, load=None):
    """Returns the mean loss of every epoch that was trained, and the loss on the test images at the end."""
    train_set, test_set = (data.load("digits", split=split, image_size=28) for split in ("train", "test"))
    net = network()
    trainer = hpcdp.Trainer(net.parameters(), optim.Adam(lr=2e-3), world=world, reproducible=True)  # here
    num = trainer.virtual_shards
    sampler = data.VirtualShardSampler(len(train_set), batch_size, num, world.size, world.rank)  # here
    loader = data.DataLoader(train_set, sampler)
    if load:
        trainer.load_states(f"{load}-states.npz")
        with trainer.changing_parameters():  # since ranks hold them together
            net.load_state_dict(dict(np.load(f"{load}-net.npz")))
    first = trainer.step_count // (len(loader) // len(trainer.own_virtual_shards))
    curve = []
    for epoch in range(first, epochs):
        loader.set_epoch(epoch)
        sums = np.zeros((num, 2))  # here: who adds them up, and in which order, must not matter
        batches = iter(loader)
        for _ in range(len(loader) // len(trainer.own_virtual_shards)):
            for shard in trainer.own_virtual_shards:  # here: the last of them updates
                x, y = next(batches)
                if len(y):
                    with autograd.record():
                        loss = nn.functional.softmax_cross_entropy(net(x), y)
                    loss.backward()
                    sums[shard] += float(loss.data.sum()), len(y)
                trainer.step(len(y))
        hpcdp.allreduce(sums, "sum", world)
        total, count = sums.sum(axis=0)
        curve.append(float(total / count))
        if world.rank == 0:
            print(f"epoch {epoch + 1}: loss {curve[-1]:.4f}, which is {curve[-1].hex()}", flush=True)
    tested = evaluate(net, test_set, world, num_parts=num)  # here
    if world.rank == 0:
        print(f"test accuracy {tested.accuracy:.4f}, loss {tested.loss:.4f}, which is {tested.loss.hex()}")
    if save:
        trainer.save_states(f"{save}-states.npz")
        if world.rank == 0:
            np.savez(f"{save}-net.npz", **net.state_dict())
    return curve, tested.loss


if __name__ == "__main__":
    parser = Program(description="training with the same bits on any number of ranks")
    parser.add_argument("--epochs", type=at_least(1), default=2, help="passes in all, with those before --load")
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="samples of a step, over all ranks")
    parser.add_argument("--save", metavar="NAME", help="write NAME-net.npz and NAME-states.npz at the end")
    parser.add_argument("--load", metavar="NAME", help="continue from the files of --save NAME")
    with parser.settings() as args:
        train(hpcdp.init(), args.epochs, args.batch_size, args.save, args.load)
