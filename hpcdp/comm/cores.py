"""Cores: how many ranks have together, and of how many the BLAS of each has threads."""

from __future__ import annotations

import os

from ..launched import THREAD_VARIABLES
from .communicator import Communicator


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
