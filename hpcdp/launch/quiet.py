"""What mpirun writes to stderr although nothing is wrong is left out, to the letter; all else passes as it comes."""

from __future__ import annotations

import re

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
