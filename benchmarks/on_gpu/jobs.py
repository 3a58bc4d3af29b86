"""The jobs of `gpu`: ranks on one GPU, started here one job after another, each with a deadline of its own."""

from __future__ import annotations

import contextlib
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

from hpcdp.launch.orphans import adopt, bound, end_orphans

_JOB_S, _ENDING_S = 90.0, 10.0
"""How long a job may take, and how long its end when it is told to."""
_LAST_S = 60.0
"""How long a kernel may take that has begun in time."""
_SHARING = ("shared", "refused")
"""Cases of ranks that share a GPU: they see one alone, also on a machine of several."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LAUNCH = [sys.executable, "-m", "hpcdp.cli", "launch"]


@dataclass(frozen=True)
class Job:
    """A case of `sums` on so many ranks, with ``ranks_per_node`` on each virtual node; None: one node."""

    case: str
    ranks: int
    ranks_per_node: int | None = None

    @property
    def name(self) -> str:
        """In a line of the table."""
        nodes = 1 if self.ranks_per_node is None else -(-self.ranks // self.ranks_per_node)
        return f"{self.case}, {self.ranks} rank{'s' * (self.ranks > 1)}" + (f" on {nodes} nodes" if nodes > 1 else "")

    def command(self, size: str, report: Path) -> list[str]:
        """What starts it; ``size`` is that of its arrays, and ``report`` gets its figures."""
        launch = [*_LAUNCH, "-n", str(self.ranks), "--", sys.executable, "-m"]
        return [*launch, "hpcdp.benchmarks.on_gpu.sums", self.case, "-m", size, "--json", str(report)]

    def environment(self) -> Mapping[str, str]:
        """What is added to that of this process."""
        found = {} if self.ranks_per_node is None else {"HPCDP_RANKS_PER_NODE": str(self.ranks_per_node)}
        return found | ({_VISIBLE: os.environ.get(_VISIBLE, "0").partition(",")[0]} if self.case in _SHARING else {})


JOBS = (
    Job("shared", 1), Job("shared", 2), Job("shared", 4), Job("staging", 1), Job("training", 2), Job("training", 2, 1),
    Job("training", 4, 2), Job("graphs", 2), Job("graphs", 2, 1), Job("codes", 2, 1), Job("nccl", 1), Job("refused", 2),
)  # fmt: skip


def run_all(jobs: Sequence[Job], size: str, ends: float) -> Iterator[dict[str, Any]]:
    """The figures of each job, with its ``name``, ``case`` and ``ranks``.

    Of one that fails, or for which no time is left until ``ends`` (in `time.monotonic`), ``failed`` says why.
    """
    for job in jobs:
        about = {"name": job.name, "case": job.case, "ranks": job.ranks}
        left = ends - time.monotonic()
        if left <= 0:
            yield {**about, "failed": "not begun: no time left"}
            continue
        with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
            report = Path(folder, "report.json")
            yield {**about, **_run(job.command(size, report), job.environment(), report, min(left, _JOB_S))}


def run_alone(size: str, batch: int, ends: float) -> dict[str, Any]:
    """The figures of `alone`, which begins no kernel once ``ends`` (in `time.monotonic`) is over.

    cuDNN's engines are measured there, as PyTorch's are.

    Where it fails, or does not end, ``failed`` says why, beside those that it has until then.
    """
    left = max(1.0, ends - time.monotonic())
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        report = Path(folder, "report.json")
        command = [*_LAUNCH, "-n", "1", "--", sys.executable, "-m", "hpcdp.benchmarks.on_gpu.alone", "-m", size]
        command += ["--batch", str(batch), "--limit-s", str(int(left)), "--json", str(report)]
        return _run(command, {"HPCDP_CUDNN_BENCHMARK": "1"}, report, left + _LAST_S)


def _run(command: Sequence[str], more: Mapping[str, str], report: Path, limit_s: float) -> dict[str, Any]:
    process = subprocess.Popen(
        command, env={**os.environ, **more}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True, preexec_fn=bound(),
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return {**_read(report), "failed": f"no end after {limit_s:.0f} s"}
    except BaseException:  # Ctrl-C
        _end(process)
        raise
    if report.exists():
        return _read(report)
    lines = [line for line in said.splitlines() if line.strip(" -")]
    told = next((line for line in lines if line.startswith(("skipped:", "hpcdp: "))), "")
    return {"failed": told or (lines[-1] if lines else f"status {process.returncode}")}


def _read(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.read_text()) if report.exists() else {}
    return found


def _end(process: subprocess.Popen[str]) -> None:
    """The launcher ends its ranks; what has not ended then is killed with all that is below this process: ranks may be
    in process groups of their own."""
    adopt()
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_ENDING_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_orphans()


def line(row: Mapping[str, Any]) -> str:
    """Of the table."""
    if "failed" in row:
        return f"{row['name']:<30}FAILED: {row['failed']}"
    share = "" if row["share"] is None else f"{row['share']:.2f}"
    wrong = f"  WRONG: {row['wrong']}" if row["wrong"] else ""
    return f"{row['name']:<30}{share:>6}  {row['told']}{wrong}"


def failed(row: Mapping[str, Any]) -> bool:
    """Whether a job has no figures, or wrong ones."""
    return "failed" in row or bool(row["wrong"])
