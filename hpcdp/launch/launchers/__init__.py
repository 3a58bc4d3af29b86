"""The launchers by name. Those of mpirun are in `mpirun`, each other one in a module of its name.

They share `batch`, for jobs of batch systems without srun.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

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
