"""The launchers by name. Each is a module here with ``plan(job)`` and ``run(job)``, see `job`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol, cast

from ...core.environment import batch_system
from ..spec import Job, LaunchPlan

LAUNCHERS = {
    "local": "this machine",
    "mpi": "mpirun over -H, or over what the batch system has given",
    "ssh": "mpirun over -H, by ssh also inside a batch job",
    "slurm": "srun, inside a Slurm job or as a job of its own",
    "sge": "a job of Grid Engine",
    "yarn": "containers of Hadoop YARN",
}
"""What each of them takes the ranks to."""

WITH_BATCH_ARGS = ("sge", "yarn")
"""Those that have a command of a batch system to pass ``--batch-args`` to."""


class Launcher(Protocol):
    """What a launcher's module has."""

    def plan(self, job: Job) -> LaunchPlan:
        """What would be done; touches nothing."""

    def run(self, job: Job) -> int:
        """The exit status of the job, once all of it has ended."""


def launcher(name: str) -> Launcher:
    """The launcher of a name in `LAUNCHERS`."""
    return cast(Launcher, importlib.import_module(f".{name}", __package__))


def usual(has_hosts: bool, environ: Mapping[str, str]) -> str:
    """The launcher of a job of which none is named: hosts that were named are reached by ssh, or are a batch job's."""
    if batch_system(environ):
        return "mpi"
    return "ssh" if has_hosts else "local"
