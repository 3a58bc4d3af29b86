"""The supervision of a job's mpirun or srun from its start to its end: signals, the first failure, orphans.

The launcher is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER). Whatever an mpirun leaves behind, even a killed one,
becomes the launcher's child and is ended before the launcher exits, so no rank on this machine outlives it.

`Started` reads the list of started ranks that Open MPI 5 writes, which includes ranks that ended before they were
observed. mpirun's output and status do not suffice: it can start no rank and exit with status 0. It does not report
that all ranks on several hosts were killed at once, and sometimes waits for them forever.

`check` makes the checks of a job before its launch, which every launcher needs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.environment import PMI_OF_SRUN, SAVE_AT, keep_to_interface, launched_ranks
from ..errors import LaunchError, shortened, to_stderr
from . import ProgramMissingError, hosts, mpi_library, process_monitor, rank_output
from . import hosts as launch_hosts
from .guard import Guards
from .launchers import Job
from .mpi_library import is_open_mpi_4, runtimes
from .mpirun_stderr import LOST_CONNECTION_STATUS, TOLD, FailedRank, MpirunStderr, first_failure
from .process_monitor import End, Start, Watch, adopt, bound, end_orphans, name_of

# DOTALL: the name of a program may have line breaks.
_START = re.compile(r"^\(rank, host, exe, pid\) = \(([0-9]+), ([^,]*), .*?, ([0-9]+)\)$", re.MULTILINE | re.DOTALL)
_OPTIONS, _LIST = ("runtime-options", "rtos"), "output-proctable"


class Started:
    """The list of started ranks, which mpirun writes once it has started all of them.

    Args:
        path: the file of the list.
        ranks: number of processes of the job.
        hosts: the host of each rank, None for this machine; empty where only the list has the hosts.
    """

    def __init__(self, path: Path, ranks: int, hosts: Sequence[str | None]) -> None:
        self._path, self._ranks, self._hosts = path, ranks, hosts
        self._is_reported = False

    def attach(self, watch: Watch, guards: Guards | None) -> None:
        """Set the receivers to which `look` reports the ranks."""
        self._watch, self._guards = watch, guards

    def look(self) -> None:
        """Report the ranks once the list is complete; call this repeatedly while mpirun runs."""
        if self._is_reported or not (starts := self._starts()):
            return
        self._is_reported = True
        elsewhere: dict[str, list[tuple[int, int]]] = {}
        for start in starts:
            if start.host is None:
                self._watch.know_of(start.rank, start.pid)
            else:
                elsewhere.setdefault(start.host, []).append((start.rank, start.pid))
        if self._guards is not None:
            self._guards.know_of(elsewhere)

    def end(self) -> int:
        """Report the ranks that were never observed as ended, after mpirun's end, and return the number of ranks."""
        starts = self._starts()
        observed = {start.rank for start in self._watch.starts}
        for start in starts:
            if start.rank not in observed:
                self._watch.note(start)
                server = self._watch.server(start.rank)
                self._watch.note(End(start.rank, start.pid, None, time.monotonic(), server, start.host))
        return len(starts)

    def _starts(self) -> list[Start]:
        """Return the entries of the list, none before it is complete."""
        starts = []
        for entry in _START.finditer(self._path.read_text(errors="replace")):
            rank = int(entry[1])
            host = self._hosts[rank] if rank < len(self._hosts) else entry[2]
            starts.append(Start(rank, int(entry[3]), host))
        return starts if len(starts) >= self._ranks else []


@contextlib.contextmanager
def listed(
    command: Sequence[str], ranks: int, hosts: Sequence[str | None]
) -> Iterator[tuple[Sequence[str], Started | None]]:
    """Yield ``command`` with the options that make mpirun write the list of started ranks, and its reader.

    The command is unchanged, and the reader None, for an mpirun without the option, or where the user has set it.
    """
    option = _option(Path(command[0]))
    user_options = {word.lstrip("-").partition("=")[0] for word in command} & {*_OPTIONS, _LIST}
    with _nameless_file() as path:
        if option is None or path is None or user_options:
            yield command, None
        else:
            yield [command[0], option, f"{_LIST}={path}", *command[1:]], Started(path, ranks, hosts)


