"""The launcher ``sge``: ranks in a job of Grid Engine (Son of, Univa, Altair), submitted by qsub, with live output."""

from __future__ import annotations

import functools
import re
import shlex
import sys
import time
from pathlib import Path

from ...core.environment import module
from ...errors import ConfigError, LaunchError, to_stderr
from . import Command, Job, LaunchPlan, batch

_AGAIN = 99
"""The exit status with which Grid Engine restarts a job."""

# setsid: Grid Engine signals all processes of a task, which would kill mpirun's daemons.
_AGENT = """\
#!/bin/sh
# mpirun calls it as it would call ssh: [OPTION ...] HOST COMMAND ...
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
command=$(printf '%s' "$*" | sed "s/'/'\\\\\\\\''/g")
exec qrsh -inherit -nostdin -V "$host" setsid -w "${SHELL:-/bin/sh}" -c "'$command'"
"""
_OURS = ("-o", "-e", "-j", "-cwd", "-wd", "-terse", "-sync", "-t", "-b", "-S", "-V", "-@")
_BEFORE_LIMIT_S = 120.0
_ASK_S = 2.0
_ACCOUNT_S = 20.0
_UNKNOWN = "do not exist"


def plan_sge(job: Job) -> LaunchPlan:
    """Return the script of ``job`` and its qsub.

    Raises:
        ConfigError: the job has hosts or a ``sync_dst_dir``; qsub would split the name of the working folder;
            ``batch_args`` lack a parallel environment for several ranks, set an option of the launcher's, or have an
            invalid value.
    """
    batch.check(job, "sge")
    folder = batch.folder_of("sge")
    if re.search("[:,$]", str(folder)):  # qsub would split it
        raise ConfigError("launch --launcher sge", where=folder, expected="a working folder without : , $ in its name")
    arguments, slots = batch.split(job.batch_args, _OURS), job.ranks + job.servers
    if "-pe" in arguments:
        at = arguments.index("-pe") + 2
        if at > len(arguments) or re.fullmatch("[0-9,-]+", "".join(arguments[at : at + 1])):
            raise ConfigError(
                "launch --batch-args",
                expected=f"only the name of a parallel environment after -pe, as the launcher adds {slots} slots",
                got=repr(job.batch_args),
            )
        arguments.insert(at, str(slots))
    elif slots > 1:
        raise ConfigError(
            "launch --batch-args",
            expected=f"a parallel environment for {slots} ranks and servers, such as -pe mpi",
            got=repr(job.batch_args),
            remedy="list those of the site with qconf -spl",
        )
    _check_values(arguments)
    files = [f"-o {shlex.quote(str(folder / batch.OUTPUT))}", f"-e {shlex.quote(str(folder / batch.ERRORS))}"]
    submitted, script = folder / "submit.sh", folder / "job.sh"
    written = {
        submitted: _submitted(files, script),
        script: _script(job, folder, _stop_s(arguments), has_hosts="-pe" in arguments),
        **batch.variables(job, folder),
    }
    if "-pe" in arguments:
        written[folder / batch.AGENT] = _AGENT
    return LaunchPlan([Command(("qsub", "-terse", "-b", "n", *arguments, str(submitted)))], written)


def run_sge(job: Job) -> int:
    """Run ``job`` as a job of Grid Engine and return its exit status; `batch.run` forwards signals.

    Grid Engine restarts a job that stops early, with status 75, and one whose host was lost.

    Raises:
        LaunchError: qsub is missing or refuses the job.
        ConfigError: as `plan_sge`.
    """
    plan = plan_sge(job)
    return batch.run(plan, batch.folder_of("sge"), functools.partial(_submit, plan.commands[0], job.verbose))


def _check_values(arguments: list[str]) -> None:
    options = list(batch.of_words(arguments))
    batch.check_values("launch --batch-args", options, batch.SGE)
    resources = [text.partition("=") for name, value in options if name == "l" for text in value.split(",")]
    with_values = [(name, value) for name, equals, value in resources if equals]
    batch.check_values("launch --batch-args", with_values, batch.SGE_RESOURCES)


