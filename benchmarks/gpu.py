"""A GPU: sums of gradients by ranks that share it, CUDA kernels against the rate of its own copy, and LeNet and
ResNet-18 in samples per second.

Those two are trained without CUDA graphs and with them (`Module.hybridize`).

``python -m hpcdp.benchmarks.gpu`` needs CuPy and an NVIDIA GPU, says so and ends where they are not, and is over within
ten minutes. A kernel's rate is that of the bytes which it must move at least, those of every array read and of every
array written; its share is that over the rate at which the device copies as many. Each is compared with its plain
reference first, on fewer elements. Sums are jobs of 1, 2 and 4 ranks, on one node or two virtual ones (`gpu_sums`), and
come first; models and kernels are one more (`gpu_alone`). One that fails, or does not end, is told and ends no other.
The tables come last, and at the very end how it stands with the targets; the figures go to a file, too.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from ..comm import gpus
from ..devices import gpu
from ..errors import ConfigError
from ..launch.arguments import Parser, at_least
from ..launched import launched_ranks
from . import gpu_jobs, program
from .files import as_json, check_writable, write
from .sizes import parse_size

_FOR_JOBS = 0.6
"""Of the time; the rest is for models and kernels."""


def gpu_or_reason() -> tuple[Any, str]:
    """CuPy with a GPU, or None and why not.

    Raises:
        DeviceError: there is a GPU, but CuPy computes on none.
    """
    try:
        cupy = importlib.import_module("cupy")
    except ImportError:
        return None, "CuPy is not installed (pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]')"
    if cupy.cuda.is_available():
        return cupy, ""
    if gpus.visible():
        gpu(0).check()
    return None, "no NVIDIA GPU, or no driver"


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


def _line_of_model(model: dict[str, Any]) -> str:
    """Its samples per second, and PyTorch's where those are known."""
    name = f"{model['name']}, {model['dtype']}, batch {model['batch']}"
    ours, theirs = (
        [f"{model[key]:>9.0f}" for key in keys if key in model]
        for keys in (("samples_s", "graphs_samples_s"), ("torch_samples_s", "torch_graphs_samples_s"))
    )
    return f"{name:<36}{''.join(ours)}" + f"{'':>11}{''.join(theirs)}" * bool(theirs)


def _met(holds: bool) -> str:
    return "met" if holds else "**missed**"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m hpcdp.benchmarks.gpu", description=__doc__)
    parser.add_argument("-m", dest="size", default="256M", help="bytes of one float32 array (256M)")
    parser.add_argument("--batch", type=at_least(1), default=256, help="of images (256)")
    parser.add_argument("--limit-s", type=at_least(1), default=480, help="nothing begins after so many seconds (480)")
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="for the figures (gpu.json)")
    args = parser.parse_args(argv)
    parse_size(args.size)  # is refused here, and not by each job
    if launched_ranks() is not None:
        raise ConfigError("gpu", expected="no launcher: it starts jobs of its own", got="mpirun or srun")
    cupy, reason = gpu_or_reason()
    if cupy is None:
        print(f"skipped: {reason}")
        return 0
    check_writable("gpu", [args.json])
    begins = time.monotonic()
    jobs = []
    for job in gpu_jobs.run_all(gpu_jobs.JOBS, args.size, begins + _FOR_JOBS * args.limit_s):
        print(f"# {job['name']}", flush=True)
        jobs.append(job)
    print("# models and kernels", flush=True)
    alone = gpu_jobs.run_alone(args.size, args.batch, begins + args.limit_s)
    models, rows = alone.get("models", []), alone.get("kernels", [])
    write(args.json, as_json({"benchmark": "gpu", "sums": jobs, **alone}))
    if "device" in alone:
        device = alone["device"]
        print(f"\n{device['gpu']}, driver {device['driver']}, CUDA {device['cuda']}, CuPy {device['cupy']}")
    print(f"{'job':<30}{'share':>6}")
    for job in jobs:
        print(gpu_jobs.line(job))
    if "failed" in alone:
        print(f"{'models and kernels':<30}FAILED: {alone['failed']}")
    print(f"{'samples/s':<36}{'steps':>9}{'graphs':>9}   PyTorch:{'steps':>9}{'graphs':>9}")
    for model in models:
        print(_line_of_model(model))
    print(f"{'kernel':<22}{'us':>10}{'GB/s':>9}{'copy':>9}{'share':>8}")
    for row in rows:
        wrong = f"  WRONG: {row['wrong']}" if row["wrong"] else ""
        print(
            f"{row['name']:<22}{row['us']:>10.1f}{row['gb_s']:>9.1f}{row['copy_gb_s']:>9.1f}{row['share']:>8.2f}{wrong}"
        )
    print("\n" + "\n".join(verdicts(jobs, rows)))
    return 1 if "failed" in alone or any(row["wrong"] for row in rows) or any(map(gpu_jobs.failed, jobs)) else 0


if __name__ == "__main__":
    program.run(main)
