"""The environment of a process, from its launch to its end.

Launchers: where they are nested, such as mpirun in a job of srun, the innermost one counts: inside mpirun the variables
of Slurm describe its daemons.

The replica number is mixed into the seeds of layers that draw random numbers. Replicas then draw different numbers, and
ranks that hold one replica together draw the same ones. It is 0 before ``hpcdp.init()``, then the rank. Under tensor or
pipeline parallelism it is the lowest rank of those that share the replica.

Then the exit status and the one line of a command that fails, the sockets that this process or a child listens on, and
a handler for SIGUSR1 during the start of a command, which is set before NumPy and MPI are imported: the signal must
neither end the process nor be lost.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from _thread import _local
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, NoReturn, TextIO

from ..errors import ConfigError, HpcdpError, LaunchError, Terminated, reason, report_directly


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

    began_s, ended, has_printed = time.monotonic(), threading.Event(), threading.Event()

    def say(text: str) -> None:
        has_printed.set()
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
        if has_printed.is_set():
            say(f"{activity}: {time.monotonic() - began_s:.1f} s")


def terminal_columns(stream: TextIO) -> int:
    """Return the width of the terminal that shows ``stream``; 0 if there is none that can rewrite a line.

    Under mpirun a rank cannot see the terminal. `hpcdp launch` passes its width in the variables that rich reads. Else
    Open MPI gives every rank a pseudo-terminal without a width, even if the output goes to a file. The output of the
    parent process, which is mpirun, then decides.
    """
    if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):  # rich shows nothing live on these
        return 0
    interactive = os.environ.get("TTY_INTERACTIVE")
    if interactive is not None:
        width = os.environ.get("COLUMNS", "80")
        return int(width) if interactive == "1" and width.isdecimal() else 0
    try:
        if not stream.isatty():
            return 0
        columns = os.get_terminal_size(stream.fileno()).columns
        if columns:
            return columns
        with open(f"/proc/{os.getppid()}/fd/1", "wb", buffering=0, opener=_open_terminal) as launcher:
            return os.get_terminal_size(launcher.fileno()).columns if launcher.isatty() else 0
    except (OSError, ValueError):
        return 0


def _open_terminal(path: str, flags: int) -> int:
    """Open ``path`` without making it the controlling terminal, and without changing it if it is a file."""
    return os.open(path, (flags | os.O_NOCTTY | os.O_NONBLOCK) & ~(os.O_TRUNC | os.O_CREAT))


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


INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""Exit statuses after Ctrl-C and SIGTERM, as in a shell."""

_OF_ALL_S, _OF_SOME_S = 1.0, 0.2


def fail(reason: object, status: int, *, by_all: bool = False) -> int:
    """Write the reason on one line of stderr; exit if this is a rank, without MPI_Finalize, which waits for all ranks.

    Rank 0 reports first, so that mpirun ends the others before they repeat the same reason; if all ranks have certainly
    failed alike, the others report nothing. The launcher reports an interrupt.

    Args:
        reason: an error, or a text.
        status: the exit status.
        by_all: whether all ranks fail with this reason; implied by `HpcdpError.is_on_every_rank`.

    Returns:
        ``status``, outside a job.
    """
    rank = launched_rank()
    by_all = by_all or (isinstance(reason, HpcdpError) and reason.is_on_every_rank)
    if rank:
        time.sleep(_OF_ALL_S if by_all else _OF_SOME_S)
    if rank is None or (status not in (INTERRUPTED, TERMINATED) and not (rank and by_all)):
        is_alone = rank is None or launched_ranks() == 1
        of_each = by_all or isinstance(reason, ConfigError | LaunchError)  # a wrong argument is wrong on each rank
        is_named = isinstance(reason, HpcdpError) and reason.rank is not None
        who = "" if is_alone or of_each or is_named else f"rank {rank}: "
        with contextlib.suppress(OSError):  # a closed terminal may be the reason
            report_directly(f"hpcdp: {who}{reason}")
    if rank is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)
    return status


def end_early(error: KeyboardInterrupt | OSError, what: str) -> int:
    """End the command ``what`` after Ctrl-C or SIGTERM, or a failed write to its standard output; raise other errors.

    Returns:
        The exit status, outside a job.
    """
    if isinstance(error, Terminated):
        return fail("ended by SIGTERM", TERMINATED)
    if isinstance(error, KeyboardInterrupt):
        return fail("interrupted", INTERRUPTED)
    if isinstance(error, BrokenPipeError):
        lead_nowhere(sys.stdout.fileno())  # Python flushes it once more when it ends
        return 128 + signal.SIGPIPE
    if _can_be_written(sys.stdout):
        raise error
    lead_nowhere(sys.stdout.fileno())
    return fail(HpcdpError(what, where="standard output", got=reason(error)), 1)


def lead_nowhere(descriptor: int) -> None:
    """Redirect ``descriptor`` to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == descriptor:
        os.set_inheritable(nowhere, True)
        return
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _can_be_written(stream: TextIO) -> bool:
    try:
        print(file=stream, flush=True)
    except OSError:
        return False
    return True


_status = 0


def exit_status() -> int:
    """Return the status of the last uncaught `sys.exit`, which is the program's exit status; 0 before any."""
    return _status


