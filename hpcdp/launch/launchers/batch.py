"""Jobs of any batch system: option values, hosts, submission, and the process inside the job.

A batch system forwards few signals, shows no output while a job runs, and reports only its own idea of the exit status.
So `run`, the submitting side, makes a folder in the working folder that all hosts of the job see. It holds the script,
the job's output, a file for every signal to be forwarded, and at the end the status. `main`, the other side, runs in
the job as ``python -m hpcdp.launch.launchers.batch FOLDER AGAIN STOP_S COMMAND...``. It runs COMMAND, sends it
SIGUSR1 after STOP_S seconds (``inf``: never), and writes its exit status into FOLDER. It exits with the same status,
except AGAIN for a command that asks for a restart (75), and 1 for a status with a meaning in Grid Engine.

`check_values` finds in a dry run what a submission would refuse; names of queues and resources are the site's own.

`read` returns the hosts of Grid Engine and LSF. Open MPI 5 reads those of Slurm and PBS itself, and others only if
built beside them. PyPI's wheel is not: it starts all ranks on the job's first host, up to its number of cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TextIO

from ...core.environment import batch_system, module
from ...core.files import require_private
from ...errors import ConfigError, LaunchError, reason, to_stderr
from .. import hosts as launch_hosts
from .. import mpi_library
from ..mpi_library import FIND_PROGRAMS, READ_BY_PROGRAMS, Dialect
from ..process_monitor import bound
from ..runner import ENDING, FORWARDED, refuse_rank
from . import Host, Job, LaunchPlan

Valid = Mapping[str, tuple[str, str]]
"""For each option, the pattern of a valid value and its description."""

COUNT = "[1-9][0-9]{0,8}", "a whole number from 1"
NAME = r"(?!-)[\w.+@:*-]+(,[\w.+@:*-]+)*", "a name of letters, digits and _.+@:*-"

_SLURM_TIME = (
    "(?=.*[1-9])[0-9]+(-[0-9]+(:[0-5]?[0-9]){0,2}|(:[0-5]?[0-9]){1,2})?|0|(?i:UNLIMITED|INFINITE)",
    "a time as Slurm writes it, e.g. 04:00:00 or 2-12, minutes and seconds below 60, or 0 for no limit",
)
_SLURM_GPUS = r"(\w[\w.-]*:)?[0-9]+"
_SLURM_GRES = r"(gres[:/])?\w+([:=][\w.-]+){0,2}"
_SLURM_MEMORY = "[0-9]+(?i:[KMGT]?B?)", "a number of MiB, or with K, M, G or T behind it, e.g. 16G"
SLURM: Valid = {
    "time": _SLURM_TIME,
    "mem": _SLURM_MEMORY,
    "mem-per-cpu": _SLURM_MEMORY,
    "mem-per-gpu": _SLURM_MEMORY,
    "cpus-per-task": COUNT,
    "time-min": _SLURM_TIME,
    "gres": (f"{_SLURM_GRES}(,{_SLURM_GRES})*", "a name, its type and its number, e.g. gpu:4 or gpu:a100:2"),
    "gpus-per-node": (f"{_SLURM_GPUS}(,{_SLURM_GPUS})*", "a number, or a type and a number, e.g. a100:2"),
    "partition": NAME,
    "qos": NAME,
}
"""Options of srun and sbatch by their long names."""

SLURM_SHORT = {"t": "time", "p": "partition", "c": "cpus-per-task", "q": "qos"}

_SGE_TIME = "(?=.)[0-9]*(:[0-9]*){0,2}|INFINITY", "seconds, or H:M:S, e.g. 4:00:00"
_SGE_MEMORY = r"[0-9]+(\.[0-9]+)?[kKmMgG]?|INFINITY", "a number of bytes, or with K, M or G behind it, e.g. 16G"
_SGE_NAME = r"[^\d\s/:@\\*?][^\s/:@\\*?]*", "a name that begins with no digit, and has no blanks and no / : @ \\ * ?"
SGE_RESOURCES: Valid = {
    **dict.fromkeys(("h_rt", "s_rt", "h_cpu", "s_cpu"), _SGE_TIME),
    **dict.fromkeys(
        ("h_vmem", "s_vmem", "h_rss", "s_rss", "h_data", "s_data", "h_stack", "s_stack", "h_fsize", "s_fsize",
         "mem_free", "virtual_free", "mem_total"), _SGE_MEMORY,
    ),
}  # fmt: skip
"""Resources of qsub's ``-l`` that every Grid Engine has."""

