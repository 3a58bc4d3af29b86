"""The stderr of mpirun and srun: filters, what it reports, and the rank that failed first.

- `Banners` keeps back mpirun's long messages on a failed rank, which the launcher reports in one line. `Quiet` drops
  messages that report no error. Both match known texts exactly; all other output passes unchanged.
- `MpirunStderr` copies and searches stderr, often the only information on ranks of other hosts. Open MPI's mpirun
  reports a lost host there, and exits with status 0. srun reports the end of each task, and exits with the greatest
  status, which may be that of a task that the library ended because another had failed.
- `first_failure` finds the rank whose end caused the others', which mpirun kills or which leave by themselves. mpirun
  does not name it, or names a rank that it has killed. See `hpcdp.launch.process_monitor` for the observation of ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from .process_monitor import End, Watch, name_of
from .rank_output import Shown

_KILLS = (signal.SIGKILL, signal.SIGTERM)
"""The signals with which mpirun ends the other ranks."""
_BEFORE_S, _AFTER_S = 1.0, 0.05
"""Seconds before and after the end of a killed rank in which the rank that caused it may have ended.

Open MPI takes a quarter of a second to kill. MPICH kills when a rank's connection closes, just before the rank has
ended. On a machine with fewer cores than ranks it sometimes ends after one that was killed for it.
"""
TOLD = (128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit statuses of programs that handle mpirun's SIGTERM, as `hpcdp train` does."""
_BEREFT_S = 0.2
"""Seconds after the end of ranks that lost a connection in which its other end may be seen to end; Open MPI's mpirun
kills later."""
LOST_CONNECTION_STATUS = 14
"""The exit status of Open MPI's ranks whose connection to another has closed."""
_HYDRA_FAILED = 255
"""The exit status of MPICH's mpirun if a signal has ended a rank on another host."""


def first_failure(ends: Sequence[End], code: int, bereft: int | None = None) -> End | None:
    """Return the end for which mpirun ended the other ranks; None where mpirun ended the job after MPI_Abort.

    If all ranks were killed, this is the first observed end, which in rare cases under MPICH (see `_AFTER_S`) is one
    that mpirun killed.

    Args:
        ends: the ends of the ranks, in order.
        code: mpirun's exit status. MPICH's is often that of a rank that it killed.
        bereft: the exit status of ranks that leave because their connection to another has closed, and may be seen to
            end before it; None where the library has no such status.
    """
    if bereft is not None:
        left = next((end for end in ends if end.exit_status == bereft), None)
        cause = None if left is None else _left_others(ends, left, bereft)
        if cause is not None:
            return cause
    first = next((end for end in ends if end.status != 0), None)
    if first is not None and first.exit_status in TOLD and bereft is not None:  # MPICH's mpirun sends no SIGTERM
        first = _told_of_later(ends, first)
    if first is not None and first.status is None:  # it may have succeeded
        failures = (end for end in ends if end.status and not _killed(end.status) and end.exit_status == code)
        return next(failures, first)
    if first is None or first.status is None or not os.WIFSIGNALED(first.status):
        return first
    sign = os.WTERMSIG(first.status)
    if not _killed(first.status):
        # A rank in MPI_Finalize may crash when another aborts the job, and end before it.
        aborted = (end for end in ends if end.status and end.exit_status == code != 128 + sign)
        return next((end for end in aborted if end.at_s - first.at_s < _BEFORE_S), first)
    if bereft is None and sign == signal.SIGKILL:  # MPICH's mpirun sends no other signal
        remote = (end for end in ends if end.status == signal.SIGTERM and end.host != first.host)
        other = next((end for end in remote if end.at_s - first.at_s < _BEFORE_S), None)
        if other is not None:
            return other
    not_killed = [
        end
        for end in ends
        if -_AFTER_S < first.at_s - end.at_s < _BEFORE_S
        and end.status is not None
        and not _killed(end.status)
        and end.exit_status not in TOLD
        and not (bereft is None and code == sign and _has_crashed_for(end, first))
    ]
    failed = next((end for end in not_killed if end.status), None)
    if failed is not None:
        return failed
    if not_killed and code in (0, 1, sign):
        return not_killed[-1]
    if not_killed and bereft is None and code == _HYDRA_FAILED and not_killed[-1].host == first.host:
        return not_killed[-1]  # Intel MPI's mpirun, after a rank that has left without MPI_Finalize
    return first if code in (sign, 128 + sign, _HYDRA_FAILED, *TOLD) else None


