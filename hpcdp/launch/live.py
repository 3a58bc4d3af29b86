"""What ranks write, shown as it comes: whole lines of one rank each, and one line that has not ended yet.

Open MPI 5 keeps a line back until it ends, so a progress bar, which draws itself anew behind a carriage return, would
come in one piece at the end; MPICH mixes what ranks write. So mpirun is set to hand on everything at once and to mark
each piece by its rank. The lines of each rank are put together here. The last line of a screen may be one that has not
ended: that of the rank that began one first. Lines of others go above it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import select
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from .mpi_library import is_open_mpi_4, runtimes
from .process_monitor import Watch

_Text = TypeVar("_Text", bytes, bytearray)

_OF_THE_USER = re.compile(
    r"-{1,2}(?:output|tag-output|timestamp-output|output-filename|merge-stderr-to-stdout|xml|stream-buffering|"
    r"prepend-rank|prepend-pattern|l|outfile|errfile|outfile-pattern|errfile-pattern)(?:[=\s]|$)"
)
"""Arguments of mpirun that say themselves how output is shown."""

_ALL = "tag-fullname:raw"
"""The options for Open MPI 5: everything at once, behind the whole name of its rank."""

_READ, _PIPE, _ATOMIC = 1 << 16, 1 << 20, 4096
_MOST_QUEUED = 1 << 20
_MOST_HELD = 1 << 22
"""A line that is longer is shown before it has ended."""

_COLUMNS = 80
"""Of a terminal that does not say how many it has."""
_NO_END = re.compile(rb"\[[^\[\]\s]*(?:\](?:<[a-z]*(?:>:?)?)?)?")
"""What may be the beginning of a mark, while none has come."""

_OF_MPIRUN = re.compile(rb"\n?(?:-{74}|={74})")
"""How what mpirun itself writes at length begins: Open MPI's, hydra's."""

# What moves no cursor: colours, and the end of a line erased.
_HARMLESS = re.compile(rb"\x1b\[[0-9;]*[mK]")


@dataclasses.dataclass(frozen=True)
class Marks:
    """How mpirun marks each piece of output by its rank.

    Args:
        pattern: a mark, with groups ``own``, its beginning, which is the same in all marks of a job, and ``rank``.
        rest: what may follow ``own`` in a mark that has not come whole.
        label: what leads each line that is shown, with the groups of ``pattern``; empty for nothing.
    """

    pattern: re.Pattern[bytes]
    rest: re.Pattern[bytes]
    label: bytes

    def split(self, received: bytes, own: bytes) -> tuple[list[tuple[re.Match[bytes] | None, bytes]], bytes, bytes]:
        """Return the pieces of ``received``, each behind its mark, what of it may be the beginning of a mark, and the
        beginning of all marks, where one has come by now."""
        pieces: list[tuple[re.Match[bytes] | None, bytes]] = []
        mark, at = None, 0
        for found in self.pattern.finditer(received):
            own = found["own"]
            pieces.append((mark, received[at : found.start()]))
            mark, at = found, found.end()
        left = received[at:]
        begins = left.rfind(b"[")
        tail = left[begins:] if begins >= 0 else b""
        if not own:
            may_be_mark = _NO_END.fullmatch(tail) is not None
        else:
            may_be_mark = own.startswith(tail) or (tail.startswith(own) and bool(self.rest.fullmatch(tail, len(own))))
        tail = tail if may_be_mark else b""
        pieces.append((mark, left[: len(left) - len(tail)]))
        return [(mark, text) for mark, text in pieces if mark or text], tail, own


def marked(command: Sequence[str], family: str, asked: str) -> tuple[list[str], Marks | None]:
    """Return ``command`` with words that have its mpirun hand on everything at once, marked by ranks, and the marks;
    as it is, and None, for one that cannot, or where ``asked``, the user's own arguments, says how output is shown."""
    program, *words = command
    if _OF_THE_USER.search(asked):
        return [*command], None
    if family == "mpich" and _knows(Path(program), b"prepend-pattern"):
        words, is_tagged = _without(["-prepend-rank"], words)
        own = f"[hpcdp-{os.urandom(4).hex()},"
        pattern = re.compile(b"(?P<own>" + re.escape(own.encode()) + rb")(?P<rank>[0-9]+)\]")
        marks = Marks(pattern, re.compile(rb"[0-9]*"), rb"[\g<rank>] " if is_tagged else b"")
        return [program, "-prepend-pattern", f"{own}%r]", *words], marks
    if family != "openmpi" or is_open_mpi_4(Path(program)) or not _knows_raw(Path(program)):
        return [*command], None
    words, is_tagged = _without(["--output", "tag"], words)
    return [program, "--output", _ALL, *words], Marks(
        re.compile(rb"(?P<own>\[[^\[\]\s@]{1,255}@)(?P<rank>[0-9]+,[0-9]+)\](?P<end><std(?:out|err|diag)>: )"),
        re.compile(rb"[0-9,]*(?:\](?:<[a-z]*(?:>:?)?)?)?"),
        rb"[\g<rank>]\g<end>" if is_tagged else b"",
    )


