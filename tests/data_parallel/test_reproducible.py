"""The same bits on any number of ranks and nodes: what is trained, and what is measured."""

from itertools import islice

import numpy as np
import pytest
from pairs import pairs
from reproducible_networks import SET, epoch, network, sampler_of, train, trainer_of

import hpcdp
from hpcdp import Trainer, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data import DataLoader, ShardedSampler, VirtualShardSampler
from hpcdp.train.fit import fit
from hpcdp.train.metrics import evaluate

WORLDS = [(1, None), (2, None), (3, None), (4, None), (8, None), (2, 1), (3, 1), (3, 2), (4, 2), (5, 2), (7, 1), (8, 3)]
"""Ranks, and ranks per node."""


@pytest.fixture(scope="module")
def alone():
    """What one rank trains, by the number of virtual shards and the norm that gradients are clipped to."""
    return {(num, clip): thread_comm.run(1, lambda world, num=num, clip=clip: epoch(world, num, clip_norm=clip))[0]
            for num in (8, 13) for clip in (None, 0.5)}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "num", "ways"),
    pairs(WORLDS, [8, 13], [(False, "shard", None), (True, "rank", 0.5), (True, "shard", None)]),
)
def test_the_number_of_ranks_and_nodes_changes_no_bit(layout, num, ways, alone):
    (ranks, per_node), (overlap, owner, clip) = layout, ways
    options = {"overlap": overlap, "owner": owner, "clip_norm": clip}
    found = thread_comm.run(ranks, lambda world: epoch(world, num, **options), ranks_per_node=per_node)
    assert set(found) == {alone[num, clip]}


@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_norms_of_layers_have_the_same_bits_too(owner):
    found = {
        ranks: thread_comm.run(ranks, lambda world: epoch(world, rule=optim.LARS(lr=1.0), owner=owner), per_node)[0]
        for ranks, per_node in [(1, None), (2, None), (3, None), (3, 1), (4, 2)]
    }
    assert len(set(found.values())) == 1


def test_what_ought_to_make_a_difference_does(alone):
    assert len(set(alone.values())) == 4
    assert thread_comm.run(1, lambda world: epoch(world, seed=2))[0] != alone[8, None]
    plain = thread_comm.run(2, lambda world: epoch_without(world))
    assert len({each[-16:] for each in [*plain, *thread_comm.run(1, epoch_without)]}) > 1


def epoch_without(world):
    """The same without reproducible: this is what rounding does on another number of ranks."""
    net = network(dropout=0)
    trainer = Trainer(net.parameters(), optim.Adam(lr=0.01), world)
    return train(net, trainer, ShardedSampler(len(SET), 32, world.size, world.rank, seed=1))


def test_the_sums_are_those_of_plain_training_but_for_rounding():
    def parameters(world, sampler, **options):
        net = nn.Sequential(nn.Flatten(), nn.Dense(36, 8, activation="relu"), nn.Dense(8, 4))
        for number, param in enumerate(net.parameters()):
            param.data = (np.random.default_rng(number).standard_normal(param.shape) / 4).astype(np.float32)
        train(net, trainer_of(net, world, optim.SGD(lr=0.1, momentum=0.9), **options), sampler(world))
        return np.concatenate([np.array(param.data).reshape(-1) for param in net.parameters()])

    plain = thread_comm.run(
        1, lambda world: parameters(world, lambda world: ShardedSampler(75, 32), reproducible=False)
    )[0]
    ours = thread_comm.run(3, lambda world: parameters(world, lambda w: VirtualShardSampler(75, 32, 8, 3, w.rank)))
    np.testing.assert_allclose(ours[0], plain, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("before", "after"), [((2, None), (3, None)), ((4, 2), (1, None)), ((1, None), (5, 2))])
@pytest.mark.parametrize("owner", ["rank", "shard"])
def test_a_restart_at_another_number_of_ranks_goes_on_with_the_same_bits(before, after, owner, tmp_path, alone):
    path = tmp_path / "states.npz"

    def some(world, first, last, values=None):
        net = network()
        if values is not None:
            net.load_state_dict(values)
        trainer = trainer_of(net, world, owner=owner)
        if values is not None:
            trainer.load_states(path)
        per_step = len(trainer.own_virtual_shards)
        end = None if last is None else last * per_step
        result = train(net, trainer, islice(sampler_of(trainer, world, seed=1), first * per_step, end))
        if last is not None:
            trainer.save_states(path)
        return result, {name: np.array(each) for name, each in net.state_dict().items()}

    _, values = thread_comm.run(before[0], lambda world: some(world, 0, 2), ranks_per_node=before[1])[0]
    found = thread_comm.run(after[0], lambda world: some(world, 2, None, values), ranks_per_node=after[1])
    assert {result for result, _ in found} == {alone[8, None]}


def test_numbers_of_numpy_will_do():
    def one(world):
        trainer = trainer_of(network(), world, virtual_shards=np.int64(5))
        assert evaluate(network(), SET, world, num_parts=np.int64(5)).count == 75
        return trainer.virtual_shards

    assert thread_comm.run(3, one, ranks_per_node=2) == [5, 5, 5]


def test_records_of_fit_and_evaluation_are_alike_on_any_number_of_ranks():
    def records(world, prefetch=2):
        net = network()
        trainer = trainer_of(net, world)
        loader = DataLoader(SET, sampler_of(trainer, world), prefetch=prefetch)
        found = fit(net, trainer, loader, epochs=2, world=world,
                    evaluate=lambda: evaluate(net, SET, world, 7, trainer.virtual_shards))  # fmt: skip
        names = ("loss", "accuracy", "samples", "test_loss", "test_accuracy", "step", "learning_rate")
        return [[each[name] for name in names] for each in found]

    wanted = thread_comm.run(1, records)[0]
    assert wanted[0][2:3] + wanted[1][5:6] == [75, 6]
    for ranks, per_node in ((2, None), (3, 2), (8, None), (5, 1)):
        assert thread_comm.run(ranks, records, ranks_per_node=per_node) == [wanted] * ranks


@pytest.mark.mpi
def test_real_ranks_have_the_bits_of_one():
    found = epoch(hpcdp.init(), clip_norm=0.5)
    assert found == thread_comm.run(1, lambda world: epoch(world, clip_norm=0.5))[0]
