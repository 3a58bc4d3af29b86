"""The guards of remote hosts, and the launcher's connections to them: the two ends of one protocol.

A `Guard` is started by ssh, and is the ancestor of all processes of the job on its host. It starts mpirun's daemon,
reports the starts and ends of ranks, and ends with its connection. When the connection closes, or is silent for
`LOST_AFTER_S`, the guard ends all its descendants and removes their files in /dev/shm. So no rank outlives the
launcher, its host or the network between them, whatever the MPI library does.

`Channel` is the launcher's ssh that runs the guard of one host. `Guards` are those of a job's other hosts: they are
connected before mpirun starts, and start its daemons at its request.

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
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from ..core.environment import explained, keep_to_interface
from ..core.files import who_else_may_write
from ..errors import LaunchError, listed
from . import hosts, process_monitor
from .hosts import HostSlots
from .mpi_library import LOST_AFTER_S, STALLED_S, blas_threads
from .process_monitor import End, Start, Watch, adopt, bound, end_orphans, living, name_of

FIRST_WORDS = "hpcdp guard "
"""The prefix of the guard's first line, which tells it from the output of login scripts."""
DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
"""The daemons of mpirun on other hosts."""
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SSH = ("ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR")
"""The ssh command, which never prompts for a password or an unknown host key."""
ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "ControlPath=none")
"""Options with which ssh ends by itself when the host is lost, independently of the guard's limit."""
AT_ONCE = 64
"""Greatest number of hosts that are connected concurrently; each needs a process on this machine."""
FILES = 2
"""Number of descriptors of a channel."""
_REMEDIES = (
    ("Could not resolve hostname", "correct the host's name, or define it in ~/.ssh/config"),
    ("Connection refused", "start sshd on {0}, or set its port in ~/.ssh/config"),
    ("timed out|No route to host|unreachable", "check that {0} is up and reachable from here: ssh {0} true"),
    ("IDENTIFICATION HAS CHANGED", "if {0} was reinstalled, forget its old key: ssh-keygen -R {0}"),
    ("Host key verification failed|host key is known", "log in once to accept its host key: ssh {0}"),
    ("Permission denied", "allow ssh without a password: ssh-copy-id {0}"),
    ("no .* with hpcdp$", "install hpcdp at the same path on all hosts"),
    ("rsync is not installed", "install rsync on all hosts"),
    ("", "find the cause with: ssh {0} true"),
)
"""Patterns in the messages of ssh and the remote shell, with what to do about each; {0} is the host."""
_ROOT = Path(__file__).resolve().parents[2]
_GUARD = "import sys; sys.path.insert(0, {!r}); from hpcdp.launch import guard; guard.main()"
_MOST_WORDS = 10_000


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
        self._output, self._output_end = os.pipe()
        os.set_blocking(self._output, False)
        self._watch.also(self._output, self._copy)
        # By pid: the launcher's number, and the Popen object, which would reap the process if it were deleted.
        self._started: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self._num_reported, self._reported_ends = 0, set[int]()
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
            written = os.read(self._output, 1 << 16)
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
            stdout=self._output_end,
            stderr=self._output_end,
            env=self._environ,
            preexec_fn=bound(),
        )
        self._started[process.pid] = number, process

    def _keep_daemons_to(self, interface: str) -> None:
        """Restrict the daemons' sockets to an interface; a daemon is a started shell's successor or child."""
        for shell in self._started:
            for pid in {shell} | living(shell):
                if _command_of(pid) in DAEMONS:
                    keep_to_interface(interface, pid)

    def _tell_of_ranks(self) -> None:
        for start in self._watch.starts[self._num_reported :]:
            tell({"rank": [start.rank, start.pid, hosts.cores_of(start.pid)]})
        self._num_reported = len(self._watch.starts)
        for end in self._watch.ends():
            if end.rank not in self._reported_ends:
                self._reported_ends.add(end.rank)
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
            name = _command_of(ended.si_pid)
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


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"


