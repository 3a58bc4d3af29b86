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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcdp.errors import LaunchError

from . import ProgramMissingError, mpi, segments
from .watch import End, Watch, first_failure

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 10.0
_HOLD_S = 0.05
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_RANKS_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SERVER = ("-m", "hpcdp.kvstore.serve")
_LIMIT_VARIABLES = ("HPCDP_STALL_S", "HPCDP_TIMEOUT_S")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SI_KERNEL = 0x80


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


def launch(
    ranks: int,
    program: Sequence[str],
    mpi_args: str = "",
    servers: int = 0,
    usr1_has_come: Callable[[], bool] | None = None,
) -> int:
    """Runs ``program`` as ``ranks`` ranks on this machine and returns its exit status; MPI is not started here.

    Behind them come ``servers`` servers (`hpcdp.kvstore.serve`) in the same MPI job. One that fails ends it as a rank
    does.

    SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 reach the ranks through mpirun. Ended by a signal to the launcher the
    status is 128 + its number, as in a shell; else it is that of the rank that failed first, which is named on stderr
    where mpirun does not. Of a program whose ranks all take SIGUSR1 at some time, ``usr1_has_come`` says whether it has
    come before: it is held back until they do, and ends nobody that starts. Raises `LaunchError` for a missing program,
    mpirun or MPI library, and `ConfigError` for a limit of the watchdog that every rank would refuse.
    """
    if launched_ranks() is not None:
        raise LaunchError(
            "launch ranks",
            expected="a plain shell",
            got=f"a rank of a job of {launched_ranks()} that mpirun or srun started",
            remedy="call the program itself there, or leave mpirun out",
        )
    if any(name in os.environ for name in _LIMIT_VARIABLES):
        _check_limits()
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
    if servers:
        command += [":", "-n", str(servers), sys.executable, *_SERVER]
    environ = environment(library, mpirun, ranks, os.environ, servers)
    return _supervise(command, environ, ranks + servers, library.family, servers, usr1_has_come)


def environment(
    library: mpi.MpiLibrary, mpirun: Path, ranks: int, environ: Mapping[str, str], servers: int = 0
) -> dict[str, str]:
    """``environ`` with what ``ranks`` ranks on one machine need; what the user has set already wins.

    They are started on this machine's own transports (Open MPI otherwise looks for fabrics for a second), unbound (two
    jobs on a machine would both bind to its first cores), with the cores shared out among the ranks' BLAS threads;
    ``servers`` behind them do not compute.
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
        if ranks + servers > cores:
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


def _check_limits() -> None:
    # With NumPy, which the launcher does not need otherwise, and whose threads must not take signals from this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        from hpcdp.comm.watchdog import limits_s

        limits_s()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _supervise(
    command: Sequence[str],
    environ: Mapping[str, str],
    ranks: int,
    family: str,
    servers: int = 0,
    usr1_has_come: Callable[[], bool] | None = None,
) -> int:
    watched = {*_FORWARDED, signal.SIGCHLD}
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def before_exec() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        with contextlib.ExitStack() as left_behind:
            if family == "mpich":
                left_behind.enter_context(segments.new_ones_removed())
            elif not mpi.is_open_mpi_4(Path(command[0])):
                environ = left_behind.enter_context(segments.own_folder(environ))
            mpirun = subprocess.Popen(command, env=environ, preexec_fn=before_exec)
            with contextlib.closing(Watch(mpirun.pid, ranks, watched, servers)) as watch:
                ended_by = _forward_signals(mpirun, watch, usr1_has_come)
                ends = watch.ends()
            _end_orphans()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if ended_by is not None:
        return 128 + ended_by
    if mpirun.returncode < 0:
        return 128 - mpirun.returncode
    return _explained(ends, mpirun.returncode, family)


def _explained(ends: Sequence[End], code: int, family: str) -> int:
    """The status of the job, once the rank that failed first has been named where mpirun has not done so.

    Open MPI names it and has its status, but says of one that left with status 0 only what may have happened, and of a
    server not that it is one.
    """
    first = first_failure(ends, code)
    if first is None or (first.status is None and code == 0):
        return code
    alike = first.exit_status < 128 and {end.status for end in ends} == {first.status}
    if (family == "mpich" or first.status == 0 or first.server is not None) and not alike:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(f"hpcdp launch: {first}", file=sys.stderr, flush=True)
    if first.status is None:
        return code
    return first.exit_status or 1


def _forward_signals(
    mpirun: subprocess.Popen[bytes], watch: Watch, usr1_has_come: Callable[[], bool] | None
) -> int | None:
    """Waits for ``mpirun``; returns the signal that ended the job, None where it ended by itself.

    A second ending signal, or the end of the grace time after the first one, after a rank has failed or after the last
    worker has ended, kills what has not ended by then.
    """
    ended_by: int | None = None
    deadline = float("inf")
    is_held = usr1_has_come is not None and usr1_has_come()
    while mpirun.poll() is None:
        received = watch.wait(min(_HOLD_S if is_held else 1.0, max(0.0, deadline - time.monotonic())))
        if is_held and watch.all_take(signal.SIGUSR1):
            mpirun.send_signal(signal.SIGUSR1)
            is_held = False
        if watch.failed is not None:  # Open MPI's now and then waits for ranks that are in MPI_Finalize
            deadline = min(deadline, watch.failed.at_s + _GRACE_S)
        alone_s = watch.servers_alone_since_s  # those of a program that has never come to hpcdp.init()
        if time.monotonic() >= min(deadline, float("inf") if alone_s is None else alone_s + _GRACE_S):
            if ended_by is None:
                why = f"{watch.failed}; mpirun has not ended the others"
                if watch.failed is None:
                    why = "all workers have ended, and the servers, whom only hpcdp.init() tells, have not"
                print(f"hpcdp launch: {why} in {_GRACE_S:g} s: killed", file=sys.stderr, flush=True)
            mpirun.kill()
            mpirun.wait()
        elif received is not None and received.number == signal.SIGUSR1 and usr1_has_come is not None:
            is_held = True
        elif received is not None and received.number in _FORWARDED:
            if received.number in _ENDING:
                deadline = time.monotonic() + _GRACE_S if ended_by is None else 0.0
                ended_by = ended_by or received.number
            # Ctrl-C on a terminal has reached mpirun already, which takes a second SIGINT for an order to die at once;
            # a terminal that is closed tells the session's leader alone.
            if received != (signal.SIGINT, _SI_KERNEL):
                mpirun.send_signal(received.number)
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
