"""Ranks on this machine: the mpirun command and its environment, and the supervision of it while it runs.

The launcher is a subreaper (prctl(2), PR_SET_CHILD_SUBREAPER): whatever an mpirun leaves behind, even one that was
killed, becomes its child and is ended before it exits, so no rank outlives the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcdp.errors import LaunchError

from . import ProgramMissingError, mpi

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 10.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_RANKS_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SEGMENT_VARIABLES = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_directory")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SI_KERNEL = 0x80


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number of ranks that the innermost launcher says it started, None outside mpirun and srun.

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


def launch(ranks: int, program: Sequence[str], mpi_args: str = "") -> int:
    """Runs ``program`` as ``ranks`` ranks on this machine and returns its exit status; MPI is not started here.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 reach the ranks through mpirun. Ended by a signal to the launcher the
    status is 128 + its number, as in a shell. Raises `LaunchError` for a missing program, mpirun or MPI library.
    """
    if launched_ranks() is not None:
        raise LaunchError(
            "launch ranks",
            expected="a plain shell",
            got=f"a rank of a job of {launched_ranks()} that mpirun or srun started",
            remedy="call the program itself there, or leave mpirun out",
        )
    try:
        further = shlex.split(mpi_args)
    except ValueError as error:
        raise LaunchError("launch --mpi-args", expected="closed quotes", got=f"{mpi_args!r}: {error}") from error
    if shutil.which(program[0]) is None:
        if Path(program[0]).is_file() and not os.access(program[0], os.X_OK):
            raise LaunchError(
                f"launch {program[0]!r}",
                got="a file that is not executable",
                remedy="name what runs it, e.g. python, or make it executable with chmod +x",
            )
        raise ProgramMissingError(f"launch {program[0]!r}", got="no such program", remedy="check its name and PATH")
    library = mpi.find_library()
    mpirun = mpi.find_mpirun(library)
    command = [str(mpirun), "-n", str(ranks), *further, *program]
    private = library.family == "openmpi" and not mpi.is_open_mpi_4(mpirun)
    return _supervise(command, environment(library, mpirun, ranks, os.environ), private)


def environment(library: mpi.MpiLibrary, mpirun: Path, ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with what ``ranks`` ranks on one machine need; what the user has set already wins.

    They are started on this machine's own transports (Open MPI otherwise looks for fabrics for a second), unbound (two
    jobs on a machine would both bind to its first cores), with the cores shared out among the ranks' BLAS threads.
    """
    cores = len(os.sched_getaffinity(0))
    wanted: dict[str, str] = {}
    if library.family == "openmpi":
        shared = "vader" if mpi.is_open_mpi_4(mpirun) else "sm"
        wanted |= {
            "OMPI_MCA_btl": f"self,{shared},tcp",
            "OMPI_MCA_osc": "^ucx",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
        }
        if ranks > cores:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if os.geteuid() == 0:
            wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        wanted["HYDRA_LAUNCHER"] = "fork"
    if "HOME" not in environ:  # Open MPI does not start without; a service or a container may have none
        wanted["HOME"] = _home()
    if not any(name in environ for name in _THREAD_VARIABLES):
        wanted |= dict.fromkeys(_THREAD_VARIABLES, str(max(1, cores // ranks)))
    wanted |= _terminal()
    return {**wanted, **environ}


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return tempfile.gettempdir()


def _terminal() -> dict[str, str]:
    """What rich asks for: ranks write to a pipe or to a pseudo-terminal of mpirun, wherever the launcher writes."""
    interactive = "1" if sys.stdout.isatty() else "0"
    size = {"COLUMNS": str(shutil.get_terminal_size().columns)} if sys.stdout.isatty() else {}
    return {"TTY_COMPATIBLE": interactive, "TTY_INTERACTIVE": interactive, **size}


@contextlib.contextmanager
def _segments_of(environ: Mapping[str, str], private: bool) -> Iterator[dict[str, str]]:
    """``environ`` with a folder of the job's own for Open MPI's segments: ranks that a signal ends leave theirs."""
    folder = None
    if private and not any(name in environ for name in _SEGMENT_VARIABLES):
        with contextlib.suppress(OSError):  # a site may forbid it; Open MPI then says what it needs itself
            folder = tempfile.mkdtemp(prefix="hpcdp-", dir="/dev/shm")
    try:
        yield {**environ, **(dict.fromkeys(_SEGMENT_VARIABLES, folder) if folder else {})}
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _supervise(command: Sequence[str], environ: Mapping[str, str], private: bool) -> int:
    watched = {*_FORWARDED, signal.SIGCHLD}
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with _segments_of(environ, private) as environ:
            mpirun = subprocess.Popen(command, env=environ, preexec_fn=before_exec)
            ended_by = _forward_signals(mpirun, watched)
            _end_orphans()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if ended_by is not None:
        return 128 + ended_by
    return mpirun.returncode if mpirun.returncode >= 0 else 128 - mpirun.returncode


def _forward_signals(mpirun: subprocess.Popen[bytes], watched: set[signal.Signals]) -> int | None:
    """Waits for ``mpirun``; returns the signal that ended the job, None where it ended by itself.

    A second ending signal, or the end of the grace time, kills what has not ended by then.
    """
    ended_by: int | None = None
    deadline = float("inf")
    while mpirun.poll() is None:
        timeout_s = min(1.0, max(0.0, deadline - time.monotonic()))
        received = signal.sigtimedwait(watched, timeout_s)
        if time.monotonic() >= deadline:
            mpirun.kill()
            mpirun.wait()
        elif received is not None and received.si_signo in _FORWARDED:
            if received.si_signo in _ENDING:
                deadline = time.monotonic() + _GRACE_S if ended_by is None else 0.0
                ended_by = ended_by or received.si_signo
            # Ctrl-C on a terminal has reached mpirun already, which takes a second SIGINT for an order to die at once;
            # a terminal that is closed tells the session's leader alone.
            if (received.si_signo, received.si_code) != (signal.SIGINT, _SI_KERNEL):
                mpirun.send_signal(received.si_signo)
    return ended_by


def _end_orphans() -> None:
    """Ends every process that mpirun left behind, which has become this process's child."""
    for sign, grace_s in ((signal.SIGTERM, 0.5), (signal.SIGKILL, 2.0)):
        deadline = time.monotonic() + grace_s
        told: set[int] = set()
        while (left := _children()) and time.monotonic() < deadline:
            for pid in left - told:
                os.kill(pid, sign)
            told |= left
            time.sleep(0.01)
        if not left:
            return


def _children() -> set[int]:
    """The living children of this process; those that have ended are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return set()
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found
