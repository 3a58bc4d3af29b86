"""Ranks by this machine's mpirun, over hosts.

Ranks by this machine's mpirun: on the hosts of -H, or on those of a batch job, which it reaches in its own way.

One mpirun of this machine over several hosts, which it reaches by ssh or through a batch system.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ...core.environment import batch_system
from ...errors import LaunchError
from .. import batch, guard_client, hosts, mpi_library, process_monitor
from ..guard_client import Guards
from ..hosts import assign_ranks, of_ranks, those_of_this_machine
from ..mpi_library import Dialect, environment_of_hosts, program, travelling
from ..parser import check, check_binding, missing_module, warn_of_other_library
from ..runner import say, supervise
from ..spec import Command, Job, LaunchPlan, server


def plan_mpirun(job: Job, *, by_ssh: bool, folder: Path = Path()) -> LaunchPlan:
    """The rsyncs, if any, and the mpirun of ``job``, with its host list in ``folder``.

    Args:
        by_ssh: whether the hosts are `Job.hosts` and reached by ssh, else they are those of a batch system.
    """
    return _planned(job, by_ssh, folder)[0]


def _planned(job: Job, by_ssh: bool, folder: Path) -> tuple[LaunchPlan, mpi_library.MpiLibrary, Dialect]:
    """With what has been found for it, which takes several milliseconds."""
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
    if by_ssh:
        environ |= dialect.by_ssh(in_batch=batch_system(os.environ) is not None)
    path = folder / "hosts"
    where = dialect.placed(places, path) if places else dialect.per_node(job.ranks_per_node)
    everywhere = [
        *dialect.exports(travelling(environ, job.env)),
        *dialect.folder(job.sync_dst_dir),
    ]
    attached = [] if given is None else dialect.under_slurm()
    argv = [str(mpirun), *dialect.options(job), *attached, *where, *further, "-n", str(job.ranks), *everywhere]
    argv += program([program_on_hosts(job), *job.program[1:]])
    if job.servers:
        argv += [":", "-n", str(job.servers), *everywhere, sys.executable, *server()]
    copies = [] if job.sync_dst_dir is None else guard_client.commands([host.name for host in places], job.sync_dst_dir)
    files = {path: dialect.host_file(places)} if places else {}
    return LaunchPlan([*copies, Command.beside(argv, environ)], files), library, dialect


def run_mpirun(job: Job, *, by_ssh: bool) -> int:
    """Runs ``job`` and returns its exit status, see `hpcdp.launch.launchers.local.run`.

    A host that is lost, or says nothing for `dialect.LOST_AFTER_S`, ends the job and is named. Raises `LaunchError`
    also for hosts that cannot be reached, copied to or run the program, each with its name.
    """
    with _ended_by_signals(), contextlib.ExitStack() as left_behind:
        try:
            base = Path(tempfile.gettempdir())
            folder = left_behind.enter_context(process_monitor.new(base, process_monitor.of_this_host("hpcdp-hosts")))
        except OSError as error:
            raise LaunchError("make a temporary folder", got=error.strerror, remedy="set TMPDIR") from error
        planned, library, dialect = _planned(job, by_ssh, folder)
        for path, text in planned.files.items():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        *_, command = planned.commands
        return _run_by_ssh(job, command, library, dialect) if by_ssh else _in_batch(job, command, library)


def _run_by_ssh(job: Job, command: Command, library: mpi_library.MpiLibrary, dialect: Dialect) -> int:
    tell = _teller(job)
    places = assign_ranks(job)
    names_here = those_of_this_machine(each.name for each in places)
    others = [each for each in places if each.name not in names_here]
    environ = {**os.environ, **command.env}
    tell(f"{library.name}, {command.argv[0]}")
    for each in places:
        tell(f"{each.name}: ranks {each.ranks}, servers {each.servers}")
    with Guards(others, tell) as guards:
        cores = guards.cores()
        for each in places:
            here = len(os.sched_getaffinity(0))
            check_binding(job, library.family, each.processes, cores.get(each.name, here), each.name)
        if job.sync_dst_dir is not None:
            tell(f"copying {os.getcwd()} to {job.sync_dst_dir} on all hosts")
            guard_client.copy([each.name for each in places], job.sync_dst_dir)
        with _segments(dialect, environ) as (environ, own):
            travels = {name: environ[name] for name in travelling(environ, job.env)}
            processes = job.ranks + job.servers
            guards.begin(processes, job.servers, travels, own, _daemons_keep_to(job, library))
            folder, is_copy = job.sync_dst_dir or os.getcwd(), job.sync_dst_dir is not None
            guards.check(folder, program_on_hosts(job), job.interface, is_copy=is_copy)
            environ |= dialect.by_ssh(guards.agent())
            tell(str(command))
            return supervise(
                command.argv,
                environ,
                processes,
                library.family,
                job.servers,
                elsewhere=sum(each.processes for each in others),
                hosts=[name if name in {each.name for each in others} else None for name in of_ranks(places)],
                asked=job.mpi_args,
                guards=guards,
                verbose=job.verbose,
                interface=_daemons_keep_to(job, library),
                missing_module=functools.partial(missing_module, job),
            )


def _in_batch(job: Job, command: Command, library: mpi_library.MpiLibrary) -> int:
    tell = _teller(job)
    tell(f"{library.name}, {command.argv[0]}, on the hosts of {batch_system(os.environ)}")
    tell(str(command))
    processes = job.ranks + job.servers
    return supervise(
        command.argv,
        {**os.environ, **command.env},
        processes,
        library.family,
        job.servers,
        elsewhere=processes,
        asked=job.mpi_args,
        verbose=job.verbose,
        interface=_daemons_keep_to(job, library),
        missing_module=functools.partial(missing_module, job),
    )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP are an exception, as SIGINT is, until mpirun runs: what was begun is undone. One that is
    ignored stays so."""

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
    """The program as every host finds it: a name that was found on PATH by its path, one of this folder as it is."""
    name = job.program[0]
    return name if "/" in name else shutil.which(name, path=job.env.get("PATH")) or name


