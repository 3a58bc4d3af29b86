"""A GPU: sums of gradients by ranks that share it, CUDA kernels against the rate of its own copy, and LeNet and
ResNet-18 in samples per second.

Those two are trained without CUDA graphs and with them (`Module.hybridize`).

``python -m hpcdp.benchmarks.gpu`` needs CuPy and an NVIDIA GPU, says so and ends where they are not, and is over within
ten minutes. A kernel's rate is that of the bytes which it must move at least, those of every array read and of every
array written; its share is that over the rate at which the device copies as many. Each is compared with its plain
reference first, on fewer elements. Sums are jobs of 1, 2 and 4 ranks, on one node or two virtual ones (`gpu_sums`), and
come first; one that fails, or does not end, is told and ends no other. The tables come last, and at the very end how it
stands with the targets; the figures go to a file, too.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from .. import comm, nn, optim
from ..arrays import Array, to_host
from ..errors import ConfigError
from ..launched import launched_ranks
from ..train.trainer import Trainer
from . import gpu_jobs, program
from .files import check_writable, write_json
from .gpu_kernels import Case, cases
from .machine import describe
from .options import Parser, at_least
from .sizes import parse_size
from .train_lenet import step_of

_CHECKED = 1 << 16
"""Elements of what is compared with the reference, some of which takes seconds for more."""
_TURNS, _TURN_S = 5, 0.02
_FOR_JOBS = 0.6
"""Of the time; the rest is for models and kernels."""
_MODELS = {"lenet": (1, 28, 28), "resnet18_cifar": (3, 32, 32)}
"""By name, and the images they take."""


def gpu_or_reason() -> tuple[Any, str]:
    """CuPy with a GPU, or None and why not."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return None, "CuPy is not installed (pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]')"
    return (cupy, "") if cupy.cuda.is_available() else (None, "no NVIDIA GPU, or no driver")