SGE: Valid = {"q": NAME, "P": NAME, "pe": NAME, "p": ("-?[0-9]{1,4}", "a number from -1023 to 1024"), "N": _SGE_NAME}

YARN: Valid = {
    **dict.fromkeys(("container_memory", "container_vcores", "master_memory", "master_vcores"), COUNT),
    **dict.fromkeys(("timeout", "priority"), ("[0-9]{1,10}", "a whole number")),
    "container_resources": (r"[\w./-]+=[0-9]+\w*(,[\w./-]+=[0-9]+\w*)*", "e.g. memory-mb=4096,vcores=2"),
    "queue": NAME,
}
"""Options of the client of YARN's distributed shell."""


def check_values(option: str, values: Iterable[tuple[str, str]], valid: Valid) -> None:
    """Raise `ConfigError` for the first invalid value in ``values``, the names and values inside of ``option``."""
    for name, value in values:
        pattern, expected = valid.get(name, (".*", ""))
        if not re.fullmatch(pattern, value, re.ASCII | re.DOTALL):
            raise ConfigError(option, expected=f"for {name} {expected}", got=repr(value))


def of_words(words: Sequence[str], short: Mapping[str, str] = {}) -> Iterator[tuple[str, str]]:
    """Yield the options among words, by name, and their values: ``-x V``, ``--long V`` or ``--long=V``.

    Args:
        words: command-line words.
        short: the long name of each short option that may be written as ``-xV``.
    """
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and len(name) > 1 and word[1] in short and not word.startswith("--"):
            yield short[word[1]], word[2:]
        elif word.startswith("-") and name:
            yield short.get(name, name), value if equals else following


_READERS = {"Grid Engine": b"ras_gridengine", "LSF": b"ras_lsf"}
"""Components of Open MPI 5's runtime that read the hosts of a batch system."""


