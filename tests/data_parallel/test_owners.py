"""Both owners update by what an optimizer's `update` does, whether or not its kernel could be fused with the sum."""

import dataclasses

import numpy as np
import pytest

from hpcdp import kernels, nn, optim
from hpcdp.comm import thread_comm
from hpcdp.data_parallel import Reducer, Replicated, ShardedUpdate, bucket_layout

SHAPES = [(7, 3), (1500,), (40, 30), (1,)]
BOUND = 0.02


@dataclasses.dataclass
class ClippingSGD(optim.SGD):
    """Another rule under the name of a fused kernel: no gradient counts more than the bound."""

    name = "clipping_sgd"

    def update(self, param, grad, state, *, step, scale=1.0):
        super().update(param, np.clip(grad * scale, -BOUND, BOUND), state, step=step)


del optim._optimizers["clipping_sgd"]  # other tests look at the list of the library's own


def gradient(rank, step, shape):
    return np.random.default_rng([rank, step, *shape]).standard_normal(shape).astype("f4")


def trained(world, owner, optimizer, steps=3):
    """The parameters after some steps, from gradients that differ by rank."""
    params = [nn.Parameter(gradient(9, 0, shape), name=f"p{i}") for i, shape in enumerate(SHAPES)]
    layout = bucket_layout.plan([(p.name, p.data.shape, p.data.dtype) for p in params], 0.004, 0.004)
    reducer = Reducer(params, layout, world, overlap=False)
    updater = owner(reducer, optimizer)
    for step in range(1, steps + 1):
        for param in reversed(params):
            param.grad[...] = gradient(world.rank, step, param.shape)
            param.grad_hook(param)
        reducer.tally(0)
        updater.reduce_and_update(step, 1 / world.size)
        reducer.reset()
        reducer.barrier()
    return np.concatenate([param.data.reshape(-1) for param in params])


def by_hand(n, optimizer, steps=3):
    flat = np.concatenate([gradient(9, 0, shape).reshape(-1) for shape in SHAPES])
    state = optimizer.init_state(flat)
    for step in range(1, steps + 1):
        total = sum(np.concatenate([gradient(r, step, shape).reshape(-1) for shape in SHAPES]) for r in range(n))
        optimizer.update(flat, total, state, step=step, scale=1 / n)
    return flat


@pytest.mark.parametrize("owner", [Replicated, ShardedUpdate])
@pytest.mark.parametrize(("n", "per_node"), [(2, None), (3, None), (2, 1)])
@pytest.mark.parametrize("kind", [optim.SGD, ClippingSGD])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_optimizers_update_is_what_is_done(owner, n, per_node, kind, momentum):
    optimizer = kind(lr=0.5, momentum=momentum)
    expected = by_hand(n, optimizer)
    for found in thread_comm.run(n, lambda world: trained(world, owner, optimizer), per_node):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_an_update_of_ones_own_on_the_object_counts_too():
    optimizer = optim.SGD(lr=0.5)
    optimizer.update = lambda param, grad, state, *, step, scale: param.fill(step)
    for found in thread_comm.run(2, lambda world: trained(world, ShardedUpdate, optimizer)):
        assert (found == 3).all()


def test_a_rule_with_the_update_of_all_is_fused_with_the_sum(monkeypatch):
    fused, calls = kernels.load("gradients"), []

    def counted(*args):
        calls.append(args)
        rule(*args)

    rule = fused.REDUCING_RULES["sgd"]
    monkeypatch.setitem(fused.REDUCING_RULES, "sgd", counted)
    thread_comm.run(2, lambda world: trained(world, ShardedUpdate, optim.SGD(lr=0.5), steps=1))
    assert calls
    calls.clear()
    thread_comm.run(2, lambda world: trained(world, ShardedUpdate, ClippingSGD(lr=0.5), steps=1))
    assert not calls


def by_layer(n, optimizer, steps=3):
    """LARS from its formula, layer by layer; what has one axis by SGD."""
    params = [gradient(9, 0, shape).astype("f8") for shape in SHAPES]
    moments = [np.zeros_like(param) for param in params]
    for step in range(1, steps + 1):
        for param, moment in zip(params, moments, strict=True):
            mean = sum(gradient(r, step, param.shape).astype("f8") for r in range(n)) / n
            weights, length = np.linalg.norm(param), np.linalg.norm(mean)
            factor = optimizer.trust * weights / (length + optimizer.weight_decay * weights) if param.ndim > 1 else 1
            moment *= optimizer.momentum
            moment += factor * (mean + optimizer.weight_decay * param)
            param -= optimizer.lr * moment
    return np.concatenate([param.reshape(-1) for param in params])


@pytest.mark.parametrize("owner", [Replicated, ShardedUpdate])
@pytest.mark.parametrize(("n", "per_node"), [(1, None), (2, None), (3, None), (4, 2), (3, 1)])
def test_a_rule_by_layers_sees_whole_ones(owner, n, per_node):
    optimizer = optim.LARS(lr=0.5, trust=0.1, weight_decay=0.01)
    expected = by_layer(n, optimizer)
    for found in thread_comm.run(n, lambda world: trained(world, owner, optimizer), per_node):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
