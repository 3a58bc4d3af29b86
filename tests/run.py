"""Runs the tests of one process, then those of 1, 2, 3 and 4 MPI ranks, and sums up all runs together.

    python tests/run.py [--workers N] [--ranks 1,2,3,4] [--limit-s SECONDS] [PYTEST ARGUMENTS ...]

Tests of one process are shared out to one worker more than there are cores, up to four, since many wait for jobs that
they have started; those marked ``alone`` follow with nothing beside them. One worker runs all in one go.

The last line is always ``N passed, N failed, N skipped``. A test that runs in several worlds counts once for each of
them; it counts as skipped if no run ran it.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hpcdp.launch.process_monitor import adopt, children, end_orphans

ROOT = Path(__file__).parents[1]
NO_TESTS_COLLECTED = 5
STACK_LINES = 120
WORKERS = min(4, 1 + len(os.sched_getaffinity(0)))


class Summary:
    """What all runs did: how many tests passed, which ran, and what failed or was skipped, and why."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.stacks: list[str] = []
        self.ran: set[str] = set()
        self.skipped: dict[str, str] = {}

    def add(self, title: str, reports: list[Path], status: int) -> None:
        """Takes in one run from what its processes recorded (a line an event) and its exit status.

        Of several workers each records its own tests, and the process that shares them out what they report.
        """
        workers = any(path.suffix.startswith(".gw") for path in reports)
        ranks = len(reports) > 1 and not workers
        passed: set[str] = set()
        failed: dict[str, str] = {}
        running: dict[str, list[str]] = {}
        for path in reports:
            rank = path.suffix[1:]
            events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for event in events:
                if event["outcome"] == "failed":
                    where = f", rank {rank}" if ranks else ""
                    failed.setdefault(event["test"], f"{title}{where}: {event['test']}")
                elif event["outcome"] == "skipped":
                    self.skipped[event["test"]] = event["reason"]
                elif event["outcome"] == "passed" and rank == "0":
                    passed.add(event["test"])
            if events and events[-1]["outcome"] == "started":
                running.setdefault(events[-1]["test"], []).append(rank)
        if status and (workers or not failed):  # ranks that waited for one that failed are ended with it
            for test, where in running.items():
                where = f", rank {', '.join(where)}" if ranks else ""
                failed[test] = f"{title}: hung or crashed{where}: {test}"
        if status not in (0, NO_TESTS_COLLECTED) and not failed:
            failed[title] = f"{title}: ended with status {status}"
        self.passed += len(passed - failed.keys())
        self.ran |= passed | failed.keys()
        self.failed += failed.values()

    def add_stacks(self, title: str, paths: list[Path]) -> None:
        """Takes in where the threads of processes were that hung or crashed; the thread that crashed stands first."""
        for path in paths:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                self.stacks += [f"{title}, {path.suffix[1:]}:", *(f"  {line}" for line in lines[:STACK_LINES])]

    def show(self) -> None:
        skipped = {test: reason for test, reason in self.skipped.items() if test not in self.ran}
        reasons = Counter(skipped.values())
        if reasons:
            print("\nskipped, in every run:")
            for reason, count in reasons.most_common():
                print(f"  {count:3} x {reason}")
        if self.stacks:
            print("\nprocesses that hung or crashed, and what their threads did:")
            print("\n".join(self.stacks))
        if self.failed:
            print("\nfailed:")
            print("".join(f"  {line}\n" for line in self.failed), end="")
        print(f"\n{self.passed} passed, {len(self.failed)} failed, {len(skipped)} skipped", flush=True)


def run(command: list[str], report: Path, limit_s: float, **environ: str) -> int:
    """Runs one pytest, or an mpirun of several, in a process group of its own; 124 if it is killed at the limit."""
    environ = {**os.environ, "HPCDP_TEST_REPORT": str(report), **environ}
    # A run starts hundreds of processes, and without kept bytecode each compiles all of hpcdp from its sources.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(command, cwd=ROOT, env=environ, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"\nkilled: not ended after {limit_s:.0f} s", flush=True)
        status = 124
    except KeyboardInterrupt:
        status = 130
    end_group(process)
    return status


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a run with its workers and the jobs of its tests, which have 15 s to clear away what they made; then those
    jobs that have a process group of their own."""
    adopt()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 15
        with contextlib.suppress(KeyboardInterrupt):  # who asks twice does not want to wait
            while time.monotonic() < deadline:
                children()  # are waited for: the dead ones still belong to the group until then
                os.killpg(process.pid, 0)
                time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    end_orphans()


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--workers", type=int, default=WORKERS, help="that share the tests of one process")
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--limit-s", type=float, default=1500.0, help="of one run, in seconds")
    options, pytest_arguments = parser.parse_known_args()
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a script's background jobs ignore the first
        signal.signal(ending, signal.default_int_handler)  # as Ctrl-C does: the run has a process group of its own
    color = f"--color={'yes' if sys.stdout.isatty() else 'no'}"  # an mpirun gives its ranks a pseudo-terminal
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", color, *pytest_arguments]
    runs = {"one process": pytest}
    if options.workers > 1:
        workers = ["-n", str(options.workers), "--dist", "worksteal", "--alone", "not"]
        runs = {f"{options.workers} workers": [*pytest, *workers], "alone": [*pytest, "--alone", "only"]}
    for n in filter(None, options.ranks.split(",")):
        launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", n, "--"]
        runs[f"{n} MPI rank{'s' * (n != '1')}"] = [*launch, *pytest, "--with-mpi", "--only-mpi"]
    summary = Summary()
    with tempfile.TemporaryDirectory() as folder:
        for number, (title, command) in enumerate(runs.items()):
            print(f"\n== {title}", flush=True)
            started = time.monotonic()
            # BLAS threads that wait for each other crawl where other workers' tests have their cores.
            threads = {"OMP_NUM_THREADS": "1"} if title.endswith("workers") else {}
            status = run(command, Path(folder, str(number)), options.limit_s, **threads)
            summary.add(title, sorted(Path(folder).glob(f"{number}.*")), status)
            summary.add_stacks(title, sorted(Path(folder).glob(f"{number}-stacks.*")))
            print(f"== {title}: {time.monotonic() - started:.0f} s", flush=True)
            if status == 130:
                break
    summary.show()
    return 1 if summary.failed else 0


if __name__ == "__main__":
    sys.exit(main())
