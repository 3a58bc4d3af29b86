"""Calls of networks without a plan, by a plan (`hybridize()`), bare, and in PyTorch, turn by turn on one core.

``python benchmarks/bench_hybrid.py`` first takes the MLP 512-256-128-2 at batch 1, of which 1000 calls
are its experiment. The limit is what its three products take with all arrays at hand: by ``numpy.matmul`` with ``out``,
as anybody would call BLAS, and by the bound method ``dot``, which has the least overhead. Beside them is thin NumPy,
with biases and activations. Then recorded calls with their backward, other networks, and chains of three to six
elementwise operators on 1 KB to 10 MB; and whole steps of training. What comes out must be the same
bits as without a plan.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from bench_harness import programs
from bench_harness.figures import write_json
from bench_harness.peers import MODELS, training_step
from bench_kernels import torch_or_reason
from hpcdp import autograd, comm, kernels, nn, optim
from hpcdp.bench.measure import (
    MeasuringSchedule,
    alternate,
    check_writable,
    describe,
    median_ratio,
    pin_to_own_core,
    turn_medians,
)
from hpcdp.launch.parser import Parser, at_least
from hpcdp.nn.layers import gelu
from hpcdp.train import TrainStep
from hpcdp.train.trainer import Trainer

_TURN_S = 2e-3


@dataclass
class Calls:
    """Something that is called ``number`` times a timing, which is told for one call."""

    name: str
    call: Callable[[], Any]
    number: int

    def refresh(self, iteration: int) -> None:
        """Write the data of an iteration into the inputs."""
        self.call()

    def timed(self) -> int:
        """Run the exchange once and return its nanoseconds."""
        call = self.call
        begin = time.perf_counter_ns()
        for _ in range(self.number):
            call()
        return (time.perf_counter_ns() - begin) // self.number

    def wrong(self, iteration: int) -> int:
        """Return how many elements of the result of an iteration are wrong."""
        return 0


def turn_by_turn(calls: Mapping[str, Callable[[], Any]], turns: int, as_often_as: str) -> dict[str, np.ndarray]:
    """Microseconds a call in each of ``turns``, by name; all are called as often as the one named."""
    calls[as_often_as]()
    begin = time.perf_counter()
    calls[as_often_as]()
    number = max(1, min(50, int(_TURN_S / (time.perf_counter() - begin))))
    candidates = [Calls(name, call, number) for name, call in calls.items()]
    series = alternate(candidates, lambda: None, MeasuringSchedule(turns, 5, 3), validate=False)
    return {name: turn_medians([each]) for name, each in series.items()}


BARE, PYTHON, PLAN, TORCH = "bare", "as written", "plan", "PyTorch"
_LR, _MOMENTUM = 1e-3, 0.9
_CHECKED_STEPS = 4
"""Steps after which parameters must be the same bits: traced, laid out, replayed."""

StepCase = tuple[str, tuple[int, ...], int]
"""Name, widths of dense layers or the shape of an image for LeNet, and batch."""
STEP_CASES: list[StepCase] = [
    *(("MLP 512-256-128-2", (512, 256, 128, 2), batch) for batch in (1, 16, 64)),
    *(("MLP 32-32-32-2", (32, 32, 32, 2), batch) for batch in (1, 16)),
    *(("LeNet", (1, 28, 28), batch) for batch in (1, 8, 64)),
]


def network(name: str, shape: tuple[int, ...]) -> nn.Module:
    """Return the network, with the same values in each call."""
    return nn.models.lenet(seed=0) if name == "LeNet" else nn.models.mlp(shape[0], shape[-1], shape[1:-1], seed=0)


def bare_step(widths: tuple[int, ...], x: np.ndarray, labels: np.ndarray) -> Callable[[], Any]:
    """Return a step of dense layers with ReLU in between, by NumPy on existing arrays and one call for the update."""
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
    rows, update = np.arange(len(x)), kernels.load("gradients").sgd_momentum

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


def measure_step(case: StepCase, turns: int, has_torch: bool, world: comm.World) -> dict[str, Any]:
    """One case: ``median_us`` by name, ``ratio`` of each to the plan in the same turn, ``wrong``."""
    name, shape, batch = case
    rng = np.random.default_rng(1)
    x = rng.standard_normal((batch, *(shape if name == "LeNet" else shape[:1]))).astype(np.float32)
    labels = rng.integers(0, 10 if name == "LeNet" else shape[-1], batch)
    nets = [network(name, shape) for _ in range(2)]
    steps = [TrainStep(net, Trainer(net.parameters(), optim.SGD(lr=_LR, momentum=_MOMENTUM), world)) for net in nets]
    steps[1].hybridize()
    for _ in range(_CHECKED_STEPS):
        for step in steps:
            step(x, labels)
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    differ = sum(int(np.count_nonzero(own.data != other.data)) for own, other in pairs)
    calls: dict[str, Callable[[], Any]] = {} if name == "LeNet" else {BARE: bare_step(shape, x, labels)}
    calls |= {key: partial(step, x, labels) for key, step in zip((PYTHON, PLAN), steps, strict=True)}
    if has_torch:
        calls[TORCH] = torch_step(name, shape, x, labels)
    taken = turn_by_turn(calls, turns, PYTHON)
    return {
        "network": name, "batch": batch, "wrong": differ,
        "median_us": {key: float(np.median(us)) for key, us in taken.items()},
        "ratio": {key: median_ratio(us, taken[PLAN]) for key, us in taken.items()},
    }  # fmt: skip


_WIDTHS = (512, 256, 128, 2)
_D2L_S = (0.5037, 0.1873)
"""Seconds for 1000 calls before and after hybridize() in "Dive into Deep Learning", section 12.1."""
PRODUCTS, BOUND, EAGER, REPLAY, TORCH = "products", "products, bound", "eager", "replay", "PyTorch"


class Chain(nn.Module):
    """Elementwise operators on an input and a parameter of ``size`` numbers."""

    def __init__(self, compute: Callable[[Any, Any], Any], size: int) -> None:
        self.weight = nn.Parameter(np.random.default_rng(2).standard_normal((1, size)).astype(np.float32))
        self._compute = compute

    def forward(self, x: Any) -> Any:
        """Compute the chain of ``x`` and the weight."""
        return self._compute(x, self.weight)


CHAINS: dict[str, Callable[[Any, Any], Any]] = {
    "multiply, add, ReLU": lambda x, w: nn.functional.relu(x * w + 0.1),
    "and tanh": lambda x, w: nn.functional.relu(x * w + 0.1).tanh(),
    "multiply, add, ReLU, multiply, subtract": lambda x, w: nn.functional.relu(x * w + 0.1) * w - x,
    "multiply, add, GELU, multiply, subtract, divide": lambda x, w: (gelu(x * w + 0.1) * 0.5 - x) / 2.0,
    "multiply, add, sigmoid, multiply, subtract, exp": lambda x, w: ((x * w + 0.1).sigmoid() * w - x).exp(),
}
_CHAIN_SIZES = (256, 25_600, 2_560_000)

Case = tuple[str, Callable[[], nn.Module], tuple[int, ...], bool]
"""Name, network, shape of the input, and whether the call is recorded and its backward follows."""


def recorded(net: nn.Module, x: np.ndarray) -> Any:
    """Return a recorded call with its backward."""
    with autograd.record():
        y = net(x)
    y.backward()
    return y


def wrong(plain: nn.Module, planned: nn.Module, x: np.ndarray, records: bool) -> int:
    """Return the number of elements of results and gradients whose bits differ in a replay."""
    differ = 0
    for _ in range(3):
        pairs = [(recorded(plain, x), recorded(planned, x))] if records else [(plain(x), planned(x))]
        found = [(own.data, other.data) for own, other in pairs]
        if records:
            both = zip(plain.parameters(), planned.parameters(), strict=True)
            found += [(own.grad, other.grad) for own, other in both]
        differ = sum(int(np.count_nonzero(own != other)) for own, other in found)
    return differ


def bare(net: nn.Module, x: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Return the MLP 512-256-128-2 in plain NumPy, on existing arrays."""
    weights, biases = ([param.data for param in net.parameters()][first::2] for first in (0, 1))
    outs = [np.empty((len(x), width), np.float32) for width in _WIDTHS[1:]]
    inputs = [x, *outs[:-1]]
    dots = [(each.dot, weight, out) for each, weight, out in zip(inputs, weights, outs, strict=True)]
    (dot0, w0, y0), (dot1, w1, y1), (dot2, w2, y2) = dots
    zero = np.zeros((), np.float32)

    def bound() -> None:
        dot0(w0, y0)
        dot1(w1, y1)
        dot2(w2, y2)

    def matmuls() -> None:
        for each, weight, out in zip(inputs, weights, outs, strict=True):
            np.matmul(each, weight, out=out)

    def thin() -> np.ndarray:
        y = np.maximum(x @ w0 + biases[0], zero)
        y = np.maximum(y @ w1 + biases[1], zero)
        return y @ w2 + biases[2]

    return {PRODUCTS: matmuls, BOUND: bound, "thin NumPy": thin}