def _left_others(ends: Sequence[End], left: End, bereft: int) -> End | None:
    """Return the rank whose end made another one leave (``left``); with few cores mpirun's kills may be seen as early.

    mpirun ends ranks by SIGTERM, and a quarter of a second later by SIGKILL, those on the host of ``left`` first.
    """

    def doubt(end: End) -> int:
        if end.status and not _killed(end.status) and end.exit_status not in TOLD:
            return 0
        groups = [(0,), (128 + signal.SIGKILL,), TOLD]
        doubted = next(number for number, statuses in enumerate(groups) if end.exit_status in statuses)
        return 1 + 2 * doubted + (end.host == left.host and end.at_s > left.at_s - _AFTER_S)

    candidates = (end for end in ends if end.status is not None and end.exit_status != bereft)
    return min((end for end in candidates if end.at_s - left.at_s < _BEREFT_S), key=doubt, default=None)


def _told_of_later(ends: Sequence[End], first: End) -> End:
    """Return the rank for which mpirun has ended ``first`` if another host reports it later; else ``first``."""

    def is_cause(end: End) -> bool:
        is_elsewhere = end.host != first.host and end.at_s - first.at_s < _BEFORE_S
        return is_elsewhere and bool(end.status) and end.exit_status not in TOLD

    causes = [end for end in ends if is_cause(end)]
    return min(causes, key=lambda end: _killed(end.status or 0), default=first)


def _has_crashed_for(end: End, first: End) -> bool:
    """Return whether a rank of MPICH may have crashed because of the end of ``first``, on another host.

    The caller has checked that mpirun's status is not that of the crash.
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
"""Open MPI 5's messages between two rules, whatever their line breaks."""

_FIRST_LINE = re.compile(
    rb"\w+ (?:detected|noticed|has exited) .*|MPI_ABORT was invoked on rank .*|"
    rb"An MPI communication peer process has .*|PRTE has lost communication .*"
)

# Printed by a rank of Open MPI whose connection to another has closed, before it exits with status 14.
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

# Open MPI's count of suppressed messages; messages of hydra and its daemons about each other after a rank's failure.
_BANNERS_LINE = re.compile(
    rb"[0-9]+ more process(?:es have| has) sent help message \S+ / .*\n|"
    rb"\[(?:mpiexec|proxy:[0-9]+)@[^\]\s]+\] \w+ \([^()]*\): "
    rb"(?:assert \(!closed\) failed|callback returned error status|demux engine error waiting for event|"
    rb"one of the processes terminated badly; aborting|launcher returned error waiting for completion|"
    rb"process manager error waiting for completion|write error \(Broken pipe\)|sock write error|"
    rb"error sending hdr upstream)\r?\n"
)
_BANNERS_BEGINNING = re.compile(rb"\[(?:mpiexec|proxy:[0-9]+)@.{0,300}")  # the rest may come later


def _pattern(banner: str) -> str:
    return re.sub(rf"\b({'|'.join(_FIELDS)})\b", lambda field: _FIELDS[field[0]], re.escape(" ".join(banner.split())))


_BETWEEN_RULES = re.compile("|".join(map(_pattern, _BANNERS.split("\n\n"))).encode())


class Banners:
    """A filter that keeps back mpirun's known long messages on failed ranks."""

    def __init__(self) -> None:
        self.kept = b""
        """The messages that were kept back."""
        self._block = b""  # the beginning of what may be a banner
        self._begun = b""  # that of a line
        self._in_line = False

    def pass_on(self, received: bytes) -> bytes:
        """Return output without known messages; a possible beginning of one is held until it can be decided."""
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
        """Return the held output at end of file."""
        left, self._block, self._begun = self._block + self._begun, b"", b""
        return left


