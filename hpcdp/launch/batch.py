"""Batch jobs: their values, hosts and checks, whatever the batch system.

A job of a batch system from the side of who submits it: its folder, what it writes, signals to it, its end.

A batch system hands on few signals, shows no output while a job runs, and of its end only what it took for the status.
So the job has a folder, in the working folder, that all its hosts see: the script lies there, what the job writes, a
file for every signal that is to reach it, and at last its status. `run_command` is the other side, in the job.

What batch systems take as values of their options, so that a dry run finds what a submission would have refused.

Names of queues, partitions and resources are a site's own: only what can be none at all is found here.

The hosts that Grid Engine or LSF has given to this job, for an mpirun that does not read them itself.

Open MPI 5 reads those of Slurm and PBS. Those of other batch systems it reads where it was built beside them, which
PyPI's was not: that starts all ranks on the first host of the job, as many as it has cores.

Runs in a job of a batch system, between it and the ``hpcdp launch`` there: signals to it, and its status.

``python -m hpcdp.launch.batch FOLDER AGAIN STOP_S COMMAND...`` runs COMMAND, which gets SIGUSR1
after STOP_S seconds (``inf``: never), and leaves its exit status in FOLDER, where `batch` looks for it. Its own status
is the same, but AGAIN for a command that wants to be started again (75), and 1 for one of those that mean something to
Grid Engine.
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

from ..core.environment import batch_system, launched_ranks, module
from ..core.files import require_private
from ..errors import ConfigError, LaunchError, to_stderr
from . import hosts as launch_hosts
from . import mpi_library
from .mpi_library import FIND_PROGRAMS, READ_BY_PROGRAMS, Dialect
from .process_monitor import bound
from .runner import ENDING, FORWARDED
from .spec import Host, Job, LaunchPlan

Valid = Mapping[str, tuple[str, str]]
"""Of options by name: what a value must be, and how that is said."""

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
"""What ``-l`` of qsub asks for, of those that every Grid Engine has."""

SGE: Valid = {"q": NAME, "P": NAME, "pe": NAME, "p": ("-?[0-9]{1,4}", "a number from -1023 to 1024"), "N": _SGE_NAME}

YARN: Valid = {
    **dict.fromkeys(("container_memory", "container_vcores", "master_memory", "master_vcores"), COUNT),
    **dict.fromkeys(("timeout", "priority"), ("[0-9]{1,10}", "a whole number")),
    "container_resources": (r"[\w./-]+=[0-9]+\w*(,[\w./-]+=[0-9]+\w*)*", "e.g. memory-mb=4096,vcores=2"),
    "queue": NAME,
}
"""Options of the client of YARN's distributed shell."""


def check_values(option: str, given: Iterable[tuple[str, str]], valid: Valid) -> None:
    """`ConfigError` for the first of ``given``, names and values within ``option``, whose value cannot be."""
    for name, value in given:
        pattern, expected = valid.get(name, (".*", ""))
        if not re.fullmatch(pattern, value, re.ASCII | re.DOTALL):
            raise ConfigError(option, expected=f"for {name} {expected}", got=repr(value))