def _torch_mlp(torch: Any, net: nn.Module, x: np.ndarray, records: bool) -> Callable[[], Any]:
    params = net.parameters()
    layers: list[Any] = []
    for weight, bias in zip(params[::2], params[1::2], strict=True):
        layer = torch.nn.Linear(*weight.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight.data.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias.data))
        layers += [layer, torch.nn.ReLU()]
    model, given = torch.nn.Sequential(*layers[:-1]), torch.from_numpy(x)

    def backward() -> None:
        model.zero_grad(set_to_none=False)
        model(given).sum().backward()

    return backward if records else torch.no_grad()(partial(model, given))  # type: ignore[no-any-return]


def cases(brief: bool) -> list[Case]:
    """Return the cases to measure."""
    mlp = partial(nn.models.mlp, _WIDTHS[0], _WIDTHS[-1], _WIDTHS[1:-1])
    found: list[Case] = [
        ("MLP 512-256-128-2", mlp, (1, _WIDTHS[0]), False),
        ("MLP 512-256-128-2", mlp, (1, _WIDTHS[0]), True),
    ]
    if not brief:
        images = (1, 28, 28)
        found += [
            ("MLP 512-256-128-2", mlp, (64, _WIDTHS[0]), False),
            ("LeNet", nn.models.lenet, (1, *images), False),
            ("LeNet", nn.models.lenet, (1, *images), True),
            ("LeNet", nn.models.lenet, (64, *images), True),
            ("ResNet-18", nn.models.resnet18, (1, *images), False),
        ]
        found += [
            (f"{size * 4 / 1e3:g} KB: {name}", partial(Chain, compute, size), (1, size), records)
            for size in _CHAIN_SIZES
            for name, compute in CHAINS.items()
            for records in (False, True)
        ]
    return found


