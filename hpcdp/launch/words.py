"""What mpirun or srun says on stderr, copied on and searched: of ranks on other hosts nothing else tells.

Of a host that it has lost Open MPI's mpirun says so, and ends with status 0. srun says of each task how it has ended,
and has the largest status of all, also of those that the library ended because another one had failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal

from .watch import BEREFT, Watch

_LOST = re.compile(rb"lost communication with a remote daemon\..{0,400}?Remote daemon: .*? on node (\S+)", re.DOTALL)
_TASK = re.compile(rb"srun: error: \S+: tasks? [0-9,\[\]-]+: (?:Exited with exit code ([0-9]+)|(.+?))(?: \(.*\))?\n")
_KEPT = 1000
_KILLED = (128 + signal.SIGKILL, 128 + signal.SIGTERM)


class Words:
    """A pipe for mpirun's stderr, and what came through it; ``end`` is what mpirun gets, and is closed by `attach`."""

    def __init__(self) -> None:
        self._read, self.end = os.pipe()
        os.set_blocking(self._read, False)
        self._kept = b""
        self._lost: list[str] = []
        self._of_tasks, self._statuses = b"", list[int]()

    def attach(self, watch: Watch) -> None:
        """From now on ``watch`` copies what comes, as long as it waits."""
        os.close(self.end)
        self._watch = watch
        watch.also(self._read, self._copy)

    def lost(self) -> list[str]:
        """What mpirun said of hosts that it has lost; called once it has ended."""
        while self._copy():
            pass
        os.close(self._read)
        return self._lost

    def status(self) -> int | None:
        """That of the task that has failed of itself, 128 + the number of a signal as in a shell; called after `lost`.

        srun tells of tasks in no certain order, so this is the first one that was not ended because another one had
        failed, if there is one; None where srun has told of none.
        """
        of_themselves = [status for status in self._statuses if status not in (*_KILLED, BEREFT)]
        killed = [status for status in self._statuses if status in _KILLED]
        return next(iter(of_themselves + killed + self._statuses), None)

    def _copy(self) -> bool:
        try:
            received = os.read(self._read, 1 << 16)
        except BlockingIOError:
            return False
        if not received:
            self._watch.no_more(self._read)
            return False
        with contextlib.suppress(OSError):  # the terminal may be closed
            os.write(2, received)
        self._kept += received
        while found := _LOST.search(self._kept):
            self._lost.append(f"mpirun has lost {found[1].decode(errors='replace')}")
            self._kept = self._kept[found.end() :]
        self._of_tasks += received
        for found in _TASK.finditer(self._of_tasks):
            status = int(found[1]) if found[1] else _status_of(found[2].decode(errors="replace"))
            self._statuses += [] if status is None else [status]
        self._of_tasks = self._of_tasks[self._of_tasks.rfind(b"\n") + 1 :][-_KEPT:]
        self._kept = self._kept[-_KEPT:]
        return True


def _status_of(words: str) -> int | None:
    """The status of a task that was ended by the signal that libc describes so; None where that is none."""
    if words == "Out Of Memory":
        return 128 + signal.SIGKILL
    return next((128 + number for number in signal.valid_signals() if signal.strsignal(number) == words), None)