def of_words(words: Sequence[str], short: Mapping[str, str] = {}) -> Iterator[tuple[str, str]]:
    """The options among words and what they are given, as ``-x V``, ``--long V`` or ``--long=V``; those of ``short``
    also as ``-xV``, by their long names."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and len(name) > 1 and word[1] in short and not word.startswith("--"):
            yield short[word[1]], word[2:]
        elif word.startswith("-") and name:
            yield short.get(name, name), value if equals else after


_READERS = {"Grid Engine": b"ras_gridengine", "LSF": b"ras_lsf"}
"""What a runtime of Open MPI 5 has in it that reads them."""


def read(environ: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """Those of a job of these two, with the slots that it has there; none of any other.

    Raises:
        LaunchError: what says so cannot be read.
    """
    batch = batch_system(environ)
    if batch == "Grid Engine":
        return launch_hosts.merged(list(_of_grid_engine(environ["PE_HOSTFILE"])))
    return launch_hosts.merged(list(_of_lsf(environ))) if batch == "LSF" else ()


def placed(job: Job, given: tuple[Host, ...], mpirun: Path, dialect: Dialect) -> tuple[launch_hosts.HostSlots, ...]:
    """What ``job`` has of each of the hosts that `read` has found; nothing where this mpirun reads them itself.

    Raises:
        LaunchError: there is not enough room.
    """
    if not given or dialect.family != "openmpi" or dialect.is_open_mpi_4:
        return ()
    batch = batch_system()
    assert batch is not None
    if any(_READERS[batch] in content for content in mpi_library.runtimes(mpirun)):
        return ()
    try:
        return launch_hosts.assign_ranks(dataclasses.replace(job, hosts=given))
    except LaunchError as error:
        error.operation, error.remedy = f"launch in a job of {batch}", "ask it for more slots, or name hosts by -H"
        raise


def _of_grid_engine(path: str) -> Iterator[Host]:
    """From sge_pe(5), $pe_hostfile: a host, its slots, its queue, its processors."""
    try:
        lines = Path(path).read_text(errors="replace").splitlines()
    except OSError as error:
        raise _unreadable("PE_HOSTFILE", "a file of hosts", f"{path}: {error.strerror}") from error
    for line in lines:
        name, slots, *_ = [*line.split(), "", ""]
        if name:
            yield _host("PE_HOSTFILE", name, slots)


def _of_lsf(environ: Mapping[str, str]) -> Iterator[Host]:
    """Of its two variables, which say the same, large jobs have the second one alone."""
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
"""That of the program there which mpirun calls as it would call ssh."""

VARIABLES = "variables.json"
"""That of the variables which ``--env`` gives to the ranks: a command line would show their values to every user of a
host, and a batch system may copy a script to where others read it."""

_TRAVEL = (*READ_BY_PROGRAMS, "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "MPICH_", "I_MPI_", "HYDRA_")
_TRAVEL_ALONE = (*FIND_PROGRAMS, "LANG", "LC_ALL")
_POLL_S = 0.2
_CANCEL_S = 90.0
_LATE_S = 10.0
_ANSWER_S = 60.0
_MOST_SAID = 400


class Submitted(Protocol):
    """A job that a batch system has taken."""

    def has_ended(self) -> bool:
        """Whether the batch system knows it no more; it is asked several times a second."""

    def cancel(self) -> None:
        """Have it ended."""

    def fate(self) -> tuple[int, str]:
        """A status, and what the batch system says of the end of a job that has told none itself."""


def folder_of(launcher: str) -> Path:
    """The folder of a job that this process submits by ``launcher``; it is there from its submission to its end."""
    return Path.cwd() / f"hpcdp-{launcher}-{socket.gethostname()}-{os.getpid()}"


def check(job: Job, launcher: str) -> None:
    """Raises for what has no meaning for a job of a batch system: `ConfigError`, or `LaunchError` within a job."""
    if launched_ranks() is not None:
        raise LaunchError(
            f"launch --launcher {launcher}",
            expected="a plain shell",
            got=f"a rank of a job of {launched_ranks()} that mpirun or srun started",
            remedy="call the program itself there",
        )
    if job.hosts:
        raise ConfigError(
            f"launch -H with --launcher {launcher}",
            expected="no hosts: the batch system chooses them",
            remedy="say what they must be in --batch-args",
        )
    if job.sync_dst_dir is not None:
        raise ConfigError(
            f"launch --sync-dst-dir with --launcher {launcher}",
            expected="a working folder that all hosts see",
            remedy="start it in a folder of the shared file system, without --sync-dst-dir",
        )


def split(arguments: str, ours: Sequence[str]) -> list[str]:
    """The words of ``--batch-args``; `ConfigError` where one is among ``ours``, which the launcher itself sets."""
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise ConfigError("launch --batch-args", expected="closed quotes", got=f"{arguments!r}: {error}") from error
    for word in words:
        if word in ours:
            raise ConfigError(
                "launch --batch-args", expected=f"none of {' '.join(ours)}, which are set already", got=repr(word)
            )
    return words


def exports(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Lines of a shell script that set the variables which a program needs on every host, and no others.

    What else an environment holds, such as a desktop's addresses and keys, concerns this machine alone.
    """
    names = sorted(name for name in environ if name in _TRAVEL_ALONE or name.startswith(_TRAVEL))
    return [f"export {name}={shlex.quote(environ[name])}" for name in names]


def agent_settings(folder: Path) -> list[str]:
    """Lines of a shell script that make mpirun start its daemons by the job's `AGENT`: that of Open MPI 5, of 4, hydra.

    Open MPI takes the agent's name apart at blanks and colons, so it is looked for on PATH; and its daemons stay
    children of the agent, as hydra's do.
    """
    return [
        f'export PATH={shlex.quote(str(folder))}:"$PATH"',
        f"export PRTE_MCA_plm_ssh_agent={AGENT} PRTE_MCA_prte_leave_session_attached=1",
        f"export OMPI_MCA_plm_rsh_agent={AGENT} OMPI_MCA_orte_leave_session_attached=1",
        f"export HYDRA_LAUNCHER=rsh HYDRA_LAUNCHER_EXEC={AGENT}",
        f"export I_MPI_HYDRA_BOOTSTRAP=rsh I_MPI_HYDRA_BOOTSTRAP_EXEC={AGENT}",
    ]