def facts(cupy: Any) -> dict[str, Any]:
    """The device, its driver, and CuPy."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    return {
        "gpu": properties["name"].decode(), "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": runtime.driverGetVersion(), "cuda": runtime.runtimeGetVersion(), "cupy": cupy.__version__,
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


def measure_model(name: str, batch: int, asarray: Callable[[np.ndarray], Array], world: comm.World) -> dict[str, Any]:
    """Forward, backward and update on one batch: ``name``, ``batch``, ``samples_s``, ``loss`` of the last step, and
    ``graphs_samples_s``, where the network is hybridized, so that forward and backward are CUDA graphs."""
    rng = np.random.default_rng(0)
    shape = _MODELS[name]
    x, labels = asarray(rng.standard_normal((batch, *shape), np.float32)), asarray(rng.integers(0, 10, batch))
    found: dict[str, Any] = {"name": name, "batch": batch}
    for key in ("samples_s", "graphs_samples_s"):
        net = nn.models.create(name, input_shape=shape, num_classes=10, seed=0).to(like=x)
        net.hybridize(key == "graphs_samples_s")
        trainer = Trainer(net.parameters(), optim.SGD(lr=0.01, momentum=0.9), world=world)
        step = step_of(net, trainer, [(x, labels)])
        found[key] = batch / seconds(partial(step, 0), asarray(np.zeros(1, np.float32)))
        found["loss"] = step(0)
    return found


def all_kernels(count: int, asarray: Callable[[np.ndarray], Array], ends: float) -> Iterator[dict[str, Any]]:
    """The rows of all kernels; none more once ``ends``, in `time.monotonic`, is over."""
    for small, large in zip(cases(min(count, _CHECKED)), cases(count), strict=True):
        if time.monotonic() > ends:
            return
        yield measure_kernel(large, asarray, small.wrong(asarray))


def verdicts(jobs: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> list[str]:
    """The targets of a GPU and what was measured, as lines of a table in Markdown."""
    shared = [each for each in jobs if each["case"] == "shared" and each["ranks"] > 1]
    rated = (
        ("kernels: share of the device's copy", 0.85, kernels),
        ("sum by ranks that share a GPU: share of a copy", 0.5, shared),
        ("staging: share of pinned copies", 0.9, [each for each in jobs if each["case"] == "staging"]),
    )
    lines = ["| what | target | measured |  |", "|---|---|---|---|"]
    for what, least, rows in rated:
        share, name = min(((row.get("share") or 0.0, row["name"]) for row in rows), default=(0.0, "not measured"))
        lines.append(f"| {what} | at least {least:.0%} | {share:.0%} at worst ({name}) | {_met(share >= least)} |")
    training = [each for each in jobs if each["case"] in ("training", "codes")]
    other = [each["name"] for each in training if gpu_jobs.failed(each)]
    bits = ", ".join(other) if other else "same bits" if training else "not measured"
    lines.append(f"| training with and without overlap | same bits | {bits} | {_met(bool(training) and not other)} |")
    return lines


def _met(holds: bool) -> str:
    return "met" if holds else "**missed**"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m hpcdp.benchmarks.gpu", description=__doc__)
    parser.add_argument("-m", dest="size", default="256M", help="bytes of one float32 array (256M)")
    parser.add_argument("--batch", type=at_least(1), default=256, help="of images (256)")
    parser.add_argument("--limit-s", type=at_least(1), default=480, help="nothing begins after so many seconds (480)")
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="for the figures (gpu.json)")
    args = parser.parse_args(argv)
    count = max(1, parse_size(args.size) // 4)
    if launched_ranks() is not None:
        raise ConfigError("gpu", expected="no launcher: it starts jobs of its own", got="mpirun or srun")
    cupy, reason = gpu_or_reason()
    if cupy is None:
        print(f"skipped: {reason}")
        return 0
    check_writable("gpu", [args.json])
    begins = time.monotonic()
    jobs = []  # before this process has MPI, or memory of the GPU
    for job in gpu_jobs.run_all(gpu_jobs.JOBS, args.size, begins + _FOR_JOBS * args.limit_s):
        print(f"# {job['name']}", flush=True)
        jobs.append(job)
    world = comm.init()
    models = []
    for name in _MODELS:
        print(f"# {name}", flush=True)
        models.append(measure_model(name, args.batch, cupy.asarray, world))
    rows = []
    for row in all_kernels(count, cupy.asarray, begins + args.limit_s):
        print(f"# {row['name']}", flush=True)
        rows.append(row)
    device = facts(cupy)
    write_json(
        args.json, world,
        {"benchmark": "gpu", "machine": describe(world), "device": device, "sums": jobs, "models": models,
         "kernels": rows},
    )  # fmt: skip
    print(f"\n{device['gpu']}, driver {device['driver']}, CUDA {device['cuda']}, CuPy {device['cupy']}")
    print(f"{'job':<30}{'share':>6}")
    for job in jobs:
        print(gpu_jobs.line(job))
    for model in models:
        print(
            f"{model['name']:<22}batch {model['batch']}: {model['samples_s']:.0f} samples/s, "
            f"{model['graphs_samples_s']:.0f} by CUDA graphs, loss {model['loss']:.3f}"
        )
    print(f"{'kernel':<22}{'us':>10}{'GB/s':>9}{'copy':>9}{'share':>8}")
    for row in rows:
        wrong = f"  WRONG: {row['wrong']}" if row["wrong"] else ""
        print(
            f"{row['name']:<22}{row['us']:>10.1f}{row['gb_s']:>9.1f}{row['copy_gb_s']:>9.1f}{row['share']:>8.2f}{wrong}"
        )
    print("\n" + "\n".join(verdicts(jobs, rows)))
    return 1 if any(row["wrong"] for row in rows) or any(map(gpu_jobs.failed, jobs)) else 0


if __name__ == "__main__":
    program.run(main)
