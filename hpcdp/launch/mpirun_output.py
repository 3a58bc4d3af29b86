"""What mpirun and its daemons write, sorted into the program's lines and causes.

What mpirun says at length of a rank that has failed is kept back, as the launcher says it in a line.

It is shown where the launcher does not: whatever differs in a word from what is known here passes as it comes.

What mpirun writes to stderr although nothing is wrong is left out, to the letter; all else passes as it comes.

What mpirun or srun says on stderr, copied on and searched: of ranks on other hosts often nothing else tells.

Of a host that it has lost Open MPI's mpirun says so, and ends with status 0. srun says of each task how it has ended,
and has the largest status of all, also of those that the library ended because another one had failed. Where mpirun may
refuse its arguments what it says is kept until a rank runs: a page of text is not what the launcher shows then.

The end of a job: its exit status and the cause.

How a command that has failed says why and ends, alone or as a rank of a job.

Which of the ends of a job's ranks was the cause of the others: mpirun kills ranks for it, and others leave for it.

mpirun itself says nothing of it, or names a rank that it has killed. See `hpcdp.launch.process_monitor` for how ends
are seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from ..core.environment import launched_rank, launched_ranks
from ..errors import ConfigError, HpcdpError, LaunchError, Terminated, report_directly
from .live import Shown
from .process_monitor import End, Watch, name_of

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""The statuses after Ctrl-C and SIGTERM, as in a shell."""

_OF_ALL_S, _OF_SOME_S = 1.0, 0.2


