"""`hpcdp train` as users start it, in a folder and an environment of its own."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("OMPI_", "PMI", "PRTE", "SLURM_", "TTY_")) and key != "COLUMNS"
}
RUN = ("mlp", "--data", "digits", "--ranks", "2", "--epochs", "12", "--batch-size", "50")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hpcdp.cli", "train", *arguments]


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ranks_in(folder: Path) -> list[int]:
    """The processes of a job that was started there, in the order of their ranks."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            values = path.read_bytes().split(b"\0")
            named = dict(each.split(b"=", 1) for each in values if b"=" in each)
            if named.get(b"PWD") == str(folder).encode() and b"OMPI_COMM_WORLD_RANK" in named:
                found[int(named[b"OMPI_COMM_WORLD_RANK"])] = int(path.parent.name)
    return [found[rank] for rank in sorted(found)]
