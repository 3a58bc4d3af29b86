"""Benchmarks of a GPU: gradient sums of ranks that share it, CUDA kernels, and training of three networks.

Kernels are compared with the rate of the device's own copy. LeNet, ResNet-18 and a GPT are measured in samples per
second, without CUDA graphs and with one per step (`TrainStep.hybridize`).

``python benchmarks/bench_gpu.py`` needs CuPy and an NVIDIA GPU, and takes at most ten minutes. A kernel's rate counts
the bytes that it must move: those of every array read and of every array written. Its share is the ratio to
the rate at which the device copies as many bytes. Each kernel is first compared with its plain reference, on fewer
elements. Sums are jobs of 1, 2 and 4 ranks, on one node or two virtual ones (`bench_gpu_sums`), and come first. Models
and kernels are one further job (`bench_gpu_alone`). A job that fails or hangs is reported and does not end the others.
The tables and the verdicts on the targets come last; the figures are also written to a file.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_harness import programs
from bench_harness.report import failed, gpu_verdicts, line_of_model, of_targets
from hpcdp.bench.measure import as_json, check_writable, parse_size, write
from hpcdp.comm import world
from hpcdp.core.arrays import gpu
from hpcdp.core.environment import launched_ranks
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least
from hpcdp.launch.process_monitor import adopt, bound, end_orphans

_JOB_S, _ENDING_S = 90.0, 10.0
"""Time limits of a job, and of its end after SIGTERM."""
_LAST_S = 60.0
"""Time limit of a kernel that started in time."""
_SHARING = ("shared", "refused")
"""Cases of ranks that share a GPU; on a machine with several GPUs only one is visible to them."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LAUNCH = [sys.executable, "-m", "hpcdp.cli", "launch"]


@dataclass(frozen=True)
class Job:
    """A case of `bench_gpu_sums` with its ranks, and ranks on each virtual node; None: one node."""

    case: str
    ranks: int
    ranks_per_node: int | None = None

    @property
    def name(self) -> str:
        """The name in the table."""
        nodes = 1 if self.ranks_per_node is None else -(-self.ranks // self.ranks_per_node)
        return f"{self.case}, {self.ranks} rank{'s' * (self.ranks > 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")

    def command(self, size: str, report: Path) -> list[str]:
        """Return the command that starts the job; ``size`` is that of its arrays, ``report`` is the output file."""
        launch = [*_LAUNCH, "-n", str(self.ranks), "--", sys.executable]
        return [*launch, str(programs.path_of("gpu_sums")), self.case, "-m", size, "--json", str(report)]

    def environment(self) -> Mapping[str, str]:
        """Return the variables to add to the environment."""
        variables = {} if self.ranks_per_node is None else {"HPCDP_RANKS_PER_NODE": str(self.ranks_per_node)}
        return variables | (
            {_VISIBLE: os.environ.get(_VISIBLE, "0").partition(",")[0]} if self.case in _SHARING else {}
        )


JOBS = (
    Job("shared", 1), Job("shared", 2), Job("shared", 4), Job("staging", 1), Job("training", 2), Job("training", 2, 1),
    Job("training", 4, 2), Job("graphs", 2), Job("graphs", 2, 1), Job("codes", 2, 1), Job("nccl", 1), Job("refused", 2),
)  # fmt: skip


def run_all(jobs: Sequence[Job], size: str, ends: float) -> Iterator[dict[str, Any]]:
    """Return the figures of each job, with its ``name``, ``case`` and ``ranks``.

    If a job fails, or has no time left until ``ends`` (in `time.monotonic`), ``failed`` has the reason.
    """
    for job in jobs:
        about = {"name": job.name, "case": job.case, "ranks": job.ranks}
        left = ends - time.monotonic()
        if left <= 0:
            yield {**about, "failed": "not started: no time left"}
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            report = Path(folder, "report.json")
            yield {**about, **_run(job.command(size, report), job.environment(), report, min(left, _JOB_S))}


def run_alone(size: str, batch: int, ends: float) -> dict[str, Any]:
    """Return the figures of `bench_gpu_alone`, which starts no kernel after ``ends`` (in `time.monotonic`).

    It measures cuDNN's engines like PyTorch's. If it fails or hangs, ``failed`` has the reason, in addition to the
    figures until then.
    """
    left = max(1.0, ends - time.monotonic())
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        report = Path(folder, "report.json")
        command = [*_LAUNCH, "-n", "1", "--", sys.executable, str(programs.path_of("gpu_alone"))]
        command += ["-m", size, "--batch", str(batch), "--limit-s", str(int(left)), "--json", str(report)]
        return _run(command, {"HPCDP_CUDNN_BENCHMARK": "1"}, report, left + _LAST_S)


