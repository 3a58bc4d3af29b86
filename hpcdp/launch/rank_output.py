"""Live output of ranks: whole lines of one rank each, and progress bars that are drawn again in place.

Open MPI 5 keeps a line back until it ends, so a progress bar, which redraws itself after a carriage return, would
appear in one piece at the end. MPICH mixes the output of ranks. So mpirun is set to forward everything at once and to
mark each piece with its rank, and the lines of each rank are assembled here. The last rows of a terminal are the bars
of all ranks, a few at most, and whole lines go above them. A file or pipe has one row: bars of several ranks take
turns in it, and a line of another rank begins on a new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import select
import time
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
"""Arguments of mpirun with which the user sets the form of the output."""

_ALL = "tag-fullname:raw"
"""The option of Open MPI 5 for unbuffered output, each piece after the full name of its rank."""

_READ, _PIPE, _ATOMIC = 1 << 16, 1 << 20, 4096
_MOST_QUEUED = 1 << 20
_MOST_HELD = 1 << 22
"""Greatest number of bytes of an unfinished line that is not shown yet."""

_COLUMNS = 80
"""Width of a terminal that does not report one."""

_MOST_BARS = 8
"""Greatest number of rows of a terminal in which unfinished lines are drawn."""

TURN_S = 5.0
"""Seconds for which one rank's unfinished line is shown before the bar of another one that waits for the same row."""
_NO_END = re.compile(rb"\[[^\[\]\s]*(?:\](?:<[a-z]*(?:>:?)?)?)?")
"""The possible beginning of a mark, before the first one."""

_OF_MPIRUN = re.compile(rb"\n?(?:-{74}|={74})")
"""The beginning of long messages of Open MPI's mpirun and of hydra."""

# Escape sequences that do not move the cursor: colors, and erasing to the end of the line.
_HARMLESS = re.compile(rb"\x1b\[[0-9;]*[mK]")


@dataclasses.dataclass(frozen=True)
class Marks:
    """The marks with which mpirun labels each piece of output with its rank.

    Args:
        pattern: a mark, with the groups ``own``, the beginning of all marks of a job, and ``rank``.
        ending: the possible text after ``own`` in an incomplete mark.
        label: template of the label of each shown line, with the groups of ``pattern``; may be empty.
    """

    pattern: re.Pattern[bytes]
    ending: re.Pattern[bytes]
    label: bytes

    def split(self, received: bytes, own: bytes) -> tuple[list[tuple[re.Match[bytes] | None, bytes]], bytes, bytes]:
        """Split output at its marks.

        Args:
            received: output, beginning with the unconsumed tail of the last call.
            own: the beginning of all marks, empty before the first one.

        Returns:
            The pieces, each with the mark before it; the tail, which may be the beginning of a mark; and ``own``.
        """
        pieces: list[tuple[re.Match[bytes] | None, bytes]] = []
        mark, at = None, 0
        for next_mark in self.pattern.finditer(received):
            own = next_mark["own"]
            pieces.append((mark, received[at : next_mark.start()]))
            mark, at = next_mark, next_mark.end()
        left = received[at:]
        begins = left.rfind(b"[")
        tail = left[begins:] if begins >= 0 else b""
        if not own:
            may_be_mark = _NO_END.fullmatch(tail) is not None
        else:
            may_be_mark = own.startswith(tail) or (tail.startswith(own) and bool(self.ending.fullmatch(tail, len(own))))
        tail = tail if may_be_mark else b""
        pieces.append((mark, left[: len(left) - len(tail)]))
        return [(mark, text) for mark, text in pieces if mark or text], tail, own


def marked(command: Sequence[str], family: str, mpi_args: str) -> tuple[list[str], Marks | None]:
    """Return ``command`` with the options for unbuffered output marked by ranks, and the marks.

    The command is unchanged, and the marks None, for an mpirun without such options, or where ``mpi_args``, the user's
    arguments, set the form of the output.
    """
    program, *words = command
    if _OF_THE_USER.search(mpi_args):
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
    """Return ``words`` without the launcher's ``option``, and whether it was present.

    It comes first or after a binding, see `hpcdp.launch.mpi_library.Dialect.options`; the program's words come later.
    """
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


@dataclasses.dataclass(eq=False)
class Line:
    """The unfinished line of a rank on one of its outputs.

    Args:
        label: the label before it.
        is_shown: returns whether the line may be shown before its end.
    """

    label: bytes
    is_shown: Callable[[bytearray], bool]
    text: bytearray = dataclasses.field(default_factory=bytearray)
    shown: int = 0
    """Number of bytes of the text that are on the screen."""
    hidden: int = 0
    """Number of bytes that were shown and then erased for other lines."""

    @property
    def is_bar(self) -> bool:
        """Return whether the line redraws itself after a carriage return."""
        return 0 <= self.text.find(b"\r") < len(self.text) - 1


