"""What mpirun says at length of a rank that has failed is kept back, as the launcher says it in a line.

It is shown where the launcher does not: whatever differs in a word from what is known here passes as it comes.
"""

from __future__ import annotations

import re

_RULE = b"-" * 74 + b"\n"
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
_LINE = re.compile(
    rb"[0-9]+ more process(?:es have| has) sent help message \S+ / .*\n|"
    rb"\[(?:mpiexec|proxy:[0-9]+)@[^\]\s]+\] \w+ \([^()]*\): "
    rb"(?:assert \(!closed\) failed|callback returned error status|demux engine error waiting for event|"
    rb"one of the processes terminated badly; aborting|launcher returned error waiting for completion|"
    rb"process manager error waiting for completion|write error \(Broken pipe\)|sock write error|"
    rb"error sending hdr upstream)\r?\n"
)
_BEGINNING = re.compile(rb"\[(?:mpiexec|proxy:[0-9]+)@.{0,300}")  # which may come alone


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
            if (piece == _RULE or _BEREFT[0].fullmatch(piece)) and not self._in_line:
                self._block = piece
            elif _LINE.fullmatch(piece) and not self._in_line:
                self.kept += piece
            elif _BEGINNING.fullmatch(piece) and not self._in_line:
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
    return (len(line) <= len(_RULE) and _RULE.startswith(bytes(line))) or _BEGINNING.fullmatch(line) is not None


def _is_known(block: bytes) -> bool | None:
    """Whether what begins as a banner is a known one; None where only more of it tells."""
    if not block.startswith(_RULE):
        lines = block.splitlines(keepends=True)
        fits = all(known.fullmatch(line) for known, line in zip(_BEREFT, lines, strict=False))
        return fits and (len(lines) == len(_BEREFT) or None)
    text = block[len(_RULE) :]
    first, newline, _ = text.partition(b"\n")
    if not newline and len(text) < len(_RULE):
        return None
    if not _FIRST_LINE.fullmatch(first) or len(block) > _MOST:
        return False
    if not text.endswith(b"\n" + _RULE):
        return None
    return _BETWEEN_RULES.fullmatch(b" ".join(text[: -len(_RULE)].split())) is not None
