"""The exceptions of hpcdp, and messages on standard error.

An error's text is one line: the operation, its place, what was expected, what was got, and a remedy. Every exception is
also the built-in that programs catch, such as ValueError.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence

LONGEST_LINE = 320
"""The most characters of an error's line, because texts from outside may have any length."""
_PARTS = ("operation", "where", "expected", "got", "remedy")
_LONGEST_WHERE = 128
"""The most characters of the place, usually a file's path, which is cut before other parts."""


class HpcdpError(Exception):
    """An error of hpcdp, whose text is one line built from its parts.

    A line of more than `LONGEST_LINE` characters is cut in the middle of its longest parts, except that the place has a
    limit of its own. The attributes stay whole.

    Args:
        operation: the attempted operation, e.g. ``"allreduce"`` or ``"read idx"``.
        where: the file, parameter, key or rank list that it concerns.
        expected: a description of valid values.
        got: the value found instead.
        remedy: an instruction for the user.
        rank: the rank that raised, if it matters.
    """

    def __init__(
        self,
        operation: str,
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        remedy: str | None = None,
        rank: int | None = None,
    ) -> None:
        self.operation = operation
        self.where = where
        self.expected = expected
        self.got = got
        self.remedy = remedy
        self.rank = rank
        self.is_on_every_rank = False
        """True if every rank of a world raises this error (`hpcdp.comm.consistency`), so that one rank reports it."""
        self.is_settled = False
        """True if no other rank of a collective call waits for this one: it raises an error, too, or is done."""
        super().__init__(operation)

    def __str__(self) -> str:
        parts = {name: _in_one_line(getattr(self, name)) for name in _PARTS if getattr(self, name) is not None}
        line = self._line(parts)
        if len(line) > LONGEST_LINE:
            space = LONGEST_LINE - (len(line) - sum(map(len, parts.values())))
            where = {"where": cut_in_middle(parts.pop("where"), _LONGEST_WHERE)} if "where" in parts else {}
            most = _level([len(text) for text in parts.values()], space - sum(map(len, where.values())))
            line = self._line({name: cut_in_middle(text, most) for name, text in parts.items()} | where)
        return line

    def _line(self, parts: Mapping[str, str]) -> str:
        text = parts["operation"] if self.rank is None else f"rank {self.rank}: {parts['operation']}"
        if "where" in parts:
            text += f" [{parts['where']}]"
        facts = [f"{name} {parts[name]}" for name in ("expected", "got") if name in parts]
        if facts:
            text += ": " + ", ".join(facts)
        if "remedy" in parts:
            text += f"; {parts['remedy']}"
        return text


def _in_one_line(part: object) -> str:
    return printable(" ".join(str(part).split()))


def _level(lengths: Sequence[int], space: int) -> int:
    """Return the length to which the longest texts are cut so that all fit into ``space``."""
    left = sorted(lengths)
    while len(left) > 1 and left[0] * len(left) <= space:
        space -= left.pop(0)
    return space // len(left)


class ConfigError(HpcdpError, ValueError):
    """A wrong setting, argument, flag or configuration file. The command line exits with 2."""


class MissingKeyError(ConfigError, KeyError):
    """A key that the key-value store does not hold."""


class LaunchError(HpcdpError, RuntimeError):
    """A job that cannot start as it was launched, or a missing launcher. The command line exits with 2."""


class MismatchError(HpcdpError, RuntimeError):
    """A disagreement between ranks; raised on every rank, naming the ranks and the first difference."""


class DataError(HpcdpError, ValueError):
    """A data file that is missing, damaged or of another format. The command line exits with 2."""


class MissingFileError(DataError, FileNotFoundError):
    """A data file that does not exist."""


class SaveError(DataError, OSError):
    """A checkpoint or run folder that could not be written during training, e.g. on a full disk.

    The command line exits with 1, because the request was valid.
    """


class TimeLimitError(HpcdpError, TimeoutError, RuntimeError):
    """An operation has lasted longer than its caller allowed."""


class ArrayMixError(HpcdpError, TypeError):
    """Arrays of different namespaces or devices in one operation."""


class DeviceError(HpcdpError, RuntimeError):
    """A device that the machine or a network does not have, or parameters without values."""


class UnsupportedError(HpcdpError, ValueError):
    """An operation that is not defined for this dtype, shape, layout or world."""


class NonFiniteGradientError(HpcdpError, FloatingPointError):
    """A NaN or an infinity in the summed gradients, where the policy is to raise."""


class StaleGradientError(HpcdpError, RuntimeError):
    """A step although some parameters got no gradient since the last one."""


class WorldAborted(HpcdpError, RuntimeError):
    """A world in which no call can succeed any more.

    Another rank has failed, for which this one was waiting; or an exception, such as Ctrl-C, has ended a call of this
    rank halfway.
    """


class Terminated(KeyboardInterrupt):
    """A SIGTERM that unwinds the program as Ctrl-C does. The command line exits with 143."""