def fail(reason: object, status: int, *, by_all: bool = False) -> int:
    """Write the reason on one line of stderr; end a rank of a job here, without MPI_Finalize, which waits for all.

    Rank 0 reports first: where all ranks failed alike, mpirun ends the others before they repeat it, and where that is
    certain they report nothing. The launcher reports an interrupt.

    Args:
        reason: an error, or a text.
        status: the exit status.
        by_all: whether all ranks fail so; an `HpcdpError` says it itself (``is_on_every_rank``).

    Returns:
        ``status``, outside a job.
    """
    rank = launched_rank()
    by_all = by_all or (isinstance(reason, HpcdpError) and reason.is_on_every_rank)
    if rank:
        time.sleep(_OF_ALL_S if by_all else _OF_SOME_S)
    if rank is None or (status not in (INTERRUPTED, TERMINATED) and not (rank and by_all)):
        is_alone = rank is None or launched_ranks() == 1
        of_each = by_all or isinstance(reason, ConfigError | LaunchError)  # what was asked wrongly is so for each rank
        is_named = isinstance(reason, HpcdpError) and reason.rank is not None
        who = "" if is_alone or of_each or is_named else f"rank {rank}: "
        with contextlib.suppress(OSError):  # the terminal may be closed: that may be why it ends
            report_directly(f"hpcdp: {who}{reason}")
    if rank is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def end_early(error: KeyboardInterrupt | OSError, what: str) -> int:
    """End the command ``what`` after Ctrl-C or SIGTERM, or where its standard output takes no more; raise other errors.

    Returns:
        The status, outside a job.
    """
    if isinstance(error, Terminated):
        return fail("ended by SIGTERM", TERMINATED)
    if isinstance(error, KeyboardInterrupt):
        return fail("interrupted", INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        lead_nowhere(sys.stdout.fileno())  # Python flushes it once more when it ends
        return 128 + signal.SIGPIPE
    if _can_be_written(sys.stdout):
        raise error
    lead_nowhere(sys.stdout.fileno())
    return fail(HpcdpError(what, where="standard output", got=error.strerror), 1)


def lead_nowhere(descriptor: int) -> None:
    """What is written to ``descriptor`` from now on is lost, without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == descriptor:
        os.set_inheritable(nowhere, True)
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _can_be_written(stream: TextIO) -> bool:
    try:
        print(file=stream, flush=True)
    except OSError:
        return False
    return True


_KILLS = (signal.SIGKILL, signal.SIGTERM)
"""What mpirun ends the other ranks with."""
_BEFORE_S, _AFTER_S = 1.0, 0.05
"""So long before, and after, a rank that mpirun has killed the one that it was killed for may have ended.

Open MPI takes a quarter of a second to kill. MPICH kills when a rank's connection closes, just before the rank has
ended: on a machine with fewer cores than ranks it now and then ends after one that was killed for it.
"""
TOLD = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""What programs end with that take mpirun's SIGTERM, as `hpcdp train` does."""
_BEREFT_S = 0.2
"""So long after ranks that leave because another has gone that one may be seen to end; Open MPI kills later."""
LOST_CONNECTION_STATUS = 14
"""The exit status of Open MPI's ranks whose connection to another has closed."""
_HYDRA_FAILED = 255
"""The status of MPICH's mpirun where a rank that a signal has ended ran on another host."""


def first_failure(ends: Sequence[End], code: int, bereft: int | None = None) -> End | None:
    """The end that made mpirun end the others, None where mpirun has ended a job in which MPI_Abort was called.

    Of several ranks that all were killed it is the first that was seen to end, which in rare cases under MPICH (see
    `_AFTER_S`) is one that mpirun killed.

    Args:
        ends: the ends of the ranks, in order.
        code: mpirun's exit status. MPICH's is often that of a rank that it killed.
        bereft: the exit status of ranks that leave because the connection to another has closed; they may be seen to
            end before it. None: there is none.
    """
    if bereft is not None:
        left = next((end for end in ends if end.exit_status == bereft), None)
        cause = None if left is None else _left_others(ends, left, bereft)
        if cause is not None:
            return cause
    first = next((end for end in ends if end.status != 0), None)
    if first is not None and first.exit_status in TOLD and bereft is not None:  # MPICH's mpirun ends none by SIGTERM
        first = _told_of_later(ends, first)
    if first is not None and first.status is None:  # it may have ended well
        told = (end for end in ends if end.status and not _killed(end.status) and end.exit_status == code)
        return next(told, first)
    if first is None or first.status is None or not os.WIFSIGNALED(first.status):
        return first
    sign = os.WTERMSIG(first.status)
    if not _killed(first.status):
        # A rank in MPI_Finalize may crash when another aborts the job, and be gone before it.
        aborted = (end for end in ends if end.status and end.exit_status == code != 128 + sign)
        return next((end for end in aborted if end.at_s - first.at_s < _BEFORE_S), first)
    if bereft is None and sign == signal.SIGKILL:  # MPICH's mpirun ends ranks by no other signal
        told = (end for end in ends if end.status == signal.SIGTERM and end.host != first.host)
        other = next((end for end in told if end.at_s - first.at_s < _BEFORE_S), None)
        if other is not None:
            return other
    of_themselves = [
        end
        for end in ends
        if -_AFTER_S < first.at_s - end.at_s < _BEFORE_S
        and end.status is not None
        and not _killed(end.status)
        and end.exit_status not in TOLD
        and not (bereft is None and code == sign and _has_crashed_for(end, first))
    ]
    failed = next((end for end in of_themselves if end.status), None)
    if failed is not None:
        return failed
    if of_themselves and code in (0, 1, sign):
        return of_themselves[-1]
    return first if code in (sign, 128 + sign, _HYDRA_FAILED, *TOLD) else None


def _left_others(ends: Sequence[End], left: End, bereft: int) -> End | None:
    """The rank for which another has ``left``; where cores are few mpirun's kills may be seen as early.

    mpirun ends ranks by SIGTERM, and a quarter of a second later by SIGKILL; first those on the host of the one that
    has left.
    """

    def doubt(end: End) -> int:
        if end.status and not _killed(end.status) and end.exit_status not in TOLD:
            return 0
        statuses = [(0,), (128 + signal.SIGKILL,), TOLD]
        doubted = next(number for number, each in enumerate(statuses) if end.exit_status in each)
        return 1 + 2 * doubted + (end.host == left.host and end.at_s > left.at_s - _AFTER_S)

    others = (end for end in ends if end.status is not None and end.exit_status != bereft)
    return min((end for end in others if end.at_s - left.at_s < _BEREFT_S), key=doubt, default=None)


def _told_of_later(ends: Sequence[End], first: End) -> End:
    """The rank for which mpirun has told ``first`` to end, where another host tells of it later; else ``first``."""

    def is_cause(end: End) -> bool:
        is_elsewhere = end.host != first.host and end.at_s - first.at_s < _BEFORE_S
        return is_elsewhere and bool(end.status) and end.exit_status not in TOLD

    causes = [end for end in ends if is_cause(end)]
    return min(causes, key=lambda end: _killed(end.status or 0), default=first)


def _has_crashed_for(end: End, first: End) -> bool:
    """Return whether a rank of MPICH may have crashed because ``first``, on another host, has gone.

    The caller knows that mpirun's status is not that of the crash.
    """
    return end.status is not None and os.WIFSIGNALED(end.status) and end.host != first.host


def _killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) in _KILLS


