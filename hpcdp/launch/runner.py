"""The run of a job: start, supervision, end.

The ranks that mpirun has started, by the list that Open MPI 5's writes: also those that had ended before a look.

Its words and its status do not tell: it can have started none and end with status 0, and it says nothing of ranks on
several hosts that are all killed at once, for which it now and then waits for ever.

A job's mpirun, or whatever starts its ranks, from its start to its end: signals, who failed first, what is left.

The launcher is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever an mpirun leaves behind, even one that was
killed, becomes its child and is ended before it exits, so no rank on this machine outlives the command.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.environment import PMI_OF_SRUN, SAVE_AT
from ..core.sockets import keep_to_interface
from ..errors import LaunchError, shortened, to_stderr
from . import hosts as launch_hosts
from . import live, process_monitor
from .guard_client import Guards
from .mpi_library import is_open_mpi_4, runtimes
from .mpirun_output import LOST_CONNECTION_STATUS, TOLD, FailedRank, MpirunStderr, first_failure
from .process_monitor import End, Start, Watch, adopt, bound, end_orphans, name_of

# The name of a program may have line breaks.
_START = re.compile(r"^\(rank, host, exe, pid\) = \(([0-9]+), ([^,]*), .*?, ([0-9]+)\)$", re.MULTILINE | re.DOTALL)
_OPTIONS, _LIST = ("runtime-options", "rtos"), "output-proctable"


class Started:
    """The list of a job of ``ranks`` processes, which mpirun writes to ``path`` once all have been started.

    Args:
        hosts: where each rank runs, None for this machine; empty where the list alone can tell.
    """

    def __init__(self, path: Path, ranks: int, hosts: Sequence[str | None]) -> None:
        self._path, self._ranks, self._hosts = path, ranks, hosts
        self._is_told = False

    def attach(self, watch: Watch, guards: Guards | None) -> None:
        """From now on `look` tells these of ranks that they have not seen."""
        self._watch, self._guards = watch, guards

    def look(self) -> None:
        """Called over and over while mpirun runs."""
        if self._is_told or not (starts := self._starts()):
            return
        self._is_told = True
        elsewhere: dict[str, list[tuple[int, int]]] = {}
        for start in starts:
            if start.host is None:
                self._watch.know_of(start.rank, start.pid)
            else:
                elsewhere.setdefault(start.host, []).append((start.rank, start.pid))
        if self._guards is not None:
            self._guards.know_of(elsewhere)

    def end(self) -> int:
        """How many ranks there were; called once mpirun has ended, and with it those that nobody has seen."""
        starts = self._starts()
        seen = {start.rank for start in self._watch.starts}
        for start in starts:
            if start.rank not in seen:
                self._watch.note(start)
                server = self._watch.server(start.rank)
                self._watch.note(End(start.rank, start.pid, None, time.monotonic(), server, start.host))
        return len(starts)

    def _starts(self) -> list[Start]:
        """None of them before all are there."""
        found = []
        for said in _START.finditer(self._path.read_text(errors="replace")):
            rank = int(said[1])
            host = self._hosts[rank] if rank < len(self._hosts) else said[2]
            found.append(Start(rank, int(said[3]), host))
        return found if len(found) >= self._ranks else []


@contextlib.contextmanager
def listed(
    command: Sequence[str], ranks: int, hosts: Sequence[str | None]
) -> Iterator[tuple[Sequence[str], Started | None]]:
    """``command`` with words that have its mpirun write the list; as it is, and None, where there are no such words,
    or where it says itself what is listed."""
    option = _option(Path(command[0]))
    its_own = {word.lstrip("-").partition("=")[0] for word in command} & {*_OPTIONS, _LIST}
    with _nameless_file() as path:
        if option is None or path is None or its_own:
            yield command, None
        else:
            yield [command[0], option, f"{_LIST}={path}", *command[1:]], Started(path, ranks, hosts)


@contextlib.contextmanager
def _nameless_file() -> Iterator[Path | None]:
    """It is gone with this process, however that ends; None where the kernel forbids it or there is no /proc."""
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
    """What the option is called: versions differ, and end where they do not know a name."""
    for content in runtimes(mpirun):
        if f"\0{_LIST}\0".encode() in content:
            return next((f"--{name}" for name in _OPTIONS if f"\0{name}\0".encode() in content), None)
    return None


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = tuple(SAVE_AT)
_AS_SIGTERM = (signal.SIGQUIT, signal.SIGXCPU)
"""What an mpirun would die of and leave its ranks: it gets SIGTERM instead."""
_GRACE_S = 10.0
_HOLD_S = 0.05
_TELL_S = 0.1
# MPICH's mpirun does not see that a rank on another host has ended with a status; others have to end within 10 s.
_FAILED_GRACE_S = 6.0
_LOST_GRACE_S = 3.0
_LAST_WORDS_S = 1.0
# Of a program that saves at SIGUSR1: so long that may take, and so soon a second signal is the first one again, which
# timeout(1), for one, sends to a process and to its group.
_SAVE_S, _TWICE_S = 120.0, 0.5
_STOPPED = os.EX_TEMPFAIL
_OF_ERRORS = (1, 2, 127)
"""The statuses of commands and programs that have written why."""
_LONGEST_ERROR = 300
_SI_KERNEL = 0x80


def supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    ranks: int,
    family: str,
    servers: int = 0,
    usr1_has_come: Callable[[], bool] | None = None,
    *,
    elsewhere: int = 0,
    guards: Guards | None = None,
    hosts: Sequence[str | None] = (),
    asked: str = "",
    verbose: bool = False,
    interface: str | None = None,
    missing_module: Callable[[str], object | None] = lambda module: None,
) -> int:
    """Runs ``command`` with all of ``environ`` until it and all that it has started have ended.

    Args:
        command: what starts the ranks, an mpirun of ``family``, or ``"srun"``.
        ranks: how many processes it starts, of which the last ``servers`` are servers.
        usr1_has_come: see `hpcdp.launch.launchers.local.run`.
        elsewhere: how many of the ranks run on other hosts.
        guards: what holds those, where it is this launcher that reaches the hosts; else it is a batch system, and of
            a host that is lost mpirun's words on stderr are all there is.
        hosts: where each rank runs, None for this machine; empty where only mpirun knows, or all run here.
        asked: arguments of the user's own in ``command``.
        verbose: whether to tell where the ranks of this machine are.
        interface: the only network interface through which ``command`` is to accept connections; None: any.
        missing_module: returns what to say of a failed job in which a Python has not found a module, or None.

    Returns:
        The job's exit status: 128 + the number of the signal that ended this launcher, or that of the rank that failed
        first, or the command's own; 1 for a job that has lost a host, or of which nothing has been started.

    Raises:
        LaunchError: mpirun has refused what was ``asked`` of it.
    """
    global _output
    given = (signal.SIGHUP, signal.SIGTSTP, *_AS_SIGTERM)
    ignored = {sign for sign in given if signal.getsignal(sign) == signal.SIG_IGN}  # as nohup has the first one
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
            command, shown = live.shown(command, family, asked, is_alone=ranks == 1)
            _output = shown
            started = None
            if family == "openmpi":
                places = hosts or ([] if elsewhere else [None] * ranks)
                command, started = left_behind.enter_context(listed(command, ranks, places))
            words = MpirunStderr(held=bool(asked), with_banners=family == "srun", shown=shown)
            # In the background it reads an error, and is not stopped.
            blocked = {*before, *ignored, signal.SIGTTIN, signal.SIGTTOU}
            # A Ctrl-C on the terminal must not reach the mpirun of ranks that are to save first.
            apart: dict[str, Any] = {"process_group": 0, "stdin": subprocess.DEVNULL} if usr1_has_come else {}
            mpirun = subprocess.Popen(
                command, env=environ, preexec_fn=bound(blocked), stdout=None if shown is None else shown.end,
                stderr=words.end, **apart,
            )  # fmt: skip
            with contextlib.closing(Watch(mpirun.pid, ranks - elsewhere, watched, servers, elsewhere)) as watch:
                if guards is not None:
                    guards.attach(watch)
                words.attach(watch)
                if shown is not None:
                    shown.attach(watch)
                if started is not None:
                    started.attach(watch, guards)
                goes_on = "--with-ft" in command  # Open MPI's, with ULFM: who survives decides
                ended_by, was_stuck = _forward_signals(
                    mpirun, watch, usr1_has_come, guards, words, started, verbose, goes_on, family, interface
                )  # fmt: skip
                failed = watch.failed  # while mpirun ran
                if shown is not None:
                    shown.drain(_waiting_for_reader(watch, ended_by))
                # Guards' words on ranks may come after it has ended, and ranks whose job was aborted end after MPICH's.
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
        raise LaunchError("launch --mpi-args", expected=f"arguments of {command[0]}", got=f"{asked!r}: {refusal}")
    words.show()
    if ended_by is not None:
        return 128 + ended_by
    other_python = missing_module(words.no_module) if mpirun.returncode and words.no_module is not None else None
    if lost:
        for each in lost.values():
            say(each)
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
    if line is None or status == LOST_CONNECTION_STATUS:  # who has left that one is not known
        words.show_banners()
        if guards is not None:
            guards.show_banners()
    if line:
        say(line)
    elif line is None and status and is_blind:
        why = "those of other hosts are not watched inside a batch job"
        say(f"mpirun has ended with status {status}; which rank failed first is not known: {why}")
    elif line is None and status and not words.has_spoken:
        say(f"mpirun has ended with status {status}, and has not said why")
    if other_python is not None:
        say(other_python)
    return status


def _waiting_for_reader(watch: Watch, ended_by: int | None) -> Callable[[], bool]:
    """Return what waits for the reader of output for a moment, and says whether to give it up: at a signal that ends
    the job, and a second after one that has ended it."""
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
    """The status of the job, and what is to be said of the rank that failed first: nothing where all have ended alike
    and said why, or have stopped early; None where only mpirun's own words tell.

    Open MPI says of a rank that left with status 0 only what may have happened, of a server not that it is one, not
    always on which host a rank was, and nothing where others have ended well before; and now and then it names another
    one, which has aborted since its connection to the first had closed. So where it ``is_blind``, and knows nothing of
    ranks of other hosts, only a rank that has called MPI_Abort, or one of this host that left with the job's status, is
    believed.
    """
    first, named = first_failure(ends, code, _bereft(family)), words.named
    if first is None and words.have_closed:  # mpirun had heard of the abort, and killed that rank before it ended
        ends = [end._replace(status=LOST_CONNECTION_STATUS << 8) if end.rank == words.aborted else end for end in ends]
        first = first_failure(ends, code, LOST_CONNECTION_STATUS)
    has_failed = code != 0 or any(end.status != 0 for end in ends)  # of a job that goes on (ULFM) the code may be 0
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
        return ends[0].exit_status, "all ranks were ended by SIGTERM"  # by which MPICH's mpirun ends none
    is_known = named is not None or words.aborted is not None or words.are_unread
    if family == "openmpi" and code == 1 and not is_known and _have_all_heard(ends):
        return code, "mpirun has ended all ranks: it was told to by a signal, which it does not name"
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
    """Whether every rank has ended in a way in which mpirun ends them, by SIGTERM and then SIGKILL."""
    return bool(ends) and all(end.exit_status in (*TOLD, 128 + signal.SIGKILL) for end in ends)


def _with_reason(line: str | None, status: int, words: MpirunStderr) -> str | None:
    """Return the launcher's last line with the cause: the error of the rank that has reported one, where the status is
    that of an error; nothing where the line above is that report."""
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
    """The status of the tasks that failed first; they are named unless all have failed alike, or have stopped early.

    Of a rank that has aborted the job srun has the status, ``code``, and often kills it before it has ended, too.
    """
    failed = words.failed()
    if words.missing is not None:
        say(_by_watchdog(words.missing))
        return 1
    if failed is not None and failed.is_killed and code < 128 and code != LOST_CONNECTION_STATUS:
        say(f"a rank has aborted the job with status {code}")
        return code
    if failed is not None and words.may_have_ended(failed):
        say("a rank was killed, and srun has ended others so, too: which one failed first is not known")
    elif failed is not None and failed.status != _STOPPED and ranks > 1 and not words.have_ended_alike():
        line = _with_reason(str(failed), failed.status, words)
        if line:
            say(line)
    return failed and failed.status


def _by_watchdog(missing: str) -> str:
    """It is not the fault of the rank that has waited."""
    return f"the watchdog has ended the job: {missing}"


def _as_named(end: End, named: FailedRank) -> End:
    return end if named.status is None else end._replace(status=named.status)


def _bereft(family: str) -> int | None:
    return LOST_CONNECTION_STATUS if family == "openmpi" else None


def _failed(seen: End | None, ends: Sequence[End], family: str) -> End | None:
    """The rank that failed first, of which an mpirun that had to be killed has said nothing."""
    if seen is None:
        return None
    found = (first_failure(ends, code, _bereft(family)) for code in (0, seen.exit_status))
    return next(filter(None, found), seen)


def _forward_signals(
    mpirun: subprocess.Popen[bytes],
    watch: Watch,
    usr1_has_come: Callable[[], bool] | None,
    guards: Guards | None,
    words: MpirunStderr,
    started: Started | None,
    verbose: bool,
    goes_on: bool,
    family: str,
    interface: str | None,
) -> tuple[int | None, bool]:
    """Waits for ``mpirun``; returns the signal that ended the job, None where it ended by itself, and whether all ranks
    had ended by themselves, and mpirun had not.

    Ranks that take SIGUSR1 (``usr1_has_come``) get the one of `SAVE_AT` at the first ending signal, to save and end.
    A second ending signal, or the end of the grace time after the first one, after a rank has failed, unless the job
    ``goes_on`` then, after a host was lost or after the last worker has ended, kills what has not ended by then.
    """
    ended_by: int | None = None
    deadline = float("inf")
    is_held, passed_on = usr1_has_come is not None and usr1_has_come(), int(signal.SIGUSR1)
    is_told_to_end, is_killed, was_stuck, num_said = False, False, False, 0
    saves_since_s: float | None = None
    while mpirun.poll() is None:
        received = watch.wait(min(_HOLD_S if is_held else 1.0, max(0.0, deadline - time.monotonic())))
        is_held = is_held and not watch.notified(passed_on)
        words.look()
        if started is not None:
            started.look()
        if interface is not None and watch.starts:  # mpirun has begun to listen before it starts a rank
            keep_to_interface(interface, mpirun.pid)
            interface = None
        if verbose:
            num_said = _tell_of_starts(watch, num_said)
        if guards is not None:
            guards.beat()
            if guards.lost and not is_told_to_end:
                mpirun.terminate()
                deadline, is_told_to_end = min(deadline, time.monotonic() + _LOST_GRACE_S), True
        if watch.failed is not None and not goes_on:  # Open MPI's now and then waits for ranks that are in MPI_Finalize
            deadline = min(deadline, watch.failed.at_s + _FAILED_GRACE_S)
        gone_s = watch.all_gone_at_s  # of ranks that all end at once Open MPI's now and then notices none, or not all
        if gone_s is not None and time.monotonic() >= gone_s + _GRACE_S and _output_is_read():
            deadline = 0.0 if watch.nothing_is_left() else deadline
        alone_s = watch.servers_alone_since_s  # those of a program that has never come to hpcdp.init()
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
                    why = "all workers have ended, and the servers, whom only hpcdp.init() tells, have not"
                    say(f"{why} in {_GRACE_S:g} s: killed")
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
            say(f"{signal.Signals(ended_by).name}: the run is saved before it ends; a second one ends it at once")
        elif received is not None and received.number in (*FORWARDED, *_AS_SIGTERM):
            if saves_since_s is not None and time.monotonic() < saves_since_s + _TWICE_S:
                continue
            if received.number in (*ENDING, *_AS_SIGTERM):
                deadline = time.monotonic() + _GRACE_S if ended_by is None else 0.0
                ended_by = ended_by or received.number
            # Ctrl-C on a terminal has reached mpirun already, which takes a second SIGINT for an order to die at once;
            # a terminal that is closed tells the session's leader alone.
            if received != (signal.SIGINT, _SI_KERNEL):
                mpirun.send_signal(signal.SIGTERM if received.number in _AS_SIGTERM else received.number)
    if mpirun.returncode < 0 and not is_killed and ended_by is None and watch.failed is None:
        say(f"{'srun' if family == 'srun' else 'mpirun'} was killed by {signal.Signals(-mpirun.returncode).name}")
    return ended_by, was_stuck


def _stop_beside(mpirun: subprocess.Popen[bytes]) -> None:
    """Ctrl-Z: ``mpirun``, which has got it, too, stops the ranks, and this process stops until a shell says fg or bg.

    Open MPI's mpirun would run on, and be stopped where it reads from the terminal, which is the shell's now; after fg
    it would sit in that read until a line is typed, and neither show what ranks print nor take Ctrl-C.
    """
    time.sleep(_TELL_S)
    mpirun.send_signal(signal.SIGSTOP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.raise_signal(signal.SIGTSTP)  # nothing where no shell could continue it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})
    mpirun.send_signal(signal.SIGCONT)


def _output_is_read() -> bool:
    """Whether it is not for who reads standard output, such as a pager, that mpirun waits."""
    poll = select.poll()
    poll.register(1, select.POLLOUT)
    return bool(poll.poll(0))


def _tell_of_starts(watch: Watch, num_said: int) -> int:
    for start in watch.starts[num_said:]:
        if start.host is None:
            cores = launch_hosts.cores_of(start.pid) or "unknown: it has ended"
            say(f"{watch.name(start.rank)} is pid {start.pid} on {socket.gethostname()}, cores {cores}")
    return len(watch.starts)


_output: live.Shown | None = None
"""What the ranks of the last job write: what is said here begins a line below that."""


def say(what: object) -> None:
    """Writes a line of the launcher's own to stderr."""
    if _output is not None:
        _output.break_line()
    with contextlib.suppress(OSError):  # the terminal may be closed
        to_stderr(f"hpcdp launch: {what}")
