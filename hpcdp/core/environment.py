"""The environment of a process: its launcher, its interpreter, its exit status, the replica that it computes.

Of several launchers, such as an mpirun in a job of srun, the innermost one counts: inside of mpirun the variables of
Slurm describe its daemons.

Layers that draw random numbers mix it into their seeds: replicas draw different numbers, and ranks that hold one
replica together draw the same ones. It is 0 before ``hpcdp.init()``, then the rank, and under tensor or pipeline
parallelism the lowest rank of those that share the replica.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, NoReturn


def apart() -> tuple[str, ...]:
    """What Python is given to find modules as this process has found them: not in the working folder, where a user's
    ``random.py`` would pass for the standard library's, unless hpcdp itself is there."""
    is_here = sys.path[:1] in ([""], [os.getcwd()])
    return () if is_here else ("-P",)


def module(name: str) -> tuple[str, ...]:
    """What Python is given to run a module of hpcdp."""
    return (*apart(), "-m", name)


THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Where BLAS reads how many threads it may have: the user says it there, or whoever has started the ranks."""

RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Where launchers say which rank this process is, the innermost one first."""

PMI_OF_SRUN = ("PMI_FD", "PMI_JOBID", "PMI_RANK", "PMI_SIZE")
"""What srun --mpi=pmi2 tells a task: one that starts an mpirun keeps it from that."""

SAVE_AT = {
    sign: signal.SIGRTMIN + number for number, sign in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), 1)
}
"""What ranks of `hpcdp train` get for a signal that ends its launcher: they save, and say which one it was."""

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_ANY = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "SLURM_STEP_ID")
_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
"""Open MPI's and MPICH's."""
# Of LSF's two, which say the same, large jobs have the second one alone.
_ALLOCATIONS = {
    "SLURM_JOB_NODELIST": "Slurm", "PBS_NODEFILE": "PBS", "PE_HOSTFILE": "Grid Engine", "LSB_HOSTS": "LSF",
    "LSB_MCPU_HOSTS": "LSF", "HPCDP_CONTAINERS": "YARN",
}  # fmt: skip


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher has started this process, be it as the only one."""
    return any(name in environ for name in _ANY)


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of ranks that the innermost launcher says it started, with servers; None outside mpirun and srun.

    A single task of srun counts as outside: it may be the shell of an interactive job.
    """
    is_alone = environ.get("SLURM_STEP_NUM_TASKS") == "1"
    of_srun = ("SLURM_STEP_NUM_TASKS",) if any(name in environ for name in _MPIRUN) else _SIZES
    for name in _SIZES:
        size = environ.get(name, "")
        if size.isdecimal() and not (is_alone and size == "1" and name in of_srun):
            return int(size)
    return None


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank in the job of the innermost launcher, None outside mpirun and srun."""
    if launched_ranks(environ) is None:
        return None
    return next((int(environ[name]) for name in RANKS if environ.get(name, "").isdecimal()), None)


def speaks(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is rank 0, or no rank: one of a job says what all would."""
    return next((environ[name] for name in RANKS if name in environ), "0") == "0"


def started_by_srun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether srun is the innermost launcher of this process."""
    return environ.get("SLURM_STEP_ID", "").isdecimal() and not any(name in environ for name in _MPIRUN)


def batch_system(environ: Mapping[str, str] = os.environ) -> str | None:
    """The batch system that has given this process the hosts of a job, None outside an allocation."""
    return next((name for variable, name in _ALLOCATIONS.items() if environ.get(variable)), None)


_number = 0
_of_thread = threading.local()


def replica_number() -> int:
    """Return the number of the replica that this thread computes."""
    found: int = getattr(_of_thread, "number", _number)
    return found


def enter_replica(number: int) -> None:
    """Set the number of this process, or of this thread where it has a number of its own."""
    global _number
    if hasattr(_of_thread, "number"):
        _of_thread.number = number
    else:
        _number = number


def enter_replica_of_thread(number: int) -> None:
    """Give this thread a number of its own, as a rank that is a thread needs."""
    _of_thread.number = number


_status = 0


def exit_status() -> int:
    """Return the status of the last `sys.exit` that nobody caught: at its end, that of this program; 0 before."""
    return _status


class _Exit(SystemExit):
    __module__ = "builtins"

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = vars(SystemExit)["code"].__get__(self)
        if sys._getframe().f_back is None:  # no function asks, so that the program has ended
            global _status
            _status = code & 0xFF if isinstance(code, int) else int(code is not None)
        return code

    def __reduce__(self) -> tuple[type[SystemExit], tuple[Any, ...]]:  # to be sent to another process
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__  # in tracebacks


def _exit(status: object = None, /) -> NoReturn:
    """As `sys.exit`."""
    raise _Exit(status)


def record_exit_status() -> None:
    """Record the status that the program passes to `sys.exit` from now on: `exit_status` returns it.

    Python calls no hook for SystemExit. But when nobody has caught it, the interpreter reads its code: so in jobs of
    several ranks `sys.exit` raises an exception that records the reading. hpcdp calls this when it is imported, since
    in ``sys.exit(main())`` the name is looked up before ``main`` is called. A SystemExit that the program makes itself,
    ``raise SystemExit(3)``, is not recorded.
    """
    sys.exit = _exit
