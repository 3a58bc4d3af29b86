"""`hpcdp train` as users start it, in a folder and an environment of its own; and on threads, where that is enough."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpcdp import cli
from hpcdp.comm import thread_comm

ENVIRONMENT = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith(("OMPI_", "PMI", "PRTE", "SLURM_", "TTY_")) and key != "COLUMNS"
}
RUN = ("mlp", "--data", "digits", "--ranks", "2", "--epochs", "4", "--batch-size", "50")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hpcdp.cli", "train", *arguments]


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)


def train_on_threads(monkeypatch: pytest.MonkeyPatch, folder: Path, ranks: int, *arguments: str) -> list[int]:
    """What each rank does that ``hpcdp train`` starts, with threads of this process in its place; their statuses.

    ``{rank}`` in an argument is each one's own.
    """
    own = threading.local()

    def rank(world) -> int:
        own.world = world
        return cli.main(["train", *(each.format(rank=world.rank) for each in arguments)])

    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("OMPI_COMM_WORLD_SIZE", str(ranks))
        for name in ("hpcdp.train.run.init", "hpcdp.comm.init"):
            patch.setattr(name, lambda: own.world)
        return thread_comm.run(ranks, rank)


def start(folder: Path, *arguments: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), cwd=folder, env=ENVIRONMENT | environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
