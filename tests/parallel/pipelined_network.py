"""A small network in stages, trained by a pipeline and, to compare with, as one."""

import itertools

import numpy as np

from hpcdp import autograd, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.parallel import Pipeline
from hpcdp.parallel.pipeline import pieces
from hpcdp.train.trainer import Trainer

LOSS = nn.functional.softmax_cross_entropy
BATCH, STEPS = 22, 3


def normal(seed):
    return lambda shape: np.random.default_rng(seed).normal(0, 0.3, shape).astype("f4")


def stages(num_stages):
    """Functions that make the stages of a network of 4 layers, the same ones however they are spread."""

    def layer(i):
        widths = [6, 12, 9, 10, 4]
        return nn.Dense(widths[i], widths[i + 1], activation="relu" if i < 3 else None, weight_init=normal(i))

    cuts = [4 * stage // num_stages for stage in range(num_stages + 1)]
    return [
        lambda first=first, last=last: nn.Sequential(*map(layer, range(first, last)))
        for first, last in itertools.pairwise(cuts)
    ]


def batch(step, replica, count=BATCH):
    rng = np.random.default_rng([step, replica])
    return rng.normal(size=(count, 6)).astype("f4"), rng.integers(0, 4, count)


def values(net):
    return np.concatenate([each.copy().reshape(-1) for each in net.state_dict().values()])


def train(world, num_stages, counts=None, micro_batches=4, schedule="1f1b", clip_norm=None, owner="auto"):
    """Parameters of this rank's stages, by stage, and losses, after a few steps; ``counts`` are samples by replica."""
    net = Pipeline(stages(num_stages), LOSS, world, micro_batches=micro_batches, schedule=schedule)
    settings = {"clip_norm": clip_norm, "owner": owner}
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), net.replicas, **settings)
    replica = net.replicas.rank
    losses = []
    for step in range(STEPS):
        x, y = batch(step, replica, BATCH if counts is None else counts[replica])
        losses.append(net.step(trainer, x, y))
    world.comm.barrier()
    return {name: part for name, part in net.state_dict().items()}, losses


def unsplit(replicas=1, counts=None, clip_norm=None, micro_batches=1):
    """The same on one rank, with the batches of all replicas, cut into micro-batches."""
    net = nn.Sequential(*(make() for make in stages(1)))
    trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), thread_comm.run(1, lambda world: world)[0],
                      clip_norm=clip_norm, owner="rank")  # fmt: skip
    losses = []
    for step in range(STEPS):
        losses.append([])
        held = [batch(step, each, BATCH if counts is None else counts[each]) for each in range(replicas)]
        parts = [(x[first:last], y[first:last]) for x, y in held for first, last in pieces(len(x), micro_batches)]
        for number, (x, y) in enumerate(parts):
            with autograd.record():
                loss = LOSS(net(x), y)
            if number < len(parts) - 1:
                with trainer.no_sync():
                    loss.backward()
                    trainer.step(len(x))
            else:
                loss.backward()
                trainer.step(len(x))
            losses[-1].append(loss.data.sum(dtype="f8"))
    return values(net), [sum(each) for each in losses]


def joined(results, num_stages):
    """One copy's parameters in the order of the unsplit model, of each replica; they must not differ."""
    copies = {}
    for state, _ in results:
        for name, part in state.items():
            copies.setdefault(name, []).append(part)
    for parts in copies.values():
        for part in parts[1:]:
            np.testing.assert_array_equal(part, parts[0])
    assert {int(name.partition(".")[0]) for name in copies} <= set(range(num_stages))  # a stage may have none
    return np.concatenate([copies[name][0].reshape(-1) for name in sorted(copies, key=_place)])


def _place(name):
    stage, layer, what = name.split(".")
    return int(stage), int(layer), ["weight", "bias"].index(what)