class Screen:
    """A terminal, file or pipe to which this process's standard output or error goes, or both.

    A terminal shows an unfinished line at once, below all others; it is erased and drawn again when other lines arrive.
    Bars of other ranks are drawn above it, each in its row. Elsewhere an unfinished line is shown only if it redraws
    itself after a carriage return, and the next line of another rank begins on a new line.

    Args:
        descriptor: standard output or error, to find out whether it is a terminal.
        is_alone: whether only one rank writes.
    """

    def __init__(self, descriptor: int, is_alone: bool) -> None:
        self._descriptor, self._is_alone = descriptor, is_alone
        self._is_terminal = os.isatty(descriptor)
        self._open: list[Line] = []  # drawn, from top to bottom; several on a terminal, each of which fits a row
        self._turn_began = 0.0
        self._lines: dict[int, tuple[Line, int]] = {}  # unfinished lines by id, with their descriptors
        self._queue: deque[tuple[int, bytes]] = deque()
        self.queued = 0
        """Number of bytes that wait for the reader."""
        self.closed: set[int] = set()
        """The descriptors whose reader has closed the pipe."""
        self._is_fresh = True  # whether the next byte begins a line
        self._is_waiting = False
        self._watch: Watch | None = None

    def attach(self, watch: Watch, when_empty: Callable[[], object]) -> None:
        """Let ``watch`` write queued bytes whenever it waits, and call ``when_empty`` once none are left."""
        self._watch, self._when_empty = watch, when_empty

    def end_line(self, line: Line, ending: bytes, descriptor: int) -> bytes | None:
        """Show the ``ending`` of a line, or return the whole line if none of it is on the screen."""
        is_open = line in self._open
        other_lines = [other for other in self._open if other is not line]
        if is_open and other_lines:
            self._hide()
        self._lines.pop(id(line), None)
        text, shown, was_hidden = bytes(line.text) + ending, line.shown, line.hidden > 0
        line.text, line.shown, line.hidden = bytearray(), 0, 0
        if not is_open:
            return _last_state(text) if was_hidden else text
        self._open = []
        if other_lines:
            self._begin_line(descriptor)
        self._write(descriptor, line.label + _last_state(text) if other_lines else text[shown:])
        self._draw(other_lines)
        self.flush()
        return None

    def show(self, text: bytes, descriptor: int) -> None:
        """Show whole lines above the unfinished ones."""
        if not text:
            return
        lines = self._open
        can_return = self._hide()
        self._begin_line(descriptor)
        self._write(descriptor, text)
        if can_return:
            self._draw(lines)
        self.flush()

    def update(self, line: Line, descriptor: int) -> None:
        """Show an unfinished line if it may be shown and there is a row for it."""
        self._lines[id(line)] = line, descriptor
        if line in self._open:
            self._go_on(line)
        elif self._may_show(line) and self._make_room(line):
            lines = [line, *self._open]
            self._hide()
            self._draw(lines)
            self._turn_began = time.monotonic()
        elif len(line.text) > _MOST_HELD:
            self._lines.pop(id(line))
            text, line.text, line.hidden = line.label + bytes(line.text), bytearray(), 0
            self.show(text, descriptor)
        self.flush()

    def next_line(self) -> None:
        """Show another unfinished line if none is shown; an erased one is shown again with its next piece."""
        for line, descriptor in [*self._lines.values()]:
            if not self._open and not line.hidden:
                self.update(line, descriptor)

    def break_line(self, descriptor: int) -> None:
        """Begin the next output on a new line."""
        self._hide()
        self._begin_line(descriptor)
        self.flush()

    def finish(self) -> Iterator[tuple[Line, int]]:
        """Yield the unfinished lines that are not shown, with their descriptors; later writes block."""
        lines = [
            (line, descriptor)
            for line, descriptor in self._lines.values()
            if line not in self._open and len(line.text) > line.hidden
        ]
        self._lines, self._open = {}, []
        if self._is_waiting and self._watch is not None:
            for descriptor in (1, 2):
                self._watch.no_more(descriptor)
        self._watch = None  # later writes wait for the reader
        yield from lines

    def flush(self) -> None:
        """Write queued bytes as far as the reader accepts them; after poll(2) `_ATOMIC` bytes never block."""
        while self._queue:
            descriptor, text = self._queue[0]
            if descriptor not in self.closed:
                if not _takes(descriptor, waits=self._watch is None):
                    self._wait(descriptor)
                    return
                try:
                    written = os.write(descriptor, text[:_ATOMIC])
                except BlockingIOError:  # another process has set O_NONBLOCK
                    self._wait(descriptor)
                    return
                except BrokenPipeError:
                    self.closed.add(descriptor)
                    continue
                except OSError:  # a full disk or a closed terminal does not end the job
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
        """Drop the queued bytes, and all later output for the same reader."""
        self.closed |= {descriptor for descriptor, _ in self._queue}
        self.flush()

    def _may_show(self, line: Line) -> bool:
        if not line.text or not line.is_shown(line.text):
            return False
        return self._is_terminal or self._is_alone or line.is_bar

    def _make_room(self, line: Line) -> bool:
        """Return whether there is a row for one more line; a bar ends the turn of a line that has had its time."""
        if not self._open:
            return True
        if not line.is_bar:
            return False
        if self._is_terminal and len(self._open) < _MOST_BARS and all(map(self._fits, [line, *self._open])):
            return True
        if time.monotonic() - self._turn_began < TURN_S and not _is_erased(self._open[-1].text):
            return False
        self._hide()
        return True

    def _go_on(self, line: Line) -> None:
        """Show the new end of a line that is drawn."""
        other_lines = [other for other in self._open if other is not line]
        if not other_lines:
            self._write(self._lines[id(line)][1], bytes(line.text[line.shown :]))
            line.text = _last_state(line.text)[-_ATOMIC:]  # the most that is drawn again
            line.shown = len(line.text)
        if self._is_terminal and not self._is_alone and _is_erased(line.text):  # its row is free until its next bar
            self._hide()
            self._draw(other_lines)
            self.next_line()
        elif other_lines:
            lines = self._open if self._fits(line) else [line]
            self._hide()
            self._draw(lines)

    def _draw(self, lines: list[Line]) -> None:
        """Draw unfinished lines where none are drawn."""
        for line in lines:
            self._begin_line(self._lines[id(line)][1])
            if line.hidden or len(lines) > 1:
                line.text = _last_state(line.text)
            self._write(self._lines[id(line)][1], line.label + bytes(line.text))
            line.text = _last_state(line.text)[-_ATOMIC:]
            line.shown, line.hidden = len(line.text), 0
        self._open = lines

    def _hide(self) -> bool:
        """Erase the unfinished lines for others; return whether they can be drawn again below those."""
        lines = self._open
        if not lines:
            return False
        descriptor = self._lines[id(lines[-1])][1]
        can_erase = self._is_terminal and all(map(self._fits, lines))
        if can_erase:
            self._write(descriptor, b"\r\x1b[K" + (len(lines) - 1) * b"\x1b[A\x1b[K")
            self._is_fresh = True
        for line in lines:
            line.shown, line.hidden = 0, len(line.text)
        self._open = []
        return can_erase

    def _fits(self, line: Line) -> bool:
        text = _HARMLESS.sub(b"", line.label + _last_state(line.text)).decode(errors="replace").strip("\r")
        if "\x1b" in text or "\t" in text:
            return False
        with contextlib.suppress(OSError):
            width = sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
            return width < (os.get_terminal_size(self._descriptor).columns or _COLUMNS)
        return False

    def _begin_line(self, descriptor: int) -> None:
        if not self._is_fresh:
            self._write(descriptor, b"\n")

    def _write(self, descriptor: int, text: bytes) -> None:
        """Queue ``text`` for `flush`: what is drawn together is written together, or a terminal would flicker."""
        if not text:
            return
        self._is_fresh = text.endswith(b"\n")
        self.queued += len(text)
        if self._queue and self._queue[-1][0] == descriptor and len(self._queue[-1][1]) < _ATOMIC:
            text = self._queue.pop()[1] + text
        self._queue.append((descriptor, text))


