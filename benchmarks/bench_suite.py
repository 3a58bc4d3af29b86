"""The suite: ``python benchmarks/bench_suite.py`` (``make bench``) measures every target that has a benchmark here.

It starts one job after another, in rounds, so that what is compared alternates; it takes 10 to 15 minutes and wants
quiet cores. It writes ``benchmarks/results.json`` and rewrites ``benchmarks/RESULTS.md``. The exit status is 1 when a
result was wrong or a job failed, never because of time. Peers that are missing are named and skipped: PyTorch by its
absence, MPICH unless ``--mpich`` or ``HPCDP_BENCH_MPICH`` names the Python of an environment with it, as
``make install MPI=mpich`` makes one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_harness import programs
from bench_harness.cluster import obstacle
from bench_harness.peers import check_python
from bench_harness.report import GPU_PARTS, render
from hpcdp.bench.measure import as_json, check_writable, describe, format_size, parse_size, write
from hpcdp.errors import ConfigError
from hpcdp.launch.parser import Parser, at_least

_HERE = Path(__file__).resolve().parent
_JOB_TIMEOUT_S = 600
_LEAST_LARGEST = 64 << 10
KINDS = (
    "startup", "allreduce", "allreduce MPICH", "updates", "updates MPICH", "lenet", "models", "scaling", "scaling DDP",
    "kernels", "convolutions", "hybrid", "kvstore", "checkpoint", "allreduce 3", "allreduce 4", "fabric", "ingress",
    "overlap", "torch",
)  # fmt: skip
"""The measured quantities, by their names in results.json."""
_STARTS_JOBS = ("startup", "fabric", "ingress", "overlap", "torch_ddp")


@dataclass
class Suite:
    """Starts jobs and keeps what they report.

    Args:
        ranks: of the jobs that compare collectives.
        largest: the largest message.
        rounds: how often every job is run.
        brief: fewer and shorter turns, to see that everything works.
        mpich: the Python of an environment with MPICH, or empty.
        only: the kinds that are measured, of `KINDS`.
    """

    ranks: int
    largest: str
    rounds: int
    brief: bool
    mpich: str
    only: frozenset[str] = frozenset(KINDS)
    results: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def job(self, kind: str, benchmark: str, arguments: list[str], *, ranks: int, python: str = sys.executable) -> None:
        """Run ``bench_<benchmark>.py`` on ``ranks`` ranks and append its report to ``results[kind]``.

        ``"bench"`` is `hpcdp bench`, whose arguments begin with what to measure. Nothing is run of a kind that is not
        asked for.
        """
        if kind not in self.only:
            return
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            report = Path(folder, "report.json")
            program = ["-m", "hpcdp.cli", "bench"] if benchmark == "bench" else [str(programs.path_of(benchmark))]
            command = [python, *program, *arguments, "--json", str(report)]
            if benchmark not in _STARTS_JOBS:
                command = [python, "-m", "hpcdp.cli", "launch", "-n", str(ranks), "--", *command]
            print(f"# {kind}: {benchmark} {' '.join(arguments)}", flush=True)
            begin = time.monotonic()
            done = _run(command)
            print(f"#   {time.monotonic() - begin:.1f} s, status {done.returncode}", flush=True)
            if done.returncode == 0:
                self.results.setdefault(kind, []).append(json.loads(report.read_text()))
            else:
                # Where there is a report, no figure of it counts, however fast.
                reason = programs.reason(done, "a result was wrong" if report.exists() else "")
                self.failures.append(f"{kind} ({benchmark} {' '.join(arguments)}): status {done.returncode}, {reason}")

    def _skip(self, reason: str, *kinds: str) -> None:
        """Note why one of ``kinds`` is not measured, where it was asked for."""
        skipped = self.results.setdefault("skipped", [])
        if self.only.intersection(kinds) and reason not in skipped:
            skipped.append(reason)

    def collectives(self) -> None:
        """One round of the jobs that compare allreduce, and reduce and update, with other libraries."""
        iterations = ["-i", "4" if self.brief else "40"]
        updates = ["-m", f"{_LEAST_LARGEST}:{self.largest}", *iterations]
        self.allreduces(["-m", f"4:{self.largest}", "--factor", "4"], iterations)
        self.job("updates", "gradients", updates, ranks=self.ranks)
        if self.mpich:
            self.job("updates MPICH", "gradients", updates, ranks=self.ranks, python=self.mpich)

    def allreduces(self, sizes: list[str], iterations: list[str]) -> None:
        """One round of allreduce, hpcdp turn by turn with Open MPI and gloo, then MPICH's in a job of its own."""
        self.job("allreduce", "allreduce", [*sizes, *iterations], ranks=self.ranks)
        if self.mpich:
            native = ["allreduce", *sizes, "--algorithm", "native", *(["-i", "4"] if self.brief else [])]
            self.job("allreduce MPICH", "bench", native, ranks=self.ranks, python=self.mpich)

    def more_ranks(self) -> None:
        """Allreduce by 3 and 4 ranks, which share two cores where the machine has no more."""
        iterations = ["-i", "4" if self.brief else "30"]
        for ranks in (3, 4):
            self.job(f"allreduce {ranks}", "allreduce", ["-m", "4:16M", "--factor", "16", *iterations], ranks=ranks)

    def fabric(self) -> None:
        """Allreduce, and asynchronous stores, over hosts with slow links, where hosts can be made on this machine."""
        reason = obstacle()
        if reason is not None:
            self._skip(f"hosts on slow links: {reason}", "fabric", "ingress")
            return
        arguments = ["--algorithms", "auto", "--sizes", "4,64K,1M,4M,16M", "-i", "2" if self.brief else "10"]
        self.job("fabric", "fabric", arguments + (["--mpich", self.mpich] if self.mpich else []), ranks=2)
        few = ["--turns", "1", "--servers", "1,2", "--workers", "1"] if self.brief else ["--turns", "5"]
        self.job("ingress", "ingress", few, ranks=2)

    def overlap(self) -> None:
        """Run steps with overlapped communication, on this machine and if possible on two hosts with slow links.

        The hosts also run with one rank each, because only then do two cores suffice for separate ranks.
        """
        turns = ["--turns", "1", "--steps", "1"] if self.brief else ["--turns", "3", "--steps", "3"]
        slow_links = obstacle() is None
        self.job("overlap", "overlap", ["--hosts", "1,2" if slow_links else "1", *turns], ranks=2)
        if slow_links:
            self.job("overlap", "overlap", ["--hosts", "2", "--ranks-per-node", "1", *turns], ranks=2)

    def torch_models(self) -> None:
        """PyTorch models against PyTorch's own wrapper, on this machine and where possible over two hosts."""
        if "torch" in self.results["machine"]["versions"]:
            turns = ["--turns", "1", "--seconds", "0.02"] if self.brief else ["--turns", "3"]
            self.job("torch", "torch_ddp", ["--hosts", "1", *turns, *(["--models", "lenet"] * self.brief)], ranks=2)
            if obstacle() is None and not self.brief:
                few = ["--hosts", "2", "--ranks-per-node", "1", "--models", "wide,gpt", *turns]
                self.job("torch", "torch_ddp", few, ranks=2)

    def training(self, batch: int) -> None:
        """One round of LeNet: on one rank against PyTorch, then 1 and 2 ranks of each; and of larger networks."""
        turns = ["--turns", "2", "--seconds", "0.02"] if self.brief else ["--turns", "8"]
        arguments = ["--batch", str(batch), *turns]
        self.job("lenet", "train_lenet", arguments, ranks=1)
        for model, samples in (("char_lstm", 32), ("resnet18", 8), ("wide", 16), ("wide", 64)):
            if batch == 64 and not self.brief:
                self.job("models", "train_models", ["--model", model, "--batch", str(samples), "--turns", "5"], ranks=1)
        for ranks in (1, 2):
            self.job("scaling", "train_lenet", [*arguments, "--framework", "hpcdp"], ranks=ranks)
        if "torch" in self.results["machine"]["versions"]:
            for ranks in (1, 2):
                self.job("scaling DDP", "train_lenet", [*arguments, "--framework", "torch"], ranks=ranks)

    def run(self) -> dict[str, Any]:
        """Every job in its rounds; what they reported, by kind."""
        for kind in self.only:
            self.results.pop(kind, None)
        self.results.setdefault("machine", describe())
        if not self.mpich:
            self._skip("MPICH: no environment was named (--mpich PYTHON)", "allreduce MPICH", "updates MPICH")
        self.job("startup", "startup", ["--repeats", "1" if self.brief else "9"], ranks=1)
        for _ in range(self.rounds):
            self.collectives()
            for batch in (64, 256):
                self.training(batch)
        self.job("kernels", "kernels", ["-i", "4" if self.brief else "40"], ranks=1)
        self.job("convolutions", "convolutions", ["--turns", "1", "--brief"] if self.brief else [], ranks=1)
        self.job("hybrid", "hybrid", ["--turns", "2", "--brief"] if self.brief else [], ranks=1)
        self.job("kvstore", "kvstore", ["-i", "4" if self.brief else "100"], ranks=self.ranks)
        size = ["-m", "16M", "-i", "1"] if self.brief else ["-m", "512M"]
        self.job("checkpoint", "checkpoint", size, ranks=self.ranks)
        self.more_ranks()
        self.fabric()
        self.overlap()
        self.torch_models()
        if "torch" not in self.results["machine"]["versions"]:
            self._skip("gloo and PyTorch: torch is not installed", *KINDS)
        earlier = [each for each in self.results.get("failures", []) if each.partition(" (")[0] not in self.only]
        self.results["failures"] = earlier + self.failures
        return self.results


