"""Runs in a job of a batch system, between it and the ``hpcdp launch`` there: signals to it, and its status.

``python -m hpcdp.launch.batch_runner FOLDER AGAIN STOP_S COMMAND...`` runs COMMAND, which gets SIGUSR1
after STOP_S seconds (``inf``: never), and leaves its exit status in FOLDER, where `batch` looks for it. Its own status
is the same, but AGAIN for a command that wants to be started again (75), and 1 for one of those that mean something to
Grid Engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .batch import STATUS, replace
from .cleanup import bound
from .runner import FORWARDED

_POLL_S = 0.2
_STOP_EARLY = {signal.SIGUSR1, signal.SIGUSR2}
_OF_GRID_ENGINE = (99, 100)
"""Start the job again; keep it from being started."""
_TASKS_END_S = 2.0
"""A job that is to be started again is lost where one of its tasks on other hosts still ends when it does (seen with
8.1.9 on a busy machine: "failed 25: rescheduling", and for the task "failed 100: assumedly after job")."""


def main(argv: Sequence[str]) -> int:
    """Returns the status of this process."""
    folder, again, stop_s, *command = argv
    status = run(Path(folder), command, float(stop_s))
    if status == os.EX_TEMPFAIL:
        time.sleep(_TASKS_END_S)
        return int(again)
    return 1 if status in _OF_GRID_ENGINE else status


def run(folder: Path, command: Sequence[str], stop_s: float = float("inf")) -> int:
    """Runs ``command`` to its end, hands signals on to it, and returns its status, as a shell puts it.

    It is in a session of its own, since batch systems send signals to all processes of a job at once, of which ranks
    that do not expect them would die. SIGUSR1 and SIGUSR2 from the batch system both say that the end is near, and both
    become SIGUSR1, at which a run stops early; those in ``folder`` come from a person, and stay what they are.
    """
    watched = {*FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    for name in (STATUS, *(sign.name for sign in FORWARDED)):  # of the run before, where this is not the first one
        (folder / name).unlink(missing_ok=True)
    try:
        stop_at_s = time.monotonic() + stop_s
        child = subprocess.Popen(command, preexec_fn=bound(), start_new_session=True)
        while child.poll() is None:
            received = signal.sigtimedwait(watched, _POLL_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                sign = signal.Signals(received.si_signo)
                child.send_signal(signal.SIGUSR1 if sign in _STOP_EARLY else sign)
            if time.monotonic() >= stop_at_s:
                stop_at_s = float("inf")
                child.send_signal(signal.SIGUSR1)
            for sign in FORWARDED:
                with contextlib.suppress(FileNotFoundError):
                    (folder / sign.name).unlink()
                    child.send_signal(sign)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = child.returncode if child.returncode >= 0 else 128 - child.returncode
    with contextlib.suppress(FileNotFoundError):  # who has submitted the job waits no more
        replace(folder / STATUS, str(status))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