def _without(option: list[str], words: list[str]) -> tuple[list[str], bool]:
    """Return ``words`` without an option of the launcher's own, and whether it was there: first, or behind a binding,
    see `hpcdp.launch.mpi_library.Dialect.options`. Words of the program's stand later."""
    for at in (0, 2):
        if words[at : at + len(option)] == option:
            return words[:at] + words[at + len(option) :], True
    return words, False


def _knows(hydra: Path, option: bytes) -> bool:
    with contextlib.suppress(OSError):
        return option in hydra.read_bytes()
    return False


def _knows_raw(mpirun: Path) -> bool:
    return any(b"\0raw\0" in content and b"\0tag-fullname\0" in content for content in runtimes(mpirun))


@dataclasses.dataclass
class Line:
    """The line that a rank has not ended yet on one of its outputs, as far as it is known.

    Args:
        label: what leads it.
        is_shown: whether it may be shown before it has ended.
    """

    label: bytes
    is_shown: Callable[[bytearray], bool]
    text: bytearray = dataclasses.field(default_factory=bytearray)
    shown: int = 0
    """So much of the text is on the screen."""
    hidden: int = 0
    """So much of it was there, and was erased for other lines."""


class Screen:
    """A terminal, a file or a pipe that standard output or error of this process goes to, or both.

    On a terminal a line that has not ended is shown at once, below all others: it is erased and drawn again where lines
    of others come. Elsewhere one is shown where it draws itself anew, behind a carriage return; a line of another then
    begins on a new line.

    Args:
        descriptor: where the kind of it is asked for.
        is_alone: whether one rank alone writes.
    """

    def __init__(self, descriptor: int, is_alone: bool) -> None:
        self._descriptor, self._is_alone = descriptor, is_alone
        self._is_terminal = os.isatty(descriptor)
        self._open: Line | None = None
        self._lines: dict[int, tuple[Line, int]] = {}  # by id, those that have not ended, and where they go to
        self._queue: deque[tuple[int, bytes]] = deque()
        self.queued = 0
        """So many bytes wait until the reader takes them."""
        self.closed: set[int] = set()
        """The descriptors whose reader has gone."""
        self._is_fresh = True  # whether the next byte begins a line
        self._is_waiting = False
        self._watch: Watch | None = None

    def attach(self, watch: Watch, when_empty: Callable[[], object]) -> None:
        """From now on ``watch`` writes what has to wait, as long as it waits; ``when_empty`` is called after that."""
        self._watch, self._when_empty = watch, when_empty

    def end_line(self, line: Line, ending: bytes, descriptor: int) -> bytes | None:
        """Show ``ending``, with which a line ends, or return the line where none of it is shown yet."""
        self._lines.pop(id(line), None)
        whole, shown, was_hidden = bytes(line.text) + ending, line.shown, line.hidden > 0
        line.text, line.shown, line.hidden = bytearray(), 0, 0
        if self._open is not line:
            return _last_state(whole) if was_hidden else whole
        self._open = None
        self._write(descriptor, whole[shown:])
        return None

    def show(self, text: bytes, descriptor: int) -> None:
        """Show whole lines, above the one that has not ended."""
        if not text:
            return
        line = self._open
        can_return = self._hide()
        self._write(descriptor, text)
        if line is not None and can_return:
            self.update(line, self._lines[id(line)][1])

    def update(self, line: Line, descriptor: int) -> None:
        """Show what has come of a line, where it may be shown, and no other one is."""
        self._lines[id(line)] = line, descriptor
        if self._open in (None, line) and self._may_show(line):
            if line.shown == 0:
                self._begin_line(descriptor)
                line.text = _last_state(line.text) if line.hidden else line.text
            self._write(descriptor, (b"" if line.shown else line.label) + bytes(line.text[line.shown :]))
            self._open = line
            line.text = _last_state(line.text)[-_ATOMIC:]  # no longer one is shown again
            line.shown, line.hidden = len(line.text), 0
        elif len(line.text) > _MOST_HELD and self._open is not line:
            self._lines.pop(id(line))
            text, line.text, line.hidden = line.label + bytes(line.text), bytearray(), 0
            self.show(text, descriptor)

    def next_line(self) -> None:
        """Show another line that has not ended, once none is shown; one that was erased comes with its next
        piece."""
        for line, descriptor in [*self._lines.values()]:
            if self._open is None and not line.hidden:
                self.update(line, descriptor)

    def break_line(self, descriptor: int) -> None:
        """Have what is written next begin a line."""
        self._hide()
        self._begin_line(descriptor)

    def finish(self) -> Iterator[tuple[Line, int]]:
        """Return the lines that never ended and are not shown, each with where it goes to."""
        lines = [
            (line, descriptor)
            for line, descriptor in self._lines.values()
            if line is not self._open and len(line.text) > line.hidden
        ]
        self._lines, self._open = {}, None
        if self._is_waiting and self._watch is not None:
            for descriptor in (1, 2):
                self._watch.no_more(descriptor)
        self._watch = None  # from now on each write waits for the reader
        yield from lines

    def flush(self) -> None:
        """Write what waits as far as the reader takes it; no write of so few bytes has to wait behind poll(2)."""
        while self._queue:
            descriptor, text = self._queue[0]
            if descriptor not in self.closed:
                if not _takes(descriptor, waits=self._watch is None):
                    self._wait(descriptor)
                    return
                try:
                    written = os.write(descriptor, text[:_ATOMIC])
                except BlockingIOError:  # somebody else has made it so
                    self._wait(descriptor)
                    return
                except BrokenPipeError:
                    self.closed.add(descriptor)
                    continue
                except OSError:  # a full disk, a terminal that is closed: the job goes on
                    written = len(text)
                self.queued -= written
                if written < len(text):
                    self._queue[0] = descriptor, text[written:]
                    continue
            else:
                self.queued -= len(text)
            self._queue.popleft()
        if self._is_waiting and self._watch is not None:
            for descriptor in (1, 2):
                self._watch.no_more(descriptor)
            self._is_waiting = False
            self._when_empty()

    def _wait(self, descriptor: int) -> None:
        if self._watch is not None and not self._is_waiting:
            self._watch.also(descriptor, self.flush, select.EPOLLOUT)
            self._is_waiting = True

    def give_up(self) -> None:
        """Forget what its reader does not take, and whatever comes for that reader."""
        self.closed |= {descriptor for descriptor, _ in self._queue}
        self.flush()

    def _may_show(self, line: Line) -> bool:
        if not line.text or not line.is_shown(line.text):
            return False
        return self._is_terminal or self._is_alone or 0 <= line.text.find(b"\r") < len(line.text) - 1

    def _hide(self) -> bool:
        """Erase the line for another one; whether the one that was shown can be shown again below that."""
        line = self._open
        if line is None:
            return False
        descriptor = self._lines[id(line)][1]
        can_erase = self._is_terminal and self._fits(line)
        self._write(descriptor, b"\r\x1b[K" if can_erase else b"\n")
        self._is_fresh = True
        line.shown, line.hidden, self._open = 0, len(line.text), None
        return can_erase

    def _fits(self, line: Line) -> bool:
        text = _HARMLESS.sub(b"", line.label + line.text).decode(errors="replace").strip("\r")
        if "\x1b" in text or "\t" in text:
            return False
        with contextlib.suppress(OSError):
            width = sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)
            return width < (os.get_terminal_size(self._descriptor).columns or _COLUMNS)
        return False

    def _begin_line(self, descriptor: int) -> None:
        if not self._is_fresh:
            self._write(descriptor, b"\n")

    def _write(self, descriptor: int, text: bytes) -> None:
        if text:
            self._is_fresh = text.endswith(b"\n")
            self._queue.append((descriptor, text))
            self.queued += len(text)
            self.flush()


