"""The launchers of mpirun: ``local`` on this machine, ``mpi`` and ``ssh`` over several hosts.

``local`` takes the mpirun of the library that mpi4py loads. ``ssh`` reaches the hosts of ``-H``, also inside a batch
job; ``mpi`` does so outside of one, and inside uses the hosts of the batch system. ``--sync-dst-dir`` copies the
working folder to the hosts by rsync.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...core.environment import batch_system, explained
from ...core.files import who_else_may_write
from ...errors import LaunchError, listed, reason
from .. import hosts, mpi_library, process_monitor
from ..guard import ALIVE, AT_ONCE, SSH, Guards, remedy
from ..hosts import assign_ranks, of_ranks, those_of_this_machine
from ..mpi_library import Dialect, environment, environment_of_hosts, program, traveling
from ..runner import check, check_binding, say, supervise, warn_of_other_library
from . import Command, Job, LaunchPlan, batch, server

EXCLUDED = (".git", ".hg", ".svn", ".venv*", "__pycache__", ".*_cache", ".ipynb_checkpoints", "*.egg-info")
"""Patterns of files that are not copied: histories, environments, caches."""
_KEPT = "-rltOE"
"""Options of rsync that keep links, times and execute permissions, but not the mode or owner of existing folders."""
_SILENT_S = 60
_NO_RSYNC = "rsync is not installed there"


def copy_commands(hosts: Sequence[str], folder: str) -> list[Command]:
    """Return the rsync of the working folder to ``folder`` on each host; other files there are kept.

    Raises:
        LaunchError: ``folder`` is not absolute, the root folder, or inside the working folder on this machine.
    """
    source, target = Path.cwd(), Path(folder)
    if not target.is_absolute():
        raise LaunchError("launch --sync-dst-dir", expected="an absolute path", got=repr(folder))
    if target.resolve() == Path("/"):
        raise LaunchError("launch --sync-dst-dir", expected="a folder below /", got=repr(folder))
    here = those_of_this_machine(hosts)
    if here and target.resolve() != source and source in target.resolve().parents:
        raise LaunchError("launch --sync-dst-dir", expected=f"a folder outside {source}", got=repr(folder))
    environments = [path.parent.name for path in source.glob("*/pyvenv.cfg")]
    excluded = [f"--exclude={name}" for name in (*EXCLUDED, *sorted(environments))]
    remote_rsync = f"mkdir -p {shlex.quote(folder)} && rsync"
    rsyncs = []
    for host in hosts:
        if host not in here:
            # -s: the remote shell does not parse the folder's name. ALIVE ends a copy to a lost host, and --timeout one
            # that waits for a disk or a process there.
            argv = ["rsync", f"{_KEPT}zs", f"--timeout={_SILENT_S}", *excluded, f"--rsync-path={remote_rsync}"]
            argv.append(f"--rsh={shlex.join([*SSH, *ALIVE])}")
            rsyncs.append(Command((*argv, "./", f"[{host}]:{folder}/" if ":" in host else f"{host}:{folder}/")))
        elif target.resolve() != source:
            rsyncs.append(Command(("mkdir", "-p", folder)))
            rsyncs.append(Command(("rsync", _KEPT, *excluded, "./", f"{folder}/")))
    return rsyncs


def copy_folder(hosts: Sequence[str], folder: str) -> None:
    """Run the rsyncs of `commands`, `AT_ONCE` at a time.

    Raises:
        LaunchError: rsync is missing, or has failed or been silent for a minute on hosts, which are named with its
            messages; or every user may write to the copy on this machine.
    """
    if shutil.which("rsync") is None:
        raise LaunchError("launch --sync-dst-dir", expected="rsync", got="none here", remedy="install it")
    running: deque[tuple[str, subprocess.Popen[str]]] = deque()
    failures, remedies = list[str](), list[str]()

    def end_first() -> None:
        host, process = running[0]
        _, errors = process.communicate()
        running.popleft()
        if process.returncode:
            why = _reason(errors, process.returncode)
            failures.append(f"{host}: {why}")
            if process.returncode == 255 or why == _NO_RSYNC:  # 255: of ssh
                remedies.append(remedy(host, f"{errors}{why}"))

    try:
        for command in copy_commands(hosts, folder):
            if command.argv[0] == "mkdir":
                subprocess.run(command.argv, capture_output=True)  # rsync reports a failure
                continue
            if len(running) == AT_ONCE:
                end_first()
            host = command.argv[-1].rpartition(f":{folder}/")[0] or "this machine"
            process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
            running.append((host, process))
        while running:
            end_first()
    finally:
        for _, process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if not failures and those_of_this_machine(hosts):  # guards check the other hosts
        writer = who_else_may_write(folder, everybody=True)
        if writer is not None:
            failures.append(f"this machine: others may change {writer}")
            remedies.append("give a folder in which you alone may write")
    if failures:
        advice = remedies[0] if remedies else None
        raise LaunchError("copy the working folder", where=folder, got=listed(failures), remedy=advice)


def _reason(errors: str, code: int) -> str:
    if code == 127 or "command not found" in errors or "rsync: not found" in errors:
        return _NO_RSYNC
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[0] if lines else f"rsync ended with status {code}"


def run_local(job: Job, usr1_has_come: Callable[[], bool] | None = None) -> int:
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


def plan_local(job: Job) -> LaunchPlan:
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
    library = mpi_library.find_library()
    mpirun = mpi_library.find_mpirun(library)
    check_binding(job, library.family, job.ranks + job.servers, len(os.sched_getaffinity(0)), "this machine")
    warn_of_other_library(job, library.family)
    dialect = Dialect.of(library, mpirun)
    argv = [str(mpirun), *dialect.options(job), "-n", str(job.ranks), *further, *program(job.program)]
    if job.servers:
        argv += [":", "-n", str(job.servers), sys.executable, *server()]
    environ = {**os.environ, **job.env}
    settings = {**environment(library, mpirun, job.ranks, environ, job.servers), **dialect.interface(job.interface)}
    return library, Command.beside(argv, settings)


def plan_mpirun(
    job: Job, *, by_ssh: bool, folder: Path = Path()
) -> tuple[LaunchPlan, mpi_library.MpiLibrary, Dialect, str | None]:
    """Return the mpirun of ``job``, after the rsyncs of ``sync_dst_dir``, with its host list in ``folder``.

    The library and the dialect of that mpirun follow, whose search takes several milliseconds, and the interface on
    which mpirun's daemons accept connections; None for any. Daemons of hydra also connect to each other within a host,
    so over several hosts they are not restricted.

    Args:
        job: the program and its options.
        by_ssh: whether the hosts are `Job.hosts` and reached by ssh; else they are those of a batch job.
        folder: where the host list is to be written.
    """
    allocated = None if by_ssh else hosts.allocation()
    places = assign_ranks(job) if job.hosts else ()
    unnamed = () if by_ssh or job.hosts else batch.read()
    further = check(job, several_hosts=len(places or unnamed or (allocated.hosts if allocated else ())) > 1)
    library = mpi_library.find_library()
    mpirun = mpi_library.find_mpirun(library)
    dialect = Dialect.of(library, mpirun)
    places = places or batch.placed(job, unnamed, mpirun, dialect)
    warn_of_other_library(job, library.family)
    if allocated is not None:
        hosts.check_allocation(job, allocated, library.family)
    environ = environment_of_hosts(library, dialect, places, {**os.environ, **job.env})
    environ |= dialect.interface(job.interface)
    interface = job.interface if library.family == "openmpi" else None
    names = [place.name for place in places] or [host.name for host in (allocated.hosts if allocated else ())]
    if names and {*names} == those_of_this_machine(names):
        interface = hosts.loopback()
        environ = {**dialect.of_one_machine(), **environ}
    if by_ssh:
        environ |= dialect.by_ssh(in_batch=batch_system(os.environ) is not None)
    path = folder / "hosts"
    where = dialect.placed(places, path) if places else dialect.per_node(job.ranks_per_node)
    everywhere = [*dialect.exports(traveling(environ, job.env)), *dialect.folder(job.sync_dst_dir)]
    attached = [] if allocated is None else dialect.under_slurm()
    argv = [str(mpirun), *dialect.options(job), *attached, *where, *further, "-n", str(job.ranks), *everywhere]
    argv += program([program_on_hosts(job), *job.program[1:]])
    if job.servers:
        argv += [":", "-n", str(job.servers), *everywhere, sys.executable, *server()]
    copies = [] if job.sync_dst_dir is None else copy_commands([host.name for host in places], job.sync_dst_dir)
    files = {path: dialect.host_file(places)} if places else {}
    return LaunchPlan([*copies, Command.beside(argv, environ)], files), library, dialect, interface


def run_mpirun(job: Job, *, by_ssh: bool) -> int:
    """Run ``job`` and return its exit status, see `run_local`.

    A host that is lost, or silent for `hpcdp.launch.mpi_library.LOST_AFTER_S`, ends the job and is named on stderr.

    Raises:
        LaunchError: as `run_local`; or hosts, which it names, cannot be reached, copied to, or
            run the program.
    """
    with _ended_by_signals(), contextlib.ExitStack() as left_behind:
        try:
            base = Path(tempfile.gettempdir())
            folder = left_behind.enter_context(process_monitor.new(base, process_monitor.of_this_host("hpcdp-hosts")))
        except OSError as error:
            raise LaunchError("make a temporary folder", got=reason(error), remedy="set TMPDIR") from error
        planned, library, dialect, interface = plan_mpirun(job, by_ssh=by_ssh, folder=folder)
        for path, text in planned.files.items():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        *_, command = planned.commands
        if by_ssh:
            return _run_by_ssh(job, command, library, dialect, interface)
        return _in_batch(job, command, library, interface)


def _run_by_ssh(
    job: Job, command: Command, library: mpi_library.MpiLibrary, dialect: Dialect, interface: str | None
) -> int:
    tell = _teller(job)
    places = assign_ranks(job)
    local_names = those_of_this_machine(place.name for place in places)
    remote_places = [place for place in places if place.name not in local_names]
    environ = {**os.environ, **command.env}
    tell(f"{library.name}, {command.argv[0]}")
    for place in places:
        tell(f"{place.name}: ranks {place.ranks}, servers {place.servers}")
    with Guards(remote_places, tell) as guards:
        cores = guards.cores()
        for place in places:
            local_cores = len(os.sched_getaffinity(0))
            check_binding(job, library.family, place.processes, cores.get(place.name, local_cores), place.name)
        if job.sync_dst_dir is not None:
            tell(f"copying {os.getcwd()} to {job.sync_dst_dir} on all hosts")
            with explained(f"copying the working folder to {job.sync_dst_dir}", os.isatty(2), sys.stderr):
                copy_folder([place.name for place in places], job.sync_dst_dir)
        with _segments(dialect, environ) as (environ, segments_folder):
            exported = {name: environ[name] for name in traveling(environ, job.env)}
            guards.begin(job.ranks + job.servers, job.servers, exported, segments_folder, interface)
            folder, is_copy = job.sync_dst_dir or os.getcwd(), job.sync_dst_dir is not None
            guards.check(folder, program_on_hosts(job), job.interface, is_copy=is_copy)
            environ |= dialect.by_ssh(guards.agent())
            tell(str(command))
            return supervise(
                command.argv,
                environ,
                library.family,
                job,
                elsewhere=sum(place.processes for place in remote_places),
                hosts=[None if name in local_names else name for name in of_ranks(places)],
                guards=guards,
                interface=interface,
            )


def _in_batch(job: Job, command: Command, library: mpi_library.MpiLibrary, interface: str | None) -> int:
    tell = _teller(job)
    tell(f"{library.name}, {command.argv[0]}, on the hosts of {batch_system(os.environ)}")
    tell(str(command))
    return supervise(
        command.argv,
        {**os.environ, **command.env},
        library.family,
        job,
        elsewhere=job.ranks + job.servers,
        interface=interface,
    )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that temporary files are removed; leave ignored signals ignored."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    handled = [sign for sign in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(sign) != signal.SIG_IGN]
    before = {sign: signal.signal(sign, end) for sign in handled}
    try:
        yield
    finally:
        for sign, handler in before.items():
            signal.signal(sign, handler)


def program_on_hosts(job: Job) -> str:
    """Return the program's path on every host: that of a name on PATH, or the relative path of a local file."""
    name = job.program[0]
    return name if "/" in name else shutil.which(name, path=job.env.get("PATH")) or name


