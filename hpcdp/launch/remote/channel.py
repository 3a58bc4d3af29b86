"""The launcher's end of its connection to the guard of one host: an ssh that runs `guard` there."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..mpirun_output import Banners, Quiet
from .guard import FIRST_WORDS

SSH = ("ssh", "-T", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "LogLevel=ERROR")
"""It never asks: for a password, or whether a host is known."""
ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "ControlPath=none")
"""It ends by itself where neither side ends it: the guard's limit is another thing."""
AT_ONCE = 64
"""Hosts that are connected to at a time: each takes a process here."""
FILES = 2
"""Descriptors of a channel."""
_ROOT = Path(__file__).resolve().parents[3]
_GUARD = "import sys; sys.path.insert(0, {!r}); from hpcdp.launch.remote import guard; guard.main()"
_MOST_WORDS = 10_000


class Channel:
    """A connection to ``host``, as ssh knows it; the remote command line holds no value of the user's."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.is_ready = self.is_closed = False
        self.cores = 0
        self.heard_s = time.monotonic()
        self._buffer = b""
        self._words, self._quiet = b"", Quiet()
        self.banners = Banners()
        """What daemons of mpirun say there at length of ranks that have failed."""
        guard = shlex.join([sys.executable, "-P", "-c", _GUARD.format(str(_ROOT))])
        self._both_ways, of_ssh = socket.socketpair()  # one descriptor a host, not two
        with of_ssh:
            self._ssh = subprocess.Popen(
                [*SSH, *ALIVE, "--", host, f"exec {guard}"],
                stdin=of_ssh.fileno(),
                stdout=of_ssh.fileno(),
                stderr=subprocess.PIPE,
                process_group=0,  # Ctrl-C on the terminal is the launcher's alone
            )
        assert self._ssh.stderr
        self.out, self.err = self._both_ways.fileno(), self._ssh.stderr.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Does nothing on a connection that has closed: `messages` tells of it."""
        left = json.dumps(message).encode() + b"\n"
        with contextlib.suppress(OSError):
            while left:
                left = left[os.write(self.out, left) :]

    def messages(self) -> Iterator[tuple[str, Any]]:
        """What has come from the guard, read when ``out`` can be read."""
        try:
            received = os.read(self.out, 1 << 16)
        except ConnectionError:  # it has ended before it has read everything
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
        """Copies what has come on ``err`` to stderr, keeps it before the guard is ready; False at its end."""
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
        self._words = (self._words + words)[-_MOST_WORDS:]

    def why_closed(self) -> str:
        """Why no guard is there, in ssh's last words or the remote shell's."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._ssh.wait(1)
        while self.copy_words() and len(self._words) < _MOST_WORDS:
            pass
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines() if line.strip()]
        code = self._ssh.returncode
        if code in (126, 127) or any("No module named 'hpcdp" in line for line in lines):
            return f"no {sys.executable} with hpcdp; it must lie at the same path on all hosts"
        return lines[-1] if lines else f"ssh ended with status {code}"

    def close(self) -> None:
        """Ends the connection, and with it the guard."""
        self._both_ways.close()
        if self._ssh.stderr is not None:
            self._ssh.stderr.close()
        try:
            self._ssh.wait(0.5)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
