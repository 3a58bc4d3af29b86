import fcntl
import os
import pty
import random
import re
import select
import struct
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcdp.launch import rank_output
from hpcdp.launch.rank_output import Marks, Output, Screen

OPEN_MPI = Marks(
    re.compile(rb"(?P<own>\[[^\[\]\s@]{1,255}@)(?P<rank>[0-9]+,[0-9]+)\](?P<end><std(?:out|err|diag)>: )"),
    re.compile(rb"[0-9,]*(?:\](?:<[a-z]*(?:>:?)?)?)?"),
    b"",
)
BAR = """
import sys, time
from pathlib import Path
from mpi4py import MPI
rank, folder = MPI.COMM_WORLD.rank, Path(sys.argv[1])
MPI.COMM_WORLD.barrier()
if rank == 0:
    sys.stderr.write("\\r1/2")
    sys.stderr.flush()
while not (folder / "seen").exists():
    time.sleep(0.01)
if rank == 1:
    print("a line", flush=True)
while not (folder / "above").exists():
    time.sleep(0.01)
if rank == 0:
    sys.stderr.write("\\r2/2\\n")
"""


def mark(rank: int) -> bytes:
    return b"[prterun-host-4711@1,%d]<stdout>: " % rank


def read(descriptor: int) -> bytes:
    """What there is to read; a terminal hands on a little later what it gets."""
    received = b""
    while select.select([descriptor], [], [], 0.02)[0] and (more := os.read(descriptor, 1 << 16)):
        received += more
    return received


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of 20 columns that hands on what it gets."""
    ours, its = pty.openpty()
    tty.setraw(its)
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    yield ours, its
    os.close(ours)
    os.close(its)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, its = os.pipe()
    yield ours, its
    os.close(ours)
    os.close(its)


def end(output: Output, screen: Screen) -> None:
    output.end()
    for line, _ in screen.finish():
        output.leave(line)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_lines_of_ranks_are_whole_however_they_come(count: int, tmp_path: Path) -> None:
    chance = random.Random(count)
    lines = [[b"%d:%d %s\n" % (rank, k, b"[x@1" * chance.randrange(9)) for k in range(200)] for rank in range(count)]
    left, stream = [b"".join(each) for each in lines], b""
    while any(left):
        rank = chance.choice([rank for rank in range(count) if left[rank]])
        cut = chance.randrange(1, 90)
        stream, left[rank] = stream + mark(rank) + left[rank][:cut], left[rank][cut:]
    with (tmp_path / "file").open("wb") as file:
        screen = Screen(file.fileno(), count == 1)
        output = Output(OPEN_MPI, screen, file.fileno())
        while stream:
            cut = chance.choice([1, 7, 50, 4096])
            output.take(stream[:cut])
            stream = stream[cut:]
        end(output, screen)
    written = (tmp_path / "file").read_bytes().splitlines(keepends=True)
    assert [[line for line in written if line.startswith(b"%d:" % rank)] for rank in range(count)] == lines
    assert len(written) == 200 * count


def test_what_one_rank_writes_stays_as_it_is(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(200_000)
    with (tmp_path / "file").open("wb") as file:
        screen = Screen(file.fileno(), True)
        output = Output(OPEN_MPI, screen, file.fileno())
        for begin in range(0, len(content), 4096):
            output.take(mark(0) + content[begin : begin + 4096])
        end(output, screen)
    assert (tmp_path / "file").read_bytes() == content


def steps(screen: Screen, output: Output, ours: int) -> Callable[[bytes], bytes]:
    def take(received: bytes) -> bytes:
        output.take(received)
        return read(ours)

    return take


def test_on_a_terminal_lines_go_above_one_that_has_not_ended(terminal: tuple[int, int]) -> None:
    ours, its = terminal
    screen = Screen(its, False)
    take = steps(screen, Output(OPEN_MPI, screen, its), ours)
    assert take(mark(0) + b"\r1/3") == b"\r1/3"
    assert take(mark(0) + b"\r2/3") == b"\r2/3"
    assert take(mark(1) + b"half") == b""
    assert take(mark(1) + b" a line\n") == b"\r\x1b[Khalf a line\n\r2/3"
    assert take(mark(1) + b"\r1 of 2") == b"\r\x1b[K\r1 of 2\n\r2/3"
    assert take(mark(0) + b"\r3/3\n") == b"\r\x1b[K\x1b[A\x1b[K\r3/3\n\r1 of 2"
    assert take(mark(1) + b"\r" + 30 * b"x") == b"\r" + 30 * b"x"  # two rows, which could not be erased
    assert take(mark(0) + b"b\n") == b"\nb\n"
    assert take(mark(1) + b"\rend\n") == b"\rend\n"
    assert take(b"-" * 74 + b"\nof mpirun") == b"-" * 74 + b"\n"


def rows_of(written: bytes) -> list[str]:
    """Return the rows of a terminal without empty last rows."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[.|.", written.decode(), re.DOTALL):
        if part == "\x1b[A":
            row -= 1
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            row, column = row + 1, 0
            rows += [""] if row == len(rows) else []
        else:
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
            column += 1
    return "\n".join(row.rstrip() for row in rows).rstrip("\n").split("\n")


