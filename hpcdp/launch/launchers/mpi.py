"""The launcher ``mpi``: ranks by one mpirun over several hosts, reached by ssh or through a batch system."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ...core.environment import batch_system
from ...errors import LaunchError
from .. import hosts, mpi_library, process_monitor
from ..guard_client import Guards
from ..hosts import assign_ranks, of_ranks, those_of_this_machine
from ..mpi_library import Dialect, environment_of_hosts, program, travelling
from ..runner import say, supervise
from ..spec import Command, Job, LaunchPlan, server
from . import batch, working_folder
from .job_checks import check, check_binding, warn_of_other_library


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
    given = None if by_ssh else hosts.allocation()
    places = assign_ranks(job) if job.hosts else ()
    unnamed = () if by_ssh or job.hosts else batch.read()
    further = check(job, several_hosts=len(places or unnamed or (given.hosts if given else ())) > 1)
    library = mpi_library.find_library()
    mpirun = mpi_library.find_mpirun(library)
    dialect = Dialect(library.family, mpi_library.is_open_mpi_4(mpirun))
    places = places or batch.placed(job, unnamed, mpirun, dialect)
    warn_of_other_library(job, library.family)
    if given is not None:
        hosts.check_allocation(job, given, library.family)
    environ = environment_of_hosts(library, dialect, places, {**os.environ, **job.env})
    environ |= dialect.interface(job.interface)
    interface = job.interface if library.family == "openmpi" else None
    names = [place.name for place in places] or [host.name for host in (given.hosts if given else ())]
    if names and {*names} == those_of_this_machine(names):
        interface = hosts.loopback()
        environ = {**dialect.of_one_machine(), **environ}
    if by_ssh:
        environ |= dialect.by_ssh(in_batch=batch_system(os.environ) is not None)
    path = folder / "hosts"
    where = dialect.placed(places, path) if places else dialect.per_node(job.ranks_per_node)
    everywhere = [*dialect.exports(travelling(environ, job.env)), *dialect.folder(job.sync_dst_dir)]
    attached = [] if given is None else dialect.under_slurm()
    argv = [str(mpirun), *dialect.options(job), *attached, *where, *further, "-n", str(job.ranks), *everywhere]
    argv += program([program_on_hosts(job), *job.program[1:]])
    if job.servers:
        argv += [":", "-n", str(job.servers), *everywhere, sys.executable, *server()]
    copies = (
        [] if job.sync_dst_dir is None else working_folder.commands([host.name for host in places], job.sync_dst_dir)
    )
    files = {path: dialect.host_file(places)} if places else {}
    return LaunchPlan([*copies, Command.beside(argv, environ)], files), library, dialect, interface


def run_mpirun(job: Job, *, by_ssh: bool) -> int:
    """Run ``job`` and return its exit status, see `hpcdp.launch.launchers.local.run`.

    A host that is lost, or silent for `hpcdp.launch.mpi_library.LOST_AFTER_S`, ends the job and is named on stderr.

    Raises:
        LaunchError: as `hpcdp.launch.launchers.local.run`; or hosts, which it names, cannot be reached, copied to, or
            run the program.
    """
    with _ended_by_signals(), contextlib.ExitStack() as left_behind:
        try:
            base = Path(tempfile.gettempdir())
            folder = left_behind.enter_context(process_monitor.new(base, process_monitor.of_this_host("hpcdp-hosts")))
        except OSError as error:
            raise LaunchError("make a temporary folder", got=error.strerror, remedy="set TMPDIR") from error
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
    others = [place for place in places if place.name not in local_names]
    environ = {**os.environ, **command.env}
    tell(f"{library.name}, {command.argv[0]}")
    for place in places:
        tell(f"{place.name}: ranks {place.ranks}, servers {place.servers}")
    with Guards(others, tell) as guards:
        cores = guards.cores()
        for place in places:
            local_cores = len(os.sched_getaffinity(0))
            check_binding(job, library.family, place.processes, cores.get(place.name, local_cores), place.name)
        if job.sync_dst_dir is not None:
            tell(f"copying {os.getcwd()} to {job.sync_dst_dir} on all hosts")
            working_folder.copy([place.name for place in places], job.sync_dst_dir)
        with _segments(dialect, environ) as (environ, segments_folder):
            exported = {name: environ[name] for name in travelling(environ, job.env)}
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
                elsewhere=sum(place.processes for place in others),
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

    taken = [sign for sign in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(sign) != signal.SIG_IGN]
    before = {sign: signal.signal(sign, end) for sign in taken}
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


def plan(job: Job) -> LaunchPlan:
    """Return the mpirun of ``job``; raise the errors of `run` that need no connection to a host."""
    return plan_mpirun(job, by_ssh=_by_ssh(job))[0]


def run(job: Job) -> int:
    """Run ``job`` and return its exit status; raise the errors of `run_mpirun`."""
    return run_mpirun(job, by_ssh=_by_ssh(job))


def _by_ssh(job: Job) -> bool:
    in_batch = batch_system(os.environ) is not None
    if not in_batch and not job.hosts:
        raise LaunchError("launch --launcher mpi", expected="hosts, -H hosts.txt, or a batch job", got="neither")
    if in_batch and job.sync_dst_dir is not None:
        raise LaunchError("launch --sync-dst-dir", expected="--launcher ssh inside a batch job", got="mpi")
    return not in_batch