@contextlib.contextmanager
def _nameless_file() -> Iterator[Path | None]:
    """Yield a file that disappears with this process; None where the kernel forbids it or there is no /proc."""
    try:
        file = os.memfd_create("hpcdp-started")
    except OSError:
        yield None
        return
    try:
        path = Path(f"/proc/{os.getpid()}/fd/{file}")
        yield path if path.exists() else None
    finally:
        os.close(file)


def _option(mpirun: Path) -> str | None:
    """Return the option's name, which differs between versions; mpirun exits at an unknown one."""
    for content in runtimes(mpirun):
        if f"\0{_LIST}\0".encode() in content:
            return next((f"--{name}" for name in _OPTIONS if f"\0{name}\0".encode() in content), None)
    return None


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = tuple(SAVE_AT)
_AS_SIGTERM = (signal.SIGQUIT, signal.SIGXCPU)
"""Signals that would kill mpirun but not its ranks; mpirun gets SIGTERM instead."""
_GRACE_S = 10.0
_HOLD_S = 0.05
_TELL_S = 0.1
_SILENCE_S = 3.0
# MPICH's mpirun does not notice that a rank on another host has failed; the other ranks have to end within 10 s.
_FAILED_GRACE_S = 6.0
_LOST_GRACE_S = 3.0
_LAST_WORDS_S = 1.0
# For a program that saves at SIGUSR1: the limit for saving, and the interval in which a second signal is taken for a
# duplicate; timeout(1) sends one to a process and another to its group.
_SAVE_S, _TWICE_S = 120.0, 0.5
_STOPPED = os.EX_TEMPFAIL
_OF_ERRORS = (1, 2, 127)
"""Exit statuses of commands and programs that have written the reason."""
_LONGEST_ERROR = 300
_SI_KERNEL = 0x80
_PYTHON = re.compile(r"python[0-9.]*")


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    family: str,
    job: Job,
    usr1_has_come: Callable[[], bool] | None = None,
    *,
    elsewhere: int = 0,
    guards: Guards | None = None,
    hosts: Sequence[str | None] = (),
    interface: str | None = None,
) -> int:
    """Run ``command`` until it and all processes that it has started have ended.

    Args:
        command: an mpirun of ``family`` or an srun, with its arguments.
        environ: all environment variables of the command.
        family: ``"openmpi"``, ``"mpich"`` or ``"srun"``.
        job: the job that it runs.
        usr1_has_come: see `hpcdp.launch.launchers.mpirun.run_local`.
        elsewhere: number of ranks and servers on other hosts.
        guards: the guards of those hosts; None where a batch system reaches them, and only mpirun's messages on stderr
            report a lost host.
        hosts: the host of each rank, None for this machine; empty where only mpirun knows, or all run here.
        interface: the only network interface on which ``command`` accepts connections; None for any.

    Returns:
        The job's exit status: 128 + the number of the signal that ended this launcher, or the status of the rank that
        failed first, or the command's; 1 for a job that has lost a host, or that has started no rank.

    Raises:
        LaunchError: mpirun has rejected `Job.mpi_args`.
    """
    global _output
    ranks, mpi_args = job.ranks + job.servers, "" if family == "srun" else job.mpi_args
    maybe_ignored = (signal.SIGHUP, signal.SIGTSTP, *_AS_SIGTERM)
    ignored = {sign for sign in maybe_ignored if signal.getsignal(sign) == signal.SIG_IGN}  # SIGHUP is, under nohup
    watched = {*FORWARDED, *_AS_SIGTERM, signal.SIGTSTP, signal.SIGCHLD} - ignored
    if family != "srun":
        environ = {name: value for name, value in environ.items() if name not in PMI_OF_SRUN}
    adopt()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    try:
        with contextlib.ExitStack() as left_behind:
            if family == "mpich":
                left_behind.enter_context(process_monitor.files_of_mpich_removed())
            elif not elsewhere and not is_open_mpi_4(Path(command[0])):
                environ, _ = left_behind.enter_context(process_monitor.own_folder(environ))
            command, shown = rank_output.shown(command, family, mpi_args, is_alone=ranks == 1)
            _output = shown
            started = None
            if family == "openmpi":
                places = hosts or ([] if elsewhere else [None] * ranks)
                command, started = left_behind.enter_context(listed(command, ranks, places))
            words = MpirunStderr(held=bool(mpi_args), with_banners=family == "srun", shown=shown)
            # With SIGTTIN blocked, mpirun in the background gets an error from the terminal, and is not stopped.
            blocked = {*before, *ignored, signal.SIGTTIN, signal.SIGTTOU}
            # The terminal's Ctrl-C must not reach mpirun before the ranks have saved.
            apart: dict[str, Any] = {"process_group": 0, "stdin": subprocess.DEVNULL} if usr1_has_come else {}
            mpirun = subprocess.Popen(
                command, env=environ, preexec_fn=bound(blocked), stdout=None if shown is None else shown.end,
                stderr=words.end, **apart,
            )  # fmt: skip
            with contextlib.closing(Watch(mpirun.pid, ranks - elsewhere, watched, job.servers, elsewhere)) as watch:
                if guards is not None:
                    guards.attach(watch)
                words.attach(watch)
                if shown is not None:
                    shown.attach(watch)
                if started is not None:
                    started.attach(watch, guards)
                goes_on = "--with-ft" in command  # Open MPI with ULFM: the surviving ranks continue
                ended_by, was_stuck = _forward_signals(
                    mpirun, watch, usr1_has_come, guards, words, started, ranks, job.verbose, goes_on, family, interface
                )  # fmt: skip
                failed = watch.failed  # before the late messages below
                if shown is not None:
                    shown.drain(_waiting_for_reader(watch, ended_by))
                # Guards may report ranks after mpirun's end; aborted ranks end after MPICH's mpirun.
                if mpirun.returncode and (guards is not None or family == "mpich"):
                    _hear_the_last(watch)
                count = ranks if started is None else started.end()
                ends = watch.ends()
                lost = words.lost() | ({} if guards is None else guards.lost)
            if guards is not None:
                guards.end()
            end_orphans()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    refusal = None if ends or mpirun.returncode <= 0 or lost or ended_by else words.refusal(started is not None)
    if refusal is not None:
        raise LaunchError("launch --mpi-args", expected=f"arguments of {command[0]}", got=f"{mpi_args!r}: {refusal}")
    words.show()
    if ended_by is not None:
        return 128 + ended_by
    other_python = _missing_module(job, words.no_module) if mpirun.returncode and words.no_module is not None else None
    if lost:
        for message in lost.values():
            say(message)
        return 1
    if family == "srun" and mpirun.returncode > 0:
        status = _told_by_srun(words, ranks, mpirun.returncode) or mpirun.returncode
        if other_python is not None:
            say(other_python)
        return status
    if was_stuck and all(end.status == 0 for end in ends):
        return 0
    if mpirun.returncode < 0:
        first = _failed(failed, ends, family)
        return 128 - mpirun.returncode if first is None else first.exit_status or 1
    if mpirun.returncode == 0 and count < ranks:
        words.show_banners()
        say(f"mpirun has ended with status 0, but not started {ranks} ranks")
        return 1
    if elsewhere:
        ends = [end._replace(host=end.host or socket.gethostname()) for end in ends]
    is_blind = elsewhere > 0 and guards is None
    status, line = _explained(ends, mpirun.returncode, family, words, is_blind)
    line = _with_reason(line, status, words)
    if line is None and words.are_unread:
        return 128 + signal.SIGPIPE
    if line is None or status == LOST_CONNECTION_STATUS:  # the first failure is unknown
        words.show_banners()
        if guards is not None:
            guards.show_banners()
    if line:
        say(line)
    elif line is None and status and is_blind:
        why = "those of other hosts are not watched inside a batch job"
        say(f"mpirun has ended with status {status}; which rank failed first is not known: {why}")
    elif line is None and status and not words.has_spoken:
        say(f"mpirun has ended with status {status}, without a message")
    if other_python is not None:
        say(other_python)
    return status


