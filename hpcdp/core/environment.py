"""The environment of a process: launcher, interpreter and replica number.

Where launchers are nested, such as mpirun in a job of srun, the innermost one counts: inside mpirun the variables of
Slurm describe its daemons.

The replica number is mixed into the seeds of layers that draw random numbers. Replicas then draw different numbers, and
ranks that hold one replica together draw the same ones. It is 0 before ``hpcdp.init()``, then the rank. Under tensor or
pipeline parallelism it is the lowest rank of those that share the replica.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from _thread import _local  # threading.local, without the 3 ms that importing threading takes
from collections.abc import Iterator, Mapping
from typing import TextIO


def apart() -> tuple[str, ...]:
    """Return the options for a Python child process that finds modules as this process does.

    Without ``-P`` a user's ``random.py`` in the working folder would replace the standard library's. The option is left
    out where hpcdp itself is in that folder.
    """
    is_here = sys.path[:1] in ([""], [os.getcwd()])
    return () if is_here else ("-P",)


def module(name: str) -> tuple[str, ...]:
    """Return the arguments of Python that run a module of hpcdp."""
    return (*apart(), "-m", name)


THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables from which BLAS libraries read their number of threads."""

RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Variables in which launchers pass the rank of a process, the innermost launcher first."""

PMI_OF_SRUN = ("PMI_FD", "PMI_JOBID", "PMI_RANK", "PMI_SIZE")
"""Variables that srun --mpi=pmi2 sets for a task; with them an mpirun that the task starts would not start."""

SAVE_AT = {
    sign: signal.SIGRTMIN + number for number, sign in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), 1)
}
"""The signal that ranks of `hpcdp train` receive for each signal that ends their launcher: they save and report it."""

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_ANY = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_ID")
_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Variables of Open MPI and of MPICH."""
# Of LSF's two, which say the same, large jobs have the second one alone.
_ALLOCATIONS = {
    "SLURM_JOB_NODELIST": "Slurm", "PBS_NODEFILE": "PBS", "PE_HOSTFILE": "Grid Engine", "LSB_HOSTS": "LSF",
    "LSB_MCPU_HOSTS": "LSF", "HPCDP_CONTAINERS": "YARN",
}  # fmt: skip


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has started this process, even as the only rank."""
    return any(name in environ for name in _ANY)


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks, with servers, that the innermost launcher started; None outside mpirun and srun.

    A single task of srun counts as outside, because it may be the shell of an interactive job.
    """
    is_alone = environ.get("SLURM_STEP_NUM_TASKS") == "1"
    of_srun = ("SLURM_STEP_NUM_TASKS",) if any(name in environ for name in _MPIRUN) else _SIZES
    for name in _SIZES:
        size = environ.get(name, "")
        if size.isdecimal() and not (is_alone and size == "1" and name in of_srun):
            return int(size)
    return None


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return this process's rank in the job of the innermost launcher; None outside mpirun and srun."""
    if launched_ranks(environ) is None:
        return None
    return next((int(environ[name]) for name in RANKS if environ.get(name, "").isdecimal()), None)


def speaks(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process should print messages for the whole job: it is rank 0, or not a rank."""
    return next((environ[name] for name in RANKS if name in environ), "0") == "0"


_SILENCE_S, _REPEAT_S = 2.0, 15.0


@contextlib.contextmanager
def explained(activity: str, speaks: bool, stream: TextIO | None = None) -> Iterator[None]:
    """Explain a silence: print ``activity`` after 2 s, the elapsed time every 15 s, and the duration at the end.

    Args:
        activity: what the block does.
        speaks: whether this process prints, as rank 0 does.
        stream: where to print; None for the standard output.
    """
    if not speaks:
        yield
        return
    import threading

    began_s, ended, said = time.monotonic(), threading.Event(), threading.Event()

    def say(text: str) -> None:
        said.set()
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(text, file=stream or sys.stdout, flush=True)

    def report() -> None:
        if ended.wait(_SILENCE_S):
            return
        say(f"{activity} ...")
        while not ended.wait(_REPEAT_S):
            say(f"{activity}: {time.monotonic() - began_s:.0f} s so far")

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
        if said.is_set():
            say(f"{activity}: {time.monotonic() - began_s:.1f} s")


def outlives_ranks(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the job continues when a rank dies: Open MPI under ``mpirun --with-ft ulfm``."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("", "0")


def started_by_srun(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether srun is the innermost launcher of this process."""
    return environ.get("SLURM_STEP_ID", "").isdecimal() and not any(name in environ for name in _MPIRUN)


def batch_system(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the name of the batch system that allocated the hosts of this job; None outside an allocation."""
    return next((name for variable, name in _ALLOCATIONS.items() if environ.get(variable)), None)


_number = 0
_of_thread = _local()


def replica_number() -> int:
    """Return the number of the replica that this thread computes."""
    number: int = getattr(_of_thread, "number", _number)
    return number


def enter_replica(number: int) -> None:
    """Set the replica number of this process, or of this thread if it has one of its own."""
    global _number
    if hasattr(_of_thread, "number"):
        _of_thread.number = number
    else:
        _number = number


def enter_replica_of_thread(number: int) -> None:
    """Give this thread a replica number of its own, as a rank that is a thread needs."""
    _of_thread.number = number