def begins_banner(line: bytes | bytearray) -> bool:
    """Return whether the beginning of a line may be that of a message of `Banners`."""
    return (len(line) <= len(_BANNERS_RULE) and _BANNERS_RULE.startswith(bytes(line))) or _BANNERS_BEGINNING.fullmatch(
        line
    ) is not None


def _is_known(block: bytes) -> bool | None:
    """Return whether a block is a known message; None where more of it is needed to decide."""
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
    # The daemon's ssh ran before its parent made it a group leader, which it has become by then.
    rb"\[[^\]\s]+:[0-9]+\] plm:ssh: Warning: setpgid\([0-9]+,[0-9]+\) failed in parent with errno=Permission denied"
    rb"\(13\)",
    # PMIx's server, about a rank that ended before it received a message.
    rb"\[[^\]\s]+:[0-9]+\] PMIX ERROR: PMIX_ERR_(UNREACH|NOT_FOUND) in file \S*/"
    rb"(pmix_server|ptl_base_connection_hdlr)\.c at line [0-9]+",
    # The srun that starts Open MPI's daemons, which requests no binding, where Slurm does not support it.
    rb"srun: cluster configuration lacks support for cpu binding",
    # libevent, about the connection to a rank or daemon that has ended meanwhile.
    rb"\[warn\] Epoll (ADD|MOD|DEL)\([0-9]+\) on fd [0-9]+ failed\. *Old events were .*: (Bad file descriptor|"
    rb"No such file or directory|Operation not permitted)",
    # After the reader of standard output has gone, at the next line; mpirun then ends the job.
    rb"\[[^\]\s]+:[0-9]+\] p\w+: SIGPIPE detected - aborting",
    # At a second Ctrl-C, which also ends the launcher.
    rb"Abort is in progress\.\.\.hit ctrl-c again to forcibly terminate",
    rb"p\w+: abort is already in progress\.\.\.hit ctrl-c again to forcibly terminate",
    # Under ULFM, a collective that began before a rank died: its caller gets the error 75, MPI_ERR_PROC_FAILED.
    rb"NBC_Progress: an error 75 was found during schedule 0x[0-9a-f]+ at row-offset [0-9]+ - aborting the schedule",
]
_LINE = re.compile(rb"(?:" + b"|".join(_NOISE) + rb")\r?\n")
_BEGINNING = re.compile(
    rb"\[[\w.-]*(:[0-9]*(\] ?([pP].*)?)?)?|\[warn\] ?(E.*)?|NB?|NBC.*|A|Abo?r?t?|Abort i?.*|s|sr|sru|srun(: ?|: c.*)?"
)
_LONGEST = 500


class Quiet:
    """A filter that drops mpirun's messages that report no error."""

    def __init__(self) -> None:
        self._held = b""
        self._line = b""  # the shown part of an unfinished line
        self._rules = 0  # two for each message of Open MPI's whose final NUL has not come

    def pass_on(self, received: bytes) -> bytes:
        """Return output without known noise; the possible beginning of such a line is held until its end."""
        shown = []
        for piece in re.findall(rb"[^\n]*\n|[^\n]+", self._held + received):
            self._held = b""
            # A NUL ends a message of Open MPI's; other output may come before it.
            while self._rules >= 2 and not self._line and piece.startswith(b"\0"):
                piece = piece[1:]
                self._rules -= 2
            if not piece:
                continue
            if not self._line and not piece.endswith(b"\n") and may_be_noise(piece):
                self._held = piece
                break
            if self._line or not _LINE.fullmatch(piece):
                shown.append(piece)
            line = (self._line + piece)[-_LONGEST:]
            self._rules += line == _BANNERS_RULE
            self._line = b"" if line.endswith(b"\n") else line
        return b"".join(shown)

    def end(self) -> bytes:
        """Return the held output at end of file."""
        held, self._held = self._held, b""
        return held


def may_be_noise(line: bytes | bytearray) -> bool:
    """Return whether the beginning of a line may be one that `Quiet` drops."""
    return len(line) < _LONGEST and _BEGINNING.fullmatch(line) is not None


