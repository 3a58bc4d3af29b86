"""A hybridized network beside the same one without plans."""

import copy

import numpy as np

from hpcdp import autograd, nn


def arrays(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def pair(net=None):
    net = nn.models.mlp(6, 3, (5,)) if net is None else net
    plain = copy.deepcopy(net)
    net.hybridize()
    return net, plain


def warm(net, x, times=3):
    for _ in range(times):
        net(x)
        with autograd.record():
            y = net(x)
        y.backward()


def same_gradients(net, plain):
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        np.testing.assert_array_equal(own.grad, other.grad, err_msg=own.name)


def in_both(net, plain, call):
    """What ``call`` gives for each, which must be the same; so must the gradients it leaves."""
    found = [call(each) for each in (net, plain)]
    for a, b in zip(*[each if isinstance(each, list) else [each] for each in found], strict=True):
        np.testing.assert_array_equal(a, b)
    same_gradients(net, plain)