def _missing_module(job: Job, module: str) -> LaunchError | None:
    """Return the error of a rank that cannot import ``module`` because it runs another Python; else None.

    The launcher does not change PATH, so ``python`` without an activated environment is another Python.
    """
    python = _python_of(job)
    if python is not None and _is_this_python(python):
        return None
    if (python is None and module != "hpcdp") or importlib.util.find_spec(module) is None:
        return None
    activate = Path(sys.prefix, "bin", "activate")
    remedies = [f"activate its environment with . {activate}"] if activate.exists() else []
    remedies += [f"give its path: hpcdp launch ... -- {sys.executable} ..."]
    return LaunchError(
        f"launch {job.program[0]!r}",
        expected=f"{sys.executable}, which has the module {module}",
        got=f"{python or 'another Python'}, which lacks it",
        remedy=", or ".join(remedies),
    )


def _python_of(job: Job) -> Path | None:
    """Return the Python that runs the program of ``job``; None for other programs, and where only a shell knows."""
    path = job.env.get("PATH")
    program = shutil.which(job.program[0], path=path)
    if program is not None and not _PYTHON.fullmatch(Path(program).name):
        try:
            with open(program, "rb") as file:
                first = os.fsdecode(file.readline(512))
        except OSError:  # executable, but not readable
            return None
        words = first.removeprefix("#!").split() if first.startswith("#!") else []
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-")]
        program = shutil.which(words[0], path=path) if words and _PYTHON.fullmatch(Path(words[0]).name) else None
    return None if program is None else Path(program).absolute()