def _segments(
    dialect: Dialect, environ: dict[str, str]
) -> contextlib.AbstractContextManager[tuple[dict[str, str], Path | None]]:
    """Return ``environ`` with the folder of Open MPI 5's segments, and that folder, which guards also make."""
    if dialect.family == "openmpi" and not dialect.is_open_mpi_4:
        return process_monitor.own_folder(environ)
    return contextlib.nullcontext((environ, None))


def _teller(job: Job) -> Callable[[str], None]:
    return say if job.verbose else lambda _: None


def plan_mpi(job: Job) -> LaunchPlan:
    """Return the mpirun of ``job``; raise the errors of `run` that need no connection to a host."""
    return plan_mpirun(job, by_ssh=_by_ssh(job))[0]


def run_mpi(job: Job) -> int:
    """Run ``job`` and return its exit status; raise the errors of `run_mpirun`."""
    return run_mpirun(job, by_ssh=_by_ssh(job))


def _by_ssh(job: Job) -> bool:
    in_batch = batch_system(os.environ) is not None
    if not in_batch and not job.hosts:
        raise LaunchError("launch --launcher mpi", expected="hosts, -H hosts.txt, or a batch job", got="neither")
    if in_batch and job.sync_dst_dir is not None:
        raise LaunchError("launch --sync-dst-dir", expected="--launcher ssh inside a batch job", got="mpi")
    return not in_batch


def plan_ssh(job: Job) -> LaunchPlan:
    """Return the mpirun of ``job``; raise the errors of `run` that need no connection to a host."""
    _check_hosts_given(job)
    return plan_mpirun(job, by_ssh=True)[0]


def run_ssh(job: Job) -> int:
    """Run ``job`` and return its exit status; raise the errors of `hpcdp.launch.launchers.mpirun.run_mpirun`."""
    _check_hosts_given(job)
    return run_mpirun(job, by_ssh=True)


def _check_hosts_given(job: Job) -> None:
    if not job.hosts:
        raise LaunchError("launch --launcher ssh", expected="hosts: -H hosts.txt, or -H node1:4,node2:4", got="none")