def _run(command: Sequence[str], more: Mapping[str, str], report: Path, limit_s: float) -> dict[str, Any]:
    process = subprocess.Popen(
        command, env={**os.environ, **more}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True, preexec_fn=bound(),
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return {**_read(report), "failed": f"no end after {limit_s:.0f} s"}
    except BaseException:  # Ctrl-C
        _end(process)
        raise
    if report.exists():
        return _read(report)
    lines = [line for line in output.splitlines() if line.strip(" -")]
    reason = next((line for line in lines if line.startswith(("skipped:", "hpcdp: "))), "")
    return {"failed": reason or (lines[-1] if lines else f"status {process.returncode}")}


def _read(report: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return figures


def _end(process: subprocess.Popen[str]) -> None:
    """End a job by its launcher, then kill its remaining processes, which may be in other process groups."""
    adopt()
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_ENDING_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_orphans()


def line(row: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    if "failed" in row:
        return f"{row['name']:<30}FAILED: {row['failed']}"
    share = "" if row["share"] is None else f"{row['share']:.2f}"
    wrong = f"  WRONG: {row['wrong']}" if row["wrong"] else ""
    return f"{row['name']:<30}{share:>6}  {row['summary']}{wrong}"


_LEAST_NBYTES = 4 << 10
_FOR_JOBS = 0.6
"""The fraction of the time for jobs; the rest is for models and kernels."""


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
    if not world.visible():
        return None, "no NVIDIA GPU, or no driver"
    if cupy is None:
        return None, "CuPy is not installed (pip install 'hpcdp[cuda12]' or 'hpcdp[cuda13]')"
    gpu(0).check()
    return None, "CuPy finds no GPU"


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_gpu.py", description=__doc__)
    parser.add_argument("-m", dest="size", default="256M", help="bytes of one float32 array (256M)")
    parser.add_argument("--batch", type=at_least(1), default=256, help="of images (256)")
    parser.add_argument("--limit-s", type=at_least(1), default=480, help="start nothing after so many seconds (480)")
    parser.add_argument("--json", metavar="FILE", default="gpu.json", help="for the figures (gpu.json)")
    args = parser.parse_args(argv)
    if parse_size(args.size) < _LEAST_NBYTES:  # refuse here, not in each job
        raise ConfigError("gpu", where="-m", expected="at least 4K", got=args.size)
    if launched_ranks() is not None:
        raise ConfigError("gpu", expected="no launcher: it starts jobs of its own", got="mpirun or srun")
    cupy, reason = gpu_or_reason()
    if cupy is None:
        print(f"skipped: {reason}")
        return 0
    check_writable("gpu", [args.json])
    begins = time.monotonic()
    jobs: list[dict[str, Any]] = []
    for job in run_all(JOBS, args.size, begins + _FOR_JOBS * args.limit_s):
        print(f"# {line(job)}", flush=True)
        jobs.append(job)
        write(args.json, as_json({"benchmark": "gpu", "size": args.size, "sums": jobs}))
    print("# models and kernels", flush=True)
    alone = run_alone(args.size, args.batch, begins + args.limit_s)
    models, rows = alone.get("models", []), alone.get("kernels", [])
    report = {"benchmark": "gpu", "size": args.size, "sums": jobs, **alone}
    write(args.json, as_json(report))
    if "device" in alone:
        device = alone["device"]
        print(f"\n{device['gpu']}, driver {device['driver']}, CUDA {device['cuda']}, CuPy {device['cupy']}")
    print(f"{'job':<30}{'share':>6}")
    for job in jobs:
        print(line(job))
    if "failed" in alone:
        print(f"{'models and kernels':<30}FAILED: {alone['failed']}")
    print(f"{'samples/s':<36}{'steps':>9}{'graphs':>9}   PyTorch:{'steps':>9}{'graphs':>9}{'compiled':>9}")
    for model in models:
        print(line_of_model(model))
    print(f"{'kernel':<22}{'us':>10}{'GB/s':>9}{'copy':>9}{'share':>8}")
    for row in rows:
        wrong = f"  WRONG: {row['wrong']}" if row["wrong"] else ""
        print(
            f"{row['name']:<22}{row['us']:>10.1f}{row['gb_s']:>9.1f}{row['copy_gb_s']:>9.1f}{row['share']:>8.2f}{wrong}"
        )
    print("\n" + of_targets(gpu_verdicts(report)), end="")
    return 1 if "failed" in alone or any(row["wrong"] for row in rows) or any(map(failed, jobs)) else 0


if __name__ == "__main__":
    programs.run(main)