class Output:
    """One of an mpirun's outputs, put together to lines of one rank each.

    Args:
        marks: those of its pieces.
        screen: where it is shown, by ``descriptor``.
        pass_on: takes whole lines and returns what is to be shown of them.
        is_shown: whether the beginning of a line may be shown before the line has ended.
    """

    def __init__(
        self,
        marks: Marks,
        screen: Screen,
        descriptor: int,
        pass_on: Callable[[bytes], bytes] = bytes,
        is_shown: Callable[[bytearray], bool] = bool,
    ) -> None:
        self._marks, self._screen, self._descriptor = marks, screen, descriptor
        self._pass_on, self._is_shown = pass_on, is_shown
        self._own, self._begun = b"", b""
        self._lines: dict[bytes, Line] = {}
        self._last = self._mpirun = Line(b"", lambda text: False)

    def take(self, received: bytes) -> None:
        """Show what has come, as far as it is to be shown by now."""
        pieces, self._begun, self._own = self._marks.split(self._begun + received, self._own)
        for mark, text in pieces:
            if mark is not None:
                label = mark.expand(self._marks.label)
                self._last = self._lines.setdefault(mark["rank"], Line(label, self._is_shown))
            elif _OF_MPIRUN.match(text):  # else it goes on with a piece that has come in two
                self._last = self._mpirun
            self._take(self._last, text)

    def end(self) -> None:
        """Show what is left; called once nothing more will come, before `Screen.finish`."""
        if self._begun:
            self._take(self._last, self._begun)
            self._begun = b""

    def leave(self, line: Line) -> None:
        """Show a line that has never ended."""
        if text := self._pass_on(line.label + bytes(line.text)):
            self._screen.break_line(self._descriptor)
            self._screen.show(text, self._descriptor)

    def has(self, line: Line) -> bool:
        """Whether a line is one of this output."""
        return line is self._mpirun or line in self._lines.values()

    def _take(self, line: Line, text: bytes) -> None:
        ending, has_ended, rest = text.partition(b"\n")
        if has_ended:
            whole = self._screen.end_line(line, ending + has_ended, self._descriptor)
            more, newline, ending = rest.rpartition(b"\n")
            lines = ([] if whole is None else [whole]) + re.findall(rb"[^\n]*\n", more + newline)
            self._screen.show(self._pass_on(b"".join(line.label + each for each in lines)), self._descriptor)
        if ending:
            line.text += ending
            self._screen.update(line, self._descriptor)
        elif has_ended:
            self._screen.next_line()


