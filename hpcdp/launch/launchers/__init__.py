"""The launchers by name, each a module of this package with the functions of `Launcher`.

They share `job_checks`, `batch` (jobs of batch systems without srun) and `working_folder`, its copies.
"""

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
"""The launchers, with the place where each one starts ranks."""

WITH_BATCH_ARGS = ("sge", "yarn")
"""The launchers that pass ``--batch-args`` to the submitting command of a batch system."""


class Launcher(Protocol):
    """The functions of a launcher's module."""

    def plan(self, job: Job) -> LaunchPlan:
        """Return the actions of `run`, without side effects."""

    def run(self, job: Job) -> int:
        """Run the job to its end and return its exit status."""


def launcher(name: str) -> Launcher:
    """Return the launcher of a name in `LAUNCHERS`."""
    return cast(Launcher, importlib.import_module(f".{name}", __package__))


def usual(has_hosts: bool, environ: Mapping[str, str]) -> str:
    """Return the default launcher: ``mpi`` inside a batch job, else ``ssh`` with ``-H``, else ``local``."""
    if batch_system(environ):
        return "mpi"
    return "ssh" if has_hosts else "local"
