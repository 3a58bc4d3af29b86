"""Ranks by this machine's mpirun: on the hosts of -H, or on those of a batch job, which it reaches in its own way."""

from __future__ import annotations

import os

from ...errors import LaunchError
from ...launched import batch_system
from ..job import Job, Plan
from . import over_hosts


def plan(job: Job) -> Plan:
    """The mpirun of ``job``. Raises as `run` does, but for what only the hosts can tell."""
    return over_hosts.plan(job, by_ssh=_by_ssh(job))


def run(job: Job) -> int:
    """Runs ``job`` and returns its exit status. Raises as `hpcdp.launch.launchers.over_hosts.run` does."""
    return over_hosts.run(job, by_ssh=_by_ssh(job))


def _by_ssh(job: Job) -> bool:
    in_batch = batch_system(os.environ) is not None
    if not in_batch and not job.hosts:
        raise LaunchError("launch --launcher mpi", expected="hosts, -H hosts.txt, or a batch job", got="neither")
    if in_batch and job.sync_dst_dir is not None:
        raise LaunchError("launch --sync-dst-dir", expected="--launcher ssh inside a batch job", got="mpi")
    return not in_batch