def _is_this_python(other: Path) -> bool:
    """Return whether ``other`` has this Python's modules; compares folders, as an environment's Python is a link."""
    own = Path(sys.executable)
    return other.parent.resolve() == own.parent.resolve() and other.resolve() == own.resolve()


def _waiting_for_reader(watch: Watch, ended_by: int | None) -> Callable[[], bool]:
    """Return a function that waits a moment for the reader of the output, and returns whether to stop waiting.

    Waiting stops at a signal that ends the job, or a second after a signal has ended it.
    """
    deadline = float("inf") if ended_by is None else time.monotonic() + _LAST_WORDS_S

    def give_up() -> bool:
        received = watch.wait(_TELL_S)
        return (received is not None and received.number in ENDING) or time.monotonic() >= deadline

    return give_up


def _hear_the_last(watch: Watch) -> None:
    deadline = time.monotonic() + _LAST_WORDS_S
    while watch.running and time.monotonic() < deadline:
        watch.wait(_LAST_WORDS_S / 20)


def _explained(
    ends: Sequence[End], code: int, family: str, words: MpirunStderr, is_blind: bool = False
) -> tuple[int, str | None]:
    """Return the status of the job and the message on the rank that failed first.

    The message is empty where all ranks have ended alike and reported why, or have stopped early; it is None where only
    mpirun's messages can tell.

    Open MPI's messages are incomplete. For a rank that left with status 0 they are vague; they do not tell servers from
    workers, sometimes omit the host, and are missing where other ranks have already succeeded. Sometimes they name
    another rank, which has aborted because its connection to the first had closed. So if the launcher ``is_blind``, and
    does not observe ranks of other hosts, only two kinds of rank are reported: one that has called MPI_Abort, and one
    of this host that left with the job's status.
    """
    first, named = first_failure(ends, code, _bereft(family)), words.named
    if first is None and words.have_closed:  # mpirun has killed the aborting rank before it ended
        ends = [end._replace(status=LOST_CONNECTION_STATUS << 8) if end.rank == words.aborted else end for end in ends]
        first = first_failure(ends, code, LOST_CONNECTION_STATUS)
    has_failed = code != 0 or any(end.status != 0 for end in ends)  # with ULFM the code may be 0
    if words.missing is not None and has_failed and (first is None or first.exit_status == code):
        return code or 1, _by_watchdog(words.missing)
    invoked_by = (
        words.invoked if words.invoked is not None and code in (words.invoked.status, LOST_CONNECTION_STATUS) else None
    )
    # MPICH's mpirun may kill a rank that has called MPI_Abort before it ends itself.
    killed_for_it = first is None or first.status is None or first.exit_status == 128 + signal.SIGKILL != code
    if invoked_by is not None and (is_blind or (family == "mpich" and killed_for_it)):
        rank, status = invoked_by
        return status or code, f"rank {rank} has aborted the job with status {status or code}"
    if family == "mpich" and len(ends) > 1 and {end.exit_status for end in ends} == {128 + signal.SIGTERM}:
        return ends[0].exit_status, "all ranks were ended by SIGTERM"  # MPICH's mpirun does not send it
    is_known = named is not None or words.aborted is not None or words.are_unread
    if family == "openmpi" and code == 1 and not is_known and _have_all_heard(ends):
        return code, "mpirun has ended all ranks at a signal, which it does not name"
    if (
        is_blind
        and named is None
        and (first is None or code in (0, LOST_CONNECTION_STATUS) or first.exit_status != code)
    ):
        return code, None
    if named is not None and (first is None or first.status is None):
        first = next((_as_named(end, named) for end in ends if named.rank == end.rank or named.pid == end.pid), first)
    if code and (first is None or (first.status is None and first.rank == words.aborted)):
        if words.aborted is None:
            return code, None
        who = next((end.who for end in ends if end.rank == words.aborted), f"rank {words.aborted}")
        return code, f"{who} has aborted the job with status {code}"
    if first is None or (first.status is None and code == 0):
        return code, None
    if first.status is None:
        return code, f"{first}; the status of mpirun is {code}{f' ({name_of(code - 128)})' if code > 128 else ''}"
    alike = first.exit_status < 128 and {end.status for end in ends} == {first.status}
    if first.exit_status == _STOPPED or (alike and words.has_spoken):
        return first.exit_status or 1, ""
    ended_well = any(end.status == 0 and end.at_s < first.at_s for end in ends)
    return first.exit_status or 1, str(first).removesuffix(" before the others") if ended_well or alike else str(first)


