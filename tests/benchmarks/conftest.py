"""Runs of ``hpcdp train`` that benchmarks start."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hpcdp import cli
from hpcdp.benchmarks.harness import jobs
from hpcdp.launch.job import Job
from hpcdp.launch.launchers import local
from hpcdp.train.metrics import Record

Trains = Callable[[ModuleType, list[Record]], list[tuple[str, ...]]]


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> Trains:
    """Takes a benchmark and what its runs shall record: commands run in this process, and their jobs' ranks do not.

    Returns the jobs' programs, as they are added.
    """

    def instead(module: ModuleType, records: list[Record]) -> list[tuple[str, ...]]:
        programs: list[tuple[str, ...]] = []

        def run(command: list[str], timeout_s: float, **_: str) -> subprocess.CompletedProcess[str]:
            assert command[:4] == [sys.executable, "-m", "hpcdp.cli", "train"]
            return subprocess.CompletedProcess(command, cli.main(command[3:]), "", "")

        def job(job: Job, **_: Any) -> int:
            programs.append(tuple(job.program))
            (folder,) = (each.removeprefix("--run-dir=") for each in job.program if each.startswith("--run-dir="))
            Path(folder, "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
            return 0

        monkeypatch.setattr(jobs, "run", run)
        monkeypatch.setattr(local, "run", job)
        return programs

    return instead
