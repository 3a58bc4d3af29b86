"""Layers that depend on how a batch is cut, where training is reproducible: batch norm and dropout."""

import copy
from itertools import pairwise

import numpy as np
import pytest
from raises import raises
from reproducible_networks import IMAGES, LABELS, backward, network, trainer_of

from hpcdp import Policy, Trainer, nn, optim
from hpcdp.autograd import record
from hpcdp.comm import thread_comm
from hpcdp.core.arrays import cpu
from hpcdp.errors import ConfigError, HpcdpError


def test_running_statistics_move_once_a_step_by_the_mean_over_all_samples():
    x = np.random.default_rng(7).standard_normal((20, 3)).astype(np.float32)
    ends = [0, 4, 8, 12, 20]

    def moved(world):
        net = nn.Sequential(nn.BatchNorm(3, momentum=0.75), nn.Dense(3, 2))
        trainer = trainer_of(net, world, virtual_shards=4)
        for shard in trainer.own_virtual_shards:
            part = x[ends[shard] : ends[shard + 1]]
            backward(net, part, np.zeros(len(part), np.int64))
            trainer.step(len(part))
        return net[0].running_mean.data, net[0].running_var.data

    parts = [x[first:end].astype(np.float64) for first, end in pairwise(ends)]
    mean = sum(len(part) * part.mean(axis=0) for part in parts) / 20
    variance = sum(len(part) * part.var(axis=0) for part in parts) / 20
    for running_mean, running_var in thread_comm.run(3, moved):
        np.testing.assert_allclose(running_mean, 0.25 * mean, atol=1e-6)
        np.testing.assert_allclose(running_var, 0.75 + 0.25 * variance, rtol=1e-5)


def test_what_is_dropped_depends_on_seed_step_and_place_alone():
    def dropped(world):
        net = nn.Sequential(nn.Dense(4, 1), nn.Dropout(0.5, seed=5))
        net[0].weight.data[...], net[0].bias.data[...] = 0, 1
        trainer, masks = trainer_of(net, world, optim.SGD(lr=0.0), virtual_shards=6), {}
        for step in range(3):
            for shard in trainer.own_virtual_shards:
                with record():
                    first, again = net(np.zeros((30, 4), "f4")), net(np.zeros((30, 4), "f4"))
                    loss = first.sum() + again.sum()
                loss.backward()
                masks[step, shard, 0], masks[step, shard, 1] = first.data.tobytes(), again.data.tobytes()
                trainer.step(30)
        return masks

    everyone = thread_comm.run(4, dropped)
    assert {key: mask for masks in everyone for key, mask in masks.items()} == thread_comm.run(1, dropped)[0]
    assert len(set(thread_comm.run(1, dropped)[0].values())) == 3 * 6 * 2


def test_dropout_without_a_seed_is_refused_and_with_a_plain_trainer_is_not():
    net = nn.Sequential(nn.Flatten(), nn.Dense(36, 4), nn.Dropout(0.5))

    def one(world, **options):
        trainer = trainer_of(net, world, **options)
        backward(net, IMAGES[:4], LABELS[:4])
        return trainer.step(4)

    with raises(ConfigError, operation="Dropout", where="seed", remedy="Dropout(0.5, seed=...)"):
        thread_comm.run(1, one)
    assert thread_comm.run(1, lambda world: one(world, reproducible=False)) == [4]


def test_a_trainer_that_is_gone_leaves_layers_as_they_were():
    def one(world):
        layer = nn.BatchNorm(2, momentum=0.5)
        trainer = trainer_of(nn.Sequential(layer), world)
        del trainer
        with record():
            layer(np.ones((4, 2), np.float32))
        return layer.running_mean.data.tolist()

    assert thread_comm.run(1, one) == [[0.5, 0.5]]


def test_layers_that_are_called_in_some_shards_only_or_twice_change_nothing():
    """Nor does a rank that has seen no layer yet, in a first batch with fewer samples than shards."""

    def one(world):
        net = nn.Sequential(nn.BatchNorm(3), nn.BatchNorm(3), nn.Dense(3, 2, weight_init=nn.init.Xavier(seed=0)))
        trainer = trainer_of(net, world, policy=Policy(unused="zero"))
        rng = np.random.default_rng(5)
        for step in range(3):
            data = rng.standard_normal((8, 4, 3)).astype("f4")
            for shard in trainer.own_virtual_shards:
                count = 0 if step == 0 and shard < 5 else 4
                if count:
                    with record():
                        x = net[0](net[0](data[shard])) if shard == 6 else data[shard]
                        loss = net[2](net[shard % 2](x)).sum()
                    loss.backward()
                trainer.step(count)
        return b"".join(np.array(each).tobytes() for each in net.state_dict().values())

    wanted = thread_comm.run(1, one)[0]
    for ranks, per_node in ((2, None), (5, 2), (8, None), (8, 3)):
        assert set(thread_comm.run(ranks, one, ranks_per_node=per_node)) == {wanted}


@pytest.mark.parametrize("is_a_copy", [False, True])
def test_a_layer_whose_parameters_the_trainer_does_not_have_is_refused(is_a_copy):
    def one(world):
        net, other = network(), nn.BatchNorm(1)
        trainer = trainer_of(net, world)
        for _ in trainer.own_virtual_shards:
            if is_a_copy and world.rank:
                backward(nn.Replicas(net, [cpu(0), cpu(1)]), IMAGES[:4], LABELS[:4])
            else:
                backward(net, IMAGES[:4], LABELS[:4])
            if not is_a_copy and world.rank:
                with record():
                    other(IMAGES[:4])
            trainer.step(4)

    def caught(world):
        try:
            one(world)
        except HpcdpError as error:
            return str(error)

    said = thread_comm.run(2, caught)
    assert said[0] == said[1] and said[0].startswith(
        "step: expected layers with parameters of this Trainer, got a Batch"
    )
    assert said[0].endswith("copies of nn.Replicas have none")


def test_layers_are_found_by_any_of_their_parameters():
    def one(world):
        first, shares, beta_alone = nn.BatchNorm(3), nn.BatchNorm(3), nn.BatchNorm(3)
        shares.gamma, shares.beta = first.gamma, first.beta
        replaced = copy.deepcopy(first)
        replaced.gamma = nn.Parameter(np.full(3, 2, "f4"))
        net = nn.Sequential(first, shares, replaced, beta_alone)
        params = [param for param in net.parameters() if param is not beta_alone.gamma]
        trainer = Trainer((param for param in params), optim.SGD(lr=0.1), world, reproducible=True, virtual_shards=4)
        for shard in trainer.own_virtual_shards:
            with record():
                loss = net(np.random.default_rng(shard).standard_normal((5, 3)).astype("f4")).sum()
            loss.backward()
            trainer.step(5)
        assert len({layer.running_mean.data.tobytes() for layer in net}) > 1
        return b"".join(np.array(each).tobytes() for each in net.state_dict().values())

    wanted = thread_comm.run(1, one)[0]
    assert set(thread_comm.run(3, one, ranks_per_node=2)) == {wanted}
