"""What runs in every container of a batch system that gives processes and no way from one to another, such as YARN.

``python -m hpcdp.launch.yarn_containers FOLDER COUNT COMMAND...`` takes a number, 1 to COUNT, which is the
container's name as a host of mpirun: container-1, container-2. The first one runs COMMAND. Its mpirun starts a daemon
on each host by an agent, `container_agent`, that leaves the daemon's command in the folder of that container, where
this finds it.

[Note: no ssh, no port] All goes through files in a folder that all containers see. A file is written under another name
and renamed, so none is read half, and making a folder succeeds for one process alone. A file system of the network
shows new files late, NFS after seconds: that delays the start, not the ranks, whose messages take the network.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ..core.environment import module
from ..errors import LaunchError, listed, to_stderr
from .batch import ERRORS, OUTPUT, STATUS, replace
from .cleanup import adopt, bound, end_orphans
from .mpi_library import find_library

COMMAND, WRITTEN, ENDED = ".command", ".written", ".ended"
"""What the names of a command's files end in: itself, what it writes, its status."""

_POLL_S = 0.1
_GATHER_S = 600.0
_BEAT_S, _LOST_S = 2.0, 120.0
_OVER, _HOST = "over", "host"
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def container_name(number: int) -> str:
    """The name of a container, numbered from 1, as a host of mpirun and as a folder."""
    return f"container-{number}"


def agent_script(folder: Path) -> str:
    """The program that mpirun of either family calls as it would call ssh."""
    agent = shlex.join([sys.executable, *module("hpcdp.launch.container_agent"), str(folder)])
    return f'#!/bin/sh\nexec {agent} "$@"\n'


def main(argv: Sequence[str]) -> int:
    """Every container calls, and ends with what it has started. Returns its status: 0 once the job is over."""
    folder, count, *command = argv
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # taken by `_pause`: none comes while orphans are ended
    adopt()
    try:
        number = _take_number(Path(folder), int(count))
        if number == 1:
            _lead(Path(folder), int(count), command)
        else:
            _follow(Path(folder), number)
    except LaunchError as error:
        to_stderr(f"hpcdp: {error}")
        return 1
    finally:
        end_orphans()
    return 0


def _take_number(folder: Path, count: int) -> int:
    for number in range(1, count + 1):
        try:
            (folder / container_name(number)).mkdir()
        except FileExistsError:
            continue
        replace(folder / container_name(number) / _HOST, socket.gethostname())
        return number
    raise LaunchError(
        "start a container",
        where=socket.gethostname(),
        expected=f"one of {count}",
        got="one more, in the place of one that was lost, whose ranks have ended",
    )


def _lead(folder: Path, count: int, command: Sequence[str]) -> None:
    """The first container: runs ``command`` once all are there, and tells the others when it is over."""
    commands, beat = _Commands(folder / container_name(1)), _Beat(folder)
    try:
        with (folder / OUTPUT).open("ab") as output, (folder / ERRORS).open("ab") as errors:
            wrong = _wait_for_all(folder, count, beat) or _together(folder, count)
            if wrong:
                errors.write(f"hpcdp launch: {wrong}\n".encode())
                replace(folder / STATUS, "1")
                return
            runner = [sys.executable, *module("hpcdp.launch.batch_runner")]
            job = _start([*runner, str(folder), str(os.EX_TEMPFAIL), "inf", *command], output, errors)
        while job.poll() is None:
            beat.give()
            commands.attend()
            _pause()
    finally:
        (folder / _OVER).touch()


def _follow(folder: Path, number: int) -> None:
    """The other containers: until the job is over, or the first one is not heard of any more."""
    commands, beat = _Commands(folder / container_name(number)), _Beat(folder)
    while folder.exists() and not (folder / _OVER).exists():
        if beat.is_lost():
            raise LaunchError("run ranks", where=container_name(number), got=f"no sign of {container_name(1)}")
        commands.attend()
        _pause()


def _wait_for_all(folder: Path, count: int, beat: _Beat) -> str | None:
    """Why the job cannot start: not all containers have come in time. YARN gives them as they become free."""
    deadline = time.monotonic() + _GATHER_S
    places = {folder / container_name(number) / _HOST for number in range(1, count + 1)}
    while (missing := {place for place in places if not place.exists()}) and time.monotonic() < deadline:
        beat.give()
        _pause()
    if not missing:
        return None
    return f"{len(missing)} of {count} containers have not started in {_GATHER_S:g} s: ask for less"


def _together(folder: Path, count: int) -> str | None:
    """Why the job cannot start: ranks of Open MPI in two containers of one machine would wait for each other for ever.

    Each takes the other for one of another machine, and their connection to the same address never comes to be used.
    """
    hosts = [(folder / container_name(number) / _HOST).read_text() for number in range(1, count + 1)]
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if not twice or find_library().family != "openmpi":
        return None
    return f"Open MPI needs one container a machine, got several on {listed(twice)}: give each more --ranks-per-node"


class _Beat:
    """The sign of life of the first container: a file whose content changes. Clocks of hosts differ."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "beat"
        self._last, self._at_s = "0", time.monotonic()

    def give(self) -> None:
        """The first container calls, over and over."""
        if time.monotonic() >= self._at_s:
            self._last, self._at_s = str(int(self._last) + 1), time.monotonic() + _BEAT_S
            replace(self._path, self._last)

    def is_lost(self) -> bool:
        """The others call."""
        try:
            now = self._path.read_text()
        except FileNotFoundError:  # not yet, or no more
            now = self._last
        if now != self._last:
            self._last, self._at_s = now, time.monotonic()
        return time.monotonic() > self._at_s + _LOST_S


class _Commands:
    """Runs the commands that are left in a container's folder, and leaves their status beside them."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._started: dict[Path, subprocess.Popen[bytes]] = {}

    def attend(self) -> None:
        """To be called over and over."""
        for path in self._place.glob(f"*{COMMAND}"):
            if path not in self._started:
                with path.with_suffix(WRITTEN).open("ab") as written:
                    self._started[path] = _start(["/bin/bash", "-c", path.read_text()], written, written)
        for path, process in self._started.items():
            ended = path.with_suffix(ENDED)
            if process.poll() is not None and not ended.exists():
                replace(ended, str(process.returncode if process.returncode >= 0 else 128 - process.returncode))


def _pause() -> None:
    """Until the next look; a signal to end ends this container."""
    received = signal.sigtimedwait(_ENDING, _POLL_S)
    if received is not None:
        sys.exit(128 + received.si_signo)


def _start(argv: Sequence[str], output: BinaryIO, errors: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, preexec_fn=bound())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