_BANNERS_RULE = b"-" * 74 + b"\n"
_MOST = 4000
_FIELDS = {
    "MPIRUN": "(?:prterun|mpirun|mpiexec|orterun)",
    "NUMBER": "-?[0-9]+",
    "WORD": r"\S+",
    "WORDS": "[\\w /-]{1,100}",
}
_BANNERS = """
MPIRUN detected that one or more processes exited with non-zero status, thus causing the job to be terminated.
The first process to do so was: Process name: WORD Exit code: NUMBER

MPIRUN noticed that process rank NUMBER with PID NUMBER on node WORD exited on signal NUMBER (WORDS).

MPIRUN has exited due to process rank NUMBER with PID NUMBER on node WORD calling "abort". This may have caused other
processes in the application to be terminated by signals sent by MPIRUN (as reported here).

MPIRUN has exited due to process rank NUMBER with PID NUMBER on node WORD exiting improperly. There are three reasons
this could occur: 1. this process did not call "init" before exiting, but others in the job did. This can cause a job to
hang indefinitely while it waits for all processes to call "init". By rule, if one process calls "init", then ALL
processes must call "init" prior to termination. 2. this process called "init", but exited without calling "finalize".
By rule, all processes that call "init" MUST call "finalize" prior to exiting or it will be considered an "abnormal
termination" 3. this process called "MPI_Abort" or "prte_abort" and the mca parameter prte_create_session_dirs is set to
false. In this case, the run-time cannot detect that the abort call was an abnormal termination. Hence, the only error
message you will receive is this one. This may have caused other processes in the application to be terminated by
signals sent by MPIRUN (as reported here). You can avoid this message by specifying -quiet on the MPIRUN command line.

MPI_ABORT was invoked on rank NUMBER in communicator WORDS Proc: WORD Errorcode: NUMBER NOTE: invoking MPI_ABORT causes
Open MPI to kill all MPI processes. You may or may not see output from other processes, depending on exactly when Open
MPI kills them.

An MPI communication peer process has unexpectedly disconnected. This usually indicates a failure in the peer process
(e.g., a crash or otherwise exiting without calling MPI_FINALIZE first). Although this local MPI process will likely now
behave unpredictably (it may even hang or crash), the root cause of this problem is the failure of the peer -- that is
what you need to investigate. For example, there may be a core file that you can examine. More generally: such peer
hangups are frequently caused by application bugs or other external events. Local host: WORD Local PID: NUMBER Peer
host: WORD

PRTE has lost communication with a remote daemon. HNP daemon : WORD on node WORD Remote daemon: WORD on node WORD This
is usually due to either a failure of the TCP network connection to the node, or possibly an internal failure of the
daemon itself. We cannot recover from this failure, and therefore will terminate the job.
"""
"""What Open MPI 5 writes between two rules, whatever its lines are."""

_FIRST_LINE = re.compile(
    rb"\w+ (?:detected|noticed|has exited) .*|MPI_ABORT was invoked on rank .*|"
    rb"An MPI communication peer process has .*|PRTE has lost communication .*"
)

# Of a rank of Open MPI whose connection to another has closed, which it has the status 14 for.
_BEREFT = [
    re.compile(rb"\[\S+\] \*\*\* " + words + rb"\r?\n")
    for words in (
        rb"An error occurred in Socket closed",
        rb"reported by process \[[0-9]+,[0-9]+\]",
        rb"on a NULL communicator",
        rb"Unknown error",
        rb"MPI_ERRORS_ARE_FATAL \(processes in this communicator will now abort,",
        rb"   and MPI will try to terminate your MPI job as well\)",
    )
]

# hydra and its daemons, of each other, once a rank has failed; and Open MPI, which counts what it does not repeat.
_BANNERS_LINE = re.compile(
    rb"[0-9]+ more process(?:es have| has) sent help message \S+ / .*\n|"
    rb"\[(?:mpiexec|proxy:[0-9]+)@[^\]\s]+\] \w+ \([^()]*\): "
    rb"(?:assert \(!closed\) failed|callback returned error status|demux engine error waiting for event|"
    rb"one of the processes terminated badly; aborting|launcher returned error waiting for completion|"
    rb"process manager error waiting for completion|write error \(Broken pipe\)|sock write error|"
    rb"error sending hdr upstream)\r?\n"
)
_BANNERS_BEGINNING = re.compile(rb"\[(?:mpiexec|proxy:[0-9]+)@.{0,300}")  # which may come alone


