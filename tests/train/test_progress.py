import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from hpcdp.core.environment import terminal_columns
from hpcdp.train import callbacks
from hpcdp.train.callbacks import LogProgress, epoch_lines

TIMES = {"compute_s": 1234.5, "comm_s": 321.0, "comm_exposed_s": 123.456, "critical_path_s": 1300.25}
SLOWEST = {"slowest_rank": 3, "slowest_host": "node17", "slowest_ratio": 1.8449, "stragglers": ["rank 3 on node17"]}
LATEST = {"loss": 0.4321, "accuracy": 0.912, "samples_per_s": 12345.6, "step": 3}

SHOW = f"""
import sys
from hpcdp.train import callbacks
callbacks._REFRESH_S = 0.0
shown = callbacks.ShowProgress(verbose=True)
shown.on_start(epochs=100, steps=1000)
shown.on_record({LATEST} | {{"kind": "step"}})
for step in range(951, 1001):
    shown.on_step(100, step)
shown.on_record({LATEST | TIMES | SLOWEST} | {{"kind": "epoch", "epoch": 100, "test_accuracy": 0.9876}})
shown.on_end()
print("end", type(shown._display).__name__)
"""


def show_in_a_terminal(columns: int, environment: dict[str, str]) -> str:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    child = subprocess.Popen([sys.executable, "-c", SHOW], stdout=slave, env=environment)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:
        pass  # the terminal's other end was closed
    assert child.wait() == 0
    os.close(master)
    return shown.decode()


@pytest.fixture
def environment(monkeypatch) -> dict[str, str]:
    for name in ("TTY_INTERACTIVE", "COLUMNS", "TERM"):
        monkeypatch.delenv(name, raising=False)
    return dict(os.environ)


def test_on_a_terminal_of_80_columns_no_line_wraps(environment):
    import rich.text

    shown = show_in_a_terminal(80, environment)
    assert "end TerminalProgress" in shown
    frames = [rich.text.Text.from_ansi(f).plain for f in shown.replace("\n", "\r").split("\r")]
    live = [frame for frame in frames if "step 1000/1000" in frame]
    assert live
    assert all("epoch 100/100" in f and "loss 0.432 acc 91.2% 12,346/s ETA 0:00" in f for f in live if "ETA" in f)
    assert max(len(frame) for frame in frames) <= 79


@pytest.mark.each_value
@pytest.mark.parametrize("columns", [20, 47])
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_narrow_terminal_need_not_have_all_characters(encoding, columns, environment):
    shown = show_in_a_terminal(columns, environment | {"PYTHONIOENCODING": encoding})
    assert "end TerminalProgress" in shown


@pytest.mark.parametrize("told", [{}, {"TTY_INTERACTIVE": "1", "COLUMNS": "80"}])
def test_a_terminal_that_cannot_write_a_line_anew_has_plain_lines(told, environment):
    shown = show_in_a_terminal(80, environment | {"TERM": "dumb"} | told)
    assert "end LogProgress" in shown and "\x1b" not in shown


def test_a_terminal_of_a_launcher_is_believed(environment):
    environment |= {"TTY_INTERACTIVE": "1", "COLUMNS": "100"}
    command = [sys.executable, "-c", SHOW]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert "end TerminalProgress" in shown


@pytest.mark.parametrize("variables", [{}, {"TTY_INTERACTIVE": "0", "COLUMNS": "80"}])
def test_a_log_has_plain_lines(environment, variables):
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, env=environment | variables
    ).stdout
    *lines, end, _ = shown.split("\n")
    assert end == "end LogProgress"
    assert lines == [
        "epoch 100/100  loss 0.4321  accuracy 91.20%  test 98.76%  12,346 samples/s",
        "  compute 1234.50 s  comm 321.00 s, 123.46 exposed  critical path 1300.25 s",
        "  slowest, 1.84 x the median: rank 3 on node17",
    ]


def test_a_long_epoch_gets_a_line_now_and_then(monkeypatch):
    now = iter(range(0, 10_000, 4))
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: float(next(now)))
    stream = io.StringIO()
    display = LogProgress(2, 50, stream)
    for step in range(1, 51):
        display.step(1, step, LATEST if step > 1 else None)
    lines = stream.getvalue().splitlines()
    assert 5 < len(lines) < 45
    assert all(line.startswith("epoch 1/2  step ") and "ETA" in line and line.isprintable() for line in lines)


def test_a_pseudo_terminal_without_width_is_a_log_when_the_launcher_writes_to_a_file(environment, tmp_path):
    """What a rank of Open MPI sees, when mpirun's output was redirected."""
    ask = "import sys; from hpcdp.core.environment import terminal_columns; print(terminal_columns(sys.stdout))"
    start = (
        "import os, pty, subprocess, sys\n"
        "master, slave = pty.openpty()\n"
        f"subprocess.run([sys.executable, '-c', {ask!r}], stdout=slave, check=True)\n"
        "os.write(1, os.read(master, 100))\n"
    )
    shown = subprocess.run([sys.executable, "-c", start], capture_output=True, check=True, env=environment).stdout
    assert shown.split() == [b"0"]


def test_a_string_buffer_is_no_terminal(environment):
    assert terminal_columns(io.StringIO()) == 0


def test_an_epoch_line_fits_a_terminal_with_large_numbers():
    large = {"epoch": 999, "loss": 12.345678, "accuracy": 1.0, "test_accuracy": 1.0, "samples_per_s": 1234567.0}
    assert max(map(len, epoch_lines(large, 999))) <= 79
    assert "test" not in epoch_lines({k: v for k, v in large.items() if k != "test_accuracy"}, 999)[0]


def test_without_an_accuracy_lines_have_none():
    without = LATEST | {"accuracy": None}
    assert epoch_lines(without | {"epoch": 2}, 3) == ["epoch 2/3  loss 0.4321  12,346 samples/s"]
    stream = io.StringIO()
    display = LogProgress(2, 50, stream)
    display._shown -= 60
    display.step(1, 1, without)
    assert stream.getvalue().startswith("epoch 1/2  step 1/50  loss 0.432 12,346/s  ETA ")


def test_the_times_of_an_epoch_fit_a_terminal_and_one_rank_has_none():
    host = "node17.cluster.example.org"
    stragglers = [f"rank {rank} on {host}" for rank in (1234, 1235, 1236)]
    record = LATEST | {"epoch": 2}
    lines = epoch_lines(record | TIMES | SLOWEST | {"compute_s": 99999.0, "stragglers": stragglers}, 3, verbose=True)
    assert len(lines) == 3
    assert max(map(len, lines)) <= 79
    assert lines[2].startswith(f"  slowest, 1.84 x the median: rank 1234 on {host}")
    assert lines[2].endswith("...")
    assert len(epoch_lines(record | TIMES | SLOWEST | {"stragglers": []}, 3, verbose=True)) == 2
    assert len(epoch_lines(record | TIMES, 3, verbose=True)) == 1


def test_an_epoch_has_one_line_unless_verbose():
    assert len(epoch_lines(LATEST | TIMES | SLOWEST | {"epoch": 2}, 3)) == 1
