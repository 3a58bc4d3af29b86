"""Copies of the working folder on the hosts of a job, ``--sync-dst-dir``, by rsync."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from ...core.files import who_else_may_write
from ...errors import LaunchError, listed
from ..guard_client import ALIVE, AT_ONCE, SSH
from ..hosts import those_of_this_machine
from ..spec import Command

EXCLUDED = (".git", ".hg", ".svn", ".venv*", "__pycache__", ".*_cache", ".ipynb_checkpoints", "*.egg-info")
"""Patterns of files that are not copied: histories, environments, caches."""
_KEPT = "-rltOE"
"""Options of rsync that keep links, times and execute permissions, but not the mode or owner of existing folders."""
_SILENT_S = 60


def commands(hosts: Sequence[str], folder: str) -> list[Command]:
    """Return the rsync of the working folder to ``folder`` on each host; other files there are kept.

    Raises:
        LaunchError: ``folder`` is not absolute, the root folder, or inside the working folder on this machine.
    """
    source, target = Path.cwd(), Path(folder)
    if not target.is_absolute():
        raise LaunchError("launch --sync-dst-dir", expected="an absolute path", got=repr(folder))
    if target.resolve() == Path("/"):
        raise LaunchError("launch --sync-dst-dir", expected="a folder below /", got=repr(folder))
    here = those_of_this_machine(hosts)
    if here and target.resolve() != source and source in target.resolve().parents:
        raise LaunchError("launch --sync-dst-dir", expected=f"a folder outside {source}", got=repr(folder))
    environments = [path.parent.name for path in source.glob("*/pyvenv.cfg")]
    excluded = [f"--exclude={name}" for name in (*EXCLUDED, *sorted(environments))]
    remote_rsync = f"mkdir -p {shlex.quote(folder)} && rsync"
    rsyncs = []
    for host in hosts:
        if host not in here:
            # -s: the remote shell does not parse the folder's name. ALIVE ends a copy to a lost host, and --timeout one
            # that waits for a disk or a process there.
            argv = ["rsync", f"{_KEPT}zs", f"--timeout={_SILENT_S}", *excluded, f"--rsync-path={remote_rsync}"]
            argv.append(f"--rsh={shlex.join([*SSH, *ALIVE])}")
            rsyncs.append(Command((*argv, "./", f"[{host}]:{folder}/" if ":" in host else f"{host}:{folder}/")))
        elif target.resolve() != source:
            rsyncs.append(Command(("mkdir", "-p", folder)))
            rsyncs.append(Command(("rsync", _KEPT, *excluded, "./", f"{folder}/")))
    return rsyncs


def copy(hosts: Sequence[str], folder: str) -> None:
    """Run the rsyncs of `commands`, `AT_ONCE` at a time.

    Raises:
        LaunchError: rsync is missing, or has failed or been silent for a minute on hosts, which are named with its
            messages; or every user may write to the copy on this machine.
    """
    if shutil.which("rsync") is None:
        raise LaunchError("launch --sync-dst-dir", expected="rsync", got="none here", remedy="install it")
    running: deque[tuple[str, subprocess.Popen[str]]] = deque()
    failures = []

    def end_first() -> None:
        host, process = running[0]
        _, errors = process.communicate()
        running.popleft()
        if process.returncode:
            failures.append(f"{host}: {_reason(errors, process.returncode)}")

    try:
        for command in commands(hosts, folder):
            if command.argv[0] == "mkdir":
                subprocess.run(command.argv, capture_output=True)  # rsync reports a failure
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
    if not failures and those_of_this_machine(hosts):  # guards check the other hosts
        writer = who_else_may_write(folder, everybody=True)
        failures += [] if writer is None else [f"this machine: others may change {writer}"]
    if failures:
        raise LaunchError("copy the working folder", where=folder, got=listed(failures))


def _reason(errors: str, code: int) -> str:
    if code == 127 or "command not found" in errors or "rsync: not found" in errors:
        return "rsync is not installed there"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[0] if lines else f"rsync ended with status {code}"