def _pattern(banner: str) -> str:
    return re.sub(rf"\b({'|'.join(_FIELDS)})\b", lambda field: _FIELDS[field[0]], re.escape(" ".join(banner.split())))


_BETWEEN_RULES = re.compile("|".join(map(_pattern, _BANNERS.split("\n\n"))).encode())


class Banners:
    """Takes what has come and returns what is to be shown of it."""

    def __init__(self) -> None:
        self.kept = b""
        """What has been kept back."""
        self._block = b""  # the beginning of what may be a banner
        self._begun = b""  # that of a line
        self._in_line = False

    def pass_on(self, received: bytes) -> bytes:
        """Without known banners; what may be one is kept until its end has come."""
        shown = []
        received, self._begun = self._begun + received, b""
        for piece in re.findall(rb"[^\n]*\n|[^\n]+", received):
            if self._block:
                is_known = _is_known(self._block + piece)
                if is_known is not False:
                    self._block += piece
                    if is_known:
                        self.kept += self._block
                        self._block = b""
                    continue
                shown.append(self._block)
                self._in_line = not self._block.endswith(b"\n")
                self._block = b""
            if (piece == _BANNERS_RULE or _BEREFT[0].fullmatch(piece)) and not self._in_line:
                self._block = piece
            elif _BANNERS_LINE.fullmatch(piece) and not self._in_line:
                self.kept += piece
            elif _BANNERS_BEGINNING.fullmatch(piece) and not self._in_line:
                self._begun = piece
            else:
                shown.append(piece)
                self._in_line = not piece.endswith(b"\n")
        return b"".join(shown)

    def end(self) -> bytes:
        """What may yet become a banner, once nothing more will come."""
        left, self._block, self._begun = self._block + self._begun, b"", b""
        return left


def begins_banner(line: bytes | bytearray) -> bool:
    """Whether the beginning of a line may become that of a banner."""
    return (len(line) <= len(_BANNERS_RULE) and _BANNERS_RULE.startswith(bytes(line))) or _BANNERS_BEGINNING.fullmatch(
        line
    ) is not None


def _is_known(block: bytes) -> bool | None:
    """Whether what begins as a banner is a known one; None where only more of it tells."""
    if not block.startswith(_BANNERS_RULE):
        lines = block.splitlines(keepends=True)
        fits = all(known.fullmatch(line) for known, line in zip(_BEREFT, lines, strict=False))
        return fits and (len(lines) == len(_BEREFT) or None)
    text = block[len(_BANNERS_RULE) :]
    first, newline, _ = text.partition(b"\n")
    if not newline and len(text) < len(_BANNERS_RULE):
        return None
    if not _FIRST_LINE.fullmatch(first) or len(block) > _MOST:
        return False
    if not text.endswith(b"\n" + _BANNERS_RULE):
        return None
    return _BETWEEN_RULES.fullmatch(b" ".join(text[: -len(_BANNERS_RULE)].split())) is not None


_NOISE = [
    # The daemon's ssh has begun to run before its parent made it the leader of its group, which it is by then.
    rb"\[[^\]\s]+:[0-9]+\] plm:ssh: Warning: setpgid\([0-9]+,[0-9]+\) failed in parent with errno=Permission denied"
    rb"\(13\)",
    # The server of PMIx, of a rank that has ended while it was to be told something.
    rb"\[[^\]\s]+:[0-9]+\] PMIX ERROR: PMIX_ERR_(UNREACH|NOT_FOUND) in file \S*/"
    rb"(pmix_server|ptl_base_connection_hdlr)\.c at line [0-9]+",
    # Where Slurm binds nobody, of the srun that starts Open MPI's daemons, which asks for none.
    rb"srun: cluster configuration lacks support for cpu binding",
    # libevent, of a connection to a rank or a daemon that has ended meanwhile.
    rb"\[warn\] Epoll (ADD|MOD|DEL)\([0-9]+\) on fd [0-9]+ failed\. *Old events were .*: (Bad file descriptor|"
    rb"No such file or directory|Operation not permitted)",
    # Where who reads its standard output has gone, at the next line that is to be shown: it ends the job then.
    rb"\[[^\]\s]+:[0-9]+\] p\w+: SIGPIPE detected - aborting",
    # At a second Ctrl-C, which ends the launcher, too.
    rb"Abort is in progress\.\.\.hit ctrl-c again to forcibly terminate",
    rb"p\w+: abort is already in progress\.\.\.hit ctrl-c again to forcibly terminate",
    # A collective that was started before a rank died, under ULFM: 75 is MPI_ERR_PROC_FAILED, which its caller gets.
    rb"NBC_Progress: an error 75 was found during schedule 0x[0-9a-f]+ at row-offset [0-9]+ - aborting the schedule",
]
_LINE = re.compile(rb"(?:" + b"|".join(_NOISE) + rb")\r?\n")
_BEGINNING = re.compile(
    rb"\[[\w.-]*(:[0-9]*(\] ?([pP].*)?)?)?|\[warn\] ?(E.*)?|NB?|NBC.*|A|Abo?r?t?|Abort i?.*|s|sr|sru|srun(: ?|: c.*)?"
)
_RULE = b"-" * 74 + b"\n"
_LONGEST = 500