def _have_all_heard(ends: Sequence[End]) -> bool:
    """Return whether every rank has ended as mpirun ends them, by SIGTERM and then SIGKILL."""
    return bool(ends) and all(end.exit_status in (*TOLD, 128 + signal.SIGKILL) for end in ends)


def _with_reason(line: str | None, status: int, words: MpirunStderr) -> str | None:
    """Return the launcher's last line with the error that a failed rank has reported.

    The line is empty where that report is the last line of the output already.
    """
    if words.missing is not None or status not in _OF_ERRORS or line == "":
        return line
    if words.reasons.stands_last:
        return ""
    for speaker, error in words.reasons.errors.items() if status == 1 else ():
        number = re.findall("rank ([0-9]+)", speaker)[0]
        who = line.removesuffix(" before the others") if line and f"rank {number} " in line else f"{speaker} failed"
        return f"{who}: {shortened(error, _LONGEST_ERROR)}"
    return line


def _told_by_srun(words: MpirunStderr, ranks: int, code: int) -> int | None:
    """Return the status of the tasks that failed first, and name them unless all have failed alike or stopped early.

    srun exits with the status ``code`` of a rank that has aborted the job, and often kills that rank before it ends.
    """
    failed = words.failed()
    if words.missing is not None:
        say(_by_watchdog(words.missing))
        return 1
    if failed is not None and failed.is_killed and code < 128 and code != LOST_CONNECTION_STATUS:
        say(f"a rank has aborted the job with status {code}")
        return code
    if failed is not None and words.may_have_ended(failed):
        say("a rank was killed, and srun has killed others: which one failed first is not known")
    elif failed is not None and failed.status != _STOPPED and ranks > 1 and not words.have_ended_alike():
        line = _with_reason(str(failed), failed.status, words)
        if line:
            say(line)
    return failed and failed.status


def _by_watchdog(missing: str) -> str:
    return f"the watchdog has ended the job: {missing}"


def _as_named(end: End, named: FailedRank) -> End:
    return end if named.status is None else end._replace(status=named.status)


def _bereft(family: str) -> int | None:
    return LOST_CONNECTION_STATUS if family == "openmpi" else None


def _failed(observed: End | None, ends: Sequence[End], family: str) -> End | None:
    """Return the rank that failed first, for an mpirun that was killed before it could report it."""
    if observed is None:
        return None
    failures = (first_failure(ends, code, _bereft(family)) for code in (0, observed.exit_status))
    return next(filter(None, failures), observed)


