"""Whole steps of training, for `hybrid`: `TrainStep` as Python, by a plan, bare, and PyTorch, turn by turn on one core.

The limit of a network of dense layers is what its products, gradients and update take with all arrays at hand.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hpcdp import comm, kernels, nn, optim
from hpcdp.bench.measure import median_ratio
from hpcdp.train import TrainStep
from hpcdp.train.trainers.trainer import Trainer

from .harness.calls import turn_by_turn
from .harness.torch_models import MODELS, training_step

BARE, PYTHON, PLAN, TORCH = "bare", "as written", "plan", "PyTorch"
_LR, _MOMENTUM = 1e-3, 0.9
_CHECKED = 4
"""Steps after which parameters must be the same bits: traced, laid out, replayed."""

Case = tuple[str, tuple[int, ...], int]
"""Name, widths of dense layers or the shape of an image for LeNet, and batch."""
CASES: list[Case] = [
    *(("document's MLP", (512, 256, 128, 2), batch) for batch in (1, 16, 64)),
    *(("MLP 32-32-32-2", (32, 32, 32, 2), batch) for batch in (1, 16)),
    *(("LeNet", (1, 28, 28), batch) for batch in (1, 8, 64)),
]


def network(name: str, shape: tuple[int, ...]) -> nn.Module:
    """The same values in each call."""
    return nn.models.lenet(seed=0) if name == "LeNet" else nn.models.mlp(shape[0], shape[-1], shape[1:-1], seed=0)


def bare(widths: tuple[int, ...], x: np.ndarray, labels: np.ndarray) -> Callable[[], Any]:
    """A step of dense layers with ReLU between them, by NumPy on arrays at hand, and one call for the update."""
    rng = np.random.default_rng(0)
    sizes = list(itertools.pairwise(widths))
    count = sum(n * m + m for n, m in sizes)
    flat, grad, velocity = rng.standard_normal(count).astype(np.float32) * 0.05, *np.zeros((2, count), np.float32)
    layers, begin = [], 0
    for n, m in sizes:
        of_weight, of_bias = slice(begin, begin + n * m), slice(begin + n * m, begin + n * m + m)
        layers.append([each[at].reshape(shape) for each in (flat, grad) for at, shape in
                       ((of_weight, (n, m)), (of_bias, (m,)))])  # fmt: skip
        begin += n * m + m
    outs = [np.empty((len(x), m), np.float32) for _, m in sizes]
    backs = [np.empty_like(out) for out in outs]
    rows, update = np.arange(len(x)), kernels.load("update").sgd_momentum

    def step() -> None:
        given = x
        for number, (weight, bias, _, _) in enumerate(layers):
            out = outs[number]
            given.dot(weight, out)
            np.add(out, bias, out)
            if number < len(layers) - 1:
                np.maximum(out, 0, out=out)
            given = out
        chances = np.exp(given - given.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        np.log(chances[rows, labels])  # the losses
        chances[rows, labels] -= 1
        back = chances
        for number in reversed(range(len(layers))):
            weight, _, of_weight, of_bias = layers[number]
            before = outs[number - 1] if number else x
            if len(x) == 1:
                np.multiply(before.T, back, of_weight)
            else:
                before.T.dot(back, of_weight)
            np.add.reduce(back, axis=0, out=of_bias)
            if number:
                back.dot(weight.T, backs[number - 1])
                back = backs[number - 1]
                back *= before > 0
        update(flat, grad, velocity, (_LR, 0.0, 1 / len(x), _MOMENTUM))

    return step


def torch_step(name: str, shape: tuple[int, ...], x: np.ndarray, labels: np.ndarray) -> Callable[[], Any]:
    """PyTorch's, with its fused update."""
    torch: Any = importlib.import_module("torch")
    if name == "LeNet":
        model = MODELS["lenet"].net(torch.nn)
    else:
        layers = [each for n, m in itertools.pairwise(shape) for each in (torch.nn.Linear(n, m), torch.nn.ReLU())]
        model = torch.nn.Sequential(*layers[:-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM, fused=True)
    return partial(training_step(model, optimizer, [(torch.from_numpy(x), torch.from_numpy(labels))]), 0)


def measure(case: Case, turns: int, has_torch: bool, world: comm.World) -> dict[str, Any]:
    """One case: ``median_us`` by name, ``ratio`` of each to the plan in the same turn, ``wrong``."""
    name, shape, batch = case
    rng = np.random.default_rng(1)
    x = rng.standard_normal((batch, *(shape if name == "LeNet" else shape[:1]))).astype(np.float32)
    labels = rng.integers(0, 10 if name == "LeNet" else shape[-1], batch)
    nets = [network(name, shape) for _ in range(2)]
    steps = [TrainStep(net, Trainer(net.parameters(), optim.SGD(lr=_LR, momentum=_MOMENTUM), world)) for net in nets]
    steps[1].hybridize()
    for _ in range(_CHECKED):
        for step in steps:
            step(x, labels)
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    differ = sum(int(np.count_nonzero(own.data != other.data)) for own, other in pairs)
    calls: dict[str, Callable[[], Any]] = {} if name == "LeNet" else {BARE: bare(shape, x, labels)}
    calls |= {key: partial(step, x, labels) for key, step in zip((PYTHON, PLAN), steps, strict=True)}
    if has_torch:
        calls[TORCH] = torch_step(name, shape, x, labels)
    taken = turn_by_turn(calls, turns, PYTHON)
    return {
        "network": name, "batch": batch, "wrong": differ,
        "median_us": {key: float(np.median(us)) for key, us in taken.items()},
        "ratio": {key: median_ratio(us, taken[PLAN]) for key, us in taken.items()},
    }  # fmt: skip
