"""Stages that have a parameter in common: right in one process, refused where they are on different ranks."""

import numpy as np
import pytest
from pipelined_network import LOSS, STEPS, batch, normal

import hpcdp
from hpcdp import autograd, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.errors import ConfigError
from hpcdp.parallel import Pipeline
from hpcdp.train.trainer import Trainer


class Head(nn.Module):
    """Scores by a weight that is an earlier layer's, as of tied embeddings."""

    def __init__(self, first):
        self.weight = first.weight

    def forward(self, h):
        return h @ self.weight


def tied(kind):
    """Three stages, of which the first and the last have a parameter in common."""
    first = nn.Dense(6, 6, activation="relu", weight_init=normal(3))
    last = nn.Dense(6, 4, weight_init=normal(4))
    if kind == "module":
        return [nn.Sequential(first), nn.Tanh(), nn.Sequential(first, last)]
    if kind == "devices":
        return [nn.Replicas(first, [hpcdp.cpu(0), hpcdp.cpu(1)]), nn.Tanh(), nn.Sequential(first, last)]
    return [first, nn.Tanh(), nn.Sequential(Head(first), last)]


TIED = {"module": "0.0.weight", "parameter": "0.weight", "devices": "0.weight"}
REMEDY = "; put layers that share a parameter into one stage"


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("n", [3, 6])
def test_a_parameter_of_two_stages_on_different_ranks_is_refused_on_all(kind, n):
    def rank(world):
        with pytest.raises(ConfigError) as found:
            Pipeline(tied(kind), LOSS, world)
        return str(found.value)

    expected = "each parameter in one stage, where stages are on different ranks"
    got = f"'{TIED[kind]}' of stage 0 in stage 2, too, as '2.0.weight'"
    assert thread_comm.run(n, rank) == [f"Pipeline [stages]: expected {expected}, got {got}{REMEDY}"] * n


@pytest.mark.parametrize("which", [0, 1])
def test_a_function_that_makes_what_another_stage_has_is_refused_on_all(which):
    def rank(world):
        dense = nn.Dense(6, 6)
        stages = [dense, dense]
        stages[which] = lambda: dense
        with pytest.raises(ConfigError) as found:
            Pipeline(stages, LOSS, world)
        return str(found.value)

    first, second = thread_comm.run(2, rank)
    assert first == second and "got '0.weight' of stage 0 in stage 1, too, as '1.weight'" in first
    assert first.startswith(f"rank {which}: Pipeline [stages]: ")


def test_modules_without_parameters_may_be_in_several_stages():
    activation = nn.Tanh()
    made = [nn.Sequential(nn.Dense(6, 4, weight_init=normal(1)), activation), activation]
    results = thread_comm.run(2, lambda world: Pipeline(made, LOSS, world)(batch(0, 0)[0]).asnumpy())
    expected = nn.Sequential(*made)(batch(0, 0)[0]).asnumpy()
    for found in results:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("settings", [{"owner": "rank"}, {"owner": "shard"}, {"overlap": True}, {"kvstore": "local"}])
@pytest.mark.parametrize("hybrid", [False, True])
def test_in_one_process_stages_may_share_a_parameter(kind, micro_batches, settings, hybrid):
    def trained(world, pipelined):
        net = nn.Sequential(*tied(kind))
        if pipelined:
            net = Pipeline(tied(kind), LOSS, world, micro_batches=micro_batches)
            net.hybridize(hybrid)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.1, momentum=0.9), world, **settings)
        for step in range(STEPS):
            x, y = batch(step, 0)
            if pipelined:
                net.step(trainer, x, y)
                continue
            with autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
            trainer.step(len(x))
        trainer.synchronize()
        return [param.data.copy() for param in net.parameters()]

    ((found, expected),) = thread_comm.run(1, lambda world: (trained(world, True), trained(world, False)))
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