def _forward_signals(
    mpirun: subprocess.Popen[bytes],
    watch: Watch,
    usr1_has_come: Callable[[], bool] | None,
    guards: Guards | None,
    words: MpirunStderr,
    started: Started | None,
    ranks: int,
    verbose: bool,
    goes_on: bool,
    family: str,
    interface: str | None,
) -> tuple[int | None, bool]:
    """Wait for ``mpirun`` and forward signals to it.

    Ranks that handle SIGUSR1 (``usr1_has_come``) get a signal of `SAVE_AT` at the first ending signal, to save and end.
    The job is killed at a second ending signal, or after a grace time that begins with the first one, with a rank's
    failure (unless the job ``goes_on``), with the loss of a host, or with the end of the last worker.

    Returns:
        The signal that ended the job, None where it ended by itself; and whether all ranks had ended but mpirun had to
        be killed.
    """
    ended_by: int | None = None
    deadline = float("inf")
    is_held, passed_on = usr1_has_come is not None and usr1_has_come(), int(signal.SIGUSR1)
    is_told_to_end, is_killed, was_stuck, num_reported = False, False, False, 0
    saves_since_s: float | None = None
    silence_s = float(os.environ.get(_SILENCE_VARIABLE) or _SILENCE_S) or float("inf")  # 0: never explain
    silent_until_s = time.monotonic() + silence_s
    while mpirun.poll() is None:
        next_s = min(deadline, silent_until_s) - time.monotonic()
        received = watch.wait(min(_HOLD_S if is_held else 1.0, max(0.0, next_s)))
        is_held = is_held and not watch.notified(passed_on)
        words.look()
        if started is not None:
            started.look()
        if interface is not None and watch.starts:  # mpirun listens before it starts a rank
            keep_to_interface(interface, mpirun.pid)
            interface = None
        if verbose:
            num_reported = _tell_of_starts(watch, num_reported)
        if time.monotonic() >= silent_until_s:
            silent_until_s = float("inf")
            _explain_silence(watch, ranks, silence_s)
        if guards is not None:
            guards.beat()
            if guards.lost and not is_told_to_end:
                mpirun.terminate()
                deadline, is_told_to_end = min(deadline, time.monotonic() + _LOST_GRACE_S), True
        if watch.failed is not None and not goes_on:  # Open MPI sometimes waits for ranks that are in MPI_Finalize
            deadline = min(deadline, watch.failed.at_s + _FAILED_GRACE_S)
        gone_s = watch.all_gone_at_s  # Open MPI sometimes misses ends of ranks that all end at once
        if gone_s is not None and time.monotonic() >= gone_s + _GRACE_S and _output_is_read():
            deadline = 0.0 if watch.nothing_is_left() else deadline
        alone_s = watch.servers_alone_since_s  # if the program has never called hpcdp.init()
        if time.monotonic() >= min(deadline, float("inf") if alone_s is None else alone_s + _GRACE_S):
            if ended_by is None and not is_told_to_end:
                if watch.failed is not None:
                    first = _failed(watch.failed, watch.ends(), family)
                    cause = str(first) if words.missing is None else _by_watchdog(words.missing)
                    who = _with_reason(cause, first.exit_status if first else 1, words) or cause
                    say(f"{who}; mpirun has not ended the others in {_FAILED_GRACE_S:g} s: killed")
                elif gone_s is not None:
                    was_stuck, who = True, watch.ends()[0].who
                    say(f"{who} and all others have ended, and mpirun has not in {_GRACE_S:g} s: killed")
                else:
                    why = "all workers have ended without hpcdp.init(), which would end the servers"
                    say(f"{why}; they have not ended in {_GRACE_S:g} s: killed")
            mpirun.kill()
            mpirun.wait()
            is_killed = True
        elif received is not None and received.number == signal.SIGUSR1 and usr1_has_come is not None:
            is_held = True
        elif received is not None and received.number == signal.SIGTSTP:
            if received.code != _SI_KERNEL or usr1_has_come is not None:
                mpirun.send_signal(signal.SIGTSTP)
            if guards is not None:
                guards.pause()
            _stop_beside(mpirun)
        elif received is not None and received.number in ENDING and usr1_has_come is not None and ended_by is None:
            ended_by, is_held, saves_since_s = received.number, True, time.monotonic()
            passed_on = SAVE_AT[signal.Signals(ended_by)]
            deadline = saves_since_s + _SAVE_S
            say(f"{signal.Signals(ended_by).name}: the run saves and ends; a second one ends it at once")
        elif received is not None and received.number in (*FORWARDED, *_AS_SIGTERM):
            if saves_since_s is not None and time.monotonic() < saves_since_s + _TWICE_S:
                continue
            if received.number in (*ENDING, *_AS_SIGTERM):
                deadline = time.monotonic() + _GRACE_S if ended_by is None else 0.0
                ended_by = ended_by or received.number
            # The terminal's Ctrl-C has reached mpirun already, which would exit at once at a second SIGINT. A closed
            # terminal sends SIGHUP to the session's leader only.
            if received != (signal.SIGINT, _SI_KERNEL):
                mpirun.send_signal(signal.SIGTERM if received.number in _AS_SIGTERM else received.number)
    if mpirun.returncode < 0 and not is_killed and ended_by is None and watch.failed is None:
        say(f"{'srun' if family == 'srun' else 'mpirun'} was killed by {signal.Signals(-mpirun.returncode).name}")
    return ended_by, was_stuck