def _stop_s(arguments: list[str]) -> float:
    """Return the seconds after which a job stops early: two minutes before its limit, but not in its first half.

    Grid Engine's own warnings to a parallel job come too late: a job that has reached even a soft limit is not
    restarted (seen with 8.1.9: "failed 37", whatever its exit status).
    """
    limits = re.findall(r"\bh_rt=([0-9]*(?::[0-9]*){0,2})(?=[,\s]|$)", " ".join(arguments))
    if not limits:
        return float("inf")
    limit_s = 0.0
    for part in limits[-1].split(":"):  # seconds, or hours, minutes and seconds, any of them empty
        limit_s = 60 * limit_s + float(part or 0)
    return max(limit_s - _BEFORE_LIMIT_S, limit_s / 2)


def _submitted(files: list[str], script: Path) -> str:
    """Return the submitted script, without variables: Grid Engine copies it into its spool, where others may read."""
    lines = ["#!/bin/bash", "# Submitted by hpcdp launch --launcher sge, which shows what it writes.", "#$ -N hpcdp"]
    # -S: the queue's shell is often csh. -r: restart after the loss of a host. -notify: SIGUSR2 before the end.
    lines += [f"#$ {option}" for option in ("-S /bin/bash", *files, "-r y", "-notify")]
    return "\n".join([*lines, "", f"exec /bin/bash {shlex.quote(str(script))}"]) + "\n"


def _script(job: Job, folder: Path, stop_s: float, *, has_hosts: bool) -> str:
    lines = ["#!/bin/bash", "# Runs as the job of hpcdp launch --launcher sge."]
    lines += [f"cd {shlex.quote(str(Path.cwd()))} || exit 1", *batch.exports()]
    hosts = None
    if has_hosts:
        lines += batch.agent_settings(folder)
        lines += ["""hosts=$(awk '{ printf "%s%s:%s", (NR > 1 ? "," : ""), $1, $2 }' "$PE_HOSTFILE")"""]
        hosts = '"$hosts"'
    runner = [sys.executable, *module("hpcdp.launch.launchers.batch"), str(folder), str(_AGAIN), f"{stop_s:g}"]
    lines += [f"exec {shlex.join(runner)} \\", f"  {batch.launch_command(job, folder, hosts)}"]
    return "\n".join(lines) + "\n"


def _submit(command: Command, verbose: bool) -> _GridJob:
    done = batch.call(command.argv)
    number = re.search(r"^[0-9]+$", done.stdout, re.MULTILINE)
    if done.returncode or number is None:
        raise LaunchError("qsub", got=batch.one_line(done.stderr + done.stdout) or "no number of a job")
    if verbose:
        to_stderr(f"hpcdp launch: job {number[0]} of Grid Engine")
    return _GridJob(number[0])


class _GridJob:
    """A submitted job, by its number."""

    def __init__(self, number: str) -> None:
        self._number = number
        self._ask_at = time.monotonic() + _ASK_S
        self._error = ""

    def has_ended(self) -> bool:
        if self._error:
            return True
        if time.monotonic() < self._ask_at:
            return False
        done = batch.call(["qstat", "-j", self._number])
        self._ask_at = time.monotonic() + _ASK_S
        reason = re.search(r"^error reason\s+\d+:\s*(.+)$", done.stdout, re.MULTILINE)
        if reason is not None:  # it would stay in the queue forever
            self._error = reason[1]
            self.cancel()
        return reason is not None or _UNKNOWN in done.stdout + done.stderr

    def cancel(self) -> None:
        batch.call(["qdel", self._number])

    def fate(self) -> tuple[int, str]:
        name = f"job {self._number} of Grid Engine"
        if self._error:
            return 1, f"{name} could not be started: {self._error}"
        deadline = time.monotonic() + _ACCOUNT_S
        while time.monotonic() < deadline:  # accounting is written late, and is unreadable at some sites
            # There is one record for every start of the job.
            records = batch.call(["qacct", "-j", self._number]).stdout
            statuses = re.findall(r"^exit_status\s+(\d+)", records, re.MULTILINE)
            failures = re.findall(r"^failed\s+(.+?)\s*$", records, re.MULTILINE)
            if statuses and failures:
                why = f"{name} was ended from outside: exit status {statuses[-1]}, failed {failures[-1]}"
                return int(statuses[-1]) or 1, why
            time.sleep(_ASK_S)
        return 1, f"{name} has ended without a status, and qacct does not know why"
