"""The ranks that mpirun has started, by the list that Open MPI 5's writes: also those that had ended before a look.

Its words and its status do not tell: it can have started none and end with status 0, and it says nothing of ranks on
several hosts that are all killed at once, for which it now and then waits for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .mpi_library import runtimes
from .remote.guards import Guards
from .watch import End, Start, Watch

# The name of a program may have line breaks.
_START = re.compile(r"^\(rank, host, exe, pid\) = \(([0-9]+), ([^,]*), .*?, ([0-9]+)\)$", re.MULTILINE | re.DOTALL)
_OPTIONS, _LIST = ("runtime-options", "rtos"), "output-proctable"


class Started:
    """The list of a job of ``ranks`` processes, which mpirun writes to ``path`` once all have been started.

    Args:
        hosts: where each rank runs, None for this machine; empty where the list alone can tell.
    """

    def __init__(self, path: Path, ranks: int, hosts: Sequence[str | None]) -> None:
        self._path, self._ranks, self._hosts = path, ranks, hosts
        self._is_told = False

    def attach(self, watch: Watch, guards: Guards | None) -> None:
        """From now on `look` tells these of ranks that they have not seen."""
        self._watch, self._guards = watch, guards

    def look(self) -> None:
        """Called over and over while mpirun runs."""
        if self._is_told or not (starts := self._starts()):
            return
        self._is_told = True
        elsewhere: dict[str, list[tuple[int, int]]] = {}
        for start in starts:
            if start.host is None:
                self._watch.know_of(start.rank, start.pid)
            else:
                elsewhere.setdefault(start.host, []).append((start.rank, start.pid))
        if self._guards is not None:
            self._guards.know_of(elsewhere)

    def end(self) -> int:
        """How many ranks there were; called once mpirun has ended, and with it those that nobody has seen."""
        starts = self._starts()
        seen = {start.rank for start in self._watch.starts}
        for start in starts:
            if start.rank not in seen:
                self._watch.note(start)
                server = self._watch.server(start.rank)
                self._watch.note(End(start.rank, start.pid, None, time.monotonic(), server, start.host))
        return len(starts)

    def _starts(self) -> list[Start]:
        """None of them before all are there."""
        found = []
        for said in _START.finditer(self._path.read_text(errors="replace")):
            rank = int(said[1])
            host = self._hosts[rank] if rank < len(self._hosts) else said[2]
            found.append(Start(rank, int(said[3]), host))
        return found if len(found) >= self._ranks else []


@contextlib.contextmanager
def listed(
    command: Sequence[str], ranks: int, hosts: Sequence[str | None]
) -> Iterator[tuple[Sequence[str], Started | None]]:
    """``command`` with words that have its mpirun write the list; as it is, and None, where there are no such words,
    or where it says itself what is listed."""
    option = _option(Path(command[0]))
    its_own = {word.lstrip("-").partition("=")[0] for word in command} & {*_OPTIONS, _LIST}
    with _nameless_file() as path:
        if option is None or path is None or its_own:
            yield command, None
        else:
            yield [command[0], option, f"{_LIST}={path}", *command[1:]], Started(path, ranks, hosts)


@contextlib.contextmanager
def _nameless_file() -> Iterator[Path | None]:
    """It is gone with this process, however that ends; None where the kernel forbids it or there is no /proc."""
    try:
        file = os.memfd_create("hpcdp-started")
    except OSError:
        yield None
        return
    try:
        path = Path(f"/proc/{os.getpid()}/fd/{file}")
        yield path if path.exists() else None
    finally:
        os.close(file)


def _option(mpirun: Path) -> str | None:
    """What the option is called: versions differ, and end where they do not know a name."""
    for content in runtimes(mpirun):
        if f"\0{_LIST}\0".encode() in content:
            return next((f"--{name}" for name in _OPTIONS if f"\0{name}\0".encode() in content), None)
    return None