class Quiet:
    """Takes what has come and returns what is to be shown of it."""

    def __init__(self) -> None:
        self._kept = b""
        self._line = b""  # what has been shown of the line that has not ended
        self._rules = 0  # two for each message of Open MPI's whose zero has not come

    def pass_on(self, received: bytes) -> bytes:
        """Without lines that are noise; the beginning of what may be one is kept until its end has come."""
        shown = []
        for piece in re.findall(rb"[^\n]*\n|[^\n]+", self._kept + received):
            self._kept = b""
            # It ends a message of Open MPI's; what others have written may come before it.
            while self._rules >= 2 and not self._line and piece.startswith(b"\0"):
                piece = piece[1:]
                self._rules -= 2
            if not piece:
                continue
            if not self._line and not piece.endswith(b"\n") and may_be_noise(piece):
                self._kept = piece
                break
            if self._line or not _LINE.fullmatch(piece):
                shown.append(piece)
            line = (self._line + piece)[-_LONGEST:]
            self._rules += line == _RULE
            self._line = b"" if line.endswith(b"\n") else line
        return b"".join(shown)

    def end(self) -> bytes:
        """What was kept, once nothing more will come."""
        kept, self._kept = self._kept, b""
        return kept


def may_be_noise(line: bytes | bytearray) -> bool:
    """Whether the beginning of a line may become one that is left out."""
    return len(line) < _LONGEST and _BEGINNING.fullmatch(line) is not None


# What is looked for ends behind a name or a number: half of it may come before the other half.
_LOST = re.compile(rb"lost communication with a remote daemon\..{0,400}?Remote daemon: .*? on node (\S+)\s", re.DOTALL)
_TASK = re.compile(
    rb"srun: error: (\S+): tasks? ([0-9,\[\]-]+): (?:Exited with exit code ([0-9]{1,9})|(.+?))(?: \(.*\))?\n"
)
_NODE_FAILED = re.compile(rb"srun: error: Node failure on (\S+)\n")
_NAMED = (
    re.compile(
        rb"process rank (?P<rank>[0-9]{1,9}) with PID (?P<pid>[0-9]{1,9}) on node \S+\s+exited\s+on\s+"
        rb"signal (?P<signal>[0-9]{1,9})\D"
    ),
    re.compile(rb"Process name: \[[^\]\n]*,(?P<rank>[0-9]{1,9})\]\n +Exit code: +(?P<code>[0-9]{1,9})\s"),
    re.compile(rb"= +PID (?P<pid>[0-9]{1,9}) RUNNING AT "),
)
_ABORTED = re.compile(
    rb"process rank ([0-9]{1,9}) with PID [0-9]{1,9} on node \S+\s+calling\s+\"abort\"|"
    rb"^Abort\([0-9]{1,9}\) on node [0-9]{1,9} \(rank ([0-9]{1,9}) in comm 0\): application called MPI_Abort",
    re.MULTILINE,
)
_INVOKED = re.compile(
    rb"MPI_ABORT was invoked on rank ([0-9]{1,9}) in communicator MPI_COMM_WORLD\s(?:\s+Proc: .*\n)?\s*"
    rb"(?:Errorcode: |with errorcode )([0-9]{1,9})\D|"
    rb"^Abort\(\d{1,9}\) on node \d{1,9} \(rank (\d{1,9}) in comm 0\): application called MPI_Abort\(MPI_COMM_WORLD, "
    rb"([0-9]{1,9})\)",
    re.MULTILINE,
)
_UNREAD = b": SIGPIPE detected - aborting\n"
_CLOSED = b"*** An error occurred in Socket closed"
# hpcdp.comm.watchdog, of the ranks that another one has waited for in vain
_MISSING = re.compile(
    rb"rank [0-9]{1,9} of [0-9]{1,9}: [^\n]* (?:has not ended in [0-9.]+ s: ([^\n]+)\n[^\n]*the job ends now|"
    rb"cannot end: ([^\n]+); the job ends now)"
)
# Python's, of an import, and of -m: "python: No module named hpcdp"
_NO_MODULE = re.compile(rb"No module named '?([A-Za-z_]\w*)")
# hpcdp.launch.mpirun_output and hpcdp.comm.mpi, where --tag-output may have led the line by its rank
_TAG = rb"(?:\[[^\]\s]*\](?:<stderr>:)? |[0-9]{1,9}: )?"
_REASON = re.compile(_TAG + rb"hpcdp: ")
_FAILED = re.compile(_TAG + rb"(rank [0-9]{1,9} of [0-9]{1,9}|server [0-9]{1,9} \(rank [0-9]{1,9}\)) failed:")
_TRACEBACK = re.compile(_TAG + rb"Traceback \(most recent call last\):")
_ERROR = re.compile(_TAG + rb"([^\W\d][\w.]*(?::.*)?)")
_WORDS_RULE = re.compile(rb"^-{74}\n", re.MULTILINE)
_OF_HYDRA = re.compile(rb"^\[(?:mpiexec|proxy)\S*\] \w+ \([^()]*\): (.*)\n", re.MULTILINE)
_HOLD_S = 10.0
_MOST_HELD, _MOST_TOLD = 1 << 16, 300
_KEPT = 1000
_LONGEST_LINE = 10_000
_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)