def interrupts(error: BaseException) -> bool:
    """Return whether ``error`` interrupts its thread, whatever this was doing.

    It is Ctrl-C's, or one that a signal's handler raised. Such an error leaves the function that the program has called
    at once, also if it comes while that advances an operation of another call.
    """
    if not isinstance(error, Exception):
        return True
    import signal

    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers} - {None}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters escaped, so that it has no effect on a terminal."""
    return text if text.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def to_stderr(text: str) -> None:
    """Write a line to `sys.stderr` in one piece, at once.

    With PYTHONUNBUFFERED `print` writes the line's end separately, and mpirun may copy other ranks' output in between.
    On a terminal a longer line is wrapped as by `wrapped`.
    """
    sys.stderr.write(f"{wrapped(text, _columns())}\n")
    sys.stderr.flush()


def wrapped(text: str, columns: int) -> str:
    """Return a message of the commands, ``hpcdp: ...``, in lines of at most ``columns``; other texts unchanged.

    What follows a semicolon, such as the remedy, begins a new line. A part in backquotes, such as a command, is not
    broken. 0 columns stand for no limit.
    """
    if not text.startswith("hpcdp") or "\n" in text or not 0 < columns < len(text):
        return text
    import re
    import textwrap

    space = "\N{NO-BREAK SPACE}"
    unbroken = re.sub(r"`[^`]*`", lambda quoted: quoted[0].replace(" ", space), text)
    lines = [
        line
        for part in re.split(r"(?<=;) ", unbroken)
        for line in textwrap.wrap(part, columns, break_long_words=False, break_on_hyphens=False)
    ]
    return "\n".join(lines).replace(space, " ")


def _columns() -> int:
    """Return the width of the terminal that shows standard error; 0 if it goes to a file or another program."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


def report_directly(text: str) -> None:
    """Write a line to file descriptor 2, whatever `sys.stderr` is; for messages before a job ends. Raises nothing.

    A buffer in place of `sys.stderr` is lost with the process: torch.distributed's `sys.excepthook` installs one and
    calls the hook that it has replaced. A stream with another target, such as a log file, also gets the line.
    """
    stream = sys.stderr
    with contextlib.suppress(Exception):
        text = wrapped(text, _columns())
    data = line = f"{text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(Exception):
        stream.flush()  # earlier lines come first
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(_STDERR, data) :]
    with contextlib.suppress(Exception):
        if not _is_descriptor_2(stream):
            with _without_descriptor_2():  # a stream that also writes to descriptor 2 must not repeat the line
                stream.write(line.decode())
                stream.flush()


_STDERR = 2


def _is_descriptor_2(stream: object) -> bool:
    """Return whether a stream only writes to the file of descriptor 2, as Python's own does."""
    try:
        return isinstance(stream, io.TextIOWrapper) and os.path.sameopenfile(stream.fileno(), _STDERR)
    except (OSError, ValueError):  # it has no descriptor, or is closed
        return False


@contextlib.contextmanager
def _without_descriptor_2() -> Iterator[None]:
    """Discard output to descriptor 2 within this context."""
    original = os.dup(_STDERR)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), _STDERR)
        yield
    finally:
        os.dup2(original, _STDERR)
        os.close(original)


def listed(names: Sequence[object], most: int = 3) -> str:
    """Join the first ``most`` of ``names``, with the number of further ones."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


_IN_WORDS = {
    errno.ENOENT: "no such file or folder",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EISDIR: "a folder",
    errno.ENOTDIR: "a path through a file",
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "no space left in the disk quota",
    errno.EFBIG: "a file larger than the limit",
    errno.ENOLCK: "no locks",
    errno.EROFS: "a read-only file system",
    errno.EIO: "an input/output error",
    errno.ELOOP: "a loop of symbolic links",
    errno.ENAMETOOLONG: "a name that is too long",
}
"""Errors of the operating system as noun phrases, which can follow "got"; `os.strerror` gives sentences."""


def reason(error: OSError) -> str:
    """Return in words, as a noun phrase, why a file or folder cannot be made, read or written.

    "File exists" becomes a description of what is in the place of the folder.
    """
    if isinstance(error, FileExistsError):
        is_link = error.filename is not None and not os.path.exists(error.filename)
        return "a link that leads nowhere" if is_link else "a file, no folder"
    text = error.strerror or str(error)
    if error.errno is None or text != os.strerror(error.errno):
        return text
    return _IN_WORDS.get(error.errno, text)


def shortened(text: str, longest: int) -> str:
    """Return ``text`` in at most ``longest`` characters; "..." replaces the end."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def cut_in_middle(text: str, longest: int) -> str:
    """Return ``text`` in at most ``longest`` characters; " ... " replaces the middle."""
    if len(text) <= longest:
        return text
    end = (longest - 5) // 3
    return f"{text[: longest - 5 - end]} ... {text[len(text) - end :]}"


def type_named(value: object) -> str:
    """Return the type of a value with its article: "an int", "a list"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn(text: str) -> None:
    """Warn at the line of the program that has called hpcdp, on this thread's stack."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