def read(environ: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """Return the hosts and slots of a job of Grid Engine or LSF; none elsewhere.

    Raises:
        LaunchError: the file or variable with the hosts is malformed.
    """
    batch = batch_system(environ)
    if batch == "Grid Engine":
        return launch_hosts.merged(list(_of_grid_engine(environ["PE_HOSTFILE"])))
    return launch_hosts.merged(list(_of_lsf(environ))) if batch == "LSF" else ()


def placed(job: Job, named: tuple[Host, ...], mpirun: Path, dialect: Dialect) -> tuple[launch_hosts.HostSlots, ...]:
    """Assign ``job`` to the hosts ``named`` by `read`; return nothing where this mpirun reads them itself.

    Raises:
        LaunchError: the hosts have too few slots.
    """
    if not named or dialect.family != "openmpi" or dialect.is_open_mpi_4:
        return ()
    batch = batch_system()
    assert batch is not None
    if any(_READERS[batch] in content for content in mpi_library.runtimes(mpirun)):
        return ()
    try:
        return launch_hosts.assign_ranks(dataclasses.replace(job, hosts=named))
    except LaunchError as error:
        error.operation, error.remedy = f"launch in a job of {batch}", "request more slots, or give hosts with -H"
        raise


def _of_grid_engine(path: str) -> Iterator[Host]:
    """Yield the hosts of a $PE_HOSTFILE, with lines of host, slots, queue and processors (sge_pe(5))."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError as error:
        raise _unreadable("PE_HOSTFILE", "a file of hosts", f"{path}, {reason(error)}") from error
    for line in lines:
        name, slots, *_ = [*line.split(), "", ""]
        if name:
            yield _host("PE_HOSTFILE", name, slots)


def _of_lsf(environ: Mapping[str, str]) -> Iterator[Host]:
    """Yield the hosts of LSF's two variables, which are equivalent; large jobs have only the second one."""
    if names := environ.get("LSB_HOSTS", "").split():
        yield from (_host("LSB_HOSTS", name, "1") for name in names)
        return
    words = [*environ["LSB_MCPU_HOSTS"].split(), ""]
    yield from (_host("LSB_MCPU_HOSTS", name, slots) for name, slots in list(pairwise(words))[::2])


def _host(variable: str, name: str, slots: str) -> Host:
    if not re.fullmatch("[1-9][0-9]{0,6}", slots):
        raise _unreadable(variable, "hosts, each with a number of slots", repr(f"{name} {slots}"[:80]))
    return Host(name, int(slots))


def _unreadable(variable: str, expected: str, got: str) -> LaunchError:
    return LaunchError(f"read the hosts of {batch_system()}", where=variable, expected=expected, got=got)


OUTPUT, ERRORS, STATUS = "output", "errors", "status"
"""The names of a job's files in its folder."""

AGENT = "hpcdp-agent"
"""The name of the program in the folder that mpirun starts instead of ssh."""

VARIABLES = "variables.json"
"""The name of the file of ``--env``: a command line would show the values to every user of a host, and a batch system
may copy a script to where others read it."""

_TRAVEL = (*READ_BY_PROGRAMS, "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "MPICH_", "I_MPI_", "HYDRA_")
_TRAVEL_ALONE = (*FIND_PROGRAMS, "LANG", "LC_ALL")
_POLL_S = 0.2
_CANCEL_S = 90.0
_LATE_S = 10.0
_ANSWER_S = 60.0
_MOST_SAID = 400


class Submitted(Protocol):
    """A job that a batch system has accepted."""

    def has_ended(self) -> bool:
        """Return whether the job has left the batch system; called several times a second."""

    def cancel(self) -> None:
        """Cancel the job."""

    def fate(self) -> tuple[int, str]:
        """Return an exit status and the batch system's reason for a job that ended without writing a status."""


def folder_of(launcher: str) -> Path:
    """Return the folder of a job that this process submits by ``launcher``; it exists until the job's end."""
    return Path.cwd() / f"hpcdp-{launcher}-{socket.gethostname()}-{os.getpid()}"


def check(job: Job, launcher: str) -> None:
    """Raise an error for options without meaning in a batch job.

    Raises:
        LaunchError: this process is itself a rank.
        ConfigError: the job has hosts or a ``sync_dst_dir``.
    """
    refuse_rank(f"launch --launcher {launcher}")
    if job.hosts:
        raise ConfigError(
            f"launch -H with --launcher {launcher}",
            expected="no hosts, as the batch system chooses them",
            remedy="request hosts with --batch-args",
        )
    if job.sync_dst_dir is not None:
        raise ConfigError(
            f"launch --sync-dst-dir with --launcher {launcher}",
            expected="a working folder that all hosts see",
            remedy="launch in a folder of the shared file system, without --sync-dst-dir",
        )


def split(arguments: str, reserved: Sequence[str]) -> list[str]:
    """Split ``--batch-args``; raise `ConfigError` for a word among ``reserved``, the options that the launcher sets."""
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise ConfigError("launch --batch-args", expected="closed quotes", got=f"{arguments!r}: {error}") from error
    for word in words:
        if word in reserved:
            raise ConfigError(
                "launch --batch-args", expected=f"none of {' '.join(reserved)}, which are set already", got=repr(word)
            )
    return words


def exports(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return shell lines that export the variables which a program needs on every host, and no others.

    The rest of an environment, such as a desktop's addresses and keys, concerns this machine only.
    """
    names = sorted(name for name in environ if name in _TRAVEL_ALONE or name.startswith(_TRAVEL))
    return [f"export {name}={shlex.quote(environ[name])}" for name in names]


def agent_settings(folder: Path) -> list[str]:
    """Return shell lines that make mpirun start its daemons through the job's `AGENT`: Open MPI 5 and 4, hydra.

    Open MPI splits the agent's name at blanks and colons, so the agent is found on PATH. Its daemons stay children of
    the agent, as hydra's do.
    """
    return [
        f'export PATH={shlex.quote(str(folder))}:"$PATH"',
        f"export PRTE_MCA_plm_ssh_agent={AGENT} PRTE_MCA_prte_leave_session_attached=1",
        f"export OMPI_MCA_plm_rsh_agent={AGENT} OMPI_MCA_orte_leave_session_attached=1",
        f"export HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC={AGENT}",
        f"export I_MPI_HYDRA_BOOTSTRAP=rsh I_MPI_HYDRA_BOOTSTRAP_EXEC={AGENT}",
    ]


def variables(job: Job, folder: Path) -> dict[Path, str]:
    """Return the file of ``job.env``, which its `launch_command` reads; none where the job has no variables."""
    return {folder / VARIABLES: json.dumps(dict(job.env), indent=2) + "\n"} if job.env else {}


def launch_command(job: Job, folder: Path, hosts: str | None) -> str:
    """Return the ``hpcdp launch`` of ``job`` inside a batch job, as a line of a shell script.

    Args:
        job: the program and its options.
        folder: the job's folder, with the file of `variables`.
        hosts: the value of ``-H``, a word of the script; None for the only host.
    """
    words = [sys.executable, *module("hpcdp.cli"), "launch", "-n", str(job.ranks)]
    words += ["-s", str(job.servers)] if job.servers else []
    words += ["--ranks-per-node", str(job.ranks_per_node)] if job.ranks_per_node is not None else []
    words += ["--env", f"@{folder / VARIABLES}"] if job.env else []
    words += ["--interface", job.interface] if job.interface is not None else []
    words += ["--bind", job.bind] if job.bind is not None else []
    words += [f"--mpi-args={job.mpi_args}"] if job.mpi_args else []
    words += ["--tag-output"] if job.tag_output else []
    words += ["-v"] if job.verbose else []
    where = "--launcher local" if hosts is None else f"--launcher mpi -H {hosts}"
    return f"{shlex.join(words)} {where} -- {shlex.join(job.program)}"


def run(plan: LaunchPlan, folder: Path, submit: Callable[[], Submitted]) -> int:
    """Write the files of ``plan``, submit the job, copy its output to this process's, and return its exit status.

    SIGINT, SIGTERM and SIGHUP cancel the job; the status is then 128 + the signal's number. A second one ends the wait.
    SIGUSR1 and SIGUSR2 are forwarded to the ranks. Ignored signals, such as SIGHUP under nohup, stay ignored. The
    folder is removed afterwards.

    Raises:
        LaunchError: the folder cannot be made, or every user may write to the working folder.
    """
    watched = {sign for sign in FORWARDED if signal.getsignal(sign) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise LaunchError(
                "make the folder of the job",
                where=folder,
                got=reason(error),
                remedy="launch in a folder that you can write to and that all hosts see",
            ) from error
        try:
            _refuse_open(folder)
            for path, text in plan.files.items():
                mode = 0o700 if text.startswith("#!") else 0o600
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                with open(file, "w", errors="surrogateescape") as opened:
                    opened.write(text)
            return _follow(folder, submit(), watched)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refuse_open(folder: Path) -> None:
    """Raise `LaunchError` where every user could replace ``folder``, from which the job's hosts run commands."""
    remedy = "launch in a folder of yours that all hosts see"
    expected = "a place that not everybody may change"
    require_private("make the folder of the job", folder, expected, remedy, everybody=True, error=LaunchError)


def replace(path: Path, text: str) -> None:
    """Write a file of the job's folder atomically."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.rename(path)


def call(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command of a batch system in a session of its own, which this terminal's Ctrl-C does not reach.

    The status is 124 after a time-out.

    Raises:
        LaunchError: there is no such command.
    """
    try:
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            timeout=_ANSWER_S,
            preexec_fn=unblock,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"no answer in {_ANSWER_S:g} s")
    except OSError as error:
        raise LaunchError(f"run {argv[0]}", got=reason(error), remedy=f"put {argv[0]} on PATH") from error


def unblock() -> None:
    """Unblock all signals in a child before its program starts."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def one_line(text: str) -> str:
    """Return the end of a command's output on one line."""
    words = " ".join(text.split())
    return words if len(words) <= _MOST_SAID else f"... {words[-_MOST_SAID:]}"


def _follow(folder: Path, submitted: Submitted, watched: set[signal.Signals]) -> int:
    output, errors = _Tail(folder / OUTPUT, sys.stdout), _Tail(folder / ERRORS, sys.stderr)
    ended_by: int | None = None
    deadline = float("inf")
    try:
        while not submitted.has_ended() and time.monotonic() < deadline:
            output.copy()
            errors.copy()
            received = signal.sigtimedwait(watched, _POLL_S)
            if received is None:
                continue
            (folder / signal.Signals(received.si_signo).name).touch()
            if received.si_signo in ENDING and ended_by is None:
                ended_by, deadline = received.si_signo, time.monotonic() + _CANCEL_S
                submitted.cancel()
            elif received.si_signo in ENDING:
                deadline = 0.0
    except BaseException:  # for example a closed standard output
        submitted.cancel()
        raise
    status = _status(folder) if ended_by is None else 128 + ended_by
    output.copy()
    errors.copy()
    if status is None:
        status, why = submitted.fate()
        to_stderr(f"hpcdp launch: {why}")
    return status


def _status(folder: Path) -> int | None:
    """Return the status that the job has written, or None; wait for it, as a network file system shows files late."""
    deadline = time.monotonic() + (_LATE_S if (folder / OUTPUT).exists() else 0.0)
    while True:
        try:
            return int((folder / STATUS).read_text())
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)


class _Tail:
    """A copier of what is appended to a file to ``stream``."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path, self._stream, self._offset = path, stream, 0

    def copy(self) -> None:
        # Reopen the file each time: only then does a network file system fetch what other hosts have written.
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return
        if new:
            self._offset += len(new)
            self._stream.flush()
            self._stream.buffer.write(new)
            self._stream.flush()


_STOP_EARLY = {signal.SIGUSR1, signal.SIGUSR2}
_OF_GRID_ENGINE = (99, 100)
"""Exit statuses with which Grid Engine restarts a job, or puts it into an error state."""
_TASKS_END_S = 2.0
"""Seconds for tasks on other hosts to end before the job exits with AGAIN.

Otherwise Grid Engine loses the job (seen with 8.1.9 on a busy machine: "failed 25: rescheduling", and for the task
"failed 100: assumedly after job")."""


def main(argv: Sequence[str]) -> int:
    """Run a command inside a batch job and return the exit status for the batch system."""
    folder, again, stop_s, *command = argv
    status = run_command(Path(folder), command, float(stop_s))
    if status == os.EX_TEMPFAIL:
        time.sleep(_TASKS_END_S)
        return int(again)
    return 1 if status in _OF_GRID_ENGINE else status


def run_command(folder: Path, command: Sequence[str], stop_s: float = float("inf")) -> int:
    """Run ``command`` to its end, forward signals to it, and return its exit status in the shell's convention.

    The command gets a session of its own, since batch systems signal all processes of a job at once, which would kill
    ranks that do not handle the signal. SIGUSR1 and SIGUSR2 from the batch system both announce the end of the job, and
    are forwarded as SIGUSR1, at which a run stops early. Signals in ``folder`` come from a person and are not changed.
    """
    watched = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    for name in (STATUS, *(sign.name for sign in FORWARDED)):  # of an earlier run of a restarted job
        (folder / name).unlink(missing_ok=True)
    try:
        stop_at_s = time.monotonic() + stop_s
        child = subprocess.Popen(command, preexec_fn=bound(), start_new_session=True)
        while child.poll() is None:
            received = signal.sigtimedwait(watched, _POLL_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                sign = signal.Signals(received.si_signo)
                child.send_signal(signal.SIGUSR1 if sign in _STOP_EARLY else sign)
            if time.monotonic() >= stop_at_s:
                stop_at_s = float("inf")
                child.send_signal(signal.SIGUSR1)
            for sign in FORWARDED:
                with contextlib.suppress(FileNotFoundError):
                    (folder / sign.name).unlink()
                    child.send_signal(sign)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = child.returncode if child.returncode >= 0 else 128 - child.returncode
    with contextlib.suppress(FileNotFoundError):  # the submitting process has ended
        replace(folder / STATUS, str(status))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
