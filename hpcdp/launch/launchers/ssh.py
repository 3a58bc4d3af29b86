"""The launcher ``ssh``: ranks on the hosts of ``-H``, all reached by ssh, also inside a batch job."""

from __future__ import annotations

from ...errors import LaunchError
from ..spec import Job, LaunchPlan
from . import mpi


def plan(job: Job) -> LaunchPlan:
    """Return the mpirun of ``job``; raise the errors of `run` that need no connection to a host."""
    _check(job)
    return mpi.plan_mpirun(job, by_ssh=True)[0]


def run(job: Job) -> int:
    """Run ``job`` and return its exit status; raise the errors of `hpcdp.launch.launchers.mpi.run_mpirun`."""
    _check(job)
    return mpi.run_mpirun(job, by_ssh=True)


def _check(job: Job) -> None:
    if not job.hosts:
        raise LaunchError("launch --launcher ssh", expected="hosts: -H hosts.txt, or -H node1:4,node2:4", got="none")