# Each pattern ends after a delimiter, as a name or number may arrive in two pieces.
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
# hpcdp.comm.watchdog, about the missing ranks
_MISSING = re.compile(
    rb"rank [0-9]{1,9} of [0-9]{1,9}: [^\n]* (?:has not ended in [0-9.]+ s: ([^\n]+)\n[^\n]*the job ends now|"
    rb"cannot end: ([^\n]+); the job ends now)"
)
# Python, at an import or -m: "python: No module named hpcdp"
_NO_MODULE = re.compile(rb"No module named '?([A-Za-z_]\w*)")
# hpcdp.core.environment and hpcdp.comm.mpi_communicator, possibly with the tag of --tag-output before the line
_TAG = rb"(?:\[[^\]\s]*\](?:<stderr>:)? |[0-9]{1,9}: )?"
_REASON = re.compile(_TAG + rb"hpcdp: ")
_FAILED = re.compile(_TAG + rb"(rank [0-9]{1,9} of [0-9]{1,9}|server [0-9]{1,9} \(rank [0-9]{1,9}\)) failed:")
_TRACEBACK = re.compile(_TAG + rb"Traceback \(most recent call last\):")
_ERROR = re.compile(_TAG + rb"([^\W\d][\w.]*(?::.*)?)")
_WORDS_RULE = re.compile(rb"^-{74}\n", re.MULTILINE)
_OF_HYDRA = re.compile(rb"^\[(?:mpiexec|proxy)\S*\] \w+ \([^()]*\): (.*)\n", re.MULTILINE)
_HOLD_S = 10.0
_MOST_HELD, _MOST_TOLD = 1 << 16, 300
_RECENT_NBYTES = 1000
_LONGEST_LINE = 10_000
_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)


class FailedRank(NamedTuple):
    """A failed rank as far as mpirun reports it: number, process number, wait status (wait(2))."""

    rank: int | None
    pid: int | None
    status: int | None


class Invoked(NamedTuple):
    """A call of MPI_Abort by a rank's program: the rank and its error code."""

    rank: int
    status: int


