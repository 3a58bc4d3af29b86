"""Results that are read twice, detached or not, are the same by a plan: values, and gradients."""

import numpy as np
import pytest

from hpcdp import autograd, nn

FORWARDS = {
    "straight-through": lambda x, w: x * w + (x * w * 2).detach(),
    "of one result": lambda x, w: (y := x * w) + (y * 2).detach(),
    "rounded": lambda x, w: (y := x * w) + (nn.functional.relu(y) - y).detach(),
    "a result less itself": lambda x, w: (y := x * w) - y.detach(),
    "of a product": lambda x, w: (y := x @ w) + nn.functional.relu(y).detach() * y,
    "of a product and its ReLU": lambda x, w: (y := nn.functional.relu(x @ w)) * y.detach(),
    "of an input": lambda x, w: x.detach() * w + x,
    "of a parameter": lambda x, w: x * w.detach() + w * x,
    "detached twice": lambda x, w: (y := (x * w).detach()) * w + y.detach() * x,
    "a detached output": lambda x, w: ((y := (x * 2).detach()) * w, y),
    "two heads": lambda x, w: ((y := x * w).tanh(), y.sigmoid()),
    "two heads of a sum": lambda x, w: (nn.functional.relu(y := x @ w + x), nn.functional.relu(-y)),
    "three heads": lambda x, w: ((y := x * w + 1.0).tanh(), y.sigmoid(), y),
}


class Network(nn.Module):
    def __init__(self, compute):
        self.weight = nn.Parameter(np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32))
        self._compute = compute

    def forward(self, x):
        return self._compute(x, self.weight)


def listed(found):
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", FORWARDS)
def test_bits_of_values_and_gradients(name):
    plain, planned = Network(FORWARDS[name]), Network(FORWARDS[name])
    planned.hybridize()
    rng = np.random.default_rng(2)
    for _ in range(4):
        x = rng.standard_normal((4, 4)).astype(np.float32)
        found = []
        for net in (plain, planned):
            predicted = [each.data for each in listed(net(x))]
            given = autograd.Tensor(x.copy())
            given.attach_grad()
            with autograd.record():
                outputs = listed(net(given))
                total = sum((each * each).sum() for each in outputs)
            total.backward()
            found.append([*predicted, *(each.data for each in outputs), net.weight.grad, given.grad])
        for own, other in zip(*found, strict=True):
            np.testing.assert_array_equal(other, own)
