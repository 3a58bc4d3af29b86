"""A GPU: sums of gradients by ranks that share it, CUDA kernels against the rate of its own copy, and LeNet and
ResNet-18 in samples per second.

Those two are trained without CUDA graphs and by one a step (`TrainStep.hybridize`).

``python -m hpcdp.benchmarks.gpu`` needs CuPy and an NVIDIA GPU, says so and ends where they are not, and is over within
ten minutes. A kernel's rate is that of the bytes which it must move at least, those of every array read and of every
array written; its share is that over the rate at which the device copies as many. Each is compared with its plain
reference first, on fewer elements. Sums are jobs of 1, 2 and 4 ranks, on one node or two virtual ones (`on_gpu.sums`),
and come first; models and kernels are one more (`on_gpu.alone`). One that fails, or does not end, is told and ends no
other. The tables come last, and at the very end how it stands with the targets; the figures go to a file, too.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from typing import Any

from hpcdp.bench.measure import parse_size
from hpcdp.bench.results import as_json, check_writable, write
from hpcdp.comm import gpus
from hpcdp.devices import gpu
from hpcdp.errors import ConfigError
from hpcdp.launch.arguments import Parser, at_least
from hpcdp.launched import launched_ranks

from .harness import program
from .on_gpu import jobs as gpu_jobs
from .on_gpu import report as gpu_report
from .reporting.markdown import of_targets

_LEAST_NBYTES = 4 << 10
_FOR_JOBS = 0.6
"""Of the time; the rest is for models and kernels."""


def gpu_or_reason() -> tuple[Any, str]:
    """CuPy with a GPU, or None and why not.

    Raises:
        DeviceError: there is a GPU, but CuPy computes on none.
    """
    cupy: Any = None
    with contextlib.suppress(ImportError):
        cupy = importlib.import_module("cupy")
    if cupy is not None and cupy.cuda.is_available():
        return cupy, ""
    if not gpus.visible():
        return None, "no NVIDIA GPU, or no driver"
    if cupy is None:
        return None, "CuPy is not installed (pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]')"
    gpu(0).check()
    return None, "CuPy finds no GPU"


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m hpcdp.benchmarks.gpu", description=__doc__)
    parser.add_argument("-m", dest="size", default="256M", help="bytes of one float32 array (256M)")
    parser.add_argument("--batch", type=at_least(1), default=256, help="of images (256)")
    parser.add_argument("--limit-s", type=at_least(1), default=480, help="nothing begins after so many seconds (480)")
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="for the figures (gpu.json)")
    args = parser.parse_args(argv)
    if parse_size(args.size) < _LEAST_NBYTES:  # is refused here, and not by each job
        raise ConfigError("gpu", where="-m", expected="at least 4K", got=args.size)
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
    report = {"benchmark": "gpu", "size": args.size, "sums": jobs, **alone}
    write(args.json, as_json(report))
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
        print(gpu_report.line_of_model(model))
    print(f"{'kernel':<22}{'us':>10}{'GB/s':>9}{'copy':>9}{'share':>8}")
    for row in rows:
        wrong = f"  WRONG: {row['wrong']}" if row["wrong"] else ""
        print(
            f"{row['name']:<22}{row['us']:>10.1f}{row['gb_s']:>9.1f}{row['copy_gb_s']:>9.1f}{row['share']:>8.2f}{wrong}"
        )
    print("\n" + of_targets(gpu_report.verdicts(report)), end="")
    return 1 if "failed" in alone or any(row["wrong"] for row in rows) or any(map(gpu_jobs.failed, jobs)) else 0


if __name__ == "__main__":
    program.run(main)
