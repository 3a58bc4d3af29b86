"""A character LSTM, ResNet-18 and a wide MLP against PyTorch on one core: training steps, in samples per second.

``python benchmarks/bench_train_models.py --model char_lstm --batch 32`` alternates hpcdp and PyTorch (where it is
installed), one thread each, after a check that both start with the same weights and get the same losses. Samples of the
LSTM are 64 characters of 62, those of ResNet-18 images of 3 x 32 x 32, and those of the MLP, which has six layers of
2048, 256 numbers. `bench_train_lenet` does so for LeNet.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from bench_harness import programs
from bench_harness.figures import write_json
from bench_harness.peers import MODELS as TORCH_MODELS
from bench_harness.peers import training_step
from bench_train_lenet import step_of, turns_of
from hpcdp import comm, nn, optim
from hpcdp.bench.measure import check_writable, describe, median_ratio, pin_to_own_core
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least
from hpcdp.train.trainer import Trainer

_LR, _MOMENTUM = 0.01, 0.9
_CONTEXT, _CHARACTERS, _WIDTH, _SIZE = 64, 62, 64, 256
_BATCHES = 3
LOSS_TOLERANCE = 1e-3
"""The largest difference between losses, relative to the first loss, because later ones may be near 0."""


def _texts(batch: int) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(batch).integers(0, _CHARACTERS, (batch, _CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _images(batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(batch)
    return rng.standard_normal((batch, 3, 32, 32), np.float32), rng.integers(0, 10, batch)


def _vectors(batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(batch)
    return rng.standard_normal((batch, 256), np.float32), rng.integers(0, 10, batch)


def _torch_lstm(torch_nn: Any) -> Any:
    class CharLSTM(torch_nn.Module):  # type: ignore[misc, name-defined]
        """The layers of `nn.models`, with one bias for the gates as there."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch_nn.Embedding(_CHARACTERS, _WIDTH)
            self.lstm = torch_nn.LSTM(_WIDTH, _SIZE, batch_first=True)
            self.lstm.bias_hh_l0.requires_grad_(False)
            self.head = torch_nn.Linear(_SIZE, _CHARACTERS)

        def forward(self, x: Any) -> Any:
            hidden, _ = self.lstm(self.tokens(x))
            return self.head(hidden).flatten(0, 1)

    return CharLSTM()


@dataclass(frozen=True)
class Pair:
    """A network here and in PyTorch, and a batch of so many samples for both."""

    ours: Callable[[], nn.Module]
    theirs: Callable[[Any], Any]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]


PAIRS = {
    "char_lstm": Pair(lambda: nn.models.char_lstm((_CONTEXT,), _CHARACTERS, 0, _WIDTH, _SIZE), _torch_lstm, _texts),
    "resnet18": Pair(lambda: nn.models.resnet18_cifar(), TORCH_MODELS["resnet18"].net, _images),
    "wide": Pair(lambda: nn.models.mlp(256, 10, (2048,) * 6), TORCH_MODELS["wide"].net, _vectors),
}


def torch_step(pair: Pair, initial: list[np.ndarray], batches: list[Any]) -> Callable[[int], Any]:
    """Return the step in PyTorch from the parameters ``initial``."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    net = pair.theirs(torch.nn)
    tables = {module.weight for module in net.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for param in net.parameters():
            if not param.requires_grad:
                param.zero_()
        learned = [param for param in net.parameters() if param.requires_grad]
        for param, values in zip(learned, initial, strict=True):
            turned = values.ndim == 2 and param not in tables
            param.copy_(torch.from_numpy(values.T.copy() if turned else values))
    optimizer = torch.optim.SGD(learned, lr=_LR, momentum=_MOMENTUM, fused=True)
    tensors = [(torch.from_numpy(x.copy()), torch.from_numpy(y.reshape(-1).copy())) for x, y in batches]
    return training_step(net, optimizer, tensors)


def against_torch(world: comm.World, model: str, batch: int, turns: int, seconds: float) -> dict[str, Any]:
    """As `bench_train_lenet.against_torch`, of one of `PAIRS`."""
    pair = PAIRS[model]
    batches = [pair.batch(batch)] * _BATCHES
    net = pair.ours()
    initial = [np.array(param.data) for param in net.parameters()]
    trainer = Trainer(net.parameters(), optim.SGD(lr=_LR, momentum=_MOMENTUM), world=world)
    steps = {"hpcdp": step_of(net, trainer, batches)}
    difference = None
    if importlib.util.find_spec("torch") is not None:
        steps["torch"] = torch_step(pair, initial, batches)
        losses = np.array([[float(step(i)) for i in range(3)] for step in steps.values()])
        difference = float(np.max(np.abs(losses[0] - losses[1])) / losses[1, 0])
    rates = turns_of(steps, batch, turns, seconds)
    return {
        "model": model,
        "batch": batch,
        "samples_s": {name: float(np.median(each)) for name, each in rates.items()},
        "ratio": median_ratio(rates["hpcdp"], rates["torch"]) if "torch" in rates else None,
        "loss_difference": difference,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_train_models.py", description=__doc__)
    parser.add_argument("--model", choices=list(PAIRS), default="char_lstm", metavar="NAME", help=", ".join(PAIRS))
    parser.add_argument("--batch", type=at_least(1), default=32, help="samples a step (32)")
    parser.add_argument("--turns", type=at_least(1), default=9)
    parser.add_argument("--seconds", type=at_least(0.0), default=0.5, help="length of a turn")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    world = comm.init()
    check_writable("train_models", [args.json], world)
    if world.size > 1:
        raise ConfigError("train_models", expected="one rank", got=world.size)
    pin_to_own_core(world)
    with threadpool_limits(1):
        result = against_torch(world, args.model, args.batch, args.turns, args.seconds)
    print(json.dumps(result))
    write_json(args.json, world, {"benchmark": "train_models", "machine": describe(world), **result})
    difference = result["loss_difference"]
    return 1 if difference is not None and not difference < LOSS_TOLERANCE else 0


if __name__ == "__main__":
    programs.run(main)