def _import_path() -> str:
    """Return the folder of this ``hpcdp``, for an environment with MPICH in which it is not installed."""
    spec = importlib.util.find_spec("hpcdp")
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).resolve().parent.parent)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [_import_path(), os.environ.get("PYTHONPATH", "")]))
    return programs.run_job(command, _JOB_TIMEOUT_S, PYTHONPATH=path)


def _earlier(file: str) -> dict[str, Any]:
    """Return the results.json of an earlier run, or nothing."""
    try:
        found = json.loads(Path(file).read_text()) if Path(file).exists() else {}
        if isinstance(found, dict):
            return found
        got = "no object"
    except (OSError, ValueError) as error:
        got = str(error)
    raise ConfigError("suite --into", where=file, expected="figures of an earlier run", got=got, remedy="remove it")


def _report_of_gpu(file: str) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(Path(file).read_text())
        if report.get("benchmark") == "gpu" and report.keys() >= GPU_PARTS:
            return report
        got = "other figures" if report.get("benchmark") != "gpu" else "one in which models and kernels failed"
    except (OSError, ValueError, AttributeError) as error:
        got = str(error)
    raise ConfigError("suite --gpu", where=file, expected="a file of python benchmarks/bench_gpu.py --json", got=got)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark and return its exit status; every rank calls."""
    parser = Parser(prog="python benchmarks/bench_suite.py", description=__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=2, help="of the jobs that compare collectives (2)")
    parser.add_argument("--largest", default="256M", metavar="SIZE", help="the largest message")
    parser.add_argument("--rounds", type=at_least(1), default=1, help="of jobs that alternate (1); more take longer")
    parser.add_argument("--brief", action="store_true", help="few and short turns, only to see that everything works")
    parser.add_argument("--mpich", default=os.environ.get("HPCDP_BENCH_MPICH", ""), metavar="PYTHON")
    parser.add_argument(
        "--only", metavar="KIND,...", default="",
        help="measure these again, as results.json calls them, e.g. kernels,models; the other figures there stay",
    )  # fmt: skip
    parser.add_argument(
        "--gpu", metavar="FILE", default="",
        help="measure nothing, but take over what bench_gpu.py wrote there, on this machine or another",
    )  # fmt: skip
    parser.add_argument("--into", default=str(_HERE), metavar="FOLDER", help="where the results are written")
    args = parser.parse_args(argv)
    if parse_size(args.largest) < _LEAST_LARGEST:
        expected = f"{format_size(_LEAST_LARGEST)} or more, where updates begin"
        raise ConfigError("suite --largest", expected=expected, got=args.largest)
    if args.mpich:
        check_python("suite --mpich", args.mpich)
    folder = Path(args.into)
    figures, text_file = (str(folder / name) for name in ("results.json", "RESULTS.md"))
    check_writable("suite --into", [figures, text_file])
    only = frozenset(args.only.split(",")) if args.only else frozenset(KINDS)
    if not only <= set(KINDS):
        unknown = ", ".join(sorted(only - set(KINDS)))
        raise ConfigError("suite --only", expected=f"some of {', '.join(KINDS)}", got=unknown)
    earlier, failures = _earlier(figures), []
    if args.gpu:
        results = {"machine": describe(), **earlier, "gpu": [_report_of_gpu(args.gpu)]}
    else:
        kept = {kind: reports for kind, reports in earlier.items() if args.only or kind == "gpu"}
        suite = Suite(args.ranks, args.largest, args.rounds, args.brief, args.mpich, only, kept)
        results, failures = suite.run(), suite.failures
    write(figures, as_json(results))
    text = render(results)
    write(text_file, text)
    print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    programs.run(main)