class Shown:
    """Both outputs of an mpirun, on the outputs of this process; ``end`` is its standard output, closed by `attach`.

    Args:
        marks: those of its pieces.
        is_alone: whether one rank alone writes.

    Raises:
        OSError: this process has no outputs.
    """

    def __init__(self, marks: Marks, is_alone: bool) -> None:
        out = Screen(1, is_alone)
        errors = out if os.path.samestat(os.fstat(1), os.fstat(2)) else Screen(2, is_alone)
        self._marks, self._screens = marks, {1: out, 2: errors}
        self._outputs = {1: Output(marks, out, 1)}
        self._waiting: dict[int, Callable[[], object]] = {}
        self._read, self.end = os.pipe()
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError):  # a user may have many pipes
            fcntl.fcntl(self._read, fcntl.F_SETPIPE_SZ, _PIPE)

    def errors(self, pass_on: Callable[[bytes], bytes], is_shown: Callable[[bytearray], bool]) -> Output:
        """Return what puts standard error together, see `Output`."""
        self._outputs[2] = Output(self._marks, self._screens[2], 2, pass_on, is_shown)
        return self._outputs[2]

    def show(self, text: bytes) -> None:
        """Show whole lines on standard error."""
        self._screens[2].show(text, 2)

    def break_line(self) -> None:
        """Have what this process writes itself to standard error begin a line."""
        self._screens[2].break_line(2)

    def attach(self, watch: Watch) -> None:
        """From now on ``watch`` copies what comes on standard output, as long as it waits."""
        os.close(self.end)
        self._watch = watch
        for screen in self._screens.values():
            screen.attach(watch, self._go_on)
        watch.also(self._read, self._copy)

    def has_room(self, source: int, when_ready: Callable[[], object]) -> bool:
        """Whether what can be read from ``source`` can be shown; if not it is left there, and mpirun kept waiting,
        until the reader of this process's outputs has taken what came before."""
        if all(screen.queued <= _MOST_QUEUED for screen in self._screens.values()):
            return True
        self._watch.no_more(source)
        self._waiting[source] = when_ready
        return False

    def drain(self, is_ended: Callable[[], bool]) -> None:
        """Show what is left on standard output, once mpirun has ended.

        Args:
            is_ended: waits a moment, and says whether the reader is no longer waited for.
        """
        while self._copy() or any(screen.queued for screen in self._screens.values()):
            for screen in self._screens.values():
                screen.flush()
            if any(screen.queued for screen in self._screens.values()) and is_ended():
                for screen in self._screens.values():
                    screen.give_up()
                return

    def finish(self) -> None:
        """Show the lines that have never ended; called after `drain`, once all of standard error has been taken."""
        self._close()
        for output in self._outputs.values():
            output.end()
        for screen in {id(screen): screen for screen in self._screens.values()}.values():
            for line, descriptor in screen.finish():
                self._outputs[descriptor].leave(line)

    def _copy(self) -> bool:
        """Whether something has come. Where the reader has gone mpirun notices, as it would without this process."""
        if 1 in self._screens[1].closed:
            self._close()
        if self._read < 0 or not self.has_room(self._read, self._copy):
            return False
        try:
            received = os.read(self._read, _READ)
        except BlockingIOError:
            return False
        if not received:
            self._close()
        self._outputs[1].take(received)
        return bool(received)

    def _close(self) -> None:
        if self._read >= 0:
            self._watch.no_more(self._read)
            self._waiting.pop(self._read, None)
            os.close(self._read)
            self._read = -1

    def _go_on(self) -> None:
        for source, when_ready in self._waiting.items():
            self._watch.also(source, when_ready)
        self._waiting.clear()


def shown(command: Sequence[str], family: str, asked: str, *, is_alone: bool) -> tuple[list[str], Shown | None]:
    """Return what `marked` does, and what shows the output; None where it is shown as mpirun does it."""
    argv, marks = marked(command, family, asked)
    if marks is not None:
        with contextlib.suppress(OSError):  # one of the outputs is closed
            return argv, Shown(marks, is_alone)
    return [*command], None


def _last_state(text: _Text) -> _Text:
    """Return what a line shows once all before is drawn over."""
    return text[max(0, text.rfind(b"\r", 0, len(text.rstrip(b"\r\n")))) :]


def _takes(descriptor: int, *, waits: bool) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if waits else 0))
