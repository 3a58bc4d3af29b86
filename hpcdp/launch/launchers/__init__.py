"""The description of a job, the plan that a launcher makes of it, and the launchers by name.

The launchers of mpirun are in `mpirun`, each other one in a module of its name. They share `batch`, for jobs of batch
systems without srun.
"""

from __future__ import annotations

import importlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ...core.environment import batch_system, module

BINDINGS = ("none", "core", "numa", "socket")
"""The units that a rank can be bound to."""


def server() -> tuple[str, ...]:
    """Return the arguments with which Python runs a server."""
    return module("hpcdp.kvstore.serve")


@dataclass(frozen=True)
class Host:
    """A machine by its name for ssh, and its number of slots; None where the host list has no number."""

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Job:
    """A program to be run as the ranks of one world, and the options of its launch.

    Args:
        program: the program of every rank and its arguments.
        ranks: number of workers.
        servers: number of key-value servers (`hpcdp.kvstore.serve`), which are the last ranks of the MPI job.
        hosts: the machines; empty for this machine, or for those of the batch job.
        ranks_per_node: greatest number of ranks on a host; None for its slots.
        env: environment variables of every rank, beside those that the launcher sets.
        interface: network interface of all traffic between hosts, such as ``"ib0"``.
        bind: one of `BINDINGS`; None for the launcher's default.
        sync_dst_dir: folder on every host into which the working folder is copied, and in which the job runs; None
            where hosts share a file system.
        mpi_args: further arguments of mpirun or srun, in shell syntax.
        batch_args: further arguments of the submitting command, such as qsub, in shell syntax.
        tag_output: whether each line of output begins with its rank.
        verbose: whether the launcher reports its actions.
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
    """A program with its arguments, and the variables added to the launcher's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def beside(cls, argv: Sequence[str], environ: Mapping[str, str]) -> Command:
        """Return the command ``argv`` with the variables of ``environ`` that differ from this process's."""
        return cls(tuple(argv), {name: value for name, value in environ.items() if os.environ.get(name) != value})

    def __str__(self) -> str:
        """Return the command in shell syntax."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.env.items()), shlex.join(self.argv)])


@dataclass(frozen=True)
class LaunchPlan:
    """The actions of a launcher: files to write, then commands to run in order; the last command is the job."""

    commands: Sequence[Command]
    files: Mapping[Path, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the output of ``--dry-run``: every file with its content, then every command."""
        written = [f"# {path}\n{text.rstrip()}\n" for path, text in self.files.items()]
        return "\n".join([*written, *map(str, self.commands)])


LAUNCHERS = {
    "local": "this machine",
    "mpi": "mpirun over -H, or over what the batch system has given",
    "ssh": "mpirun over -H, by ssh also inside a batch job",
    "slurm": "srun, inside a Slurm job or as a job of its own",
    "sge": "a job of Grid Engine",
    "yarn": "containers of Hadoop YARN",
}
"""The launchers, with the place where each one starts ranks."""

WITH_BATCH_ARGS = ("sge", "yarn")
"""The launchers that pass ``--batch-args`` to the submitting command of a batch system."""


class Launcher(NamedTuple):
    """The two functions of a launcher."""

    plan: Callable[[Job], LaunchPlan]
    """Return the actions of `run`, without side effects."""
    run: Callable[[Job], int]
    """Run the job to its end and return its exit status."""


def launcher(name: str) -> Launcher:
    """Return the launcher of a name in `LAUNCHERS`."""
    home = "mpirun" if name in ("local", "mpi", "ssh") else name
    module = importlib.import_module(f".{home}", __package__)
    return Launcher(getattr(module, f"plan_{name}"), getattr(module, f"run_{name}"))


def usual(has_hosts: bool, environ: Mapping[str, str]) -> str:
    """Return the default launcher: ``mpi`` inside a batch job, else ``ssh`` with ``-H``, else ``local``."""
    if batch_system(environ):
        return "mpi"
    return "ssh" if has_hosts else "local"
