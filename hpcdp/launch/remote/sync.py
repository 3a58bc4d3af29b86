"""Copies of the working folder on all hosts, by rsync."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ...errors import LaunchError, listed
from ...permissions import who_else_may_write
from ..hosts import those_of_this_machine
from ..job import Command
from .channel import ALIVE, AT_ONCE, SSH

EXCLUDED = (".git", ".hg", ".svn", ".venv*", "__pycache__", ".*_cache", ".ipynb_checkpoints", "*.egg-info")
"""What is not copied: histories, environments, caches."""
_KEPT = "-rltOE"
"""What a copy keeps: links, times and who may run a file; not the mode or the owner of folders that are there."""
_SILENT_S = 60


def commands(hosts: Sequence[str], folder: str) -> list[Command]:
    """The rsync to each host; what else lies in ``folder`` there is left alone.

    Raises:
        LaunchError: ``folder`` is no absolute path, or the root of all, or one that would be copied into itself.
    """
    source, target = Path.cwd(), Path(folder)
    if not target.is_absolute():
        raise LaunchError("launch --sync-dst-dir", expected="an absolute path", got=repr(folder))
    if target.resolve() == Path("/"):
        raise LaunchError("launch --sync-dst-dir", expected="a folder of its own", got=repr(folder))
    here = those_of_this_machine(hosts)
    if here and target.resolve() != source and source in target.resolve().parents:
        raise LaunchError("launch --sync-dst-dir", expected=f"a folder outside {source}", got=repr(folder))
    environments = [path.parent.name for path in source.glob("*/pyvenv.cfg")]
    excluded = [f"--exclude={name}" for name in (*EXCLUDED, *sorted(environments))]
    made = f"mkdir -p {shlex.quote(folder)} && rsync"
    found = []
    for host in hosts:
        if host not in here:
            # -s: the remote shell does not see the folder's name. ALIVE ends a copy to a host that has gone, and
            # --timeout one that waits for a disk or a process there.
            argv = ["rsync", f"{_KEPT}zs", f"--timeout={_SILENT_S}", *excluded, f"--rsync-path={made}"]
            argv.append(f"--rsh={shlex.join([*SSH, *ALIVE])}")
            found.append(Command((*argv, "./", f"[{host}]:{folder}/" if ":" in host else f"{host}:{folder}/")))
        elif target.resolve() != source:
            found.append(Command(("mkdir", "-p", folder)))
            found.append(Command(("rsync", _KEPT, *excluded, "./", f"{folder}/")))
    return found


def copy(hosts: Sequence[str], folder: str) -> None:
    """Run the rsyncs of `commands`, `AT_ONCE` at a time.

    Raises:
        LaunchError: some have failed, or not answered for a minute; it names the hosts, and what rsync said of each; or
            every user may write to the copy on this machine.
    """
    if shutil.which("rsync") is None:
        raise LaunchError("launch --sync-dst-dir", expected="rsync", got="none here", remedy="install it")
    running: deque[tuple[str, subprocess.Popen[str]]] = deque()
    wrong = []

    def end_first() -> None:
        host, process = running[0]
        _, said = process.communicate()
        running.popleft()
        if process.returncode:
            wrong.append(f"{host}: {_reason(said, process.returncode)}")

    try:
        for command in commands(hosts, folder):
            if command.argv[0] == "mkdir":
                subprocess.run(command.argv, capture_output=True)  # rsync says why it cannot write there
                continue
            if len(running) == AT_ONCE:
                end_first()
            host = command.argv[-1].rpartition(f":{folder}/")[0] or "this machine"
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
            running.append((host, process))
        while running:
            end_first()
    finally:
        for _, process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if not wrong and those_of_this_machine(hosts):  # the guards look at the others'
        writer = who_else_may_write(folder, everybody=True)
        wrong += [] if writer is None else [f"this machine: others may change {writer}"]
    if wrong:
        raise LaunchError("copy the working folder", where=folder, got=listed(wrong))


def _reason(said: str, code: int) -> str:
    if code == 127 or "command not found" in said or "rsync: not found" in said:
        return "rsync is not installed there"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[0] if lines else f"rsync ended with status {code}"
