"""A job of a batch system from the side of who submits it: its folder, what it writes, signals to it, its end.

A batch system hands on few signals, shows no output while a job runs, and of its end only what it took for the status.
So the job has a folder, in the working folder, that all its hosts see: the script lies there, what the job writes, a
file for every signal that is to reach it, and at last its status. `batch_runner` is the other side, in the job.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from ...errors import ConfigError, LaunchError, to_stderr
from ...interpreter import module
from ...launched import launched_ranks
from ...permissions import who_else_may_write
from ..environment import FIND_PROGRAMS, READ_BY_PROGRAMS
from ..job import Job, Plan
from ..supervise import ENDING, FORWARDED

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


def run(plan: Plan, folder: Path, submit: Callable[[], Submitted]) -> int:
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
    writer = who_else_may_write(folder, everybody=True)
    if writer is not None:
        raise LaunchError(
            "make the folder of the job",
            where=folder,
            expected="a place that not everybody may change",
            got=writer,
            remedy="start it in a folder of yours that all hosts see",
        )


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
