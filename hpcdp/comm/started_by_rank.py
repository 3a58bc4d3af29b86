"""Processes that a rank starts are no ranks, and must not start MPI in its place.

- A process of `multiprocessing` (fork, forkserver or spawn; workers of PyTorch's DataLoader) imports the script of the
  rank again, with its call of `hpcdp.init`. It gets a world that knows which rank it belongs to and refuses to
  communicate, so that code that reads data works.
- So does a child made by `os.fork`, with the world that it has inherited.
- A program that a rank runs (`subprocess`) has inherited the launcher's variables, by which MPI would take it for the
  rank. It forgets them, and so is a job of its own.

In a world of one rank nobody needs MPI to communicate, and children compute as well.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import MutableMapping
from typing import Any

from ..errors import UnsupportedError
from ..launched import launched_rank, launched_ranks
from . import threads
from .refused import FIELDS, Refused, refuse
from .world import World

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
        return threads.alone()
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
        alone = threads.alone()
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
