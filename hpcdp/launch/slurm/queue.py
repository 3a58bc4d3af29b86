"""Slurm's queue: submitting a script, asking how jobs are, ending them. Everything is asked of Slurm's own commands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...core.files import require_private
from ...errors import LaunchError, listed
from .script import Script

SAVE_LIMIT_S = 150.0
"""So long a job may take to save and end once it is asked to: a little more than the signal leaves it."""

_LIMIT_S = 60.0
_POLL_S = 2.0
_JOB = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
_UNKNOWN = re.compile("invalid job id|no job|not found", re.IGNORECASE)


@dataclass(frozen=True)
class QueuedJob:
    """A job, or a task of an array, as Slurm tells it; empty where it does not.

    Args:
        number: ``"4711"``, of a task ``"4711_3"``, of tasks that wait ``"4711_[4-9]"``.
        state: ``"RUNNING"``, ``"PENDING"``, ``"COMPLETED"``, ...
        took: wall time since it was started the last time.
        where: hosts; why it waits; how it ended.
    """

    number: str
    name: str
    state: str
    took: str
    where: str

    @property
    def family(self) -> str:
        """The number without that of a task."""
        return self.number.partition("_")[0]


def write(script: Script) -> Path:
    """Write the script into its folder, which is made, under a new name; for nobody else to read.

    Raises:
        LaunchError: it cannot be written, or every user may write to its folder.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = script.folder / f"{script.name}-{stamp}.sbatch"
    try:
        script.folder.mkdir(parents=True, exist_ok=True)
        require_private(  # others might exchange the script before sbatch reads it
            "write the script", script.folder, "a folder that not everybody may change",
            "submit from a folder of yours", everybody=True, error=LaunchError,
        )  # fmt: skip
        number = 1
        while True:
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                break
            except FileExistsError:
                number += 1
                path = script.folder / f"{script.name}-{stamp}-{number}.sbatch"
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(script.text)
    except OSError as error:
        raise LaunchError("write the script", where=path, got=error.strerror) from error
    return path


def submit(path: Path) -> str:
    """Submit a script and return the number of its job; ``LaunchError`` says what sbatch refuses."""
    done = _run(["sbatch", "--parsable", str(path)])
    number = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
    if done.returncode or not number.isdecimal():
        raise LaunchError("sbatch", where=path, got=_said(done))
    return number


def own_jobs() -> list[QueuedJob]:
    """Those of this user in the queue. `LaunchError` where Slurm is not there or does not answer."""
    return _queued([f"--user={os.getuid()}"])


def jobs(numbers: Sequence[str]) -> tuple[list[QueuedJob], list[str]]:
    """The jobs of these numbers, in that order, and the numbers of which nobody knows a job.

    One that has left the queue is looked up in the accounts (sacct), else in what Slurm still remembers of it.

    Raises:
        LaunchError: Slurm is not there or does not answer; a number is none.
    """
    check_numbers(numbers)
    found: list[QueuedJob] = []
    unknown = []
    for number in dict.fromkeys(numbers):
        of_it = _queued([f"--jobs={number}"]) or _accounted(number) or _remembered(number)
        found += of_it
        if not of_it:
            unknown.append(number)
    return found, unknown


def refuse_unknown(unknown: Sequence[str]) -> None:
    """``LaunchError`` that names them, where there are any."""
    if unknown:
        there = listed(sorted({job.number for job in own_jobs()})) or "none"
        raise LaunchError("Slurm job", expected=f"jobs; yours in the queue: {there}", got=f"unknown {listed(unknown)}")


def check_numbers(numbers: Sequence[str]) -> None:
    """``LaunchError`` for the first that is no number of a job."""
    for number in numbers:
        if not _JOB.fullmatch(number):
            raise LaunchError("Slurm job", expected="a number such as 4711, or 4711_3 for a task", got=repr(number))


