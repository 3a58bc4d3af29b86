"""Horovod's interface, so that its scripts run by changing an import: ``import hpcdp.horovod.torch as hvd``.

This module has what does not depend on PyTorch: start, numbers of ranks, process sets.

- `torch`: the names of Horovod's module for PyTorch.
- `operations`: collectives and their handles, also for ranks that run out of data.
- `optimizer`: the optimizer that reduces gradients while backward runs, and broadcasts of states.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import hpcdp

from ..collectives.blocks import nodes_of
from ..comm import World
from ..core.checks import whole_number
from ..errors import ConfigError


class ProcessSet:
    """Some ranks that run collectives together. `init` or `add_process_set` connects them.

    Args:
        ranks: numbers of ranks, in any order.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        if not isinstance(ranks, Iterable):
            raise ConfigError(
                "ProcessSet", where="ranks", expected="numbers of ranks", got=type(ranks).__name__,
                remedy="pass a communicator of mpi4py to hpcdp.World.from_comm()",
            )  # fmt: skip
        self.ranks: list[int] | None = sorted(whole_number("ProcessSet", "ranks", rank, 0) for rank in ranks)
        self.process_set_id: int | None = None
        self._world: World | None = None

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    @property
    def world(self) -> World:
        """The ranks as a world; `ConfigError` if this rank is not included, or the set not registered."""
        if self._world is None:
            self.require_registered()
            raise ConfigError(
                "horovod", where="process_set", expected=f"a rank of {self.ranks}", got=f"rank {rank()}",
                remedy="check process_set.included()",
            )  # fmt: skip
        return self._world

    def require_registered(self) -> None:
        """Raise `ConfigError` unless `init` or `add_process_set` has registered the set."""
        if self.process_set_id is None:
            is_global = self is global_process_set
            raise ConfigError(
                "horovod", where="process_set", expected="a process set that is registered",
                got="no call of hvd.init()" if is_global else repr(self),
                remedy="call hvd.init() first" if is_global else "call hvd.add_process_set()",
            )  # fmt: skip

    def size(self) -> int:
        """Return the number of ranks of the set."""
        return global_process_set.world.size if self is global_process_set else len(self.ranks or ())

    def rank(self) -> int:
        """Return the number of this rank within the set."""
        return self.world.rank

    def included(self) -> bool:
        """Return whether this rank belongs to the set."""
        return self._world is not None

    def rank_of(self, global_rank: int) -> int:
        """Return the number within the set of a rank of all; `ConfigError` if it is not included."""
        if self is global_process_set:
            return global_rank
        if self.ranks is None or global_rank not in self.ranks:
            raise ConfigError("horovod", where="root_rank", expected=f"a rank of {self.ranks}", got=global_rank)
        return self.ranks.index(global_rank)

    def connect(self, number: int, world: World | None) -> None:
        """Give the set its number and its world, None on ranks outside."""
        self.process_set_id, self._world = number, world

    def disconnect(self) -> None:
        """Make the set unusable."""
        if self._world is not None and self is not global_process_set:
            self._world.close()
        self.process_set_id = self._world = None
        self.ranks = [] if self is global_process_set else None


global_process_set = ProcessSet([])
"""All ranks."""

_registered: list[ProcessSet] = []
_numbers = 1  # the number of the next set


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start MPI; every rank must call. Further calls do nothing.

    Args:
        comm: a communicator of mpi4py, for programs that own theirs; default all ranks of the job.
        process_sets: sets to register. ``"dynamic"`` has no effect: sets can always be added.
    """
    if is_initialized():
        return
    if comm is not None and not hasattr(comm, "Get_rank"):
        raise ConfigError(
            "init", where="comm", expected="a communicator of mpi4py", got=repr(comm),
            remedy="pass process_sets=[hvd.ProcessSet(ranks)] for some of the ranks",
        )  # fmt: skip
    world = hpcdp.init(comm=comm) if comm is not None else hpcdp.init()
    global_process_set.ranks = list(range(world.size))
    global_process_set.connect(0, world)
    for process_set in process_sets if process_sets is not None and not isinstance(process_sets, str) else ():
        add_process_set(process_set)


def shutdown() -> None:
    """Forget all process sets. MPI itself ends with the program, and `init` may be called again."""
    for process_set in _registered:
        process_set.disconnect()
    _registered.clear()
    if is_initialized():
        global_process_set.disconnect()


def is_initialized() -> bool:
    """Return whether `init` has been called."""
    return global_process_set.process_set_id is not None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register some ranks as a set, and return it; every rank must call, with the same ranks."""
    global _numbers
    world = global_process_set.world
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or len(set(ranks)) != len(ranks) or ranks[-1] >= world.size:
        expected = f"different ranks, 0 to {world.size - 1}"
        raise ConfigError("add_process_set", where="process_set", expected=expected, got=ranks)
    if any(other.ranks == ranks for other in (global_process_set, *_registered)):
        raise ConfigError("add_process_set", where="process_set", expected="ranks of no other set", got=ranks)
    added.connect(_numbers, world.subset(ranks) if world.rank in ranks else None)
    _numbers += 1
    _registered.append(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Release a set that `add_process_set` registered; return whether it was one. Every rank must call."""
    if process_set not in _registered:
        return False
    _registered.remove(process_set)
    process_set.disconnect()
    return True


def size() -> int:
    """Return the number of ranks."""
    return global_process_set.world.size


def rank() -> int:
    """Return the number of this rank."""
    return global_process_set.world.rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return global_process_set.world.local_size


def local_rank() -> int:
    """Return the number of this rank on its node."""
    return global_process_set.world.local_rank


def cross_size() -> int:
    """Return the number of nodes."""
    return global_process_set.world.num_nodes


def cross_rank() -> int:
    """Return the number of this node."""
    return global_process_set.world.node


def is_homogeneous() -> bool:
    """Return whether all nodes have the same number of ranks."""
    nodes = nodes_of(global_process_set.world)
    return all(len(node) == len(nodes.here) for node in nodes.other_nodes)


def mpi_threads_supported() -> bool:
    """Return whether several threads of a rank may communicate at a time."""
    return global_process_set.world.concurrent


def mpi_enabled() -> bool:
    """Return True: hpcdp runs on MPI."""
    return True


def mpi_built() -> bool:
    """Return True: hpcdp runs on MPI."""
    return True


def cuda_built() -> bool:
    """Return whether CuPy, which hpcdp needs for tensors on GPUs, is installed."""
    return importlib.util.find_spec("cupy") is not None


def nccl_built() -> bool:
    """Return False: these operations copy tensors on GPUs through host memory."""
    return False


def gloo_enabled() -> bool:
    """Return False: hpcdp has no gloo."""
    return False


gloo_built = ddl_built = ccl_built = rocm_built = gloo_enabled