def remedy(host: str, words: str) -> str:
    """Return what to do about a host that ssh cannot reach, given what ssh or the remote shell has written."""
    return next(advice for pattern, advice in _REMEDIES if re.search(pattern, words)).format(host)


class Channel:
    """A connection to the guard on ``host``, a name for ssh; the remote command line has no value of the user's."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_ready = self.is_closed = False
        self.cores = 0
        self.heard_s = time.monotonic()
        self._buffer = b""
        from .mpirun_stderr import Banners, Quiet  # late: a guard does not need them

        self._login_output, self._quiet = b"", Quiet()
        self.banners = Banners()
        """The long messages of mpirun's daemons on failed ranks, kept back."""
        guard = shlex.join([sys.executable, "-P", "-c", _GUARD.format(str(_ROOT))])
        self._both_ways, ssh_end = socket.socketpair()  # one descriptor per host, not two
        with ssh_end:
            self._ssh = subprocess.Popen(
                [*SSH, *ALIVE, "--", host, f"exec {guard}"],
                stdin=ssh_end.fileno(),
                stdout=ssh_end.fileno(),
                stderr=subprocess.PIPE,
                process_group=0,  # the terminal's Ctrl-C reaches the launcher only
            )
        assert self._ssh.stderr
        self.out, self.err = self._both_ways.fileno(), self._ssh.stderr.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; do nothing on a closed connection, which `messages` reports."""
        left = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self.out, left) :]

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Yield the messages of the guard; call this when ``out`` is readable."""
        try:
            received = os.read(self.out, 1 << 16)
        except ConnectionError:  # ssh has ended with unread input
            received = b""
        if not received:
            self.is_closed = True
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in lines:
            if not self.is_ready:
                before, first, line = line.partition(FIRST_WORDS.encode())
                if not first:
                    self._keep(before + b"\n")
                    continue
            self.heard_s = time.monotonic()
            ((key, value),) = json.loads(line).items()
            if key == "ready":
                self.is_ready = True
                self.cores = value[1]
            else:
                yield key, value

    def copy_words(self) -> bool:
        """Copy input of ``err`` to stderr, or keep it until the guard is ready; return False at end of file."""
        received = os.read(self.err, 1 << 16)
        if self.is_ready:
            shown = self._quiet.pass_on(received) if received else self._quiet.end()
            shown = self.banners.pass_on(shown) + (b"" if received else self.banners.end())
            with contextlib.suppress(OSError):
                os.write(2, shown)
        else:
            self._keep(received)
        return bool(received)

    def _keep(self, words: bytes) -> None:
        self._login_output = (self._login_output + words)[-_MOST_WORDS:]

    def why_closed(self) -> tuple[str, str]:
        """Return the reason for a missing guard, the last line of ssh or the remote shell, and the remedy."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ssh.wait(1)
        while self.copy_words() and len(self._login_output) < _MOST_WORDS:
            pass
        words = self._login_output.decode(errors="replace")
        lines = [line.strip() for line in words.splitlines() if line.strip()]
        code = self._ssh.returncode
        if code in (126, 127) or "No module named 'hpcdp" in words:
            why = words = f"no {sys.executable} with hpcdp"
        else:
            why = lines[-1].removeprefix("ssh: ") if lines else f"ssh ended with status {code}"
        return why, remedy(self.host, words)

    def hang_up(self) -> None:
        """Close the connection, which ends the guard; call `wait` afterwards."""
        self._both_ways.close()
        if self._ssh.stderr is not None:
            self._ssh.stderr.close()

    def wait(self, deadline_s: float) -> None:
        """Wait for ssh to end until ``deadline_s`` (monotonic), then kill it."""
        try:
            self._ssh.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()


_REACHED_S, _ANSWERED_S, _ENDED_S, _HUNG_UP_S = 20.0, 20.0, 4.0, 1.0
_BEAT_S = 2.0
_OTHER_FILES = 256
"""Number of descriptors besides those of channels: the launcher's, local ranks, and waiting agents."""


