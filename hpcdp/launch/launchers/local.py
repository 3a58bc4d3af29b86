"""The launcher ``local``: ranks on this machine, by the mpirun of the library that mpi4py loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from ...errors import LaunchError
from .. import hosts, mpi_library
from ..mpi_library import Dialect, environment, program
from ..runner import supervise
from ..spec import Command, Job, LaunchPlan, server
from .job_checks import check, check_binding, warn_of_other_library


def run(job: Job, usr1_has_come: Callable[[], bool] | None = None) -> int:
    """Run ``job`` on this machine and return its exit status, without initializing MPI in this process.

    A server that fails ends the job as a rank does. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded to the
    ranks through mpirun.

    Args:
        job: the program and its options.
        usr1_has_come: for a program whose ranks save and end at SIGUSR1, returns whether that signal has come already.
            SIGUSR1 is then held back until all ranks handle it, since it would end a rank that does not. At SIGINT,
            SIGTERM and SIGHUP the ranks get the signals of `hpcdp.core.environment.SAVE_AT`, at which they save too.

    Returns:
        128 + the number of the signal that ended the launcher, as in a shell; else the status of the rank that failed
        first, which is named on stderr where mpirun does not name it.

    Raises:
        LaunchError: the program, mpirun or the MPI library is missing.
        ConfigError: a watchdog limit is invalid.
    """
    library, command = _mpirun(job)
    environ = {**os.environ, **command.env}
    return supervise(command.argv, environ, library.family, job, usr1_has_come, interface=hosts.loopback())


def plan(job: Job) -> LaunchPlan:
    """Return the mpirun of ``job``; raise the errors of `run`, and those for options that need other hosts."""
    return LaunchPlan([_mpirun(job)[1]])


def _mpirun(job: Job) -> tuple[mpi_library.MpiLibrary, Command]:
    """Return the MPI library, whose search takes several milliseconds, and the command."""
    for option, value in (("-H", job.hosts), ("--sync-dst-dir", job.sync_dst_dir)):
        if value:
            raise LaunchError(f"launch {option}", expected="--launcher ssh or mpi", got="local")
    if job.ranks_per_node is not None and job.ranks > job.ranks_per_node:
        raise LaunchError(
            "launch --ranks-per-node", expected=f"{job.ranks} or more on one machine", got=job.ranks_per_node
        )
    further = check(job)
    found = mpi_library.find_library()
    mpirun = mpi_library.find_mpirun(found)
    check_binding(job, found.family, job.ranks + job.servers, len(os.sched_getaffinity(0)), "this machine")
    warn_of_other_library(job, found.family)
    dialect = Dialect(found.family, mpi_library.is_open_mpi_4(mpirun))
    argv = [str(mpirun), *dialect.options(job), "-n", str(job.ranks), *further, *program(job.program)]
    if job.servers:
        argv += [":", "-n", str(job.servers), sys.executable, *server()]
    given = {**os.environ, **job.env}
    wanted = {**environment(found, mpirun, job.ranks, given, job.servers), **dialect.interface(job.interface)}
    return found, Command.beside(argv, wanted)