def measure(case: Case, turns: int, torch: Any) -> dict[str, Any]:
    """One case: ``median_us`` by name, ``ratio`` of each to the replay in the same turn, ``wrong``."""
    name, make, shape, records = case
    plain, planned = make(), make()
    planned.hybridize()
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    differ = wrong(plain, planned, x, records)
    calls: dict[str, Callable[[], Any]] = {}
    is_brief = name.startswith("MLP 512-")
    if is_brief and not records:
        calls |= bare(plain, x)
    for key, net in ((EAGER, plain), (REPLAY, planned)):
        calls[key] = partial(recorded, net, x) if records else partial(net, x)
    if torch and is_brief:
        calls[TORCH] = _torch_mlp(torch, plain, x, records)
    taken = turn_by_turn(calls, turns, EAGER)
    return {
        "network": name, "batch": shape[0], "backward": records, "wrong": differ,
        "median_us": {key: float(np.median(us)) for key, us in taken.items()},
        "ratio": {key: median_ratio(us, taken[REPLAY]) for key, us in taken.items()},
        "eager_over_torch": median_ratio(taken[EAGER], taken[TORCH]) if TORCH in taken else None,
    }  # fmt: skip


def _show(row: dict[str, Any], what: str) -> None:
    print(f"{row['network']}, batch {row['batch']}{what}" + (f"  WRONG: {row['wrong']}" if row["wrong"] else ""))
    for key, us in row["median_us"].items():
        print(f"  {key:<18}{us:>10.1f}{row['ratio'][key]:>8.2f}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_hybrid.py", description=__doc__)
    parser.add_argument("--turns", type=at_least(1), default=40, help="of each candidate (40)")
    parser.add_argument("--brief", action="store_true", help="the MLP 512-256-128-2 alone")
    parser.add_argument("--json", metavar="FILE", help="the figures, and the machine they were measured on")
    args = parser.parse_args(argv)
    world = comm.init()
    check_writable("hybrid", [args.json], world)
    core = pin_to_own_core(world)
    torch, reason = torch_or_reason()
    print(f"# hybridize() on core {core}: microseconds a call, and the time of each over a replay's")
    rows, steps = [], []
    for case in cases(args.brief):
        rows.append(measure(case, args.turns, torch))
        _show(rows[-1], ", with backward" * rows[-1]["backward"])
    for step in STEP_CASES[: 1 if args.brief else None]:
        steps.append(measure_step(step, args.turns, torch is not None, world))
        _show(steps[-1], ", a step of training")
    eager, replay = (rows[0]["median_us"][key] / 1e3 for key in (EAGER, REPLAY))
    print(f"# 1000 calls of the MLP 512-256-128-2: {eager:.4f} s without a plan, {replay:.4f} s by it, "
          f"{eager / replay:.1f}x; D2L: {_D2L_S[0]} s, {_D2L_S[1]} s, 2.7x")  # fmt: skip
    write_json(args.json, world, {"benchmark": "hybrid", "machine": describe(world), "skipped": reason,
                                 "rows": rows, "steps": steps})  # fmt: skip
    return 1 if any(row["wrong"] for row in rows + steps) else 0


if __name__ == "__main__":
    programs.run(main)
