"""The guard of a remote host: started there by ssh, it is the ancestor of all processes of the job on that host.

It starts mpirun's daemon, reports the starts and ends of ranks, and ends with its connection. When the connection
closes, or is silent for `LOST_AFTER_S`, the guard ends all its descendants and removes their files in /dev/shm. So no
rank outlives the launcher, its host or the network between them, whatever the MPI library does.

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

from ..core.environment import keep_to_interface
from ..core.files import who_else_may_write
from . import hosts, process_monitor
from .mpi_library import LOST_AFTER_S, STALLED_S, blas_threads
from .process_monitor import Watch, adopt, bound, end_orphans, living

FIRST_WORDS = "hpcdp guard "
"""The prefix of the guard's first line, which tells it from the output of login scripts."""
DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
"""The daemons of mpirun on other hosts."""
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Guard:
    """The guard of this host, on its standard input and output.

    Args:
        begin: the launcher's settings: numbers of ``ranks`` here and ``elsewhere``, of ``servers`` among all, and of
            ``workers`` here; the ``environ`` of started processes; the job's ``folder`` for Open MPI's segments, or
            None; the ``interface`` on which mpirun's daemon accepts connections, None for any.
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
        # Children must not inherit the guard's descriptors: ssh keeps a connection open while a process holds them, and
        # the launcher would not notice that the guard was killed.
        self._words, self._words_end = os.pipe()
        os.set_blocking(self._words, False)
        self._watch.also(self._words, self._copy)
        # By pid: the launcher's number, and the Popen object, which would reap the process if it were deleted.
        self._started: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._told_starts, self._told_ends = 0, set[int]()
        self._buffer = b""
        self._is_over = False
        self._heard_s = time.monotonic()

    def run(self) -> None:
        """Run until the job has ended on this host, and remove what it leaves behind."""
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
                    if self._interface is not None and self._watch.starts:  # the daemon listens before it starts ranks
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
                self._heard_s = math.inf  # no limit until the next line
            elif key == "end":
                self._is_over = True

    def _copy(self) -> bool:
        """Copy the output of this host's processes to the launcher's stderr; return whether there was any."""
        try:
            written = os.read(self._words, 1 << 16)
        except BlockingIOError:
            return False
        while written:
            written = written[os.write(2, written) :]
        return True

    def _start(self, number: int, command: str) -> None:
        """Start a command as sshd does, by the user's shell in the home folder; it gets SIGTERM if the guard dies.

        The signal reaches the program that replaces the shell; a process that daemonizes ends with mpirun.
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
        """Restrict the daemons' sockets to an interface; a daemon is a started shell's successor or child."""
        for shell in self._started:
            for pid in {shell} | living(shell):
                if _name_of(pid) in DAEMONS:
                    keep_to_interface(interface, pid)

    def _tell_of_ranks(self) -> None:
        for start in self._watch.starts[self._told_starts :]:
            tell({"rank": [start.rank, start.pid, hosts.cores_of(start.pid)]})
        self._told_starts = len(self._watch.starts)
        for end in self._watch.ends():
            if end.rank not in self._told_ends:
                self._told_ends.add(end.rank)
                tell({"rank_end": [end.rank, end.pid, end.status]})

    def _reap(self) -> None:
        """Reap and report ended children, and orphans that this process has adopted, such as a daemon of mpirun."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            self._tell_of_ranks()  # the status of a rank that is reaped here is lost afterwards
            name = _name_of(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if ended.si_pid in self._started:
                number, process = self._started.pop(ended.si_pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                tell({"started_end": [number, process.returncode]})
            elif status:
                tell({"died": [name, ended.si_pid, status]})


def problems(folder: str | None, program: str, interface: str | None, *, is_copy: bool = False) -> list[str]:
    """Return the reasons why a program cannot run on this host, none where it can.

    Args:
        folder: the working folder.
        program: the program's path, relative to ``folder`` or absolute.
        interface: network interface of the job's traffic; None for any.
        is_copy: whether ``--sync-dst-dir`` has filled the folder, which others may have made before, as in /tmp.
    """
    reasons = []
    if folder is not None and not os.path.isdir(folder):
        reasons.append(f"there is no folder {folder}; share it, or copy it with --sync-dst-dir")
    elif folder is not None and is_copy and (writer := who_else_may_write(folder, everybody=True)) is not None:
        reasons.append(f"others may change {writer}; give --sync-dst-dir a folder of yours")
    path = program if os.path.isabs(program) or folder is None else os.path.join(folder, program)
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        reasons.append(f"there is no program {program}; install it at the same path on all hosts")
    if interface is not None and (reason := hosts.problem(interface)) is not None:
        reasons.append(reason)
    return reasons


def tell(message: dict[str, Any], before: str = "") -> None:
    """Write one line to the launcher."""
    os.write(1, f"{before}{json.dumps(message)}\n".encode())


def main() -> None:
    """Run the guard on the standard input and output of ssh."""
    cores = len(os.sched_getaffinity(0))
    tell({"ready": [socket.gethostname(), cores]}, FIRST_WORDS)
    line = b""
    while not line.endswith(b"\n"):  # reads no more than this line
        received = os.read(0, 1)
        if not received:
            return
        line += received
    Guard(json.loads(line)["begin"]).run()


def _shares(workers: int, environ: dict[str, str]) -> dict[str, str]:
    """Return this host's environment with its cores shared out among BLAS threads, unless ``environ`` sets them."""
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