def _daemons_keep_to(job: Job, library: mpi_library.MpiLibrary) -> str | None:
    """Return the interface through which daemons of mpirun accept connections; None for any. Those of hydra connect to
    each other on one host, too."""
    return job.interface if library.family == "openmpi" else None


def _segments(
    dialect: Dialect, environ: dict[str, str]
) -> contextlib.AbstractContextManager[tuple[dict[str, str], Path | None]]:
    """``environ`` with the folder of Open MPI 5's segments, and that folder, which guards make on their hosts too."""
    if dialect.family == "openmpi" and not dialect.is_open_mpi_4:
        return process_monitor.own_folder(environ)
    return contextlib.nullcontext((environ, None))


def _teller(job: Job) -> Callable[[str], None]:
    return say if job.verbose else lambda _: None


def plan(job: Job) -> LaunchPlan:
    """The mpirun of ``job``. Raises as `run` does, but for what only the hosts can tell."""
    return plan_mpirun(job, by_ssh=_by_ssh(job))


def run(job: Job) -> int:
    """Runs ``job`` and returns its exit status. Raises as `hpcdp.launch.launchers.mpi.run_mpirun` does."""
    return run_mpirun(job, by_ssh=_by_ssh(job))


def _by_ssh(job: Job) -> bool:
    in_batch = batch_system(os.environ) is not None
    if not in_batch and not job.hosts:
        raise LaunchError("launch --launcher mpi", expected="hosts, -H hosts.txt, or a batch job", got="neither")
    if in_batch and job.sync_dst_dir is not None:
        raise LaunchError("launch --sync-dst-dir", expected="--launcher ssh inside a batch job", got="mpi")
    return not in_batch
