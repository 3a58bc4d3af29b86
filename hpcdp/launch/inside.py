"""Whether this process is a rank of a job, by what the innermost launcher has put into its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

_RANKS_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_ALLOCATIONS = {
    "SLURM_JOB_NODELIST": "Slurm", "PBS_NODEFILE": "PBS", "PE_HOSTFILE": "Grid Engine", "LSB_HOSTS": "LSF",
    "HPCDP_CONTAINERS": "YARN",
}  # fmt: skip


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of ranks that the innermost launcher says it started, with servers; None outside mpirun and srun.

    A single task of srun counts as outside: it may be the shell of an interactive job.
    """
    for name in _RANKS_VARIABLES:
        if environ.get(name, "").isdecimal() and (name, environ[name]) != ("SLURM_STEP_NUM_TASKS", "1"):
            return int(environ[name])
    return None


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank in the job of the innermost launcher, None outside mpirun and srun."""
    if launched_ranks(environ) is None:
        return None
    return next((int(environ[name]) for name in _RANK_VARIABLES if environ.get(name, "").isdecimal()), None)


def batch_system(environ: Mapping[str, str] = os.environ) -> str | None:
    """The batch system that has given this process the hosts of a job, None outside an allocation."""
    return next((name for variable, name in _ALLOCATIONS.items() if environ.get(variable)), None)