def _explain_silence(watch: Watch, ranks: int, silence_s: float) -> None:
    """Explain on stderr the silence of a job that has printed nothing in ``silence_s``.

    Do nothing where the job's output is not observed.
    """
    if _output is None or not _output.is_silent:
        return
    if len(watch.starts) < ranks:
        say(f"mpirun has started {len(watch.starts)} of {ranks} ranks in {silence_s:g} s")
    elif watch.running:
        who = "rank 0" if ranks == 1 else f"{ranks} ranks"
        say(f"no output from {who} in {silence_s:g} s: imports and MPI_Init take time")


def _stop_beside(mpirun: subprocess.Popen[bytes]) -> None:
    """Stop this process and ``mpirun`` at Ctrl-Z, until the shell continues them; ``mpirun`` has stopped the ranks.

    Open MPI's mpirun would run on until it reads from the terminal, which is the shell's, and stop there. After fg it
    would stay in that read until a line is typed, and neither show output nor handle Ctrl-C.
    """
    time.sleep(_TELL_S)
    mpirun.send_signal(signal.SIGSTOP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.raise_signal(signal.SIGTSTP)  # has no effect where no shell could continue this process
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    mpirun.send_signal(signal.SIGCONT)


def _output_is_read() -> bool:
    """Return whether standard output can be written, so that mpirun does not wait for its reader, such as a pager."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return bool(poll.poll(0))


def _tell_of_starts(watch: Watch, num_reported: int) -> int:
    for start in watch.starts[num_reported:]:
        if start.host is None:
            cores = launch_hosts.cores_of(start.pid) or "unknown: it has ended"
            say(f"{watch.name(start.rank)} is pid {start.pid} on {socket.gethostname()}, cores {cores}")
    return len(watch.starts)


_output: rank_output.Shown | None = None
"""The output of the last job's ranks, so that `say` begins a new line after it."""


def say(message: object) -> None:
    """Write a line of the launcher to stderr."""
    if _output is not None:
        _output.break_line()
    with contextlib.suppress(OSError):  # the terminal may be closed
        to_stderr(f"hpcdp launch: {message}")


# execve(2): the interpreter's path ends at a blank or at the end of the line
_FIRST_LINE = re.compile(rb"#![ \t]*([^ \t\n]*)")
_SILENCE_VARIABLE = "HPCDP_SILENCE_S"
_LIMIT_VARIABLES = ("HPCDP_STALL_S", "HPCDP_TIMEOUT_S", _SILENCE_VARIABLE)


def check(job: Job, *, several_hosts: bool = False) -> list[str]:
    """Check that ``job`` can be launched from this process, and return the words of `Job.mpi_args`.

    Args:
        job: the program and its options.
        several_hosts: whether the job will run on more than one host.

    Raises:
        LaunchError: this process is itself a rank; the program is missing here; ``mpi_args`` has an open quote.
        ConfigError: the network interface is missing or reaches no other host; a watchdog limit is invalid.
    """
    refuse_rank("launch ranks")
    if any(name in os.environ for name in _LIMIT_VARIABLES):
        _check_limits()
    try:
        mpi_args = shlex.split(job.mpi_args)
    except ValueError as error:
        raise LaunchError("launch --mpi-args", expected="closed quotes", got=f"{job.mpi_args!r}: {error}") from error
    if job.interface is not None:
        hosts.check(job.interface, several_hosts=several_hosts)
    check_program(job.program[0], job.env.get("PATH"))
    return mpi_args


def refuse_rank(operation: str) -> None:
    """Raise `LaunchError` in a rank of a job, which cannot launch another one."""
    if (ranks := launched_ranks()) is not None:
        got = f"a rank of a job of {ranks} that mpirun or srun started"
        remedy = "call the program itself, or remove the outer mpirun or srun"
        raise LaunchError(operation, expected="a plain shell", got=got, remedy=remedy)


def warn_of_other_library(job: Job, family: str) -> None:
    """Warn on stderr if the program's virtual environment has an MPI library of another family than ``family``.

    Each rank would then be a world of one.
    """
    other = mpi_library.of_other_environment(job.program[0])
    if other is None or other.family == family or "MPI4PY_LIBMPI" in {**os.environ, **job.env}:
        return
    say(
        f"the environment of {job.program[0]} has {other.name}, but {mpi_library.FAMILIES[family]} starts it: "
        f"its ranks will be worlds of one; use {other.path.parent.parent}/bin/hpcdp launch"
    )


def check_binding(job: Job, family: str, processes: int, cores: int, host: str) -> None:
    """Raise `LaunchError` where Open MPI could not bind each process on ``host`` to a core; it then starts none."""
    if family == "openmpi" and job.bind not in (None, "none") and processes > cores:
        raise LaunchError(
            f"launch --bind {job.bind}", expected=f"at most {cores} processes, the cores of {host}", got=processes
        )


def check_program(name: str, path: str | None = None) -> None:
    """Raise `LaunchError` unless this machine can run the program; ``path`` replaces this process's PATH.

    Raises:
        ProgramMissingError: there is no such program.
        LaunchError: the file is not executable, or a script whose interpreter execve(2) would not find.
    """
    program = shutil.which(name, path=path)
    if program is not None:
        _check_first_line(name, Path(program))
    elif os.path.isfile(name) and not os.access(name, os.X_OK):
        remedy = "put its interpreter before it, e.g. python, or make it executable with chmod +x"
        raise LaunchError(f"launch {name!r}", got="a file that is not executable", remedy=remedy)
    else:
        raise ProgramMissingError(f"launch {name!r}", got="no such program", remedy="check its name and PATH")


def _check_first_line(name: str, program: Path) -> None:
    """Raise `LaunchError` for a script without ``#!``, which execve(2) refuses, or with a missing interpreter."""
    try:
        with program.open("rb") as file:
            beginning = file.read(512)
    except OSError:  # executable, but not readable
        return
    script = _FIRST_LINE.match(beginning)
    if script is None and b"\0" not in beginning:
        raise LaunchError(
            f"launch {name!r}",
            got="a script without a first line that begins with #!",
            remedy="begin it with e.g. #!/bin/sh, or put its interpreter before it, e.g. bash",
        )
    if script is not None and not os.path.exists(script[1]):
        interpreter = os.fsdecode(script[1])
        raise LaunchError(
            f"launch {name!r}",
            got=f"a script of {interpreter!r}, which does not exist",
            remedy="convert its Windows line ends: sed -i 's/\\r$//'" if "\r" in interpreter else None,
        )


def _check_limits() -> None:
    # The import loads NumPy, whose threads must not receive this thread's signals.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGTSTP})
    try:
        from ..comm.watchdog import limits_s, seconds

        limits_s()
        seconds(_SILENCE_VARIABLE, _SILENCE_S)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