class _Exit(SystemExit):
    __module__ = "builtins"

    @property
    def code(self) -> Any:  # type: ignore[override]
        code = vars(SystemExit)["code"].__get__(self)
        if sys._getframe().f_back is None:  # the interpreter itself reads the code: the program has ended
            global _status
            _status = code & 0xFF if isinstance(code, int) else int(code is not None)
        return code

    def __reduce__(self) -> tuple[type[SystemExit], tuple[Any, ...]]:  # to be sent to another process
        return SystemExit, self.args


_Exit.__name__ = _Exit.__qualname__ = SystemExit.__name__  # in tracebacks


def _exit(status: object = None, /) -> NoReturn:
    """Replace `sys.exit`."""
    raise _Exit(status)


def record_exit_status() -> None:
    """Record the status that the program passes to `sys.exit` from now on; `exit_status` returns it.

    Python calls no hook for SystemExit, but the interpreter reads the code of one that nobody has caught. In jobs of
    several ranks `sys.exit` therefore raises an exception that records the reading. hpcdp calls this at import, because
    ``sys.exit(main())`` looks up the name before it calls ``main``. A SystemExit that the program makes itself, ``raise
    SystemExit(3)``, is not recorded.
    """
    sys.exit = _exit


_failed_at_exit = False


def fail_at_exit(error: Exception) -> None:
    """Report an error of an exit function, and make the process exit with `exit_status`, or 1 if that is 0.

    Python prints exceptions of exit functions, ignores them, and exits with status 0. The other exit functions still
    run. Rank 0 reports an error that is on every rank.
    """
    global _failed_at_exit, _status
    _failed_at_exit = True
    _status = _status or 1
    rank, is_ours = launched_rank(), isinstance(error, HpcdpError)
    if not (rank and isinstance(error, HpcdpError) and error.is_on_every_rank):
        import traceback  # late: seldom needed

        text = str(error) if is_ours else "".join(traceback.format_exception(error)).rstrip()
        report_directly(
            f"hpcdp: {text}" if rank is None or is_ours else f"rank {rank} of {launched_ranks()} failed:\n{text}"
        )


def flush_streams() -> None:
    """Write what logging and the standard streams have buffered, before `os._exit`."""
    if "logging" in sys.modules:
        sys.modules["logging"].shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or replaced
            stream.flush()


@atexit.register  # at import, so it runs after the exit functions of hpcdp and of most programs
def _exit_with_failure() -> None:
    if not _failed_at_exit:
        return
    flush_streams()
    MPI: Any = sys.modules.get("mpi4py.MPI")
    try:
        if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()  # a process that leaves without it makes mpirun report an abnormal end
    finally:
        os._exit(_status)


_PIDFD_GETFD = 438
"""The number of the system call on all architectures, Linux 5.6 and later."""
_ALL_ADDRESSES = ("0.0.0.0", "::")


def keep_to_interface(interface: str, pid: int) -> None:
    """Bind the sockets of a process that listen on all addresses to ``interface``.

    Does nothing where the kernel denies access to the sockets of ``pid``, a child of this process: without pidfds, or
    in a container that forbids them.
    """
    with contextlib.suppress(OSError, AttributeError):
        process = os.pidfd_open(pid)
        try:
            for descriptor in _sockets(pid):
                copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
                if copy >= 0:
                    _bind(copy, interface)
        finally:
            os.close(process)


@contextlib.contextmanager
def kept_to_interface(interface: str) -> Iterator[None]:
    """Bind the sockets that this process opens in this context, as `keep_to_interface` does."""
    before = _sockets(os.getpid())
    yield
    for descriptor in _sockets(os.getpid()) - before:
        _bind(os.dup(descriptor), interface)


def _sockets(pid: int) -> set[int]:
    descriptors = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    descriptors.add(int(name))
    return descriptors


def _bind(descriptor: int, interface: str) -> None:
    """Bind the socket of a descriptor if it listens on all addresses; close the descriptor."""
    with socket.socket(fileno=descriptor) as listener, contextlib.suppress(OSError):
        if (
            listener.family in (socket.AF_INET, socket.AF_INET6)
            and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            and listener.getsockname()[0] in _ALL_ADDRESSES
        ):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, f"{interface}\0".encode())


_usr1_has_come = False


def note_usr1() -> None:
    """Record SIGUSR1 from now on, until `StopRequests` handles it; only in the main thread.

    Signals of the launcher that were ignored get their default effect again: it sends them only when ranks handle or
    ignore them.
    """
    take_usr1()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _note_usr1)
        for number in SAVE_AT.values():
            signal.signal(number, signal.SIG_DFL)


def is_usr1_note(handler: object) -> bool:
    """Return whether ``handler`` is the handler of `note`, which is that of a command."""
    return handler is _note_usr1


def ignore_usr1() -> None:
    """Ignore SIGUSR1 from now on if `note` handled it: Python resets handlers before the command has ended."""
    if is_usr1_note(signal.getsignal(signal.SIGUSR1)):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def usr1_has_come() -> bool:
    """Return whether the signal has arrived since `note`."""
    return _usr1_has_come


def take_usr1() -> bool:
    """Return whether the signal has arrived, and reset that."""
    global _usr1_has_come
    came, _usr1_has_come = _usr1_has_come, False
    return came


def _note_usr1(number: int, frame: FrameType | None) -> None:
    global _usr1_has_come
    _usr1_has_come = True
