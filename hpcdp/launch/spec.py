"""What is to be started, the same for every launcher, and what a launcher makes of it.

A launcher is a module of `launchers/` with two functions: ``plan(job)`` says what it would do and touches nothing, and
``run(job)`` does it and returns the exit status of the job. `LAUNCHERS` in `launchers/__init__.py` lists them.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..core.environment import module

BINDINGS = ("none", "core", "numa", "socket")
"""What a rank can be bound to."""


def server() -> tuple[str, ...]:
    """What Python is given to run a server."""
    return module("hpcdp.kvstore.serve")


@dataclass(frozen=True)
class Host:
    """A machine as ssh knows it, and how many ranks it takes; None where its list does not say."""

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Job:
    """A program as ranks of one world, and what was asked of the launcher.

    Args:
        program: what every rank runs, with its arguments.
        ranks: how many work.
        servers: how many processes that keep keys (`hpcdp.kvstore.serve`) come behind them, in the same MPI job.
        hosts: where; empty for this machine, or for what a batch system has given.
        ranks_per_node: at most so many on a host; None for what the hosts' slots say.
        env: variables of every rank, on all hosts, beside those that the launcher sets itself.
        interface: the network interface that all traffic between hosts takes, such as ``"ib0"``.
        bind: one of `BINDINGS`; None for the launcher's own choice.
        sync_dst_dir: the folder on every host that gets a copy of this working folder and is the job's; None where
            hosts share a file system.
        mpi_args: further arguments of mpirun or srun, as a shell writes them.
        batch_args: further arguments of what submits to a batch system, such as qsub, as a shell writes them.
        tag_output: whether each line of output is led by its rank.
        verbose: whether the launcher tells what it does.
    """

    program: tuple[str, ...]
    ranks: int
    servers: int = 0
    hosts: tuple[Host, ...] = ()
    ranks_per_node: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    interface: str | None = None
    bind: str | None = None
    sync_dst_dir: str | None = None
    mpi_args: str = ""
    batch_args: str = ""
    tag_output: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the variables that it gets beside those of the launcher."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def beside(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Command:
        """``argv`` with what of ``environ`` this process does not have, or has otherwise."""
        return cls(tuple(argv), {name: value for name, value in environ.items() if os.environ.get(name) != value})

    def __str__(self) -> str:
        """As it can be pasted into a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


@dataclass(frozen=True)
class LaunchPlan:
    """What a launcher does: files that it writes first, then commands, one after the other; the last one is the job."""

    commands: Sequence[Command]
    files: Mapping[Path, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """As ``--dry-run`` prints it: every file with its content, then every command."""
        written = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        return "\n".join([*written, *map(str, self.commands)])
