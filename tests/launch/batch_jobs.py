"""Jobs for batch systems as tests of their launchers want them: rendered in a fixed place, and run by stand-ins."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdp.launch.launchers import Job, batch

GOLDEN = Path(__file__).with_name("golden_batch")
SHELLCHECK = ["shellcheck", "--exclude=SC2016", "-"]
"""But for a dollar in single quotes, which is meant: words reach the program as they are."""

PROGRAM = ("python", "train.py", "--name", 'it\'s $HOME; `echo "two"`')
FULL = Job(
    PROGRAM,
    ranks=4,
    servers=2,
    ranks_per_node=3,
    env={"GREETING": "a 'quoted' $word"},
    interface="ib0",
    bind="core",
    mpi_args="--report-bindings",
    tag_output=True,
    verbose=True,
)
"""One that asks for everything."""

RANKS = """
import glob, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
ranks = world.gather(world.rank)
secret, shown = os.environb.get(b"GREETING", b"none"), []
for path in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        words = open(path, "rb").read()
    except OSError:
        continue
    shown += [words] * (secret in words)
assert not shown, shown
if world.rank == 0:
    print(ranks, os.environ.get("GREETING"), os.environ.get("SSH_AUTH_SOCK"), sys.argv[1:], flush=True)
    print("to stderr", file=sys.stderr, flush=True)
"""
SLEEPER = """
import os, signal, sys, time
from mpi4py import MPI
from pathlib import Path
place = Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
MPI.COMM_WORLD.barrier()
runs = len(list(place.glob(f"run-*-{MPI.COMM_WORLD.rank}")))
(place / f"run-{runs}-{MPI.COMM_WORLD.rank}").touch()
for _ in range(600 if runs == 0 else 0):  # in one sleep a signal that comes just before it would not be seen
    time.sleep(0.1)
"""


def rendered(plan: Callable[[Job], object], job: Job, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What --dry-run prints in a folder /shared/jobs of a machine with a small environment."""
    environ = {"PATH": "/shared/venv/bin:/usr/bin", "HPCDP_STALL_S": "60", "SSH_AUTH_SOCK": "/tmp/agent"}
    environ |= {
        "PYTHONPATH": "/shared/it's mine",
        **{name: os.environ[name] for name in ("HADOOP_HOME",) if name in os.environ},
    }
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(batch, "folder_of", lambda launcher: Path(f"/shared/jobs/hpcdp-{launcher}-login1-4711"))
    monkeypatch.setattr(sys, "executable", "/shared/venv/bin/python")
    monkeypatch.chdir(folder)
    return str(plan(job)).replace(str(folder), "/shared/jobs") + "\n"


def is_script(text: str) -> bool:
    """Whether a file of a job is none of variables."""
    return text.startswith("#!")


def install(folder: Path, stand_in: Path, *names: str) -> dict[str, str]:
    """Commands in ``folder`` that call ``stand_in`` with their name first; the environment that has them on PATH."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "{stand_in}" {name} "$@"\n')
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def launch(arguments: list[str], folder: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    """``hpcdp launch`` in ``folder``."""
    return subprocess.Popen(
        [sys.executable, "-m", "hpcdp.cli", "launch", *arguments],
        cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for(condition: Callable[[], object], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def processes(mark: str) -> list[int]:
    """Those whose command line has ``mark`` in it, such as the folder of a test."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
