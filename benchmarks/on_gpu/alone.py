"""What one process measures on a GPU alone: LeNet and ResNet-18 in samples per second, and each kernel against the
rate of the device's own copy. `gpu` starts it as a job, since what hangs on a GPU can only be ended with its process.

The file with the figures is written anew after each of them, so that those of one that is ended are there. What
fails is named there, and ends no other.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hpcdp import comm, nn, optim
from hpcdp.arrays import Array, to_host
from hpcdp.bench.measure import parse_size
from hpcdp.bench.results import check_writable, describe, write_json
from hpcdp.comm import gpus
from hpcdp.kernels.cuda import cudnn_conv
from hpcdp.launch.arguments import Parser, at_least
from hpcdp.train import TrainStep
from hpcdp.train.trainers.trainer import Trainer

from ..harness import program
from ..train_lenet import step_of
from . import torch as gpu_torch
from .kernels import Case, cases

_CHECKED = 1 << 16
"""Elements of what is compared with the reference, some of which takes seconds for more."""
_TURNS, _TURN_S = 5, 0.02
_MODELS = {"lenet": (1, 28, 28), "resnet18_cifar": (3, 32, 32)}
"""By name, and the images they take."""
_DTYPES = ("float32", "bfloat16")
"""Of weights, activations and gradients."""


def facts(cupy: Any) -> dict[str, Any]:
    """The device, its driver, CUDA as CuPy has it, CuPy, and cuDNN, None where convolutions go without it."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "gpu": properties["name"].decode(), "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": gpus.driver_release(), "cuda": runtime.runtimeGetVersion(), "cupy": cupy.__version__,
        "cudnn": importlib.import_module("cudnn").backend_version_string() if cudnn_conv.is_there() else None,
    }  # fmt: skip


def seconds(call: Callable[[], Any], marker: Array) -> float:
    """Of one ``call``, the median over turns of as many in a row as take `_TURN_S`, without waits between them.

    Args:
        marker: an array of one element; its copy to the host waits for all that was launched before.
    """

    def turn(number: int) -> float:
        to_host(marker)
        begin = time.perf_counter()
        for _ in range(number):
            call()
        to_host(marker)
        return time.perf_counter() - begin

    turn(1)
    number = 1
    while turn(number) < _TURN_S:
        number *= 2
    return float(np.median([turn(number) / number for _ in range(_TURNS)]))


def measure_kernel(case: Case, asarray: Callable[[np.ndarray], Array], wrong: int) -> dict[str, Any]:
    """One row of the table: ``name``, ``us``, ``gb_s``, ``copy_gb_s``, ``share``, ``wrong``."""
    marker = asarray(np.zeros(1, np.float32))
    source, target = (asarray(np.zeros(case.moved // 2, np.uint8)) for _ in range(2))
    ours = seconds(case.on(asarray)[0], marker)
    copy = seconds(lambda: target.__setitem__(..., source), marker)
    return {
        "name": case.name, "us": 1e6 * ours, "gb_s": 1e-9 * case.moved / ours, "copy_gb_s": 1e-9 * case.moved / copy,
        "share": copy / ours, "wrong": wrong,
    }  # fmt: skip


def _graphs_step_of(net: nn.Module, trainer: Trainer, x: Array, labels: Array) -> Callable[[int], Array]:
    """A step by one CUDA graph, which returns each image's loss."""
    whole = TrainStep(net, trainer)
    whole.hybridize()
    return lambda _: whole(x, labels)[0].data


def measure_model(
    name: str, dtype: str, batch: int, asarray: Callable[[np.ndarray], Array], world: comm.World
) -> dict[str, Any]:
    """Forward, backward and update on one batch: ``name``, ``dtype``, ``batch``, ``samples_s``, ``loss`` of the last
    step, and ``graphs_samples_s``, where each step is one CUDA graph. Where PyTorch is, ``torch_samples_s`` and
    ``torch_graphs_samples_s``, the same of its steps."""
    rng = np.random.default_rng(0)
    shape = _MODELS[name]
    given = rng.standard_normal((batch, *shape), np.float32), rng.integers(0, 10, batch)
    x, labels, marker = asarray(given[0]), asarray(given[1]), asarray(np.zeros(1, np.float32))
    found: dict[str, Any] = {"name": name, "dtype": dtype, "batch": batch}
    for key in ("samples_s", "graphs_samples_s"):
        net = nn.models.create(name, input_shape=shape, num_classes=10, seed=0).to(like=x).to(dtype)
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.01, momentum=0.9), world=world)
        by_graphs = key == "graphs_samples_s"
        step = _graphs_step_of(net, trainer, x, labels) if by_graphs else step_of(net, trainer, [(x, labels)])
        found[key] = batch / seconds(partial(step, 0), marker)
        found["loss"] = float(step(0).mean())
    if gpu_torch.is_there():
        for key, peer in gpu_torch.steps(name, dtype, *given).items():
            found[f"{key}_samples_s"] = batch / seconds(peer, marker)
    return found


def all_kernels(
    count: int, asarray: Callable[[np.ndarray], Array], ends: float
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """All kernels by name, and what gives their rows; none more once ``ends``, in `time.monotonic`, is over."""

    def row(small: Case, large: Case) -> dict[str, Any]:
        return measure_kernel(large, asarray, small.wrong(asarray))

    for small, large in zip(cases(min(count, _CHECKED)), cases(count), strict=True):
        if time.monotonic() > ends:
            return
        yield large.name, partial(row, small, large)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m hpcdp.benchmarks.on_gpu.alone", description=__doc__)
    parser.add_argument("-m", dest="size", default="256M", help="bytes of one float32 array (256M)")
    parser.add_argument("--batch", type=at_least(1), default=256, help="of images (256)")
    parser.add_argument("--limit-s", type=at_least(1), default=200, help="no kernel begins after so many seconds (200)")
    parser.add_argument("--json", metavar="FILE", required=True, help="for the figures")
    args = parser.parse_args(argv)
    ends = time.monotonic() + args.limit_s
    world = comm.init()
    check_writable("on_gpu.alone", [args.json], world)
    cupy = importlib.import_module("cupy")
    found: dict[str, Any] = {"machine": describe(world), "device": facts(cupy), "models": [], "kernels": []}
    failed: dict[str, list[str]] = {}
    """Names by reason: after some errors CUDA refuses everything."""

    def write(*more: str) -> None:
        told = [*(f"{', '.join(names)}: {reason}" for reason, names in failed.items()), *more]
        write_json(args.json, world, {**found, **({"failed": "; ".join(told)} if told else {})})

    def measure(kind: str, name: str, row: Callable[[], dict[str, Any]]) -> None:
        try:
            found[kind].append(row())
        except Exception as error:
            failed.setdefault(f"{type(error).__name__}: {error}", []).append(name)
        write(f"it ended after {name}")

    write("nothing is measured")
    for name, dtype in itertools.product(_MODELS, _DTYPES):
        measure("models", f"{name} of {dtype}", partial(measure_model, name, dtype, args.batch, cupy.asarray, world))
    for name, row in all_kernels(max(1, parse_size(args.size) // 4), cupy.asarray, ends):
        measure("kernels", name, row)
    write()
    return 1 if failed else 0


if __name__ == "__main__":
    program.run(main)