class Output:
    """One of mpirun's outputs, assembled into lines of one rank each.

    Args:
        marks: the marks of its pieces.
        screen: the screen that shows it.
        descriptor: standard output or error.
        pass_on: filters whole lines and returns those to be shown.
        is_shown: returns whether the beginning of a line may be shown before its end.
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
        self.has_spoken = False
        """True once a rank has written to it."""
        self._lines: dict[bytes, Line] = {}
        self._last = self._mpirun = Line(b"", lambda text: False)

    def take(self, received: bytes) -> None:
        """Process received output and show what can be shown."""
        pieces, self._begun, self._own = self._marks.split(self._begun + received, self._own)
        for mark, text in pieces:
            if mark is not None:
                self.has_spoken = True
                label = mark.expand(self._marks.label)
                self._last = self._lines.setdefault(mark["rank"], Line(label, self._is_shown))
            elif _OF_MPIRUN.match(text):  # else it continues the last piece
                self._last = self._mpirun
            self._take(self._last, text)

    def end(self) -> None:
        """Process the remaining tail at end of file, before `Screen.finish`."""
        if self._begun:
            self._take(self._last, self._begun)
            self._begun = b""

    def leave(self, line: Line) -> None:
        """Show a line that was never finished."""
        if text := self._pass_on(line.label + bytes(line.text)):
            self._screen.break_line(self._descriptor)
            self._screen.show(text, self._descriptor)

    def _take(self, line: Line, text: bytes) -> None:
        ending, has_ended, following = text.partition(b"\n")
        if has_ended:
            first = self._screen.end_line(line, ending + has_ended, self._descriptor)
            more, newline, ending = following.rpartition(b"\n")
            lines = ([] if first is None else [first]) + re.findall(rb"[^\n]*\n", more + newline)
            self._screen.show(self._pass_on(b"".join(line.label + text for text in lines)), self._descriptor)
        if ending:
            line.text += ending
            self._screen.update(line, self._descriptor)
        elif has_ended:
            self._screen.next_line()


class Shown:
    """Both outputs of an mpirun, shown on those of this process; ``end`` is mpirun's stdout, closed by `attach`.

    Args:
        marks: the marks of its pieces.
        is_alone: whether only one rank writes.

    Raises:
        OSError: an output of this process is closed.
    """

    def __init__(self, marks: Marks, is_alone: bool) -> None:
        out = Screen(1, is_alone)
        errors = out if os.path.samestat(os.fstat(1), os.fstat(2)) else Screen(2, is_alone)
        self._marks, self._screens = marks, {1: out, 2: errors}
        self._outputs = {1: Output(marks, out, 1)}
        self._waiting: dict[int, Callable[[], object]] = {}
        self._read, self.end = os.pipe()
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError):  # the user's limit of pipe memory
            fcntl.fcntl(self._read, fcntl.F_SETPIPE_SZ, _PIPE)

    def errors(self, pass_on: Callable[[bytes], bytes], is_shown: Callable[[bytearray], bool]) -> Output:
        """Return the assembler of standard error, see `Output`."""
        self._outputs[2] = Output(self._marks, self._screens[2], 2, pass_on, is_shown)
        return self._outputs[2]

    @property
    def is_silent(self) -> bool:
        """Return whether no rank has written anything yet."""
        return not any(output.has_spoken for output in self._outputs.values())

    def show(self, text: bytes) -> None:
        """Show whole lines on standard error."""
        self._screens[2].show(text, 2)

    def break_line(self) -> None:
        """Begin this process's next message on standard error on a new line."""
        self._screens[2].break_line(2)

    def attach(self, watch: Watch) -> None:
        """Let ``watch`` copy standard output whenever it waits."""
        os.close(self.end)
        self._watch = watch
        for screen in self._screens.values():
            screen.attach(watch, self._go_on)
        watch.also(self._read, self._copy)

    def has_room(self, source: int, when_ready: Callable[[], object]) -> bool:
        """Return whether input from ``source`` can be shown now.

        If not, it stays in the pipe, so that mpirun waits, until the reader of this process has caught up; then
        ``when_ready`` is called.
        """
        if all(screen.queued <= _MOST_QUEUED for screen in self._screens.values()):
            return True
        self._watch.no_more(source)
        self._waiting[source] = when_ready
        return False

    def drain(self, is_ended: Callable[[], bool]) -> None:
        """Show the rest of standard output after mpirun's end.

        Args:
            is_ended: waits a moment and returns whether to stop waiting for the reader.
        """
        while self._copy() or any(screen.queued for screen in self._screens.values()):
            for screen in self._screens.values():
                screen.flush()
            if any(screen.queued for screen in self._screens.values()) and is_ended():
                for screen in self._screens.values():
                    screen.give_up()
                return

    def finish(self) -> None:
        """Show the unfinished lines, after `drain` and the end of standard error."""
        self._close()
        for output in self._outputs.values():
            output.end()
        for screen in {id(screen): screen for screen in self._screens.values()}.values():
            for line, descriptor in screen.finish():
                self._outputs[descriptor].leave(line)

    def _copy(self) -> bool:
        """Copy standard output and return whether there was any; close it for mpirun if its reader has gone."""
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


def shown(command: Sequence[str], family: str, mpi_args: str, *, is_alone: bool) -> tuple[list[str], Shown | None]:
    """Return the command of `marked`, and the display of its output; None where mpirun's output is not processed."""
    argv, marks = marked(command, family, mpi_args)
    if marks is not None:
        with contextlib.suppress(OSError):  # one of the outputs is closed
            return argv, Shown(marks, is_alone)
    return [*command], None


def _last_state(text: _Text) -> _Text:
    """Return the part of a line after its last carriage return."""
    return text[max(0, text.rfind(b"\r", 0, len(text.rstrip(b"\r\n")))) :]


def _is_erased(text: bytearray) -> bool:
    """Return whether a bar has erased itself at its end, with the cursor at the beginning of its row."""
    return b"\r" in text and re.fullmatch(rb"\r*(?: *\r+)?", _HARMLESS.sub(b"", bytes(_last_state(text)))) is not None


def _takes(descriptor: int, *, waits: bool) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if waits else 0))
