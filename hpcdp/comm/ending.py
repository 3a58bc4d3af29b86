"""Ends the whole job, in the way of each MPI library."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_OUTLIVES_RANKS = "OMPI_MCA_mpi_ft_enable"
"""What that mpirun sets."""
_PID = os.getpid()
_LOOKS, _NAP_S = 50, 0.01
_OF_HYDRA, _HEARD_S = "PMI_RANK", 0.2
"""MPICH's mpirun ends at once and drops what a rank on another host has just written, such as why it ends the job."""


def outlives_ranks() -> bool:
    """Whether the library lets a job go on when one of its ranks dies: Open MPI under ``mpirun --with-ft ulfm``."""
    return os.environ.get(_OUTLIVES_RANKS, "0") not in ("", "0")


def end_job(comm_world: MPI.Intracomm, code: int) -> None:
    """End all processes of the job, which has this status then; of a child made by fork, this process alone."""
    if os.getpid() != _PID:
        os._exit(code)
    for _ in range(_LOOKS if outlives_ranks() else 0):
        with contextlib.suppress(Exception):  # by which it takes in who has died
            comm_world.Iprobe()
        if comm_world.Get_failed().size == comm_world.size - 1:
            os._exit(code)  # mpirun would forget the status of the only one that is left
        time.sleep(_NAP_S)
    if _OF_HYDRA in os.environ:
        time.sleep(_HEARD_S)
    comm_world.Abort(code)