@pytest.mark.parametrize("seed", range(3))
def test_bars_of_ranks_are_drawn_live_each_in_its_row(terminal: tuple[int, int], seed: int) -> None:
    """Bars that stay, bars that erase themselves, and lines, in pieces and in any order."""
    ours, its = terminal
    screen, chance = Screen(its, False), random.Random(seed)
    output = Output(OPEN_MPI, screen, its)
    take = steps(screen, output, ours)
    bars: dict[int, str] = {}
    lines: list[str] = []
    written = b""
    for k in range(60):
        rank = chance.randrange(4)
        if rank not in bars and chance.random() < 0.5:
            text = f"{rank} says {k}"
            lines.append(text)
            text += "\n"
        elif rank in bars and chance.random() < 0.1:
            lines.append(bars.pop(rank))
            text = "\n"
        elif rank in bars and chance.random() < 0.1:
            text = "\r" + len(bars.pop(rank)) * " " + "\r"
        else:
            bars[rank] = f"{rank} at {k}"
            text = "\r" + bars[rank]
        cut = chance.randrange(len(text)) if text.endswith("\n") else 0
        output.take(mark(rank) + text[:cut].encode())
        written += take(mark(rank) + text[cut:].encode())
        rows = [row for row in rows_of(written) if row]
        assert rows[: len(lines)] == lines
        assert sorted(rows[len(lines) :]) == sorted(bars.values())


