"""Ctrl-Z, fg and bg, by a shell of a few lines on a pseudo-terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

SHELL = r"""
import os, signal, subprocess, sys, time

def say(*words):  # in one write: print's may have the job's lines between them
    os.write(1, f"{' '.join(map(str, words))}\n".encode())

signal.signal(signal.SIGTTOU, signal.SIG_IGN)
how, *command = sys.argv[1:]
job = subprocess.Popen(command, process_group=0)
os.tcsetpgrp(0, job.pid)
assert os.WIFSTOPPED(os.waitpid(job.pid, os.WUNTRACED)[1])
os.tcsetpgrp(0, os.getpgrp())
time.sleep(1.0)  # meanwhile whoever reads from the terminal sees what is typed
say("stopped", input())
if how == "fg":
    os.tcsetpgrp(0, job.pid)
os.killpg(job.pid, signal.SIGCONT)
if how == "bg":
    say("shell", input())
    say("shell", input())
    os.kill(job.pid, signal.SIGTERM)
status = os.waitpid(job.pid, os.WUNTRACED)[1]
os.tcsetpgrp(0, os.getpgrp())
say("status", os.waitstatus_to_exitcode(status))
"""
LINES = "import os, time\nfor number in range(300): os.write(1, f'line {number}\\n'.encode()); time.sleep(0.1)"


def read_until(terminal: int, pattern: str, limit_s: float = 20.0) -> str:
    said, deadline = "", time.monotonic() + limit_s
    while not re.search(pattern, said):
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {pattern!r} in {said!r}"
        try:
            said += os.read(terminal, 4096).decode()
        except OSError:  # nobody has it open any more
            raise AssertionError(f"no {pattern!r} in {said!r}") from None
    return said


@pytest.mark.parametrize("how", ["fg", "bg"])
def test_a_job_that_was_stopped_goes_on(how: str) -> None:
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "1", "--", sys.executable, "-c", LINES]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SHELL, how, *launch])
    read_until(terminal, "line 3")
    os.write(terminal, b"\x1a")
    time.sleep(0.5)
    os.write(terminal, b"typed\n")
    before = read_until(terminal, "stopped typed")
    number = int(re.findall(r"line (\d+)", f"line 3{before}")[-1])
    assert number < 12, "it was not stopped"
    read_until(terminal, f"line {number + 5}")
    if how == "fg":
        os.write(terminal, b"\x03")
    else:  # what is typed is for the shell
        for word in (b"one", b"two"):
            os.write(terminal, word + b"\n")
            read_until(terminal, f"shell {word.decode()}")
            time.sleep(0.3)
    sign = signal.SIGINT if how == "fg" else signal.SIGTERM
    read_until(terminal, f"status {128 + sign}")
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)


@pytest.mark.thorough
def test_a_job_that_no_shell_could_continue_is_not_stopped() -> None:
    launch = [sys.executable, "-m", "hpcdp.cli", "launch", "-n", "1", "--", sys.executable, "-c", LINES]
    with subprocess.Popen(launch, stdout=subprocess.PIPE, text=True, start_new_session=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "line 0\n"
        job.send_signal(signal.SIGTSTP)
        for number in range(1, 20):
            assert job.stdout.readline() == f"line {number}\n"
        job.terminate()
    assert job.returncode == 128 + signal.SIGTERM