class Guards:
    """A context with a guard on each of ``places``.

    Args:
        places: hosts other than this machine.
        say: writes a line of ``-v``.

    Raises:
        LaunchError: on entry, with the hosts that cannot be reached and the reasons.
    """

    def __init__(self, places: Sequence[HostSlots], say: Callable[[str], None]) -> None:
        self._places = {place.name: place for place in places}
        self._say = say
        self._channels: dict[str, Channel] = {}
        self._folder = Path()
        self._left_behind = contextlib.ExitStack()
        self._socket: socket.socket | None = None
        self._agents: dict[int, socket.socket] = {}  # by the number of the awaited daemon
        self._number = 0
        self._next_beat = 0.0
        self._watch: Watch | None = None
        self.lost: dict[str, str] = {}
        """The first failure of each host or of mpirun's daemon there."""

    def __enter__(self) -> Guards:
        if self._places and shutil.which("ssh") is None:
            raise LaunchError("reach other hosts", expected="ssh", got="none here", remedy="install OpenSSH's client")
        try:
            self._folder = _private_folder(self._left_behind)
            _allow_files(len(self._places))
            names = list(self._places)
            with explained(f"connecting by ssh to {listed(names)}", os.isatty(2), sys.stderr):
                for first in range(0, len(names), AT_ONCE):
                    wave = [Channel(name) for name in names[first : first + AT_ONCE]]
                    self._channels |= {channel.host: channel for channel in wave}
                    untried = len(names) - len(self._channels)
                    self._wait(
                        lambda channel: channel.is_ready, _REACHED_S, "reach by ssh", among=wave, untried=untried
                    )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        for channel in self._channels.values():
            self._say(f"{channel.host} is reached, {channel.cores} cores")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels.values():
            channel.hang_up()
        deadline_s = time.monotonic() + _HUNG_UP_S  # for all together, as each ssh to a silent host uses it up
        for channel in self._channels.values():
            channel.wait(deadline_s)
        if self._socket is not None:
            self._socket.close()
        self._left_behind.close()

    def begin(
        self, ranks: int, servers: int, environ: Mapping[str, str], segments: Path | None, interface: str | None
    ) -> None:
        """Send the settings of the job to every guard.

        Args:
            ranks: total number of processes, including servers.
            servers: number of servers.
            environ: variables besides the host's own.
            segments: folder that each guard makes, and removes at the end.
            interface: network interface on which mpirun's daemons accept connections; None for any.
        """
        folder = None if segments is None else str(segments)
        for name, channel in self._channels.items():
            place = self._places[name]
            counts = {"ranks": place.processes, "elsewhere": ranks - place.processes, "servers": servers}
            counts["workers"] = place.ranks
            settings = {"environ": dict(environ), "folder": folder, "interface": interface}
            channel.send({"begin": {**counts, **settings}})

    def know_of(self, ranks: Mapping[str, Sequence[tuple[int, int]]]) -> None:
        """Send each guard the ranks and process numbers that mpirun reports to have started on its host."""
        for host, started in ranks.items():
            if host in self._channels:
                self._channels[host].send({"ranks": started})

    def cores(self) -> dict[str, int]:
        """Return the number of usable cores of each host."""
        return {name: channel.cores for name, channel in self._channels.items()}

    def check(self, folder: str, program: str, interface: str | None, *, is_copy: bool = False) -> None:
        """Check that the program can run on each host; call this after `begin`.

        Args:
            folder: the working folder.
            program: the program's path on the hosts.
            interface: network interface of the job's traffic; None for any.
            is_copy: whether the launcher has made the folder there.

        Raises:
            LaunchError: it cannot, with the hosts and the first reason of each.
        """
        answers: dict[str, list[str]] = {}
        for channel in self._channels.values():
            request = {"folder": folder, "program": program, "interface": interface, "is_copy": is_copy}
            channel.send({"check": request})
        self._wait(lambda channel: channel.host in answers, _ANSWERED_S, "check hosts", answers)
        failures = [f"{host}: {problems[0]}" for host, problems in answers.items() if problems]
        if failures:
            raise LaunchError("launch", got=listed(failures))

    def agent(self) -> str:
        """Make the program that mpirun starts instead of ssh, and return its path."""
        path, script = self._folder / "socket", self._folder / "agent"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(128)
        words = [sys.executable, "-IS", str(Path(__file__).resolve().with_name("rsh_agent.py")), str(path)]
        script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        script.chmod(0o700)
        return str(script)

    def attach(self, watch: Watch) -> None:
        """Receive the guards' messages whenever ``watch`` waits, and report their ranks to it."""
        self._watch = watch
        if self._socket is not None:
            watch.also(self._socket.fileno(), self._accept)
        for channel in self._channels.values():
            channel.heard_s = time.monotonic()
            watch.also(channel.out, partial(self._hear, channel))
            watch.also(channel.err, partial(self._copy, channel))

    def beat(self) -> None:
        """Send heartbeats to the guards and detect lost ones; call this about every second."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        late_s = now - self._next_beat if self._next_beat else 0.0
        self._next_beat = now + _BEAT_S
        for channel in self._channels.values():
            if late_s > STALLED_S:
                channel.heard_s = min(now, channel.heard_s + late_s)
            if not channel.is_closed:
                silent_s = now - channel.heard_s
                if silent_s > LOST_AFTER_S:
                    self._lose(channel, f"has not answered for {silent_s:.0f} s: lost")
                else:
                    channel.send({"beat": 0})

    def pause(self) -> None:
        """Tell the guards that the launcher is going to be stopped, so that its silence does not end them."""
        for channel in self._channels.values():
            channel.send({"pause": 0})

    def show_banners(self) -> None:
        """Write the kept messages of mpirun's daemons on failed ranks to stderr."""
        with contextlib.suppress(OSError):
            os.write(2, b"".join(channel.banners.kept for channel in self._channels.values()))

    def end(self) -> None:
        """End all remaining processes on the hosts, and wait a few seconds for it."""
        for channel in self._channels.values():
            channel.send({"end": 0})
        with contextlib.suppress(LaunchError):
            self._wait(lambda channel: channel.is_closed, _ENDED_S, "end hosts")

    def _accept(self) -> None:
        assert self._socket is not None
        connection, _ = self._socket.accept()
        connection.settimeout(5)
        with contextlib.suppress(OSError, ValueError):
            request = json.loads(connection.makefile("rb").readline())
            short_names = {name.partition(".")[0]: channel for name, channel in reversed(self._channels.items())}
            channel = self._channels.get(request["host"]) or short_names.get(request["host"])
            if channel is not None:
                self._number += 1
                self._agents[self._number] = connection
                channel.send({"start": {"number": self._number, "command": request["command"]}})
                return
        connection.close()

    def _hear(self, channel: Channel) -> None:
        assert self._watch is not None
        for key, value in channel.messages():
            if key == "rank":
                rank, pid, cores = value
                self._watch.note(Start(rank, pid, channel.host))
                where = f"pid {pid} on {channel.host}, cores {cores or 'unknown: it has ended'}"
                self._say(f"{self._watch.name(rank)} is {where}")
            elif key == "rank_end":
                rank, pid, status = value
                end = End(rank, pid, status, time.monotonic(), self._watch.server(rank), channel.host)
                self._watch.note(end)
            elif key == "started_end":
                number, code = value
                self._answer(number, code % 256)
                if code < 0 and self._watch.failed is None:
                    self._lose_daemon("mpirun's daemon", channel, -code)
            elif key == "died":
                name, pid, status = value
                if os.WIFSIGNALED(status) and name in DAEMONS and self._watch.failed is None:
                    self._lose_daemon(f"{name} (pid {pid})", channel, os.WTERMSIG(status))
            elif key == "told_to_end":
                self.lost.setdefault(channel.host, f"the guard on {channel.host} was ended by {name_of(value)}")
        if channel.is_closed:
            self._lose(channel, "is lost: the connection to its guard has closed")

    def _lose_daemon(self, daemon: str, channel: Channel, sign: int) -> None:
        self.lost.setdefault(channel.host, f"{daemon} on {channel.host} was killed by {name_of(sign)}")

    def _answer(self, number: int, status: int) -> None:
        connection = self._agents.pop(number, None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(str(status).encode())
            connection.close()

    def _copy(self, channel: Channel) -> None:
        if not channel.copy_words() and self._watch is not None:
            self._watch.no_more(channel.err)

    def _lose(self, channel: Channel, why: str) -> None:
        assert self._watch is not None
        channel.is_closed = True
        self._watch.no_more(channel.out)
        self._watch.no_more(channel.err)
        self.lost.setdefault(channel.host, f"{channel.host} {why}")

    def _wait(
        self,
        is_met: Callable[[Channel], bool],
        limit_s: float,
        what: str,
        answers: dict[str, Any] | None = None,
        *,
        among: Sequence[Channel] | None = None,
        untried: int = 0,
    ) -> None:
        """Wait until ``is_met`` is true of all channels, or of those ``among`` them.

        Raises:
            LaunchError: some have closed before or not answered, with their names and the number of ``untried`` hosts.
        """
        deadline = time.monotonic() + limit_s
        poll = select.poll()
        channels = self._channels.values() if among is None else among
        waiting = {channel.out: channel for channel in channels if not channel.is_closed}
        ends = {channel.err: channel for channel in waiting.values()}
        for descriptor in (*waiting, *ends):
            poll.register(descriptor, select.POLLIN)
        failures: dict[str, tuple[str, str]] = {}
        while True:
            waiting = {descriptor: channel for descriptor, channel in waiting.items() if not is_met(channel)}
            left_s = deadline - time.monotonic()
            if not waiting or left_s <= 0:
                break
            for descriptor, _ in poll.poll(left_s * 1000):
                if descriptor in ends and not ends[descriptor].copy_words():
                    poll.unregister(descriptor)
                if descriptor not in waiting:
                    continue
                channel = waiting[descriptor]
                for key, value in channel.messages():
                    if key == "problems" and answers is not None:
                        answers[channel.host] = value
                if channel.is_closed:
                    poll.unregister(descriptor)
                    if not is_met(channel):
                        failures[channel.host] = channel.why_closed()
                        del waiting[descriptor]
        for channel in waiting.values():
            why = f"no answer in {limit_s:.0f} s"
            failures[channel.host] = why, remedy(channel.host, why)
        if failures:
            hosts = sorted(failures)
            expected = "an answer of each host" if answers is not None else "a login on each host"
            more = f" ({untried} more hosts were not tried)" if untried else ""
            got = listed([f"{host}: {failures[host][0]}" for host in hosts]) + more
            raise LaunchError(what, expected=expected, got=got, remedy=failures[hosts[0]][1])


def _allow_files(hosts: int) -> None:
    """Raise this process's limit of open files to the number that channels to ``hosts`` hosts need."""
    needed = _OTHER_FILES + FILES * hosts
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise LaunchError(
                f"launch on {hosts} other hosts", expected=f"a limit of {needed} open files", got=hard,
                remedy=f"run ulimit -n {needed}, which an administrator may have to allow",
            )  # fmt: skip
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _private_folder(left_behind: contextlib.ExitStack) -> Path:
    """Return a new folder of this user's whose files may be executed, which some sites forbid in /tmp."""
    prefix = process_monitor.of_this_host("hpcdp-guards")
    reasons = []
    for base in (Path(tempfile.gettempdir()), Path(os.path.expanduser("~/.cache"))):
        try:
            base.mkdir(exist_ok=True)
            folder = left_behind.enter_context(process_monitor.new(base, prefix))
            probe = folder / "probe"
            probe.touch(mode=0o700)
            if os.access(probe, os.X_OK) and len(str(folder)) < 90 and not set(" :,;\"'") & set(str(folder)):
                return folder
            reasons.append(f"no programs may be run from {base}")
        except OSError as error:
            reasons.append(str(error.strerror))
    raise LaunchError(
        "launch on other hosts",
        expected="a folder whose files may be executed, TMPDIR or ~/.cache",
        got=", ".join(reasons),
        remedy="set TMPDIR",
    )