def variables(job: Job, folder: Path) -> dict[Path, str]:
    """Return the file of the variables of ``job``, which its `launch_command` reads; none where it has no variables."""
    return {folder / VARIABLES: json.dumps(dict(job.env), indent=2) + "\n"} if job.env else {}


def launch_command(job: Job, folder: Path, hosts: str | None) -> str:
    """The ``hpcdp launch`` of ``job`` inside a job of a batch system, as a line of a shell script.

    Args:
        folder: the job's, where `variables` says that its file is.
        hosts: where its ranks go, a word of the script; None for the one host that there is.
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
    """Writes the files of ``plan``, submits the job, hands on what it writes, and returns its status.

    A signal that ends this process cancels the job, 128 + its number being the status then; SIGUSR1 and SIGUSR2 reach
    its ranks. A second one ends the wait. One that is ignored, as SIGHUP is under nohup, stays so. The folder is gone
    afterwards. Raises `LaunchError` where the folder cannot be made, or every user may write to the working folder.
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
                got=error.strerror,
                remedy="start it in a folder that you may write to and that all hosts see",
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
    """Raise `LaunchError` where every user may exchange ``folder``, out of which the job's hosts run commands."""
    remedy = "start it in a folder of yours that all hosts see"
    expected = "a place that not everybody may change"
    require_private("make the folder of the job", folder, expected, remedy, everybody=True, error=LaunchError)


def replace(path: Path, text: str) -> None:
    """Writes a file of the job's folder that no reader sees half."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.rename(path)


def call(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command of a batch system, which a Ctrl-C on this terminal does not reach; its status is 124 without an
    answer in time. `LaunchError` where there is no such command."""
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
        raise LaunchError(f"run {argv[0]}", got=error.strerror, remedy=f"is {argv[0]} on PATH?") from error


def unblock() -> None:
    """Signals that this process has blocked reach a child that calls this before its program begins."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def one_line(text: str) -> str:
    """The end of what a command says, on one line."""
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
    except BaseException:  # who reads the output has gone, for one
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
    """What the job has left as its status, if it has run; a file system of the network shows a file late."""
    deadline = time.monotonic() + (_LATE_S if (folder / OUTPUT).exists() else 0.0)
    while True:
        try:
            return int((folder / STATUS).read_text())
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)


class _Tail:
    """What is added to a file goes to ``stream``."""

    def __init__(self, path: Path, stream: TextIO) -> None:
        self._path, self._stream, self._offset = path, stream, 0

    def copy(self) -> None:
        # Opened anew each time: only then does a file system of the network ask what other hosts have written.
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


_SIGNAL_POLL_S = 0.2
_STOP_EARLY = {signal.SIGUSR1, signal.SIGUSR2}
_OF_GRID_ENGINE = (99, 100)
"""Start the job again; keep it from being started."""
_TASKS_END_S = 2.0
"""A job that is to be started again is lost where one of its tasks on other hosts still ends when it does (seen with
8.1.9 on a busy machine: "failed 25: rescheduling", and for the task "failed 100: assumedly after job")."""


def main(argv: Sequence[str]) -> int:
    """Returns the status of this process."""
    folder, again, stop_s, *command = argv
    status = run_command(Path(folder), command, float(stop_s))
    if status == os.EX_TEMPFAIL:
        time.sleep(_TASKS_END_S)
        return int(again)
    return 1 if status in _OF_GRID_ENGINE else status


def run_command(folder: Path, command: Sequence[str], stop_s: float = float("inf")) -> int:
    """Runs ``command`` to its end, hands signals on to it, and returns its status, as a shell puts it.

    It is in a session of its own, since batch systems send signals to all processes of a job at once, of which ranks
    that do not expect them would die. SIGUSR1 and SIGUSR2 from the batch system both say that the end is near, and both
    become SIGUSR1, at which a run stops early; those in ``folder`` come from a person, and stay what they are.
    """
    watched = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    for name in (STATUS, *(sign.name for sign in FORWARDED)):  # of the run before, where this is not the first one
        (folder / name).unlink(missing_ok=True)
    try:
        stop_at_s = time.monotonic() + stop_s
        child = subprocess.Popen(command, preexec_fn=bound(), start_new_session=True)
        while child.poll() is None:
            received = signal.sigtimedwait(watched, _SIGNAL_POLL_S)
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
    with contextlib.suppress(FileNotFoundError):  # who has submitted the job waits no more
        replace(folder / STATUS, str(status))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