def test_elsewhere_bars_of_ranks_take_turns(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, its = pipe
    screen = Screen(its, False)
    take = steps(screen, Output(OPEN_MPI, screen, its), ours)
    assert take(mark(0) + b"\r1/9") == b"\r1/9"
    assert take(mark(1) + b"\r1 of 9") == b""
    assert take(mark(0) + b"\r2/9") == b"\r2/9"
    monkeypatch.setattr(rank_output, "TURN_S", 0.0)
    assert take(mark(1) + b"\r2 of 9") == b"\n\r1 of 9\r2 of 9"
    monkeypatch.setattr(rank_output, "TURN_S", 60.0)
    assert take(mark(0) + b"\r3/9") == b""
    assert take(mark(1) + b"\r      \r") == b"\r      \r"
    assert take(mark(1) + b"\r1 of 3") == b"\r1 of 3"  # its next bar
    assert take(mark(1) + b"\r      \r") == b"\r      \r"
    assert take(mark(0) + b"\r4/9") == b"\n\r4/9"  # and that of the other one
    assert take(mark(0) + b"\r9/9\n") == b"\r9/9\n"


def test_elsewhere_a_line_that_draws_itself_anew_is_shown(pipe: tuple[int, int]) -> None:
    ours, its = pipe
    screen = Screen(its, False)
    output = Output(OPEN_MPI, screen, its)
    take = steps(screen, output, ours)
    assert take(mark(0) + b"loss ") == b""
    assert take(mark(1) + b"\r1/3") == b"\r1/3"
    assert take(mark(0) + b"0.5\n") == b"\nloss 0.5\n"
    assert take(mark(1) + b"\r2/3") == b"\r2/3"
    assert take(mark(1) + b"\r3/3\nat") == b"\r3/3\n"
    screen.break_line(its)
    end(output, screen)
    assert read(ours) == b"at"


def test_each_line_is_led_by_its_rank(pipe: tuple[int, int]) -> None:
    ours, its = pipe
    screen = Screen(its, False)
    output = Output(Marks(OPEN_MPI.pattern, OPEN_MPI.ending, rb"[\g<rank>]\g<end>"), screen, its)
    output.take(mark(0) + b"a\nb\n" + mark(1) + b"c\n")
    assert read(ours) == b"[1,0]<stdout>: a\n[1,0]<stdout>: b\n[1,1]<stdout>: c\n"


def test_a_reader_is_waited_for_and_missed(pipe: tuple[int, int]) -> None:
    ours, its = pipe
    fcntl.fcntl(its, fcntl.F_SETPIPE_SZ, 4096)

    class Watch:
        def __init__(self) -> None:
            self.waits: dict[int, Callable[[], object]] = {}

        def also(self, descriptor: int, when_ready: Callable[[], object], event: int) -> None:
            self.waits[descriptor] = when_ready

        def no_more(self, descriptor: int) -> None:
            self.waits.pop(descriptor, None)

    watch, emptied = Watch(), list[int]()
    screen = Screen(its, True)
    screen.attach(watch, lambda: emptied.append(screen.queued))  # type: ignore[arg-type]
    lines = b"".join(b"%d\n" % k for k in range(3000))
    screen.show(lines, its)
    assert screen.queued > 0 and its in watch.waits
    received = b""
    while screen.queued:
        received += read(ours)
        watch.waits[its]()
    assert received + read(ours) == lines and emptied == [0]
    os.close(ours)
    screen.show(b"unread\n", its)
    assert screen.closed == {its} and screen.queued == 0
    os.dup2(its, ours)  # for the fixture


@pytest.mark.parametrize(
    ("asked", "is_marked"),
    [("", True), ("--report-bindings -x A", True), ("--output dir=x", False), ("-prepend-rank", False), ("-l", False)],
)
def test_the_words_of_mpirun(asked: str, is_marked: bool, tmp_path: Path) -> None:
    hydra = tmp_path / "mpiexec.hydra"
    hydra.write_bytes(b"\x7fELF hydra\0prepend-pattern\0")
    command = [str(hydra), "-bind-to", "core", "-prepend-rank", "-n", "2", "x", "-prepend-rank"]
    argv, marks = rank_output.marked(command, "mpich", asked)
    if not is_marked:
        assert (argv, marks) == (command, None)
        return
    assert marks is not None
    assert argv[1] == "-prepend-pattern" and argv[3:] == ["-bind-to", "core", "-n", "2", "x", "-prepend-rank"]
    ((found, text),), tail, own = marks.split(
        argv[2].replace("%r", "12").encode() + b"text" + argv[2][:5].encode(), b""
    )
    assert found is not None and (found.expand(marks.label), text, tail) == (b"[12] ", b"text", argv[2][:5].encode())
    assert own == argv[2][: -len("%r]")].encode()
    assert rank_output.marked(["sh", "-c", "x"], "mpich", asked) == (["sh", "-c", "x"], None)
    assert rank_output.marked(["srun", "x"], "srun", asked) == (["srun", "x"], None)


def test_a_bar_is_seen_while_it_is_drawn_and_lines_of_others_above(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "2", "--", sys.executable, "-c", BAR, str(tmp_path)]
    job = subprocess.Popen(command, stdin=its, stdout=its, stderr=its)
    seen, deadline = b"", time.monotonic() + 60
    for text, file in ((b"\r1/2", "seen"), (b"a line\r\n\r1/2", "above")):
        while text not in seen:
            assert time.monotonic() < deadline and job.poll() is None, seen
            seen += read(ours)
            time.sleep(0.01)
        (tmp_path / file).touch()
    assert job.wait(60) == 0
    seen += read(ours)
    os.close(ours)
    os.close(its)
    assert seen.endswith(b"\r1/2\r\x1b[Ka line\r\n\r1/2\r2/2\r\n"), seen