class FailedRank(NamedTuple):
    """A rank that has failed, as far as mpirun tells: its number, its process, and its status (wait(2))."""

    rank: int | None
    pid: int | None
    status: int | None


class Invoked(NamedTuple):
    """A call of MPI_Abort by a rank's program: the rank, and the status that it asked for."""

    rank: int
    status: int


class Tasks(NamedTuple):
    """Tasks of one host that srun says have ended alike: their numbers as it writes them, and their status, which is
    128 + the number of a signal as in a shell."""

    host: str
    numbers: str
    status: int

    @property
    def is_killed(self) -> bool:
        """Whether srun may have ended them itself."""
        return self.status in _KILLED

    @property
    def how_many(self) -> int:
        """How many they are."""
        runs = re.findall(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", self.numbers)
        return sum(int(last or first) - int(first) + 1 for first, last in runs)

    def __str__(self) -> str:
        sign = self.status - 128
        how = f"killed by {name_of(sign)}" if sign > 0 else f"ended with status {self.status} before the others"
        who, verb = ("rank", "was ") if self.numbers.isdecimal() else ("ranks", "were ")
        return f"{who} {self.numbers} (on {self.host}) {verb if sign > 0 else ''}{how}"


class Reasons:
    """Why ranks say that they have failed, found in the lines of stderr that are shown."""

    def __init__(self) -> None:
        self._begun = b""
        self._speaker: str | None = None
        self._in_traceback = False
        self._last = b""
        self.errors: dict[str, str] = {}
        """The last lines of the tracebacks of ranks, by what those call themselves, the first one first."""

    def read(self, shown: bytes) -> None:
        """Take in what is shown next."""
        *lines, begun = (self._begun + shown).split(b"\n")
        self._begun = begun[-_LONGEST_LINE:]
        for line in lines:
            self._last = line if line.strip() else self._last
            if found := _FAILED.fullmatch(line):
                self._speaker, self._in_traceback = found[1].decode(), False
            elif _TRACEBACK.fullmatch(line):
                self._in_traceback = self._speaker is not None
            elif self._in_traceback and self._speaker is not None and (found := _ERROR.fullmatch(line)):
                self.errors[self._speaker] = found[1].decode(errors="replace")  # of a chain the last one
                self._in_traceback = False

    @property
    def stands_last(self) -> bool:
        """Whether the last line is the reason that a command of hpcdp has given."""
        return _REASON.match(self._last) is not None


class MpirunStderr:
    """A pipe for mpirun's stderr, and what came through it; ``end`` is what mpirun gets, and is closed by `attach`.

    Args:
        held: whether nothing is shown before a rank has been seen, or ten seconds have passed.
        with_banners: whether what mpirun says at length of ranks that have failed is shown as it comes; else
            `show_banners` does it.
        shown: what puts lines of ranks together, where mpirun marks them; else what comes is shown as it is.
    """

    def __init__(self, held: bool = False, with_banners: bool = False, shown: Shown | None = None) -> None:
        self._shown = shown
        self._output = None if shown is None else shown.errors(self._pass_on, self._may_be_shown)
        self._read, self.end = os.pipe()
        os.set_blocking(self._read, False)
        self._quiet, self._kept = Quiet(), b""
        self._banners = None if with_banners else Banners()
        self.has_spoken = False
        """Whether anything has been shown, or is held."""
        self._held: bytes | None = b"" if held else None
        self._until_s = time.monotonic() + _HOLD_S
        self._lost: dict[str, str] = {}
        self.named: FailedRank | None = None
        """The first rank that mpirun has said to have failed."""
        self.aborted: int | None = None
        """The rank that has aborted the job, says mpirun: its program did, or Open MPI when a connection had closed."""
        self.invoked: Invoked | None = None
        """The first call of MPI_Abort that a rank's library has told of; a lost connection makes none."""
        self.have_closed = False
        """Whether a rank of Open MPI has said that its connection to another has closed."""
        self.are_unread = False
        """Whether mpirun has ended the job since who reads its standard output has gone."""
        self.missing: str | None = None
        """Why the watchdog of a rank has ended the job: which ranks have not come, and what is known of them."""
        self.no_module: str | None = None
        """The first module that a Python has not found, the package where it is part of one."""
        self.reasons = Reasons()
        self._of_tasks, self._tasks = b"", list[Tasks]()

    def attach(self, watch: Watch) -> None:
        """From now on ``watch`` copies what comes, as long as it waits."""
        os.close(self.end)
        self._watch = watch
        watch.also(self._read, self._copy)

    def look(self) -> None:
        """Shows what was held, once a rank has been seen or time has passed; called over and over."""
        if self._held is not None and (
            self._watch.starts or time.monotonic() > self._until_s or len(self._held) > _MOST_HELD
        ):
            self.show()

    def show(self) -> None:
        """Shows what is held."""
        held, self._held = self._held, None
        self._write(held or b"", has_spoken=False)

    def lost(self) -> dict[str, str]:
        """What mpirun or srun said of each host that it has lost; called once it has ended."""
        while self._copy():
            pass
        self._watch.no_more(self._read)
        os.close(self._read)
        if self._shown is not None:
            self._shown.finish()
        self._show(self._quiet.end())
        if self._banners is not None:
            self._write(self._banners.end())
        return self._lost

    def show_banners(self) -> None:
        """Shows what mpirun has said of ranks that have failed; called after `lost`."""
        if self._banners is not None:
            self._write(self._banners.kept)

    def refusal(self, is_certain: bool) -> str | None:
        """Why mpirun has started nothing, in its own words, where they have not been shown; called after `lost`.

        Args:
            is_certain: whether it is known that it has started nothing.
        """
        held = self._held or b""
        if not held or not (is_certain or b"unrecogni" in held):
            return None
        if of_hydra := _OF_HYDRA.search(held):
            return of_hydra[1].decode(errors="replace")
        rule = _WORDS_RULE.search(held)
        said = _WORDS_RULE.split(held[rule.end() :])[0] if rule else held
        text = said.decode(errors="replace").partition("\n\nPlease ")[0]
        return " ".join(text.split())[:_MOST_TOLD]

    def failed(self) -> Tasks | None:
        """The tasks that have failed of themselves; called after `lost`.

        srun tells of tasks in no certain order, so these are the first ones that were not ended because another one had
        failed, if there are some; None where srun has told of none. See also `may_have_ended`.
        """
        of_themselves = [
            tasks for tasks in self._tasks if not tasks.is_killed and tasks.status != LOST_CONNECTION_STATUS
        ]
        alone = [tasks for tasks in self._tasks if tasks.is_killed and self._is_alone(tasks)]
        killed = [tasks for tasks in self._tasks if tasks.is_killed]
        return next(iter(of_themselves + alone + killed + self._tasks), None)

    def may_have_ended(self, tasks: Tasks) -> bool:
        """Whether srun may have ended ``tasks`` for another one: it does so by SIGTERM, then by SIGKILL."""
        return tasks.is_killed and not self._is_alone(tasks)

    def _is_alone(self, tasks: Tasks) -> bool:
        """Whether one task alone was ended so, and no other by a signal, or several others by the other one."""
        counts = {status: sum(each.how_many for each in self._tasks if each.status == status) for status in _KILLED}
        others = sum(counts.values()) - counts[tasks.status]
        return counts[tasks.status] == 1 and others != 1

    def have_ended_alike(self) -> bool:
        """Whether all tasks that srun has told of, of several hosts or one, ended by themselves with one status."""
        return (
            len({tasks.status for tasks in self._tasks}) == 1
            and self._tasks[0].status < 128
            and (len(self._tasks) > 1 or not self._tasks[0].numbers.isdecimal())
        )

    def _copy(self) -> bool:
        if self._shown is not None and not self._shown.has_room(self._read, self._copy):
            return False
        try:
            received = os.read(self._read, 1 << 16)
        except BlockingIOError:
            return False
        if not received:
            self._watch.no_more(self._read)
            return False
        if self._output is not None:
            self._output.take(received)
        else:
            self._show(self._quiet.pass_on(received))
            self._hear(received)
        return True

    def _pass_on(self, lines: bytes) -> bytes:
        """What is to be shown of whole lines."""
        self._hear(lines)
        shown = self._quiet.pass_on(lines)
        if self._banners is not None:
            shown = self._banners.pass_on(shown)
        self.has_spoken |= bool(shown)
        if self._held is None:
            return shown
        self._held += shown
        return b""

    def _may_be_shown(self, beginning: bytes | bytearray) -> bool:
        """Whether it is known of the beginning of a line that all of it will be shown."""
        may = self._held is None and not may_be_noise(beginning) and not begins_banner(beginning)
        self.has_spoken |= may
        return may

    def _hear(self, received: bytes) -> None:
        self._kept += received
        for what, pattern in (("mpirun", _LOST), ("Slurm", _NODE_FAILED)):
            while found := pattern.search(self._kept):
                host = found[1].decode(errors="replace")
                self._lost[host] = f"{what} has lost {host}"
                self._kept = self._kept[found.end() :]
        if self.named is None:
            self.named = next(map(_named, filter(None, (each.search(self._kept) for each in _NAMED))), None)
        if self.aborted is None and (found := _ABORTED.search(self._kept)):
            self.aborted = int(found[1] or found[2])
        if self.invoked is None and (found := _INVOKED.search(self._kept)):
            rank, asked = (int(each) for each in found.groups() if each is not None)
            self.invoked = Invoked(rank, asked % 256)
        self.have_closed |= _CLOSED in self._kept
        self.are_unread |= _UNREAD in self._kept
        if self.missing is None and (found := _MISSING.search(self._kept)):
            self.missing = (found[1] or found[2]).decode(errors="replace")
        if self.no_module is None and (found := _NO_MODULE.search(self._kept)):
            self.no_module = found[1].decode()
        self._of_tasks += received
        for found in _TASK.finditer(self._of_tasks):
            host, numbers, code, how = ((each or b"").decode(errors="replace") for each in found.groups())
            status = int(code) if code else _status_of(how)
            self._tasks += [] if status is None else [Tasks(host, numbers, status)]
        self._of_tasks = self._of_tasks[self._of_tasks.rfind(b"\n") + 1 :][-_KEPT:]
        self._kept = self._kept[-_KEPT:]

    def _show(self, what: bytes) -> None:
        if self._banners is not None:
            what = self._banners.pass_on(what)
        self._write(what)

    def _write(self, what: bytes, has_spoken: bool = True) -> None:
        self.has_spoken |= bool(what) and has_spoken
        self.reasons.read(what)
        if self._held is not None:
            self._held += what
        elif self._shown is not None:
            self._shown.show(what)
        else:
            _write(what)


def _write(what: bytes) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, what)


def _named(said: re.Match[bytes]) -> FailedRank:
    found = {name: int(value) for name, value in said.groupdict().items()}
    status = found["code"] << 8 if "code" in found else found.get("signal")
    return FailedRank(found.get("rank"), found.get("pid"), status)


def _status_of(words: str) -> int | None:
    """The status of a task that was ended by the signal that libc describes so; None where that is none."""
    if words == "Out Of Memory":
        return 128 + signal.SIGKILL
    return next((128 + number for number in signal.valid_signals() if signal.strsignal(number) == words), None)
