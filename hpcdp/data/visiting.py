"""Whether HDF5 comes to an end with a file from outside: a child process does first what this one is going to do.

HDF5 follows some damaged structures for ever, in C, where no signal handler of Python's runs, and crashes at others.
Opening a file and listing its keys is safe; opening data sets, visiting all objects and reading are not.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from ..errors import DataError, HpcdpError
from ..interpreter import module
from ..kernels import cache_dir

LIMIT_S = 5.0
"""Processor time of a visit. What is sound takes milliseconds, and a second where there are 100,000 chunks."""
_LONGEST_S = 120.0
"""Of a visit by the clock: the child has to start, and file systems may be slow."""
_SOUND = "sound"
_WRONG_FOR_S, _KEPT_FOR_S = 60.0, 30 * 86400.0
"""How long other processes of the node believe that a file is wrong, and how long that it is sound."""


def require_visited(path: Path, names: Sequence[str], external: bool) -> None:
    """Let a child process visit data sets of a file, once a node and version of the file.

    Args:
        path: the file.
        names: of the data sets; where one is missing all objects are visited.
        external: follow what leads to other files.

    Raises:
        DataError: HDF5 comes to no end with it, or crashes.
    """
    version = _version(path)
    asked = hashlib.sha256(json.dumps([version, names, external]).encode()).hexdigest()
    if version in _trusted or asked in _visited:
        return
    with _visiting, _kept(asked) as kept:
        said = _read(kept)
        if not said:
            said = _child.visit([os.path.abspath(path), [*names], external])
            _write(kept, said)
    if said not in ("", _SOUND):
        raise DataError(
            "read HDF5", where=path, expected="a file with which HDF5 comes to an end", got=said,
            remedy="it is damaged: get it again, or write it anew",
        )  # fmt: skip
    _visited.add(asked)


def trust(path: Path) -> None:
    """Note that this process has written a file itself, so that it is not visited."""
    with contextlib.suppress(OSError):
        _trusted.add(_version(path))


def _version(path: Path) -> tuple[int, ...]:
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextlib.contextmanager
def _kept(asked: str) -> Iterator[TextIO | None]:
    """Yield the file that keeps what a visit has found, locked; None where there is no folder for it, or no lock."""
    with contextlib.ExitStack() as held:
        file = None
        with contextlib.suppress(HpcdpError, OSError):
            folder = cache_dir() / "hdf5"
            folder.mkdir(mode=0o700, exist_ok=True)
            opened = held.enter_context(open(folder / asked, "a+"))
            fcntl.flock(opened, fcntl.LOCK_EX)  # others wait here for the visit of the first
            file = opened
        yield file


def _read(kept: TextIO | None) -> str:
    """Return what another process has found out, or an empty text."""
    if kept is None:
        return ""
    kept.seek(0)
    said = kept.read(1000)
    age_s = time.time() - os.fstat(kept.fileno()).st_mtime
    return said if said == _SOUND or age_s < _WRONG_FOR_S else ""


def _write(kept: TextIO | None, said: str) -> None:
    if kept is None:
        return
    with contextlib.suppress(OSError):  # a full disk: the next process visits the file again
        kept.truncate(0)
        kept.write(said)
        kept.flush()
        for each in os.scandir(os.path.dirname(kept.name)):
            if time.time() - each.stat().st_mtime > _KEPT_FOR_S:
                os.unlink(each)


class _Child:
    """A process of Python that visits files for this one. It starts with the first, and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        """A pipe from which a byte comes for each visit."""

    def visit(self, asked: list[object]) -> str:
        """Return what came of a visit; an empty text, and a warning, where no child can be started."""
        try:
            process = self._started()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its status tells why
                process.stdin.write(json.dumps([*asked, LIMIT_S]).encode() + b"\n")
                process.stdin.flush()
            answers = select.poll()  # `select` knows the first 1,024 descriptors of a process alone
            answers.register(self._answers)
            is_ready = answers.poll(1e3 * _LONGEST_S)
            if is_ready and os.read(self._answers, 1):
                return _SOUND
        except OSError as error:
            self.end()
            warnings.warn(f"HDF5 files are opened without a visit by a child process: {error}", stacklevel=2)
            return ""
        except BaseException:  # as Ctrl-C: the next visit must not take this one's answer for its own
            self.end()
            raise
        if not is_ready:
            self.end()
            return f"one that it has not visited in {_LONGEST_S:g} s"
        status = self.end(kill=False)
        if status == -signal.SIGPROF:
            return f"one that it visits for more than {LIMIT_S:g} s"
        if status < 0:
            return f"one at which it crashes ({signal.Signals(-status).name})"
        warnings.warn("HDF5 files are opened without a visit by a child process, which fails to start", stacklevel=2)
        return ""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.end()  # somebody has ended it between two visits
        if self._process is None:
            self._answers, answers = os.pipe()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *module("hpcdp.data.visit"), str(answers)], pass_fds=(answers,),
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )  # fmt: skip
            except BaseException:
                os.close(self._answers)
                raise
            finally:
                os.close(answers)
        return self._process

    def end(self, kill: bool = True) -> int:
        """End the process, if there is one, or wait for its end; return its status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if kill:
            process.kill()
        os.close(self._answers)
        with contextlib.suppress(OSError), process:  # what is not sent yet is lost
            pass
        return process.wait()

    def forget(self) -> None:
        """In a process that was forked: the child is that of the other one."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            os.close(self._answers)
            process.stdin.close()
            process.returncode = 0


_trusted: set[tuple[int, ...]] = set()
_visited: set[str] = set()
_visiting = threading.Lock()
_child = _Child()


def _begin_anew() -> None:
    global _visiting
    _visiting = threading.Lock()
    _child.forget()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(_child.end)
