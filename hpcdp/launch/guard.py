"""What holds a job's processes on another host: started there by ssh, it is the ancestor of all of them.

It starts what mpirun wants started on its host, tells of the ranks that start and end there, and dies with its
connection: when that closes, or nothing has come for `LOST_AFTER_S`, everything below it is ended and what it left in
/dev/shm is removed. So no rank outlives the launcher, its host, or the network between them, whatever the MPI library
does.

Both sides write lines of JSON, each with one key: the launcher ``begin``, ``check``, ``start``, ``ranks``, ``beat``,
``pause`` and ``end``, the guard ``ready``, ``problems``, ``beat``, ``rank``, ``rank_end``, ``started_end``, ``died``
and ``told_to_end``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from ..core.files import who_else_may_write
from ..core.sockets import keep_to_interface
from . import hosts, process_monitor
from .mpi_library import LOST_AFTER_S, STALLED_S, blas_threads
from .process_monitor import Watch, adopt, bound, end_orphans, living

FIRST_WORDS = "hpcdp guard "
"""Before its first line: what a login script has written is not taken for it."""
DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
"""Programs of mpirun on other hosts."""
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Guard:
    """The guard of this host, on its standard input and output.

    Args:
        begin: how many ``ranks`` run here and ``elsewhere``, how many ``servers`` are among all, the ``workers`` here,
            the ``environ`` of what is started, the ``folder`` that Open MPI's segments share with no other job,
            or None, and the ``interface`` through which mpirun's daemon accepts connections, None for any.
    """

    def __init__(self, begin: dict[str, Any]) -> None:
        adopt()
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        self._environ = {**_shares(begin["workers"], begin["environ"]), **begin["environ"]}
        self._folder: str | None = begin["folder"]
        self._interface: str | None = begin["interface"]
        self._wrong: list[str] = []
        self._watch = Watch(os.getpid(), begin["ranks"], set(_WATCHED), begin["servers"], begin["elsewhere"])
        self._watch.also(0, self._read)
        # What is started here must not hold the guard's own descriptors: ssh keeps a connection open while somebody
        # does, and the launcher would not notice that the guard was killed.
        self._words, self._words_end = os.pipe()
        os.set_blocking(self._words, False)
        self._watch.also(self._words, self._copy)
        # By pid: the launcher's number, and the process, which would take its own status if it were forgotten.
        self._started: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._told_starts, self._told_ends = 0, set[int]()
        self._buffer = b""
        self._is_over = False
        self._heard_s = time.monotonic()

    def run(self) -> None:
        """Returns once the job is over here and nothing of it is left."""
        with contextlib.ExitStack() as left_behind:
            if self._folder is None:
                left_behind.enter_context(process_monitor.files_of_mpich_removed())
            else:
                try:
                    left_behind.enter_context(process_monitor.same_folder(self._folder))
                except OSError as error:
                    self._wrong.append(f"no folder for segments: {error.strerror}")
            try:
                looked_s = time.monotonic()
                while not self._is_over and looked_s - self._heard_s < LOST_AFTER_S:
                    received = self._watch.wait(1.0)
                    late_s = time.monotonic() - looked_s
                    looked_s += late_s
                    if late_s > STALLED_S and self._heard_s < looked_s:
                        self._heard_s = min(looked_s, self._heard_s + late_s)
                    if self._interface is not None and self._watch.starts:  # the daemon listens before
                        self._keep_daemons_to(self._interface)
                        self._interface = None
                    self._tell_of_ranks()
                    self._reap()
                    if received is not None and received.number != signal.SIGCHLD:
                        tell({"told_to_end": received.number})
                        break
            except BrokenPipeError:
                pass
            finally:
                end_orphans()
                with contextlib.suppress(OSError):
                    while self._copy():
                        pass

    def _read(self) -> None:
        received = os.read(0, 1 << 16)
        self._is_over |= not received
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            ((key, value),) = json.loads(line).items()
            self._heard_s = time.monotonic()
            if key == "beat":
                tell({"beat": value})
            elif key == "check":
                tell({"problems": [*self._wrong, *problems(**value)]})
            elif key == "start":
                self._start(**value)
            elif key == "ranks":
                for rank, pid in value:
                    self._watch.know_of(rank, pid)
            elif key == "pause":
                self._heard_s = math.inf  # until the next line
            elif key == "end":
                self._is_over = True

    def _copy(self) -> bool:
        """Copy what processes here have written, for the launcher's stderr; return whether there was any."""
        try:
            written = os.read(self._words, 1 << 16)
        except BlockingIOError:
            return False
        while written:
            written = written[os.write(2, written) :]
        return True

    def _start(self, number: int, command: str) -> None:
        """Start a command as sshd does, by the user's shell, from the home folder; it gets SIGTERM if the guard dies.

        The signal reaches what the shell becomes; what has left that process, as a daemon does, ends with mpirun.
        """
        process = subprocess.Popen(
            [_shell(), "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=self._words_end,
            stderr=self._words_end,
            env=self._environ,
            preexec_fn=bound(),
        )
        self._started[process.pid] = number, process

    def _keep_daemons_to(self, interface: str) -> None:
        """A daemon is the shell that was started here, which has become it, or a child of that."""
        for pid in self._started:
            for each in {pid} | living(pid):
                if _name_of(each) in DAEMONS:
                    keep_to_interface(interface, each)

    def _tell_of_ranks(self) -> None:
        for start in self._watch.starts[self._told_starts :]:
            tell({"rank": [start.rank, start.pid, hosts.cores_of(start.pid)]})
        self._told_starts = len(self._watch.starts)
        for end in self._watch.ends():
            if end.rank not in self._told_ends:
                self._told_ends.add(end.rank)
                tell({"rank_end": [end.rank, end.pid, end.status]})

    def _reap(self) -> None:
        """Takes the statuses of what was started here, and of what it left behind, such as a daemon of mpirun."""
        while True:
            try:
                seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if seen is None:
                return
            self._tell_of_ranks()  # of a rank that is reaped here nobody else could tell the status
            name = _name_of(seen.si_pid)
            _, status = os.waitpid(seen.si_pid, 0)
            if seen.si_pid in self._started:
                number, process = self._started.pop(seen.si_pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                tell({"started_end": [number, process.returncode]})
            elif status:
                tell({"died": [name, seen.si_pid, status]})


def problems(folder: str | None, program: str, interface: str | None, *, is_copy: bool = False) -> list[str]:
    """Return why a program cannot run on this host, nothing where it can.

    Args:
        folder: its working folder.
        is_copy: whether ``--sync-dst-dir`` has filled the folder: others may have made it before, in /tmp.
    """
    found = []
    if folder is not None and not os.path.isdir(folder):
        found.append(f"there is no folder {folder}; share it, or copy it with --sync-dst-dir")
    elif folder is not None and is_copy and (writer := who_else_may_write(folder, everybody=True)) is not None:
        found.append(f"others may change {writer}; give --sync-dst-dir a folder of yours")
    path = program if os.path.isabs(program) or folder is None else os.path.join(folder, program)
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        found.append(f"there is no program {program}; it must lie at the same path on all hosts")
    wrong = None if interface is None else hosts.problem(interface)
    if wrong is not None:
        found.append(wrong)
    return found


def tell(message: dict[str, Any], before: str = "") -> None:
    """Writes one line to the launcher."""
    os.write(1, f"{before}{json.dumps(message)}\n".encode())


def main() -> None:
    """The program on a host."""
    cores = len(os.sched_getaffinity(0))
    tell({"ready": [socket.gethostname(), cores]}, FIRST_WORDS)
    line = b""
    while not line.endswith(b"\n"):  # no more than this line is read
        received = os.read(0, 1)
        if not received:
            return
        line += received
    Guard(json.loads(line)["begin"]).run()


def _shares(workers: int, environ: dict[str, str]) -> dict[str, str]:
    """This host's environment, with its cores shared out among the ranks' BLAS threads unless the user says."""
    return {**os.environ, **blas_threads(max(1, len(os.sched_getaffinity(0)) // max(1, workers)), environ)}


def _shell() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    except KeyError:
        return "/bin/sh"


def _name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"