class Tasks(NamedTuple):
    """Tasks of one host that ended alike: their numbers in srun's format, and their status as a shell has it."""

    host: str
    numbers: str
    status: int

    @property
    def is_killed(self) -> bool:
        """Return whether srun may have killed the tasks."""
        return self.status in _KILLED

    @property
    def how_many(self) -> int:
        """Return the number of tasks."""
        runs = re.findall(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", self.numbers)
        return sum(int(last or first) - int(first) + 1 for first, last in runs)

    def __str__(self) -> str:
        sign = self.status - 128
        how = f"killed by {name_of(sign)}" if sign > 0 else f"ended with status {self.status} before the others"
        who, verb = ("rank", "was ") if self.numbers.isdecimal() else ("ranks", "were ")
        return f"{who} {self.numbers} (on {self.host}) {verb if sign > 0 else ''}{how}"


class Reasons:
    """The errors that failed ranks report, found in the shown lines of stderr."""

    def __init__(self) -> None:
        self._begun = b""
        self._speaker: str | None = None
        self._in_traceback = False
        self._last = b""
        self.errors: dict[str, str] = {}
        """The last line of each rank's traceback, by the rank's name for itself, in order."""

    def read(self, shown: bytes) -> None:
        """Search the next shown output."""
        *lines, begun = (self._begun + shown).split(b"\n")
        self._begun = begun[-_LONGEST_LINE:]
        for line in lines:
            self._last = line if line.strip() else self._last
            if match := _FAILED.fullmatch(line):
                self._speaker, self._in_traceback = match[1].decode(), False
            elif _TRACEBACK.fullmatch(line):
                self._in_traceback = self._speaker is not None
            elif self._in_traceback and self._speaker is not None and (match := _ERROR.fullmatch(line)):
                self.errors[self._speaker] = match[1].decode(errors="replace")  # the last one of a chain
                self._in_traceback = False

    @property
    def stands_last(self) -> bool:
        """Return whether the last shown line is an error of a command of hpcdp."""
        return _REASON.match(self._last) is not None


class MpirunStderr:
    """A pipe for mpirun's stderr and the information found in it; ``end`` is mpirun's side, closed by `attach`.

    Args:
        held: whether to hold output until a rank has been observed or ten seconds have passed. mpirun may reject its
            arguments with a page of text, which the launcher replaces.
        with_banners: whether to show mpirun's long messages on failed ranks at once; else `show_banners` shows them.
        shown: assembles the lines of ranks where mpirun marks them; None to show the output unchanged.
    """

    def __init__(self, held: bool = False, with_banners: bool = False, shown: Shown | None = None) -> None:
        self._shown = shown
        self._output = None if shown is None else shown.errors(self._pass_on, self._may_be_shown)
        self._read, self.end = os.pipe()
        os.set_blocking(self._read, False)
        self._quiet, self._recent = Quiet(), b""
        self._banners = None if with_banners else Banners()
        self.has_spoken = False
        """True if any output has been shown or is held."""
        self._held: bytes | None = b"" if held else None
        self._until_s = time.monotonic() + _HOLD_S
        self._lost: dict[str, str] = {}
        self.named: FailedRank | None = None
        """The first rank that mpirun reports to have failed."""
        self.aborted: int | None = None
        """The rank that aborted the job according to mpirun: by its program, or by Open MPI after a lost connection."""
        self.invoked: Invoked | None = None
        """The first call of MPI_Abort that a rank's library reports; a lost connection makes none."""
        self.have_closed = False
        """True if a rank of Open MPI has reported a closed connection to another."""
        self.are_unread = False
        """True if mpirun has ended the job because the reader of its standard output has gone."""
        self.missing: str | None = None
        """The watchdog's reason for ending the job: the missing ranks and their state."""
        self.no_module: str | None = None
        """The first module that a Python did not find, or its package."""
        self.reasons = Reasons()
        self._of_tasks, self._tasks = b"", list[Tasks]()

    def attach(self, watch: Watch) -> None:
        """Let ``watch`` copy stderr whenever it waits."""
        os.close(self.end)
        self._watch = watch
        watch.also(self._read, self._copy)

    def look(self) -> None:
        """Show the held output once a rank has been observed or time has passed; call this repeatedly."""
        if self._held is not None and (
            self._watch.starts or time.monotonic() > self._until_s or len(self._held) > _MOST_HELD
        ):
            self.show()

    def show(self) -> None:
        """Show the held output."""
        held, self._held = self._held, None
        self._write(held or b"", has_spoken=False)

    def lost(self) -> dict[str, str]:
        """Read stderr to its end, after mpirun's or srun's end, and return their messages on lost hosts."""
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
        """Show mpirun's kept messages on failed ranks; call this after `lost`."""
        if self._banners is not None:
            self._write(self._banners.kept)

    def refusal(self, is_certain: bool) -> str | None:
        """Return mpirun's reason for starting nothing, from the held output; None for others. Call this after `lost`.

        Args:
            is_certain: whether mpirun is known to have started nothing.
        """
        held = self._held or b""
        if not held or not (is_certain or b"unrecogni" in held):
            return None
        if hydra_error := _OF_HYDRA.search(held):
            return hydra_error[1].decode(errors="replace")
        rule = _WORDS_RULE.search(held)
        message = _WORDS_RULE.split(held[rule.end() :])[0] if rule else held
        text = message.decode(errors="replace").partition("\n\nPlease ")[0]
        return " ".join(text.split())[:_MOST_TOLD]

    def failed(self) -> Tasks | None:
        """Return the tasks that failed by themselves; None where srun has reported none. Call this after `lost`.

        srun reports tasks in no particular order, so these are the first ones that were not ended because of another's
        failure, if there are any. See also `may_have_ended`.
        """
        not_killed = [tasks for tasks in self._tasks if not tasks.is_killed and tasks.status != LOST_CONNECTION_STATUS]
        killed = [tasks for tasks in self._tasks if tasks.is_killed]
        alone = [tasks for tasks in killed if self._is_alone(tasks)]
        return next(iter(not_killed + alone + killed + self._tasks), None)

    def may_have_ended(self, tasks: Tasks) -> bool:
        """Return whether srun may have ended ``tasks`` because of another: by SIGTERM, then by SIGKILL."""
        return tasks.is_killed and not self._is_alone(tasks)

    def _is_alone(self, tasks: Tasks) -> bool:
        """Return whether only one task has this status, and no or several others have that of the other signal."""
        counts = {status: sum(task.how_many for task in self._tasks if task.status == status) for status in _KILLED}
        num_others = sum(counts.values()) - counts[tasks.status]
        return counts[tasks.status] == 1 and num_others != 1

    def have_ended_alike(self) -> bool:
        """Return whether all reported tasks, more than one, ended by themselves with the same status."""
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
        """Search whole lines, and return the part that is to be shown."""
        self._hear(lines)
        shown = self._quiet.pass_on(lines)
        if self._banners is not None:
            shown = self._banners.pass_on(shown)
        self.has_spoken |= bool(shown)
        if self._held is None:
            self.reasons.read(shown)
            return shown
        self._held += shown
        return b""

    def _may_be_shown(self, beginning: bytes | bytearray) -> bool:
        """Return whether the whole line with this beginning will certainly be shown."""
        may = self._held is None and not may_be_noise(beginning) and not begins_banner(beginning)
        self.has_spoken |= may
        return may

    def _hear(self, received: bytes) -> None:
        self._recent += received
        for reporter, pattern in (("mpirun", _LOST), ("Slurm", _NODE_FAILED)):
            while match := pattern.search(self._recent):
                host = match[1].decode(errors="replace")
                self._lost[host] = f"{reporter} has lost {host}"
                self._recent = self._recent[match.end() :]
        if self.named is None:
            self.named = next(map(_named, filter(None, (named.search(self._recent) for named in _NAMED))), None)
        if self.aborted is None and (match := _ABORTED.search(self._recent)):
            self.aborted = int(match[1] or match[2])
        if self.invoked is None and (match := _INVOKED.search(self._recent)):
            rank, exit_status = (int(group) for group in match.groups() if group is not None)
            self.invoked = Invoked(rank, exit_status % 256)
        self.have_closed |= _CLOSED in self._recent
        self.are_unread |= _UNREAD in self._recent
        if self.missing is None and (match := _MISSING.search(self._recent)):
            self.missing = (match[1] or match[2]).decode(errors="replace")
        if self.no_module is None and (match := _NO_MODULE.search(self._recent)):
            self.no_module = match[1].decode()
        self._of_tasks += received
        for match in _TASK.finditer(self._of_tasks):
            host, numbers, code, how = ((group or b"").decode(errors="replace") for group in match.groups())
            status = int(code) if code else _status_of(how)
            self._tasks += [] if status is None else [Tasks(host, numbers, status)]
        self._of_tasks = self._of_tasks[self._of_tasks.rfind(b"\n") + 1 :][-_RECENT_NBYTES:]
        self._recent = self._recent[-_RECENT_NBYTES:]

    def _show(self, text: bytes) -> None:
        self._write(text if self._banners is None else self._banners.pass_on(text))

    def _write(self, text: bytes, has_spoken: bool = True) -> None:
        self.has_spoken |= bool(text) and has_spoken
        self.reasons.read(text)
        if self._held is not None:
            self._held += text
        elif self._shown is not None:
            self._shown.show(text)
        else:
            with contextlib.suppress(OSError):  # the terminal may be closed
                os.write(2, text)


def _named(match: re.Match[bytes]) -> FailedRank:
    numbers = {name: int(value) for name, value in match.groupdict().items()}
    status = numbers["code"] << 8 if "code" in numbers else numbers.get("signal")
    return FailedRank(numbers.get("rank"), numbers.get("pid"), status)


def _status_of(words: str) -> int | None:
    """Return the status of a task ended by the signal that libc describes so; None for other words."""
    if words == "Out Of Memory":
        return 128 + signal.SIGKILL
    return next((128 + number for number in signal.valid_signals() if signal.strsignal(number) == words), None)