def cancel(numbers: Sequence[str], save: bool) -> list[str]:
    """End jobs. With ``save`` they are asked to stop with a checkpoint first, and are not requeued.

    Returns:
        With ``save`` a line for each job: what its script has said of how it goes on, or why there is nothing of that.

    Raises:
        LaunchError: as `jobs`, or nobody knows a job, before anything is done; one is at its end already; Slurm
            refuses.
    """
    check_numbers(numbers)
    there = {number: _queued([f"--jobs={number}"]) for number in dict.fromkeys(numbers)}
    if gone := [number for number, found in there.items() if not found]:
        ended, unknown = jobs(gone)
        refuse_unknown(unknown)
        raise LaunchError("cancel", where=ended[0].number, expected="a job in the queue", got=ended[0].state)
    told = []
    if save:
        queued = [job for found in there.values() for job in found]
        running = [job.number for job in queued if job.state == "RUNNING"]
        for number in running:
            _do(["scontrol", "update", f"JobId={number}", "Requeue=0"])
            _do(["scancel", "--batch", "--signal=USR1", number])
        deadline = time.monotonic() + SAVE_LIMIT_S
        while _are_running(running) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        told = [_last_words(each.number) if each.number in running else _idle(each) for each in queued]
    _do(["scancel", *there])
    return told


def _are_running(numbers: Sequence[str]) -> bool:
    states = {job.state for number in numbers for job in _queued([f"--jobs={number}"])}
    return bool(states & {"RUNNING", "COMPLETING"})


def _idle(job: QueuedJob) -> str:
    return f"job {job.number} was {job.state}: it had nothing to save"


def _last_words(number: str) -> str:
    """What the script of a job has said at last of itself, in its output; else where that is."""
    found = re.search(r"^ *StdOut=(.*)$", _run(["scontrol", "show", "job", number]).stdout, re.MULTILINE)
    lines: list[str] = []
    if found is not None:
        with contextlib.suppress(OSError):
            lines = Path(found[1]).read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.startswith(f"hpcdp: job {number} ")]
    if not said:
        return f"job {number} has said nothing of a checkpoint: see {found[1] if found else 'its output'}"
    return said[-1].removeprefix("hpcdp: ")


def _queued(which: Sequence[str]) -> list[QueuedJob]:
    done = _run(["squeue", "--noheader", "--format=%i|%T|%M|%R|%j", *which])
    if done.returncode:
        if _UNKNOWN.search(done.stderr):
            return []
        raise LaunchError("squeue", got=_said(done))
    rows = [line.split("|", 4) for line in done.stdout.splitlines() if line.count("|") >= 4]
    return [QueuedJob(number, name, state, took, where) for number, state, took, where, name in rows]


def _accounted(number: str) -> list[QueuedJob]:
    if shutil.which("sacct") is None:
        return []
    columns = "--format=JobID,State,Elapsed,ExitCode,JobName"
    done = _run(["sacct", "--noheader", "--parsable2", "--allocations", columns, f"--jobs={number}"])
    rows = [line.split("|", 4) for line in done.stdout.splitlines() if line.count("|") >= 4]
    if done.returncode:  # most often it keeps no accounts
        return []
    return [QueuedJob(job, name, state, took, f"exit {code}") for job, state, took, code, name in rows]


def _remembered(number: str) -> list[QueuedJob]:
    done = _run(["scontrol", "--oneliner", "show", "job", number])
    if done.returncode:
        return []
    found = []
    for line in done.stdout.splitlines():
        facts = dict(re.findall(r"(\w+)=(\S*)", line))
        if "JobState" in facts:
            array = facts.get("ArrayJobId")
            task = f"{array}_{facts['ArrayTaskId']}" if array and "ArrayTaskId" in facts else facts["JobId"]
            code = f"exit {facts.get('ExitCode', '')}"
            found.append(QueuedJob(task, facts.get("JobName", ""), facts["JobState"], facts.get("RunTime", ""), code))
    return found


def _do(command: Sequence[str]) -> None:
    done = _run(command)
    if done.returncode:
        raise LaunchError(command[0], where=shlex.join(command[1:]), got=_said(done))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise LaunchError(
            command[0],
            expected="Slurm's commands on PATH",
            got="none",
            remedy="run this on a login node of the cluster",
        )
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(command[0], got=f"no answer in {_LIMIT_S:g} s", remedy="is Slurm's controller up?") from error


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"status {done.returncode}"
